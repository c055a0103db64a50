"""Bytes exchanged between ranks, by operation, in an early step and in every 50th step.

Collectives are read from torch's flight recorder (`collectives.py`); point-to-point sends are counted in their Python
functions. A step's traffic are the operations started after the end of the previous step. A step after an evaluation is
skipped, and so is one whose collectives no longer fit into the recorder. Without a flight recorder no traffic is
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from labkit.probe.collectives import FlightRecorder
from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.untraced import compiling
from labkit.record import clock
from labkit.record.writer import sent

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
        self._passed: list[dict[str, Any]] | None = None
        self._read: list[dict[str, Any]] | None = None  # the recorder's entries, if already read for this step
        if dist.is_available():
            for name in ("send", "isend", "recv", "irecv"):
                patches.wrap("sends", f"torch.distributed.{name}", partial(self._counting, "send" in name))

    def _counting(self, sends: bool, original: Callable[..., Any]) -> Callable[..., Any]:
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
