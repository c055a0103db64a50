"""Events of a small run with round figures, and the state after them; diagnosed.py has those that findings need."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import asdict

from labkit.plan.spec import Spec
from labkit.record.documents import Guesses, Plan, SpecFields, Status, decoded
from labkit.record.events import Event, Step, StepMemory, StepSeconds, checked
from labkit.record.reader import Block, StepFile, column
from labkit.record.state import Applied, RunState
from labkit.record.writer import COLUMNS, MEMORY, PHASES, steps_path

DOCUMENTS = {"spec": SpecFields, "status": Status, "prediction": Plan, "guess": Guesses}


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


def applied(event: dict | Applied) -> Applied:
    """An event as the reader returns it: checked, and a document of the run folder as what it is."""
    if not isinstance(event, dict):
        return event
    if event["kind"] in DOCUMENTS:
        return decoded(event.get(event["kind"]), DOCUMENTS[event["kind"]])
    return checked({"t": 0.0} | event)


def fold(*events) -> RunState:
    """The state after events, or lists of events; an invalid one is counted as a broken line."""
    state = RunState()
    for event in events:
        apply(state, *(event if isinstance(event, list) else [event]))
    return state


def apply(state: RunState, *events: dict | Applied) -> None:
    """Applies events; an invalid one is counted as a broken line."""
    for event in events:
        try:
            state.apply(applied(event))
        except ValueError:
            state.broken += 1


def one_by_one(events: Iterable[Event | Block]) -> Iterator[Event]:
    """Events as a reader returns them, with a `Step` for each valid record of a block."""
    for event in events:
        if isinstance(event, Block):
            columns = {name: column(event.records[event.valid()], name).tolist() for name, _ in COLUMNS}
            for values in zip(*columns.values()):
                row = {name: None if math.isnan(value) else value for name, value in zip(columns, values)}
                seconds = {"step": row["seconds"]} | {phase: row[phase] for phase in PHASES}
                yield Step(
                    t=row["t"],
                    rank=event.rank,
                    step=int(row["step"]),
                    loss=values[2] if row["losses"] else None,
                    samples=row["samples"],
                    seconds=StepSeconds(**seconds),
                    memory=StepMemory(*(row[name] for name in MEMORY)),
                )
        else:
            yield event


def events_in(path: Path) -> list[dict]:
    """The events of a rank as they are in its two files, in the order of writing; broken lines are no events."""
    file = StepFile(steps_path(path))
    steps = deque(one_by_one([Block(file, 0, file.read(0, count))] if (count := file.whole()) else []))
    found, taken = [], 0
    for line in path.read_bytes().splitlines():
        event = json.loads(line)
        while taken < (event.get("after") or 0) and event["kind"] != "going_on":
            found.append(_as_written(steps.popleft()))
            taken += 1
        found.append(event)
    return found + [_as_written(step) for step in steps]


def _as_written(step: Step) -> dict:
    return {"kind": "step", **asdict(step), "seconds": asdict(step.seconds), "memory": asdict(step.memory)}
