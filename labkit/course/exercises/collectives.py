"""Exercises of lab 01: what a ring costs, what it is made of, and a ring of one's own, run by threads that stand for ranks."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from labkit.course.exercises import Exercise, Wrong

_PATIENCE = 5.0  # seconds that a function which waits for nobody may take
_LOOK = 0.005
RANKS = (4, 3)  # the ring must work for an odd number too


def _bytes(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"the answer is a number of MB, and this is {answer!r}")
    if answer == 100:
        raise Wrong("a rank does not send its message once: it sends pieces of it, in two laps of the ring")
    if answer == 200:
        raise Wrong("nearly: a piece need not come back to where its lap began; how many hops does a lap have on 8 ranks?")
    if answer in (700, 1400):
        raise Wrong("that is for whole messages at every hop; in the ring only a piece of an eighth travels at a time")
    if abs(answer - 87.5) < 0.1:
        raise Wrong("that is one lap, the reduce-scatter; what comes after it?")
    if abs(answer - 175) > 0.1:
        raise Wrong("count the rounds, and how large a piece is that a rank sends in each of them")
    return "14 rounds of an eighth each: 2 (n − 1) / n of the message, and never more than twice of it, however many ranks there are"


def _halves(answer: Any) -> str:
    words = answer if isinstance(answer, (list, tuple)) else re.split(r"[,;]|\bthen\b|\band\b|\+", str(answer))
    named = [re.sub(r"[^a-z]", "", str(word).lower()) for word in words if str(word).strip()]
    if len(named) != 2:
        raise Wrong(f"name two collectives, the first first, such as 'broadcast, reduce'; this names {len(named)}")
    if named == ["reduce", "broadcast"]:
        raise Wrong(
            "that makes an all-reduce too, by way of one rank; in the ring, which pieces are complete after half of the rounds, and where?"
        )
    if named == ["allgather", "reducescatter"]:
        raise Wrong("these two, but not in this order: what must be done before there is a sum to pass on?")
    if named[0] != "reducescatter":
        raise Wrong("look at the picture after half of the rounds: each rank has the sum of one piece; which collective is that?")
    if named[1] != "allgather":
        raise Wrong("the first is right; in the second half nothing is added any more: finished pieces come to all. What is that called?")
    return "reduce-scatter, then all-gather: FSDP uses the halves by themselves"


# ---- a ring of one's own


class Stuck(Exception):
    """Ends a rank's thread when the exercise is over for it."""


