"""Events: append-only JSON lines, one file per rank. The envelope, the writer, and a reader that forgives.

The run folder is the only link between the workers and everything that shows them, so this module is the whole protocol. It is
imported inside every worker: nothing but the standard library.

Kinds written today, beside `v`, `t` (unix seconds), `rank` and `kind`:

=========== ==========================================================================================================
start       pid, host, local_rank, world_size, device ("cpu", "cuda:0"), device_name, torch, attempt
device      device, device_name: where the script really works, once that has been seen
step        step (from 1, counting on over attempts' own count), loss (null where this rank has none), samples,
            seconds {step, data, copy, forward, backward, optimizer, other}, memory {allocated, reserved, peak} in bytes
memory      owners {parameters, gradients, optimizer, activations, communication, other} in bytes, step
timeline    step, t0 (unix seconds at which the step began), seconds, device, backend; phases [[name, start, end]],
            comm [[operation, start, end, bytes, group, ranks, sequence number]], busy [[start, end]] (intervals in which the rank
            computed), marks [[name, start, end]] (FSDP units, micro-batches), exposed {phase: seconds}; times from t0. A few steps only
memory_step step, t0, seconds, phases as above, times [...] and owners {owner: [...]} (bytes from each time on), peak, at_peak
            {owner: bytes}. For one early step, and for those that were asked for
waiting     since (unix seconds of the last progress), step, activity, stack (text), ops [{op, group, ranks, seq, sizes, over}], the
            newest of each group: written when a rank has made no progress for long, and again while that lasts
report      values {name: a number, text or list}: what the script brings back by labkit.report
going_on    after (seconds): a rank that was waiting goes on
saw         what ("model", "loader", "epoch", "batch", "item", "save") and its fields, see probe/observations.py
=========== ==========================================================================================================

`system.jsonl` holds lines of kind `system`: cpu_percent, memory_used, gpus [{index, memory_used, memory_total, utilisation,
power}], ranks {rank: {cpu_percent, rss}}; all bytes, percent of one core or device, and watts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = 1
PHASES = ("data", "copy", "forward", "backward", "optimizer", "other")
REPORT = "labkit.report"  # the torch.monitor event that becomes a `report`; its field `values` is JSON
OWNERS = ("parameters", "gradients", "optimizer", "activations", "communication", "other")


class Writer:
    """Appends events to one file, each in one write, so that a reader sees whole lines and a kill loses none."""

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None):
        self._head = {"v": VERSION, "t": 0.0} | ({} if rank is None else {"rank": rank})
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=True, default=str).encode

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event, stamped with the time of now unless `t` is given."""
        line = self._encode(self._head | {"t": time.time(), "kind": kind} | fields)
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Closes the file; nothing was held back."""
        os.close(self._file)


class Reader:
    """Reads on where it stopped. A half-written last line is waited for; a broken line is counted, never fatal."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.broken = 0
        self._offset = 0
        self._rest = b""

    def poll(self, limit: int = 4 << 20) -> Iterator[dict[str, Any]]:
        """The events that came since the last call, reading `limit` bytes at most."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                block = file.read(limit)
        except OSError:
            return
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            event = self._parse(line)
            if event is not None:
                yield event

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("t"), (int, float)):
            return event
        self.broken += 1
        return None
