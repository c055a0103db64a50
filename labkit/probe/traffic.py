"""Bytes exchanged between ranks, by operation, read from torch's flight recorder."""

from __future__ import annotations

import heapq
import json
import math
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from labkit.probe.journal import Guard, Journal, compiling
from labkit.probe.patches import Patches
from labkit.probe.torch_private import FLIGHT_RECORDER, NCCL_RECORDER, WORLD
from labkit.record import clock
from labkit.record.writer import sent

# ---- reads collectives from torch's flight recorder


_SET_BACK = 1_000_000_000  # ns; an earlier entry with a time later by more than this means that the clock was set
_NEWEST = 24  # maximum number of collectives reported when a rank waits
_COALESCED = ":coalesced"
_MESSAGE = re.compile(r":(send|recv) \d+(?:->|<-)(\d+)$")  # of two ranks of the group, the second is the peer
_SIZES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "ComplexFloat": 8,
    "ComplexDouble": 16,
}  # fmt: skip
_NAMES = (
    "reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier", "gather", "scatter", "reduce",
)  # fmt: skip
_SAME = {
    "allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all", "reducescatter": "reduce_scatter",
}  # fmt: skip


class FlightRecorder:
    """The collectives of this rank; without torch's flight recorder nothing is known of them."""

    def __init__(self, journal: Journal):
        self._guard = Guard(journal, "collectives")
        self.messages = Messages()
        self._last: list[dict[str, Any]] = []

    def entries(self) -> list[dict[str, Any]] | None:
        """All entries, which takes a millisecond; None if they are unknown."""
        return self._guard(_entries)

    def since(self, since: int, entries: list[dict[str, Any]] | None = None) -> list[dict[str, Any]] | None:
        """The collectives since a time (Unix ns), as `described`, in order; None if they are unknown. `entries` are
        given if they have been read already.
        """
        return self._guard(_since, entries or self.entries(), since)

    def newest(self) -> list[dict[str, Any]]:
        """Per group the last completed collective and all active ones, as {op, group, ranks, seq, sizes, over}, which
        show which rank waits in which collective; then the messages that it waits for.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return list(self._last)
        entries = self.entries() or []
        collectives = self._guard(_newest, entries) or []
        in_collective = any(not op["over"] for op in collectives)
        messages = self._guard(self.messages.awaited, in_collective)
        if not messages and not in_collective:
            messages = self._guard(_pending_messages, entries)
        return [*collectives, *(messages or [])]

    def sequences(self) -> list[dict[str, Any]]:
        """Per group the stored collectives in the order of their calls (see `events.Sequence`)."""
        if not (dist.is_available() and dist.is_initialized()):
            return []
        return self._guard(_sequences, self.entries() or []) or []

    def store_newest(self) -> None:
        """Stores the newest collectives, because an error may be reported after a `finally` block has destroyed the
        group.
        """
        self._last = self.newest()


def _entries() -> list[dict[str, Any]]:
    recorders = [NCCL_RECORDER] if dist.is_nccl_available() else []
    if not recorders or FLIGHT_RECORDER.exists():
        recorders.append(FLIGHT_RECORDER)
    texts = [row.get()(includeCollectives=True, onlyActive=False) for row in recorders]
    return joined([json.loads(text).get("entries", []) for text in texts])


def joined(recorders: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The entries of several recorders in the order of their times, numbered as those of one: from 0 if none has lost
    its first entry."""
    kept = [sorted(entries, key=lambda entry: entry["record_id"]) for entries in recorders if entries]
    if len(kept) < 2:
        return kept[0] if kept else []
    lost = any(entries[0]["record_id"] for entries in kept)
    merged = heapq.merge(*kept, key=lambda entry: entry["time_created_ns"])
    return [entry | {"record_id": number} for number, entry in enumerate(merged, int(lost))]


