"""The schema of each kind of event, and the parser of one line. Events that pass need no further checks.

A field that the probe writes and a front end reads needs a row here: fields without one are dropped on reading. Kinds
without a table pass with any fields, so that folders of newer versions open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from labkit.record.events import PHASES
from labkit.record.plain import parse
from labkit.record.schema import Either, Flag, Null, Number, Record, Row, Sequence, Shape, Table, Text, record

RANKS = 1_024  # most ranks of one run; front ends draw a row for each

RANK = Number(0, RANKS - 1, whole=True)
TIME = Number(
    0, 32_000_000_000
)  # unix seconds, up to the year 2984: the last that every platform can write as a date is in 3000
SECONDS = Number(-1e9, 1e9)
COUNT = Number(0, 2**53, whole=True)  # the largest that a column of floats holds exactly
AMOUNT = Number(0, 1e15)
BYTES = Number(0, 2**62)
LOSS = Number(-1e300, 1e300, any_float=True)
SERIES = Number(0, 63, whole=True)  # optimizers with separate losses; a chart has a line for each
PID = Number(1, 2**31 - 1, whole=True)
CODE = Number(-(2**63), 2**63, whole=True)
NAME = Text(4_096, inline=True)
TEXT = Text()
NULL = Null()
SCALAR = Either((Number(-1e300, 1e300, any_float=True), TEXT, Flag(), NULL))
VALUE: Shape = SCALAR  # of a metric or a report: nested lists, at most as deep as a tensor of eight dimensions
for _ in range(8):
    VALUE = Either((SCALAR, Sequence(VALUE)))


_Shapes = Mapping[str, Shape] | None


def _event(required: _Shapes = None, optional: _Shapes = None, null: _Shapes = None, **nullable: Shape) -> Record:
    """An event of a rank: the envelope (with `after`, the number of steps written before it) and its own fields."""
    return record(
        {"t": TIME, "kind": NAME, "rank": RANK} | dict(required or {}),
        optional,
        null,
        **{"v": COUNT, "after": COUNT} | nullable,
    )


_SPANS = Sequence(Row((NAME, SECONDS, SECONDS), least=3))
_CALLS = Sequence(  # operation, start, end, and if known: bytes, group, ranks, sequence number
    Row(
        (NAME, SECONDS, SECONDS, *(Either((shape, NULL)) for shape in (BYTES, NAME, Sequence(RANK, RANKS), COUNT))),
        least=3,
    )
)
_OWNERS = Table(BYTES, most=100)
_SIZES = Sequence(Sequence(COUNT, most=64), most=10_000)
COLLECTIVES = Sequence(
    record(
        optional={"op": NAME, "over": Flag()}, group=NAME, id=NAME, ranks=Sequence(RANK, RANKS), seq=COUNT, sizes=_SIZES
    ),
    1_000,
)
_GPU = record({"index": RANK}, memory_used=BYTES, memory_total=BYTES, utilisation=AMOUNT, power=AMOUNT)
_REPLICA = record(
    {"replica": RANK, "device": NAME, "forward": SECONDS, "cpu": SECONDS, "samples": AMOUNT, "memory": BYTES}
)
_EXTRA = record({"outputs": BYTES, "gradients": BYTES})
_STEP_SECONDS = record(step=SECONDS, **dict.fromkeys(PHASES, SECONDS))
_MOMENT = {"step": COUNT, "t0": TIME, "seconds": SECONDS, "phases": _SPANS}

EVENTS: dict[str, Record] = {
    "start": _event(
        optional={"device": NAME, "device_name": NAME, "attempt": Number(0, 1e6, whole=True)},
        **{
            "pid": PID,
            "host": NAME,
            "local_rank": RANK,
            "world_size": Number(1, RANKS, whole=True),
            "torch": NAME,
            "began": TIME,
        },
    ),
    "startup": _event({"name": NAME}),
    "device": _event({"device": NAME}, {"device_name": NAME}),
    "step": _event(
        {"step": COUNT},
        loss=LOSS,
        samples=AMOUNT,
        seconds=_STEP_SECONDS,
        memory=record(allocated=BYTES, reserved=BYTES, peak=BYTES),
    ),
    "optimizer": _event({"optimizer": SERIES, "name": NAME, "sets_pace": Flag()}),
    "losses": _event({"optimizer": SERIES, "points": Sequence(Row((COUNT, Either((LOSS, NULL))), 2))}),
    "memory": _event({"owners": _OWNERS}, step=COUNT),
    "replica": _event({"replicas": Sequence(_REPLICA, 64, least=1), "extra": _EXTRA}, step=COUNT, gil_wait=SECONDS),
    "traffic": _event({"step": COUNT, "ops": Table(record({"calls": AMOUNT, "bytes": BYTES, "sent": BYTES}))}),
    "timeline": _event(
        _MOMENT
        | {
            "comm": _CALLS,
            "marks": _SPANS,
            "busy": Sequence(Row((SECONDS, SECONDS), 2)),
            "exposed": Table(SECONDS),
        },
        {"device": NAME, "backend": NAME, "left_out": COUNT},
    ),
    "memory_step": replace(
        _event(
            _MOMENT | {"times": Sequence(SECONDS), "owners": Table(Sequence(BYTES)), "peak": BYTES, "at_peak": _OWNERS}
        ),
        columns=("times", "owners"),
    ),
    "waiting": _event(
        {"since": TIME}, {"stack": TEXT, "ops": COLLECTIVES}, step=COUNT, activity=NAME, phase=NAME, computed=SECONDS
    ),
    "going_on": _event(after=SECONDS, waited=SECONDS),
    "silent": _event({"since": TIME, "process": NAME}, {"stack": TEXT}, computed=SECONDS),
    "heard": _event(),
    "dropped": _event({"events": COUNT}),
    "saw": _event({"what": NAME}),
    "activity": _event(null={"name": NAME}),
    "metric": record({"t": TIME, "kind": NAME}, v=COUNT, after=COUNT, rank=RANK, name=NAME, value=VALUE, step=COUNT),
    "report": _event({"values": Table(VALUE)}),
    "error": _event(optional={"type": TEXT, "message": TEXT, "traceback": TEXT, "ops": COLLECTIVES, "owners": _OWNERS}),
    "probe_error": _event({"part": TEXT, "type": TEXT, "message": TEXT}, traceback=TEXT),
    "end": _event(optional={"stack": TEXT}, exit_code=CODE, steps=COUNT, seconds=SECONDS),
    "system": record(
        {"t": TIME, "kind": NAME},
        **{"v": COUNT, "rank": RANK, "cpu_percent": AMOUNT, "memory_used": BYTES, "gpus": Sequence(_GPU, 1_024)},
        ranks=Table(record(cpu_percent=AMOUNT, rss=BYTES), numbers=RANKS),
    ),
}

# Observations, by `what`; see probe/observations.py and probe/elsewhere.py.
SAW: dict[str, Record] = {
    "model": _event({"what": NAME, "name": NAME, "units": COUNT, "parameters": COUNT}),
    "loader": _event({"what": NAME}, null={"batches": COUNT, "samples": COUNT}, sampler=NAME),
    "epoch": _event(
        {"what": NAME, "sampler": COUNT, "set": Number(-(2**53), 2**53, whole=True), "shuffle": Flag()}, ranks=COUNT
    ),
    "batch": _event({"what": NAME, "step": COUNT, "digest": NAME}),
    "item": _event({"what": NAME, "calls": COUNT, "steps": COUNT}),
    "save": _event({"what": NAME, "path": NAME, "step": COUNT}),
    "input": _event({"what": NAME, "step": COUNT}, digest=NAME),
    "process": _event({"what": NAME, "how": NAME, "target": NAME}),
    "thread": _event({"what": NAME, "name": NAME}),
    "gradients": _event({"what": NAME, "backwards": COUNT}),
    "not_finite": _event({"what": NAME, "step": COUNT}, parameters=COUNT, nan=COUNT, infinite=COUNT),
}

_ENVELOPE = record({"t": TIME, "kind": NAME})


def event(line: bytes) -> dict[str, Any] | None:
    """The event of one line, with the fields in its table; None for an invalid event."""
    try:
        value = parse(line)
    except ValueError:
        return None
    return checked(value)


def checked(value: Any) -> dict[str, Any] | None:
    """The same for a parsed value."""
    if type(value) is not dict:
        return None
    kind = value.get("kind")
    shape = EVENTS.get(kind) if type(kind) is str else None
    if shape is None:
        return value if _ENVELOPE.check(value) else None
    if kind == "saw" and shape.check(value):
        shape = SAW.get(value["what"])
        if shape is None:
            return value  # an observation of a newer version
    return shape.known(value) if shape.check(value) else None
