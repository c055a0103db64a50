"""Exercises of lab 01: the cost of a ring, its two halves, and an all-reduce to write, run by one thread per rank."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from labkit.course.answers import Wrong, require_number
from labkit.course.exercises import Exercise

_TIMEOUT = 5.0  # seconds without any message after which a function that is not waiting counts as an infinite loop
_POLL = 0.005  # seconds
RANKS = (4, 3)  # the ring must work for an odd number too


def _bytes(answer: Any) -> str:
    require_number(answer, "of MB")
    if answer == 100:
        raise Wrong("a rank does not send its whole message once: it sends chunks of it, in two passes around the ring")
    if answer == 200:
        raise Wrong(
            "almost: a chunk need not return to the rank where its pass started; how many hops has a pass on 8 ranks?"
        )
    if answer in (700, 1400):
        raise Wrong(
            "that is for a whole message in every round; in the ring a rank sends one chunk, an eighth, per round"
        )
    if abs(answer - 87.5) < 0.1:
        raise Wrong("that is one pass, the reduce-scatter; what comes after it?")
    if abs(answer - 175) > 0.1:
        raise Wrong("multiply the number of rounds by the size of the chunk that a rank sends in each round")
    return "14 rounds of an eighth each: 2 (n − 1) / n of the message, which is less than twice the message for any n"


def _halves(answer: Any) -> str:
    words = answer if isinstance(answer, (list, tuple)) else re.split(r"[,;]|\bthen\b|\band\b|\+", str(answer))
    named = [re.sub(r"[^a-z]", "", str(word).lower()) for word in words if str(word).strip()]
    if len(named) != 2:
        raise Wrong(f"the answer must name two collectives in order, such as 'broadcast, reduce', got {len(named)}")
    if named == ["reduce", "broadcast"]:
        raise Wrong(
            "that is also an all-reduce, through a single rank; in the ring, which chunks are complete after half of"
            " the rounds, and on which ranks?"
        )
    if named == ["allgather", "reducescatter"]:
        raise Wrong(
            "these are the two collectives, but in the other order: what has to happen before a sum can be passed on?"
        )
    if named[0] != "reducescatter":
        raise Wrong(
            "look at the picture after half of the rounds: each rank has the sum of one chunk; which collective is"
            " that?"
        )
    if named[1] != "allgather":
        raise Wrong(
            "the first is right; the second half adds nothing and sends complete chunks to all ranks; which collective"
            " is that?"
        )
    return "reduce-scatter, then all-gather: FSDP uses the two halves separately"


# ---- the ring that the learner writes


class Stuck(Exception):
    """Raised inside a rank's thread to terminate it when the check is over."""


