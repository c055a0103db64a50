"""The schema of the documents of a run folder (`spec.json`, `status.json`, …), and the reader that checks them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.record.files import read_below
from labkit.record.kinds import AMOUNT, BYTES, CODE, COUNT, NAME, NULL, PID, RANK, RANKS, SECONDS, TEXT, TIME, VALUE
from labkit.record.plain import parse
from labkit.record.schema import Anything, Choice, Either, Flag, Number, Record, Sequence, Table, Text, record

STATES = ("starting", "running", "stopping", "finished", "failed", "stopped", "lost")

_PROCESSES = Number(1, RANKS, whole=True)
_LINE = Text(inline=True)  # arguments, variables and paths, of any length
_WHO = record({"pid": PID, "create_time": TIME}, host=NAME, boot=NAME)

_SPEC = record(  # the fields of `Spec`, which itself checks their combinations
    optional={
        **dict.fromkeys(("scaling", "device"), NAME),
        **dict.fromkeys(("max_restarts", "sample_every", "hang_after"), COUNT),
        "seed": Number(-(2**64), 2**64, whole=True),
        **dict.fromkeys(("tensors", "as_module"), Flag()),
        "args": Sequence(_LINE, 10_000),
        "options": Table(Either((NAME, Number(), Flag(), NULL))),
    },
    **dict.fromkeys(("strategy", "workload", "precision", "data", "fault"), NAME),
    **dict.fromkeys(("data_dir", "script", "resume"), _LINE),
    **dict.fromkeys(("batch_size", "epochs", "steps", "samples", "save_every"), COUNT),
    nproc=_PROCESSES,
)
_FAILED = record(
    optional={"message": TEXT, "traceback": TEXT, "last_seen": Flag()},
    **{"exit_code": CODE, "pid": PID, "signal": NAME, "t": TIME},
)
_START = Choice(("warm", "cold"))
_STATUS = record(
    {"state": Choice(STATES)},
    {"message": TEXT, "restarts": COUNT, "start": _START, "cold_because": TEXT},
    **{
        "v": COUNT,
        "started": TIME,
        "ended": TIME,
        "supervisor": _WHO,
        "agent": _WHO,
        "exit_code": CODE,
        "detached": Flag(),
    },
    agent_began=TIME,
    ranks=Table(PID, RANKS, numbers=RANKS),
    failures=Table(_FAILED, RANKS, numbers=RANKS),
    oom_kills=COUNT,
)
_LAUNCH = record(
    optional={
        "argv": Sequence(_LINE),
        "env": Table(_LINE, 10_000),
        "cwd": _LINE,
        "start": _START,
        "cold_because": TEXT,
    },
    **{"v": COUNT, "engine": NAME, "detached": Flag()},
)
_CAPTURE = record({"step": COUNT}, snapshot=Flag())

_FINDING = record(
    dict.fromkeys(("name", "kind", "title", "evidence", "cause", "fix"), TEXT) | {"ranks": Sequence(RANK, RANKS)}
)
_ENTRY = record(
    {"op": NAME, "calls": AMOUNT, "measured": Number(), "formula": TEXT, "reason": TEXT}, null={"theory": Number()}
)
_RANK = record(
    {"rank": RANK, "memory_bytes": Table(BYTES), "phase_seconds": Table(Either((SECONDS, NULL)))},
    null={
        "exit_code": CODE,
        "peak_memory_bytes": BYTES,
        "step_seconds_median": SECONDS,
        "comm_bytes_per_step": Number(),
    }
    | {"communication": record(step=COUNT, seconds=SECONDS, open_seconds=SECONDS, hidden=Number())},
)
_RANKS = Sequence(RANK, RANKS)
_FAILURE = record(
    {"rank": RANK, "type": TEXT, "message": TEXT, "traceback": TEXT, "collateral": _RANKS},
    {"alike": _RANKS, "left": _RANKS, "last_seen": Flag()},
    {"exit_code": CODE},
)
_SUMMARY = record(
    {
        "run": NAME,
        "state": Choice(("ready", *STATES)),
        "world_size": _PROCESSES,
        "steps": COUNT,
        "restarts": COUNT,
        "broken_lines": COUNT,
    }
    | {
        "seconds": record(null={"total": Number(), "to_first_step": Number()}),
        "note": TEXT,
        "ranks": Sequence(_RANK, RANKS),
    }
    | {
        "findings": Sequence(_FINDING, 1_000),
        "ledger": Sequence(_ENTRY, 1_000),
        "replicas": Sequence(Anything(), 1_000),
    },
    optional={"start": _START},
    null={
        **dict.fromkeys(("strategy", "workload", "device"), NAME),
        **dict.fromkeys(("samples_per_second", "loss", "gil_wait"), Number()),
        **{"script": _LINE, "accuracy": VALUE, "failure": _FAILURE},
    },
)


@dataclass(frozen=True)
class Document:
    """The schema of one file of the run folder, and its largest size in bytes."""

    shape: Record
    limit: int


DOCUMENTS = {
    "spec.json": Document(_SPEC, 1 << 20),
    "status.json": Document(_STATUS, 64 << 20),
    "launch.json": Document(_LAUNCH, 4 << 20),
    "capture.json": Document(_CAPTURE, 1 << 16),
    "summary.json": Document(_SUMMARY, 64 << 20),
}


class Unreadable(LookupError):
    """A run folder with an invalid file. `reason` is one clause: the file, the field, and the value found."""

    def __init__(self, run: str, reason: str):
        super().__init__(f"run {run} cannot be read: {reason}")
        self.reason = reason


def read_document(path: Path) -> dict[str, Any]:
    """The document `path`, directly in a run folder, with the fields in its schema; empty if there is no such file.

    Raises `Unreadable` for anything but a plain file with valid values.
    """
    document = DOCUMENTS[path.name]
    try:
        value = parse(read_below(path.parent, path, document.limit))
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = str(error) if error.errno is None else f"{path.name}: {os.strerror(error.errno)}"
        raise Unreadable(path.parent.name, reason) from None
    except ValueError as error:
        raise Unreadable(path.parent.name, f"{path.name} is not JSON: {error}") from None
    if path.name == "summary.json":
        value = _with_current_names(value)
    if not document.shape.check(value):
        raise Unreadable(path.parent.name, f"{path.name}: {document.shape.problem(value, '')}")
    return document.shape.known(value)


def _with_current_names(summary: Any) -> Any:
    """A summary in which findings have `fix`, which older versions called `way_out`."""
    found = summary.get("findings") if type(summary) is dict else None
    if type(found) is not list:
        return summary
    return summary | {"findings": [_renamed(one, "way_out", "fix") if type(one) is dict else one for one in found]}


def _renamed(fields: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in fields.items()}
