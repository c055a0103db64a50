"""Events of profiled steps, and the state after them."""

from __future__ import annotations

from folded import applied

from labkit.record.documents import SpecFields
from labkit.record.state import RunState
from labkit.record.writer import OWNERS

MIB = 1 << 20
MS = 1_000_000  # in nanoseconds, in which the profiler measures
PHASES = (
    ("data", 0, 2 * MS),
    ("forward", 2 * MS, 10 * MS),
    ("backward", 10 * MS, 30 * MS),
    ("optimizer", 30 * MS, 40 * MS),
)


def timeline_event(rank, step=8, t0=1000.0, comm=None, **more):
    """A step of 40 ms, with one collective from 20 to 30 ms that overlaps with compute until 26 ms."""
    return {
        "kind": "timeline",
        "t": t0 + 1,
        "rank": rank,
        "step": step,
        "t0": t0,
        "seconds": 0.04,
        "backend": "gloo",
        "device": "cpu",
        "phases": [[name, start / 1e9, end / 1e9] for name, start, end in PHASES],
        "comm": [["all_reduce", 0.02, 0.03, 4096, "default_pg", [0, 1], 7]] if comm is None else comm,
        "busy": [[0.002, 0.026], [0.031, 0.04]],
        "marks": [["FSDP::pre_forward (0)", 0.002, 0.003]],
        "exposed": {"backward": 0.004},
    } | more


def memory_event(rank, owners, times=(0.0, 0.01, 0.02)):
    columns = {owner: list(owners.get(owner, [0] * len(times))) for owner in OWNERS}
    sums = [sum(row) for row in zip(*columns.values())]
    highest = sums.index(max(sums))
    return {
        "kind": "memory_step",
        "t": 1001.0,
        "rank": rank,
        "step": 2,
        "t0": 1000.0,
        "seconds": 0.04,
        "phases": [["forward", 0.0, 0.01], ["backward", 0.01, 0.04]],
        "times": list(times),
        "owners": columns,
        "peak": max(sums),
        "at_peak": {owner: column[highest] for owner, column in columns.items()},
    }


def step_event(rank, step):
    seconds = {
        "step": 0.04,
        "data": 0.002,
        "copy": 0.0,
        "forward": 0.008,
        "backward": 0.02,
        "optimizer": 0.01,
        "other": 0.0,
    }
    memory = {"allocated": MIB, "reserved": MIB, "peak": MIB}
    fields = {"step": step, "loss": 1.0, "samples": 32, "seconds": seconds, "memory": memory}
    return {"kind": "step", "t": 1000.0 + step, "rank": rank} | fields


def state_of(*events, nproc=2):
    state = RunState()
    state.spec = SpecFields(nproc=nproc)
    for event in events:
        state.apply(applied(event))
    return state
