"""Collectives as messages: plans in rounds, and a simulation of what each rank holds after each round.

In each round a rank sends at most one message and receives at most one, both at once on a full-duplex link. A message
carries chunks. The state of a chunk on a rank is the set of ranks that contributed to it, so that a double-counted
partial sum is detected. The algorithms: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Piece = Any  # a chunk: a number, or (source, target) of an all-to-all
Holding = Mapping[Piece, frozenset[int]]
Round = tuple["Message", ...]


@dataclass(frozen=True)
class Message:
    """`source` sends the chunks in `pieces` to `target`, which stores them or, with `add`, adds them to its own."""

    source: int
    target: int
    pieces: tuple[Piece, ...]
    add: bool = False


@dataclass(frozen=True)
class Plan:
    """One algorithm of a collective on `n` ranks: the initial chunks, the rounds, and the expected final chunks of each
    rank.

    `parts` is the number of chunks in the whole message of one rank.
    """

    title: str
    n: int
    parts: int
    start: tuple[Holding, ...]
    rounds: tuple[Round, ...]
    goal: tuple[Holding, ...]

    def states(self) -> list[tuple[Holding, ...]]:
        """The chunks of each rank initially and after each round. Raises `ValueError` for a plan that is invalid or
        misses its goal."""
        states = [self.start]
        for number, messages in enumerate(self.rounds, 1):
            states.append(_after(states[-1], messages, number))
        for rank, wanted in enumerate(self.goal):
            for piece, who in wanted.items():
                if states[-1][rank].get(piece) != who:
                    raise ValueError(
                        f"{self.title}: rank {rank} has {states[-1][rank].get(piece)} of chunk {piece}, expected {who}"
                    )
        return states

    def busiest(self) -> float:
        """The total that the busiest rank sends, in units of one rank's whole message."""
        sent = [
            sum(len(message.pieces) for messages in self.rounds for message in messages if message.source == rank)
            for rank in range(self.n)
        ]
        return max(sent) / self.parts

    def sent(self, per_node: int, between: bool) -> list[float]:
        """What each rank sends to ranks on other nodes (`between`), or on its own node of `per_node` consecutive ranks,
        in units of one rank's whole message."""
        amounts = [0.0] * self.n
        for messages in self.rounds:
            for message in messages:
                if (message.source // per_node != message.target // per_node) == between:
                    amounts[message.source] += len(message.pieces) / self.parts
        return amounts

    def seconds(self, size: float, alpha: float, beta: float) -> float:
        """The seconds of the latency-bandwidth model: `alpha` per round, plus `beta` per byte of its longest message.

        `size` is the whole message of one rank, in bytes. The model: Hockney, "The communication challenge for MPP",
        1994.
        """
        longest = (max(len(message.pieces) for message in messages) for messages in self.rounds)
        return sum(alpha + beta * size * pieces / self.parts for pieces in longest)


def _after(before: tuple[Holding, ...], messages: Round, number: int) -> tuple[Holding, ...]:
    for role in ("source", "target"):
        ranks = [getattr(message, role) for message in messages]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"round {number}: a rank is the {role} of two messages")
    after = [dict(holding) for holding in before]
    for message in messages:
        for piece in message.pieces:
            if piece not in before[message.source]:
                raise ValueError(f"round {number}: rank {message.source} sends chunk {piece}, which it does not have")
            sent, had = before[message.source][piece], before[message.target].get(piece, frozenset())
            if message.add and sent & had:
                raise ValueError(
                    f"round {number}: rank {message.target} would count {sorted(sent & had)} twice in chunk {piece}"
                )
            after[message.target][piece] = sent | had if message.add else sent
    return tuple(after)


# ---- the initial and final chunks of the ranks

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
    """A binomial tree: every rank that has the message forwards it, so that the number of holders doubles each
    round."""
    edges, have = [], 1
    while have < n:
        edges.append([(rank, rank + have) for rank in range(min(have, n - have))])
        have *= 2
    return edges


BROADCASTS: dict[str, tuple[str, Callable[[int], Edges]]] = {
    "one_by_one": ("the root sends to one rank after another", _one_by_one),
    "chain": ("each rank forwards to the next", _chain),
    "tree": ("a binomial tree", _tree),
}


def _down(edges: Edges) -> tuple[Round, ...]:
    return tuple(tuple(Message(source, target, (0,)) for source, target in edges_of_round) for edges_of_round in edges)


