"""How collectives are made of messages: plans in rounds, and the simulation that shows what each rank has after each of them.

In a round a rank sends one message and receives one, at the most; both at once, as a full-duplex wire lets it. A message carries pieces;
what a rank has of a piece is known as the set of ranks whose contribution is in it, so that a sum that counts somebody twice is seen.
The algorithms: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Piece = Any  # a number, or (source, target) of an all-to-all
Holding = Mapping[Piece, frozenset[int]]
Round = tuple["Message", ...]


@dataclass(frozen=True)
class Message:
    """`source` sends `pieces` to `target`, which takes them as they are or, if `add`, adds them to its own."""

    source: int
    target: int
    pieces: tuple[Piece, ...]
    add: bool = False


@dataclass(frozen=True)
class Plan:
    """One way to do a collective on `n` ranks: what each has at first, the rounds, and what each must have in the end.

    `parts` is how many pieces make up the whole message of one rank.
    """

    title: str
    n: int
    parts: int
    start: tuple[Holding, ...]
    rounds: tuple[Round, ...]
    goal: tuple[Holding, ...]

    def states(self) -> list[tuple[Holding, ...]]:
        """What each rank has at first and after each round. Raises `ValueError` for a plan that cannot be, or does not reach its goal."""
        states = [self.start]
        for number, messages in enumerate(self.rounds, 1):
            states.append(_after(states[-1], messages, number))
        for rank, wanted in enumerate(self.goal):
            for piece, who in wanted.items():
                if states[-1][rank].get(piece) != who:
                    raise ValueError(f"{self.title}: rank {rank} has {states[-1][rank].get(piece)} of piece {piece}, and not {who}")
        return states

    def busiest(self) -> float:
        """What the rank that sends most sends in all, in whole messages of one rank."""
        sent = [sum(len(one.pieces) for messages in self.rounds for one in messages if one.source == rank) for rank in range(self.n)]
        return max(sent) / self.parts

    def seconds(self, size: float, alpha: float, beta: float) -> float:
        """The time by the latency-bandwidth model: a round takes `alpha` seconds, and `beta` for each byte of its longest message.

        `size` is that of the whole message of one rank, in bytes. The model: Hockney, "The communication challenge for MPP", 1994.
        """
        longest = (max(len(one.pieces) for one in messages) for messages in self.rounds)
        return sum(alpha + beta * size * pieces / self.parts for pieces in longest)


def _after(before: tuple[Holding, ...], messages: Round, number: int) -> tuple[Holding, ...]:
    for role in ("source", "target"):
        ranks = [getattr(one, role) for one in messages]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"round {number}: a rank is the {role} of two messages")
    after = [dict(holding) for holding in before]
    for one in messages:
        for piece in one.pieces:
            if piece not in before[one.source]:
                raise ValueError(f"round {number}: rank {one.source} sends piece {piece}, which it does not have")
            sent, had = before[one.source][piece], before[one.target].get(piece, frozenset())
            if one.add and sent & had:
                raise ValueError(f"round {number}: rank {one.target} would count {sorted(sent & had)} twice in piece {piece}")
            after[one.target][piece] = sent | had if one.add else sent
    return tuple(after)


# ---- the pieces that ranks begin and end with

_ROOT = 0


def _everyone(n: int) -> frozenset[int]:
    return frozenset(range(n))


def _own(n: int, parts: int) -> tuple[Holding, ...]:
    return tuple({piece: frozenset({rank}) for piece in range(parts)} for rank in range(n))


def _sums(n: int, parts: int) -> tuple[Holding, ...]:
    return tuple({piece: _everyone(n) for piece in range(parts)} for _ in range(n))


# ---- who sends to whom

Edges = list[list[tuple[int, int]]]


def _one_by_one(n: int) -> Edges:
    return [[(_ROOT, rank)] for rank in range(1, n)]


def _chain(n: int) -> Edges:
    return [[(rank, rank + 1)] for rank in range(n - 1)]


def _tree(n: int) -> Edges:
    """A binomial tree: whoever has it sends it on, so that twice as many have it after each round."""
    edges, have = [], 1
    while have < n:
        edges.append([(rank, rank + have) for rank in range(min(have, n - have))])
        have *= 2
    return edges


BROADCASTS: dict[str, tuple[str, Callable[[int], Edges]]] = {
    "one_by_one": ("the root sends to one after another", _one_by_one),
    "chain": ("each passes it on to the next", _chain),
    "tree": ("whoever has it sends it on: a tree", _tree),
}


def _down(edges: Edges) -> tuple[Round, ...]:
    return tuple(tuple(Message(source, target, (0,)) for source, target in one) for one in edges)


def _up(edges: Edges) -> tuple[Round, ...]:
    return tuple(tuple(Message(target, source, (0,), add=True) for source, target in one) for one in reversed(edges))


def _ring(n: int, shift: int, add: bool) -> tuple[Round, ...]:
    """n - 1 rounds in which each rank sends one piece to its right neighbour: in round k rank r sends piece r + shift - k."""
    return tuple(tuple(Message(rank, (rank + 1) % n, ((rank + shift - k) % n,), add) for rank in range(n)) for k in range(n - 1))


# ---- the plans


def broadcast(n: int, by: str = "tree") -> Plan:
    """The root's message comes to all."""
    words, edges = _choice(BROADCASTS, by, n)
    start = tuple({0: frozenset({_ROOT})} if rank == _ROOT else {} for rank in range(n))
    goal = tuple({0: frozenset({_ROOT})} for _ in range(n))
    return Plan(f"broadcast: {words}", n, 1, start, _down(edges(n)), goal)


