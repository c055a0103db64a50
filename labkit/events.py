"""Events: append-only JSON lines, one file per rank. The envelope, the writer, and a reader that forgives.

The run folder is the only link between the workers and everything that shows them, so this module is the whole protocol. It is
imported inside every worker: nothing but the standard library.

Kinds written today, beside `v`, `t` (unix seconds), `rank` and `kind`:

=========== ==========================================================================================================
start       pid, host, local_rank, world_size, device ("cpu", "cuda:0"), device_name, torch, attempt
device      device, device_name: where the script really works, once that has been seen
step        step (from 1, counting on over attempts' own count), loss (null where this rank has none), samples,
            seconds {step, data, forward, backward, optimizer, other}, memory {allocated, reserved, peak} in bytes
memory      owners {parameters, gradients, optimizer, activations, other} in bytes, step
replica     step, replicas [{replica, device, forward, cpu (seconds), samples, memory (bytes)}], extra {outputs, gradients}:
            bytes that replica 0 gathers and reduces, gil_wait (a share of time; null at first)
traffic     step, ops {operation: {calls, bytes, sent}}, for few steps: bytes are the payload, `sent` what a rank puts on the wire
            in a ring, see probe/traffic.py; no operation where there is no process group
activity    name: "training" or "evaluating", when it changes
checkpoint  step: the last that a checkpoint holds, written whole
metric      name, value, step: what the script logged with torch.monitor
error       type, message, traceback (text)
probe_error part, type, message, traceback: a part of the probe that failed and watches no more; the script went on
end         exit_code (0 for a script that ran to its end), steps, seconds since the start event
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
PHASES = ("data", "forward", "backward", "optimizer", "other")
OWNERS = ("parameters", "gradients", "optimizer", "activations", "other")


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