def _up(edges: Edges) -> tuple[Round, ...]:
    return tuple(
        tuple(Message(target, source, (0,), add=True) for source, target in edges_of_round)
        for edges_of_round in reversed(edges)
    )


def _ring(n: int, shift: int, add: bool) -> tuple[Round, ...]:
    """n - 1 rounds in which each rank sends one chunk to its right neighbour: in round k rank r sends chunk r + shift -
    k."""
    return tuple(
        tuple(Message(rank, (rank + 1) % n, ((rank + shift - k) % n,), add) for rank in range(n)) for k in range(n - 1)
    )


# ---- the plans


def broadcast(n: int, by: str = "tree") -> Plan:
    """Every rank receives the message of the root."""
    words, edges = _choice(BROADCASTS, by, n)
    start = tuple({0: frozenset({_ROOT})} if rank == _ROOT else {} for rank in range(n))
    goal = tuple({0: frozenset({_ROOT})} for _ in range(n))
    return Plan(f"broadcast: {words}", n, 1, start, _down(edges(n)), goal)


def reduce(n: int, by: str = "tree") -> Plan:
    """The root receives the sum of all messages: a broadcast in reverse."""
    words, edges = _choice(REDUCES, by, n)
    goal = tuple({0: _everyone(n)} if rank == _ROOT else {} for rank in range(n))
    return Plan(f"reduce: {words}", n, 1, _own(n, 1), _up(edges(n)), goal)


def all_reduce(n: int, by: str = "ring") -> Plan:
    """Every rank receives the sum of all messages."""
    words, make = _choice(ALL_REDUCES, by, n)
    parts, rounds = make(n)
    return Plan(f"all-reduce: {words}", n, parts, _own(n, parts), rounds, _sums(n, parts))


def all_gather(n: int) -> Plan:
    """Every rank receives the chunks of all ranks, by a ring. The whole message is the final state of a rank."""
    _at_least_two(n)
    start = tuple({rank: frozenset({rank})} for rank in range(n))
    goal = tuple({piece: frozenset({piece}) for piece in range(n)} for _ in range(n))
    return Plan("all-gather: chunks travel around the ring", n, n, start, _ring(n, 0, add=False), goal)


def reduce_scatter(n: int) -> Plan:
    """Rank r receives chunk r of the sum, by a ring. The whole message is the initial state of a rank."""
    _at_least_two(n)
    goal = tuple({rank: _everyone(n)} for rank in range(n))
    return Plan(
        "reduce-scatter: partial sums travel around the ring", n, n, _own(n, n), _ring(n, n - 1, add=True), goal
    )


def all_to_all(n: int) -> Plan:
    """Every rank has a chunk for every rank: in round k it sends to the k-th rank after it."""
    _at_least_two(n)
    start = tuple({(rank, other): frozenset({rank}) for other in range(n)} for rank in range(n))
    goal = tuple({(other, rank): frozenset({other}) for other in range(n)} for rank in range(n))
    rounds = tuple(
        tuple(Message(rank, (rank + k) % n, ((rank, (rank + k) % n),)) for rank in range(n)) for k in range(1, n)
    )
    return Plan("all-to-all: each rank sends a different chunk to every other rank", n, n, start, rounds, goal)


def _by_root(edges: Callable[[int], Edges]) -> Callable[[int], tuple[int, tuple[Round, ...]]]:
    return lambda n: (1, _up(edges(n)) + _down(edges(n)))


def _by_ring(n: int) -> tuple[int, tuple[Round, ...]]:
    """A reduce-scatter, then an all-gather of the sums; between the two, rank r has the sum of chunk r."""
    return n, _ring(n, n - 1, add=True) + _ring(n, 0, add=False)


Parents = dict[int, int]  # of every rank but the root


def double_tree(n: int) -> tuple[Parents, Parents]:
    """The two binary trees of NCCL. In the first, the lowest bit of a rank is its height, so that odd ranks are leaves.
    The second is the first one mirrored, or shifted by one rank if n is odd. If n is even, no rank is an inner node of
    both (Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019; the trees: Sanders, Speck and
    Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009)."""
    first: Parents = {}
    for rank in range(1, n):
        height = rank & -rank
        above = rank - height
        first[rank] = above | 2 * height if above | 2 * height < n else above
    moved = [n - 1 - rank if n % 2 == 0 else (rank + 1) % n for rank in range(n)]
    return first, {moved[rank]: moved[parent] for rank, parent in first.items()}


