"""The schema of the documents of a run folder (`spec.json`, `status.json`, …), and the reader that checks them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.record.files import read_below
from labkit.record.plain import parse
from labkit.record.schema import Record, record_of
from labkit.record.types.documents import Capture, Launch, SpecFields, Status
from labkit.record.types.guess import Guesses
from labkit.record.types.prediction import Plan
from labkit.record.types.summary import Summary


@dataclass(frozen=True)
class Document:
    """The schema of one file of the run folder, and its largest size in bytes."""

    shape: Record
    limit: int


DOCUMENTS = {
    "spec.json": Document(record_of(SpecFields), 1 << 20),
    "status.json": Document(record_of(Status), 64 << 20),
    "launch.json": Document(record_of(Launch), 4 << 20),
    "plan.json": Document(record_of(Plan), 64 << 20),
    "guess.json": Document(record_of(Guesses), 1 << 20),
    "capture.json": Document(record_of(Capture), 1 << 16),
    "summary.json": Document(record_of(Summary), 64 << 20),
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