class Network:
    """Connects `n` threads. `send` and `receive` block until both sides have called them, as `dist.send` may do."""

    def __init__(self, n: int):
        self.n = n
        self.sent = [0] * n
        self.waits: dict[int, tuple[str, int]] = {}  # by rank, what it waits for: ("send", to) or ("receive", from)
        self.over = False
        self.turns = 0
        self._offers: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()

    def send(self, me: int, to: Any, value: Any) -> None:
        """Blocks until rank `to` has received the value."""
        self._known("sends to", me, to)
        if to not in ((me + 1) % self.n, (me - 1) % self.n):
            raise Wrong(f"rank {me} sends to rank {to} of {self.n}; in a ring a rank sends to its neighbours only")
        if type(value) is not int or value > 10 * sum(_value(rank, self.n, self.n) for rank in range(self.n)):
            what = f"{value:,}" if type(value) is int else f"a {type(value).__name__}"
            raise Wrong(f"rank {me} sends {what}; a message is one number, the (partial) sum of one chunk")
        with self._changed:
            self._offers[me, to] = value
            self.sent[me] += 1
            self._wait(me, ("send", to), lambda: (me, to) not in self._offers)

    def receive(self, me: int, source: Any) -> Any:
        """Blocks until rank `source` sends a value, and returns it."""
        self._known("receives from", me, source)
        with self._changed:
            self._wait(me, ("receive", source), lambda: (source, me) in self._offers)
            return self._offers.pop((source, me))

    def end(self) -> None:
        """Unblocks all waiting threads, which then raise `Stuck`."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def _known(self, does: str, me: int, other: Any) -> None:
        if isinstance(other, bool) or not isinstance(other, int) or not 0 <= other < self.n or other == me:
            raise Wrong(
                f"rank {me} {does} rank {other!r}; the other ranks are"
                f" {', '.join(str(r) for r in range(self.n) if r != me)}"
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
        """Whether every rank in `alive` waits for a message that cannot arrive (a deadlock)."""
        with self._changed:
            if not alive or set(self.waits) != alive:
                return False
            return not any(
                (what == "send" and (rank, other) not in self._offers)
                or (what == "receive" and (other, rank) in self._offers)
                for rank, (what, other) in self.waits.items()
            )


def _ring(function: Any) -> str:
    if not callable(function):
        raise Wrong(f"the answer must be the function itself, got {function!r}")
    for n in RANKS:
        _check(n, *_run(function, n))
    return (
        f"every chunk on every rank is the sum, on {' and '.join(map(str, RANKS))} ranks, and each rank sends 2 (n − 1)"
        " chunks"
    )


def _run(function: Callable[..., Any], n: int) -> tuple[list[Any], Network]:
    """The function's results on `n` ranks. Raises `Wrong` if a rank fails or does not return, or if there is a
    deadlock."""
    network, results, errors = Network(n), [None] * n, {}

    def work(rank: int) -> None:
        try:
            given = [_value(rank, chunk, n) for chunk in range(n)]
            results[rank] = function(
                given,
                rank,
                n,
                lambda to, value: network.send(rank, to, value),
                lambda source: network.receive(rank, source),
            )
        except Stuck:
            pass
        except Exception as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True, name=f"rank {rank} of an exercise")
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    try:
        _watch(threads, network, errors)
    finally:
        network.end()
        for thread in threads:
            _end(thread)
    return results, network


def _watch(threads: list[threading.Thread], network: Network, errors: dict[int, Exception]) -> None:
    last, turns = time.monotonic() + _TIMEOUT, -1
    while alive := {rank for rank, thread in enumerate(threads) if thread.is_alive()}:
        if errors:
            break
        if network.stuck(alive):
            raise Wrong(_deadlock(network, len(threads) - len(alive)))
        if network.turns != turns:
            turns, last = network.turns, time.monotonic() + _TIMEOUT
        if time.monotonic() > last:
            busy = min(alive - set(network.waits), default=min(alive))
            raise Wrong(
                f"rank {busy} did not return within {_TIMEOUT:g} s and is not waiting: is there an infinite loop?"
            )
        time.sleep(_POLL)
    for rank, error in sorted(errors.items()):
        if isinstance(error, Wrong):
            raise error
        raise Wrong(f"on {network.n} ranks, rank {rank} failed: {type(error).__name__}: {error}")


def _deadlock(network: Network, done: int) -> str:
    words = {"send": "waits for rank {} to receive", "receive": "waits for rank {} to send"}
    waits = ", ".join(
        f"rank {rank} {words[what].format(other)}" for rank, (what, other) in sorted(network.waits.items())
    )
    if all(what == "send" for what, _ in network.waits.values()):
        hint = "send blocks until the other rank receives: let some ranks receive first"
    elif done:
        hint = "a rank has returned while another still waits for it"
    else:
        hint = "which ranks send, and which receive, in each round?"
    return f"a deadlock on {network.n} ranks: {waits}; {hint}"


def _end(thread: threading.Thread) -> None:
    """Terminates a thread that is in an infinite loop, at its next bytecode instruction."""
    thread.join(0.2)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stuck))
        thread.join(1.0)


def _value(rank: int, chunk: int, n: int) -> int:
    """A number that encodes its origin: in a sum of such numbers, digit r counts rank r, and the higher digits the
    chunk."""
    return 10**rank + 10**n * 10 * chunk


def _check(n: int, results: list[Any], network: Network) -> None:
    """Raises `Wrong` for the first chunk that is not the sum, and for more messages than a ring needs."""
    for rank, got in enumerate(results):
        if got is None:
            raise Wrong(f"rank {rank} returned None; return the list of {n} sums")
        if not isinstance(got, (list, tuple)) or len(got) != n:
            size = f" of {len(got)}" if isinstance(got, (list, tuple)) else ""
            raise Wrong(f"rank {rank} must return a list of {n} sums, one per chunk, got a {type(got).__name__}{size}")
        for chunk, value in enumerate(got):
            if value != sum(_value(device, chunk, n) for device in range(n)):
                raise Wrong(f"on {n} ranks, chunk {chunk} of rank {rank} is wrong: {_why(value, chunk, n)}")
    for rank, sent in enumerate(network.sent):
        if sent > 2 * (n - 1):
            raise Wrong(
                f"the sums are right, but rank {rank} of {n} sent {sent} chunks; a ring needs 2 (n − 1) = {2 * (n - 1)}"
            )


def _why(value: Any, chunk: int, n: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return f"it is {value!r}, which is not a sum of the given numbers"
    counts = [value // 10**rank % 10 for rank in range(n)]
    if value - sum(count * 10**rank for rank, count in enumerate(counts)) != sum(counts) * 10**n * 10 * chunk:
        return "it contains numbers of another chunk; which chunk arrives in each round?"
    errors = [f"the number of rank {rank} is missing" for rank, count in enumerate(counts) if count == 0]
    errors += [f"the number of rank {rank} was added {count} times" for rank, count in enumerate(counts) if count > 1]
    return ", ".join(errors)


EXERCISES: dict[str, Exercise] = {
    "collectives.bytes": Exercise(
        "What a rank sends in a ring",
        _bytes,
        "**175 MB.** A rank sends a chunk of 100 / 8 = 12.5 MB in each of 2 (n − 1) = 14 rounds. For many ranks the"
        " total approaches 200 MB.",
    ),
    "collectives.halves": Exercise(
        "The two halves of a ring",
        _halves,
        "**reduce-scatter, all-gather.** After n − 1 rounds each rank has the sum of one chunk; after n − 1 more rounds"
        " each rank has all sums.",
    ),
    "collectives.ring": Exercise(
        "Write a ring all-reduce",
        _ring,
        """Even ranks send first and odd ranks receive first; otherwise the ring deadlocks:

```python
def ring(chunks, rank, n, send, receive):
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(2 * (n - 1)):
        out, back = (rank - k) % n, (rank - k - 1) % n
        if rank % 2 == 0:
            send(right, chunks[out]); came = receive(left)
        else:
            came = receive(left); send(right, chunks[out])
        chunks[back] = chunks[back] + came if k < n - 1 else came
    return chunks
```
""",
    ),
}
