"""Events of a small run with round figures, and the state after them; diagnosed.py has those that findings need."""

from __future__ import annotations

from labkit.plan.spec import Spec
from labkit.record.state import RunState


def step(rank: int, number: int, t: float = 0.0, **fields) -> dict:
    seconds = {"step": 0.5, "data": 0.1, "forward": 0.1, "backward": 0.2, "optimizer": 0.05, "other": 0.05}
    memory = {"allocated": 100, "reserved": None, "peak": 150 + number}
    given = {"loss": 1.0 / number, "samples": 8, "seconds": seconds, "memory": memory}
    return {"kind": "step", "t": t or float(number), "rank": rank, "step": number} | given | fields


def start(rank: int, t: float = 0.0, attempt: int = 0, **fields) -> dict:
    return {
        "kind": "start",
        "t": t,
        "rank": rank,
        "pid": 100 + rank,
        "host": "here",
        "device": "cpu",
        "attempt": attempt,
    } | fields


def spec(**asked) -> dict:
    asked = {"strategy": "ddp", "workload": "cnn", "nproc": 2, "steps": 10, "device": "cpu"} | asked
    return {"kind": "spec", "spec": Spec(**asked).to_json()}


def status(state: str, **fields) -> dict:
    return {"kind": "status", "status": {"state": state} | fields}


def error(rank: int, t: float, type: str = "ValueError", message: str = "bad sample") -> dict:
    return {"kind": "error", "t": t, "rank": rank, "type": type, "message": message, "traceback": "Traceback …"}


def fold(*events: dict) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state