def reduce(n: int, by: str = "tree") -> Plan:
    """The sum of all messages comes to the root: a broadcast backwards."""
    words, edges = _choice(REDUCES, by, n)
    goal = tuple({0: _everyone(n)} if rank == _ROOT else {} for rank in range(n))
    return Plan(f"reduce: {words}", n, 1, _own(n, 1), _up(edges(n)), goal)


def all_reduce(n: int, by: str = "ring") -> Plan:
    """The sum of all messages comes to all."""
    words, make = _choice(ALL_REDUCES, by, n)
    parts, rounds = make(n)
    return Plan(f"all-reduce: {words}", n, parts, _own(n, parts), rounds, _sums(n, parts))


def all_gather(n: int) -> Plan:
    """The pieces of all come to all, by a ring. The whole message is what each rank has in the end."""
    _at_least_two(n)
    start = tuple({rank: frozenset({rank})} for rank in range(n))
    goal = tuple({piece: frozenset({piece}) for piece in range(n)} for _ in range(n))
    return Plan("all-gather: pieces go round the ring", n, n, start, _ring(n, 0, add=False), goal)


def reduce_scatter(n: int) -> Plan:
    """Piece r of the sum comes to rank r, by a ring. The whole message is what each rank has at first."""
    _at_least_two(n)
    goal = tuple({rank: _everyone(n)} for rank in range(n))
    return Plan("reduce-scatter: sums go round the ring", n, n, _own(n, n), _ring(n, n - 1, add=True), goal)


def all_to_all(n: int) -> Plan:
    """Every rank has a piece for every rank: in round k it sends to the k-th after it."""
    _at_least_two(n)
    start = tuple({(rank, other): frozenset({rank}) for other in range(n)} for rank in range(n))
    goal = tuple({(other, rank): frozenset({other}) for other in range(n)} for rank in range(n))
    rounds = tuple(tuple(Message(rank, (rank + k) % n, ((rank, (rank + k) % n),)) for rank in range(n)) for k in range(1, n))
    return Plan("all-to-all: each sends every other its piece", n, n, start, rounds, goal)


def _by_root(edges: Callable[[int], Edges]) -> Callable[[int], tuple[int, tuple[Round, ...]]]:
    return lambda n: (1, _up(edges(n)) + _down(edges(n)))


def _by_ring(n: int) -> tuple[int, tuple[Round, ...]]:
    """A reduce-scatter, and then an all-gather of the sums; rank r has the sum of piece r between the two."""
    return n, _ring(n, n - 1, add=True) + _ring(n, 0, add=False)


REDUCES = {
    "one_by_one": ("one after another sends to the root", _one_by_one),
    "tree": ("up a tree", _tree),
}
ALL_REDUCES: dict[str, tuple[str, Callable[[int], tuple[int, tuple[Round, ...]]]]] = {
    "root": ("reduce to the root, then broadcast", _by_root(_one_by_one)),
    "tree": ("reduce up a tree, broadcast down it", _by_root(_tree)),
    "ring": ("each piece twice round the ring", _by_ring),
}


def _choice(table: Mapping[str, tuple[str, Any]], by: str, n: int) -> tuple[str, Any]:
    if by not in table:
        raise ValueError(f"by={by!r} is not known; there is {', '.join(table)}")
    _at_least_two(n)
    return table[by]


def _at_least_two(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 2:
        raise ValueError(f"n was {n!r}; a collective needs at least 2 ranks")


def plans(n: int) -> Iterator[Plan]:
    """Every plan there is for `n` ranks."""
    for make, table in ((broadcast, BROADCASTS), (reduce, REDUCES), (all_reduce, ALL_REDUCES)):
        yield from (make(n, by) for by in table)
    yield from (make(n) for make in (all_gather, reduce_scatter, all_to_all))