def _by_double_tree(n: int) -> tuple[int, tuple[Round, ...]]:
    """Half of the message up and down each tree, every message in the first round in which both ends are free."""
    waiting: list[tuple[Message, set[Message]]] = []
    for half, parents in enumerate(double_tree(n)):
        up = {rank: Message(rank, parent, (half,), add=True) for rank, parent in parents.items()}
        down = {rank: Message(parent, rank, (half,)) for rank, parent in parents.items()}
        for rank, parent in parents.items():
            waiting.append((up[rank], {up[child] for child in up if parents[child] == rank}))
            before = {down[parent]} if parent in down else {up[child] for child in up if parents[child] == parent}
            waiting.append((down[rank], before))
    waiting.sort(key=lambda needing: not needing[0].add)  # up before down
    rounds, done = [], set[Message]()
    while waiting:
        messages: list[Message] = []
        for message, needs in waiting:
            sources, targets = ({getattr(other, role) for other in messages} for role in ("source", "target"))
            if needs <= done and message.source not in sources and message.target not in targets:
                messages.append(message)
        waiting = [needing for needing in waiting if needing[0] not in messages]
        done.update(messages)
        rounds.append(tuple(messages))
    return 2, tuple(rounds)


def two_level(nodes: int, per_node: int) -> Plan:
    """An all-reduce in three phases, each by rings: a reduce-scatter within each node, an all-reduce of the sums
    between the ranks with the same local rank, and an all-gather within each node. Chunk k·nodes + j is the j-th part
    of what local rank k sums up (Cho et al., "BlueConnect", 2019)."""
    _at_least_two(nodes)
    _at_least_two(per_node)
    n = nodes * per_node

    def within(plan: Plan) -> list[Round]:
        """The rounds of `plan` on every node; each chunk of it stands for `nodes` chunks."""
        return [
            tuple(
                Message(
                    node * per_node + message.source,
                    node * per_node + message.target,
                    tuple(piece * nodes + part for piece in message.pieces for part in range(nodes)),
                    message.add,
                )
                for node in range(nodes)
                for message in messages
            )
            for messages in plan.rounds
        ]

    between = [
        tuple(
            Message(
                message.source * per_node + local,
                message.target * per_node + local,
                tuple(local * nodes + piece for piece in message.pieces),
                message.add,
            )
            for local in range(per_node)
            for message in messages
        )
        for messages in all_reduce(nodes).rounds
    ]
    rounds = (*within(reduce_scatter(per_node)), *between, *within(all_gather(per_node)))
    return Plan("all-reduce: within nodes, between them, within", n, n, _own(n, n), rounds, _sums(n, n))


REDUCES = {"one_by_one": ("one rank after another sends to the root", _one_by_one), "tree": ("up a tree", _tree)}
ALL_REDUCES: dict[str, tuple[str, Callable[[int], tuple[int, tuple[Round, ...]]]]] = {
    "root": ("reduce to the root, then broadcast", _by_root(_one_by_one)),
    "tree": ("reduce up a tree, broadcast down it", _by_root(_tree)),
    "double_tree": ("half of the message by each of two trees", _by_double_tree),
    "ring": ("each chunk travels around the ring twice", _by_ring),
}


def _choice(table: Mapping[str, tuple[str, Any]], by: str, n: int) -> tuple[str, Any]:
    if by not in table:
        raise ValueError(f"by must be one of {', '.join(table)}, got {by!r}")
    _at_least_two(n)
    return table[by]


def _at_least_two(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 2:
        raise ValueError(f"n must be at least 2, got {n!r}")


def plans(n: int) -> Iterator[Plan]:
    """All plans for `n` ranks."""
    for make, table in ((broadcast, BROADCASTS), (reduce, REDUCES), (all_reduce, ALL_REDUCES)):
        yield from (make(n, by) for by in table)
    yield from (make(n) for make in (all_gather, reduce_scatter, all_to_all))


# ---- what the links of any algorithm carry


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes that each link must carry at least, per byte of the message: bus bandwidth = this × size / seconds.

    The message is the whole tensor of an all-gather (output), reduce-scatter (input) or all-to-all (input of a rank),
    and the tensor of a rank for the other operations. As nccl-tests defines it (doc/PERFORMANCE.md).
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "reduce", "send", "recv") else (ranks - 1) / ranks