class Wire:
    """What joins `n` threads: a message is handed over when both sides are there, as `dist.send` may do it."""

    def __init__(self, n: int):
        self.n = n
        self.sent = [0] * n
        self.waits: dict[int, tuple[str, int]] = {}  # by rank what it waits for: ("send", to) or ("receive", from)
        self.over = False
        self.turns = 0
        self._offers: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()

    def send(self, me: int, to: Any, value: Any) -> None:
        """Waits until rank `to` has taken the value."""
        self._known("sends to", me, to)
        with self._changed:
            self._offers[me, to] = value
            self.sent[me] += len(value) if isinstance(value, (list, tuple)) else 1
            self._wait(me, ("send", to), lambda: (me, to) not in self._offers)

    def receive(self, me: int, source: Any) -> Any:
        """Waits until rank `source` offers a value, and takes it."""
        self._known("receives from", me, source)
        with self._changed:
            self._wait(me, ("receive", source), lambda: (source, me) in self._offers)
            return self._offers.pop((source, me))

    def end(self) -> None:
        """Has whoever still waits leave."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def _known(self, does: str, me: int, other: Any) -> None:
        if isinstance(other, bool) or not isinstance(other, int) or not 0 <= other < self.n or other == me:
            raise Wrong(
                f"rank {me} {does} {other!r}; the others of {self.n} ranks are {', '.join(str(r) for r in range(self.n) if r != me)}"
            )

    def _wait(self, me: int, what: tuple[str, int], done: Callable[[], bool]) -> None:
        self.waits[me] = what
        self._changed.notify_all()
        self._changed.wait_for(lambda: self.over or done())
        if self.over:
            raise Stuck
        del self.waits[me]
        self.turns += 1
        self._changed.notify_all()

    def stuck(self, alive: set[int]) -> bool:
        """Whether every rank that is `alive` waits for what cannot come."""
        with self._changed:
            if not alive or set(self.waits) != alive:
                return False
            return not any(
                (what == "send" and (rank, other) not in self._offers) or (what == "receive" and (other, rank) in self._offers)
                for rank, (what, other) in self.waits.items()
            )


def _ring(function: Any) -> str:
    if not callable(function):
        raise Wrong(f"the answer is the function itself, and this is {function!r}")
    for n in RANKS:
        _check(n, *_run(function, n))
    return f"every piece of every rank is the sum, on {' and on '.join(map(str, RANKS))} ranks, with 2 (n − 1) pieces sent by each"


def _run(function: Callable[..., Any], n: int) -> tuple[list[Any], Wire]:
    """What the function gives on each of `n` ranks. Raises `Wrong` where one fails, all wait for each other, or one does not end."""
    wire, results, errors = Wire(n), [None] * n, {}

    def work(rank: int) -> None:
        try:
            given = [_value(rank, piece, n) for piece in range(n)]
            results[rank] = function(
                given, rank, n, lambda to, value: wire.send(rank, to, value), lambda source: wire.receive(rank, source)
            )
        except Stuck:
            pass
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True, name=f"rank {rank} of an exercise") for rank in range(n)]
    for thread in threads:
        thread.start()
    try:
        _watch(threads, wire, errors)
    finally:
        wire.end()
        for thread in threads:
            _end(thread)
    return results, wire


def _watch(threads: list[threading.Thread], wire: Wire, errors: dict[int, Exception]) -> None:
    last, turns = time.monotonic() + _PATIENCE, -1
    while alive := {rank for rank, thread in enumerate(threads) if thread.is_alive()}:
        if errors:
            break
        if wire.stuck(alive):
            raise Wrong(_deadlock(wire, len(threads) - len(alive)))
        if wire.turns != turns:
            turns, last = wire.turns, time.monotonic() + _PATIENCE
        if time.monotonic() > last:
            busy = min(alive - set(wire.waits), default=min(alive))
            raise Wrong(f"rank {busy} did not come to an end within {_PATIENCE:g} s and waits for nobody: is there a loop without an end?")
        time.sleep(_LOOK)
    for rank, error in sorted(errors.items()):
        if isinstance(error, Wrong):
            raise error
        raise Wrong(f"on {wire.n} ranks, rank {rank} failed: {type(error).__name__}: {error}")


def _deadlock(wire: Wire, done: int) -> str:
    words = {"send": "waits until rank {} receives", "receive": "waits for what rank {} sends"}
    told = ", ".join(f"rank {rank} {words[what].format(other)}" for rank, (what, other) in sorted(wire.waits.items()))
    hint = "send waits for its receiver: let some ranks receive first" if all(what == "send" for what, _ in wire.waits.values()) else ""
    hint = hint or ("a rank is done while another still waits for it" if done else "who sends, and who receives, in the same round?")
    return f"a deadlock on {wire.n} ranks: {told}; {hint}"


def _end(thread: threading.Thread) -> None:
    """Ends a thread that computes for ever, at its next line."""
    thread.join(0.2)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stuck))
        thread.join(1.0)


def _value(rank: int, piece: int, n: int) -> int:
    """A number whose sum over ranks tells who is in it, a digit for each rank, and after these digits the piece."""
    return 10**rank + 10**n * 10 * piece


def _check(n: int, results: list[Any], wire: Wire) -> None:
    """Raises `Wrong` for the first piece that is not the sum, and for more messages than a ring needs."""
    for rank, got in enumerate(results):
        if got is None:
            raise Wrong(f"rank {rank} gave nothing back; return the list of {n} sums")
        if not isinstance(got, (list, tuple)) or len(got) != n:
            size = f" of {len(got)}" if isinstance(got, (list, tuple)) else ""
            raise Wrong(f"rank {rank} gave back a {type(got).__name__}{size}; return a list of {n} sums, one for each piece")
        for piece, value in enumerate(got):
            if value != sum(_value(each, piece, n) for each in range(n)):
                raise Wrong(f"on {n} ranks, piece {piece} of rank {rank} is wrong: {_why(value, piece, n)}")
    for rank, sent in enumerate(wire.sent):
        if sent > 2 * (n - 1):
            raise Wrong(f"the sums are right, and rank {rank} of {n} sent {sent} pieces; the ring needs 2 (n − 1) = {2 * (n - 1)}")


def _why(value: Any, piece: int, n: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return f"it is {value!r}, and not a sum of the numbers that were given"
    counts = [value // 10**rank % 10 for rank in range(n)]
    if value - sum(count * 10**rank for rank, count in enumerate(counts)) != sum(counts) * 10**n * 10 * piece:
        return "there are numbers of another piece in it; which piece comes in each round?"
    told = [f"what rank {rank} had is missing" for rank, count in enumerate(counts) if count == 0]
    told += [f"what rank {rank} had was counted {count} times" for rank, count in enumerate(counts) if count > 1]
    return ", ".join(told)


EXERCISES = {
    "bytes": Exercise(
        "What a rank sends in a ring",
        _bytes,
        "**175 MB.** Each of 2 (n − 1) = 14 rounds sends a piece of 100 / 8 = 12.5 MB. It tends to 200 MB for many ranks.",
    ),
    "halves": Exercise(
        "The two halves of a ring",
        _halves,
        "**reduce-scatter, all-gather.** After n − 1 rounds rank r has the sum of one piece; n − 1 more bring all sums to all.",
    ),
    "ring": Exercise(
        "An all-reduce of your own",
        _ring,
        """Even ranks send first and odd ones receive first, or the ring stands still:

```python
def ring(pieces, rank, n, send, receive):
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(2 * (n - 1)):
        out, back = (rank - k) % n, (rank - k - 1) % n
        if rank % 2 == 0:
            send(right, pieces[out]); came = receive(left)
        else:
            came = receive(left); send(right, pieces[out])
        pieces[back] = pieces[back] + came if k < n - 1 else came
    return pieces
```
""",
    ),
}