def _since(entries: list[dict[str, Any]] | None, since: int) -> list[dict[str, Any]] | None:
    found = since_then(entries, since)
    return None if found is None else [described(entry) for entry in found]


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: entry["record_id"]):
        if not _is_collective(entry):
            continue
        known = described(entry)
        over = bool(entry["retired"]) or entry["state"] == "completed"
        if over:
            found = [call for call in found if call["id"] != known["id"] or not call["over"]]
        found.append(
            {name: known[name] for name in ("op", "group", "id", "ranks", "seq")}
            | {"sizes": entry["input_sizes"], "over": over}
        )
    return found[-_NEWEST:]


def _pending_messages(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sends and receives of NCCL that have not completed, the oldest first. The functions that start them return at
    once, and the script waits for the device later. Of those in a coalesced group NCCL does not record the end."""
    found: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: entry["record_id"]):
        group, called = entry["process_group"] or ("", "")
        if entry["profiling_name"].endswith(_COALESCED):
            found = [message for message in found if message["id"] != group]
        kind = _MESSAGE.search(entry["profiling_name"])
        if entry["is_p2p"] and kind and not (entry["retired"] or entry["state"] == "completed"):
            op, peer = kind[1], _members(group)[int(kind[2])]
            message = {"op": op, "group": called or group, "id": group, "ranks": [], "peer": peer, "tag": 0}
            found.append(message | {"sizes": entry["input_sizes"], "over": False})
    return found[:_NEWEST]


def _sequences(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    main = threading.main_thread()
    beside = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not main and not isinstance(thread, threading._DummyThread)
    }
    for entry in sorted(entries, key=lambda entry: entry["record_id"]):
        if not _is_collective(entry):
            continue
        group, called = entry["process_group"]
        kind = {"op": operation(entry["profiling_name"]), "sizes": entry["input_sizes"]}
        kind |= {"dtypes": entry["input_dtypes"], "thread": entry.get("thread_id") in beside}
        if group not in found:
            known = {"group": called or group, "id": group, "ranks": _members(group)}
            found[group] = known | {"first": entry["collective_seq_id"], "kinds": [], "calls": []}
        sequence = found[group]
        if entry["collective_seq_id"] < sequence["first"] + len(sequence["calls"]):
            continue  # a part of a coalesced call
        if kind not in sequence["kinds"]:
            sequence["kinds"].append(kind)
        sequence["calls"].append(sequence["kinds"].index(kind))
    return list(found.values())


def since_then(entries: list[dict[str, Any]] | None, since: int, now: int | None = None) -> list[dict[str, Any]] | None:
    """The recorder's collectives since a time (Unix ns); None if there is no recorder or it no longer has all of them.

    The recorder timestamps its entries with the system clock. If that was set back, an earlier entry has a later time:
    that entry and all entries before it are excluded. `now` is the time of the call.
    """
    if not entries:
        return entries  # gloo records no sends, so a pipeline may have no entry at all
    newest_first = sorted(entries, key=lambda entry: -entry["record_id"])
    found, later = [], clock.SystemMoment.now().ns if now is None else now
    for entry in newest_first:
        created = entry["time_created_ns"]
        if created < since or created > later + _SET_BACK:
            break
        found.append(entry)
        later = created
    else:
        if newest_first[-1]["record_id"] > 0:
            return None
    return [entry for entry in reversed(found) if _is_collective(entry)]


def _is_collective(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is a collective: no message, and not the end of a coalesced group, of which NCCL also records
    each operation."""
    return not entry["is_p2p"] and entry["process_group"] and not entry["profiling_name"].endswith(_COALESCED)


def described(entry: dict[str, Any]) -> dict[str, Any]:
    """One recorded collective: op, payload bytes, the group's description, id and ranks, and its sequence number in the
    group.
    """
    name, (group, called) = operation(entry["profiling_name"]), entry["process_group"]
    ranks = _members(group)
    return {
        "op": name,
        "bytes": payload(entry, name, len(ranks)),
        "group": called or group,
        "id": group,
        "ranks": ranks,
        "seq": entry["collective_seq_id"],
    }


def operation(profiled: str) -> str:
    """The operation of a recorded name such as "nccl:_all_gather_base"."""
    name = profiled.split(":")[-1].lower()
    name = next((_SAME[other] for other in _SAME if other in name), name)
    return "barrier" if "barrier" in name else next((known for known in _NAMES if known in name), name)


def payload(entry: dict[str, Any], name: str, ranks: int) -> int:
    """Payload bytes of one recorded collective: the whole gathered or scattered tensor, otherwise a rank's input."""
    given = _bytes(entry["input_sizes"], entry["input_dtypes"])
    made = _bytes(entry["output_sizes"], entry["output_dtypes"])
    if name == "all_gather":
        return max(made, given * ranks)
    return max(given, made * ranks) if name == "reduce_scatter" else given


def _bytes(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> int:
    return sum(math.prod(size) * _SIZES.get(kind, 1) for size, kind in zip(sizes, types))


def _members(group: str) -> list[int]:
    world = WORLD.get()
    ranks = next(
        (world.pg_group_ranks[process_group] for process_group, name in world.pg_names.items() if name == group),
        range(dist.get_world_size()),
    )
    return sorted(ranks)


# ---- sends and receives under way, which gloo's flight recorder does not have


class Messages:
    """The sends and receives that have not completed."""

    def __init__(self) -> None:
        self._blocking: dict[str, Any] | None = None
        self._works: deque[tuple[dict[str, Any], weakref.ref[Any]]] = deque(maxlen=_NEWEST)

    def begins(self, op: str, tensor: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A function such as torch.distributed.send is called with these arguments."""
        given = dict(zip(("peer", "group", "tag", "group_peer"), args))
        given |= {name.replace("src", "peer").replace("dst", "peer"): value for name, value in named.items()}
        group = given.get("group") or dist.group.WORLD
        peer = given.get("peer")
        if peer is None and given.get("group_peer") is not None:
            peer = dist.get_global_rank(group, given["group_peer"])
        self._blocking = {
            **{"op": op, "group": group.group_desc or group.group_name, "id": group.group_name, "ranks": []},
            **{"peer": peer, "tag": given.get("tag") or 0, "sizes": [list(tensor.shape)], "over": False},
        }

    @property
    def peer(self) -> int | None:
        """The other end of the message that has just begun; None if any rank may have sent it."""
        return self._blocking["peer"] if self._blocking else None

    def ends(self, work: Any) -> None:
        """The function has returned, with a Work if it was isend or irecv."""
        message, self._blocking = self._blocking, None
        if message is not None and hasattr(work, "is_completed"):
            self._works.append((message, weakref.ref(work)))

    def awaited(self, in_collective: bool) -> list[dict[str, Any]]:
        """The message in which the rank blocks. If there is none, and it is in no collective either, all that have not
        completed, the oldest first.
        """
        if (blocking := self._blocking) is not None:
            return [blocking]
        works = [] if in_collective else [(message, ref()) for message, ref in list(self._works)]
        return [message for message, work in works if work is not None and not work.is_completed()]


# ---- before the script destroys its process groups


_PAUSE = 0.05  # seconds; a thread needs microseconds, or a few milliseconds on a busy machine


class GroupWatch:
    """Calls functions, which must not raise, before all process groups are destroyed."""

    def __init__(self, patches: Patches):
        self._called: list[Callable[[], Any]] = []
        if dist.is_available():
            patches.wrap("process groups", "torch.distributed.destroy_process_group", self._destroying)

    def before_end(self, function: Callable[[], Any]) -> None:
        self._called.append(function)

    def _destroying(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def destroy_process_group(group: Any = None) -> Any:
            if group in (None, dist.group.WORLD):
                for function in self._called:
                    function()
                time.sleep(_PAUSE)
            return original(group)

        return destroy_process_group


# ---- bytes exchanged between ranks, by operation, in an early step and in every 50th step


_EARLY = (2, 3)  # in step 1 DDP still orders its buckets; step 2 is included for scripts of two steps
_EVERY = 50


class TrafficWatch:
    """Receives the end of every step and writes `traffic` for a few of them."""

    def __init__(self, journal: Journal, patches: Patches, recorder: FlightRecorder):
        self._journal, self._recorder = journal, recorder
        self._guard = Guard(journal, "traffic")
        self._due = _EARLY[0]
        self._begun = clock.SystemMoment.now()
        self._seen = (0, 0)
        self._calls = self._sent = self._depth = 0
        self.messages = 0  # that this rank has sent since it started
        self.bytes_of_messages = 0  # the size of all of them
        self._passed: list[dict[str, Any]] | None = None
        self._read: list[dict[str, Any]] | None = None  # the recorder's entries, if already read for this step
        if dist.is_available():
            for name in ("send", "isend", "recv", "irecv"):
                patches.wrap("sends", f"torch.distributed.{name}", partial(self._counting, "send" in name))

    def _counting(self, sends: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(tensor, *args, **kwargs)
            outermost = not self._depth  # `send` may call `isend`
            work = None
            if outermost:
                self._guard(self._recorder.messages.begins, "send" if sends else "recv", tensor, args, kwargs)
                size = tensor.numel() * tensor.element_size()
                if sends:
                    self.messages += 1
                    self.bytes_of_messages += size
                    self._calls += 1
                    self._sent += size
                if self._passed is not None:
                    peer = self._recorder.messages.peer
                    ranks = None if peer is None else [peer]
                    self._passed.append({"op": "send" if sends else "recv", "bytes": size, "ranks": ranks})
            self._depth += 1
            try:
                work = original(tensor, *args, **kwargs)
                return work
            finally:
                self._depth -= 1
                if outermost:
                    self._recorder.messages.ends(work)

        return call

    def keep_sends(self) -> None:
        """Starts recording sends and receives, until `operations_since` is called."""
        self._passed = []

    def operations_since(self, since: int) -> list[dict[str, Any]]:
        """Operations started since a time (Unix ns), as {op, bytes, group, ranks, seq}: collectives in order, then
        sends and receives.
        """
        passed, self._passed = self._passed or [], None
        if not (dist.is_available() and dist.is_initialized()):
            return []
        self._read = self._recorder.entries()
        return (self._recorder.since(since, self._read) or []) + passed

    def step_ends(self, step: int, evaluations: int) -> None:
        """Step `step` has ended, after `evaluations` since the script began; repeated calls for a step are ignored."""
        self._guard(self._look, step, evaluations)

    def _look(self, step: int, evaluations: int) -> None:
        last, before = self._seen
        if step == last:
            return
        if step >= self._due and step == last + 1 and evaluations == before and not self._begun.clock_was_set():
            ops = self._operations()
            every = self._journal.spaced(_EVERY)
            self._due = _EARLY[1] if step < _EARLY[1] else (step // every + 1) * every
            if ops is not None:
                self._journal.write("traffic", step=step, ops=ops)
        self._seen, self._read = (step, evaluations), None
        self._calls = self._sent = 0
        self._begun = clock.SystemMoment.now()

    def _operations(self) -> dict[str, dict[str, float]] | None:
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        entries = self._recorder.since(self._begun.ns, self._read)
        if entries is None or not (entries or self._calls):
            return None
        ops = {}
        for known in entries:
            _add(ops, known["op"], known["bytes"], len(known["ranks"]))
        if self._calls:
            ops["send"] = {"calls": self._calls, "bytes": self._sent, "sent": float(self._sent)}
        return ops


def _add(ops: dict[str, dict[str, float]], name: str, size: int, ranks: int) -> None:
    op = ops.setdefault(name, {"calls": 0, "bytes": 0, "sent": 0.0})
    op["calls"] += 1
    op["bytes"] += size
    op["sent"] += sent(name, size, ranks)
