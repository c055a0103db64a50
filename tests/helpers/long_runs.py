"""Step files, and the folder of a long run."""

from __future__ import annotations

from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState
from labkit.record.writer import PHASES, Writer

RECORD = 88  # bytes


def measured(step: int, **fields) -> dict:
    seconds = {"step": 0.0123456} | {phase: 0.001 * number for number, phase in enumerate(PHASES)}
    memory = {"allocated": 1 << 20, "reserved": None, "peak": (3 << 33) + step}
    return {
        "t": 1000.0 + step / 100,
        "step": step,
        "loss": 1 / step,
        "samples": 128,
        "seconds": seconds,
        "memory": memory,
    } | fields


def written(root, count: int, ranks: int = 1, **fields) -> RunFolder:
    """The folder of a finished run with `count` steps per rank, written by the real writer."""
    folder = RunFolder.create("long", root)
    RunFolder.write_json(folder.spec, {"script": "train.py", "nproc": ranks})
    RunFolder.write_json(folder.status, {"state": "finished", "started": 1000.0, "ended": 1000.0 + count / 100})
    for rank in range(ranks):
        writer = Writer(folder.events_of(rank), rank)
        writer.write("start", t=1000.0, pid=1, device="cpu", attempt=0)
        for step in range(1, count + 1):
            writer.write("step", **measured(step, **fields))
        writer.write("end", t=1000.0 + count / 100, exit_code=0, steps=count, seconds=count / 100)
        writer.close()
    return folder


def opened(folder: RunFolder) -> RunState:
    follower = Follower(folder)
    follower.poll()
    return follower.state
