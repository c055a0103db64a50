"""Bytes exchanged between ranks, by operation, in an early step and in every 50th step.

Collectives are read from torch's flight recorder; point-to-point sends are counted in their Python functions. A step's
traffic are the operations started after the end of the previous step. A step after an evaluation is skipped, and so is
one whose collectives no longer fit into the recorder. Without a flight recorder no traffic is reported.

`bytes` is the payload: the whole tensor of an all-gather or reduce-scatter, otherwise a rank's input. `sent` is what
each of n ranks sends with a ring algorithm: 2(n-1)/n of the payload for all-reduce, all of it for a send, nothing for a
barrier, (n-1)/n for other operations. Operations count as the backend executes them: gloo implements reduce-scatter as
all-reduce.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from labkit.probe.groups import before_groups_end
from labkit.probe.journal import Guard, Journal
from labkit.probe.untraced import compiling
from labkit.record import clock

_EARLY = (2, 3)  # in step 1 DDP still orders its buckets; step 2 is included for scripts of two steps
_EVERY = 50
_SET_BACK = 1_000_000_000  # ns; an earlier entry with a time later by more than this means that the clock was set
_NEWEST = 24  # maximum number of collectives reported when a rank waits
_SIZES = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}
_NAMES = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
)
_SAME = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
}


class TrafficWatch:
    """Receives the end of every step and writes `traffic` for a few of them."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._guard = Guard(journal, "traffic")
        self._due = _EARLY[0]
        self._begun = clock.SystemMoment.now()
        self._seen = (0, 0)
        self._calls = self._sent = self._depth = 0
        self._passed: list[dict[str, Any]] | None = None
        self._read: list[dict[str, Any]] | None = None  # the recorder's entries, if already read for this step
        if dist.is_available():
            for name in ("send", "isend", "recv", "irecv"):
                self._count(name, sends="send" in name)
        before_groups_end(self._store_newest)

    def _store_newest(self) -> None:
        """Stores the newest collectives, because an error may be reported after a `finally` block has destroyed the
        group.
        """
        _LAST[:] = self._guard(newest) or []

    def _count(self, name: str, sends: bool) -> None:
        original = getattr(dist, name)

        @functools.wraps(original)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(tensor, *args, **kwargs)
            if not self._depth:  # `send` may call `isend`
                size = tensor.numel() * tensor.element_size()
                if sends:
                    self._calls += 1
                    self._sent += size
                if self._passed is not None:
                    self._passed.append({"op": "send" if sends else "recv", "bytes": size})
            self._depth += 1
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._depth -= 1

        setattr(dist, name, call)
        setattr(dist.distributed_c10d, name, call)  # P2POp compares with this function

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
        self._read = _entries()
        return [described(entry) for entry in since_then(self._read, since) or ()] + passed

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
        entries = since_then(self._read or _entries(), self._begun.ns)
        if entries is None or not (entries or self._calls):
            return None
        ops = {}
        for entry in entries:
            known = described(entry)
            _add(ops, known["op"], known["bytes"], len(known["ranks"]))
        if self._calls:
            ops["send"] = {"calls": self._calls, "bytes": self._sent, "sent": float(self._sent)}
        return ops


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
    return [entry for entry in reversed(found) if not entry["is_p2p"] and entry["process_group"]]


_LAST: list[dict[str, Any]] = []  # what `newest` gave when the process group was destroyed


def newest() -> list[dict[str, Any]]:
    """Per group the last completed collective and all active ones, as {op, group, ranks, seq, sizes, over}: shows who
    waits where.
    """
    found: list[dict[str, Any]] = []
    if not (dist.is_available() and dist.is_initialized()):
        return list(_LAST)
    for entry in sorted(_entries() or (), key=lambda entry: entry["record_id"]):
        if entry["is_p2p"] or not entry["process_group"]:
            continue
        known = described(entry)
        over = bool(entry["retired"]) or entry["state"] == "completed"
        if over:
            found = [one for one in found if one["id"] != known["id"] or not one["over"]]
        found.append(
            {name: known[name] for name in ("op", "group", "id", "ranks", "seq")}
            | {"sizes": entry["input_sizes"], "over": over}
        )
    return found[-_NEWEST:]


def _entries() -> list[dict[str, Any]] | None:
    """All entries of the flight recorder; None if this version of torch has none."""
    from torch._C import _distributed_c10d

    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])


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


def sent(name: str, size: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends with a ring algorithm, for a payload of `size` bytes."""
    if name in ("send", "barrier"):
        return float(size if name == "send" else 0)
    return (2 if name == "all_reduce" else 1) * size * (ranks - 1) / ranks


def _bytes(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> int:
    return sum(math.prod(size) * _SIZES.get(kind, 1) for size, kind in zip(sizes, types))


def _members(group: str) -> list[int]:
    world = dist.distributed_c10d._world
    ranks = next(
        (world.pg_group_ranks[each] for each, name in world.pg_names.items() if name == group),
        range(dist.get_world_size()),
    )
    return sorted(ranks)


def _add(ops: dict[str, dict[str, float]], name: str, size: int, ranks: int) -> None:
    op = ops.setdefault(name, {"calls": 0, "bytes": 0, "sent": 0.0})
    op["calls"] += 1
    op["bytes"] += size
    op["sent"] += sent(name, size, ranks)
