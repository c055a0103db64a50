"""The published JSON Schemas of events, of the summary and of the learner's predictions, from the types that the
reader checks.

What JSON Schema cannot express is in a `$comment`: NaN and infinities, columns of equal length.
"""

from __future__ import annotations

from typing import Any

from labkit.record import events, kinds
from labkit.record.documents import DOCUMENTS
from labkit.record.types import guess, summary

_HEAD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$comment": "An integer has no decimal point or exponent. Fields without a schema are ignored.",
}


def schemas() -> dict[str, Any]:
    """By name, `events` (one line of an event file), `summary` and `guess`: `version` and `schema`.

    The version is that of the field `v`. It grows when a field is removed or changes its meaning; new kinds and fields
    do not change it.
    """
    figures, guessed = (DOCUMENTS[f"{name}.json"].shape.json_schema() for name in ("summary", "guess"))
    return {
        "events": {"version": events.VERSION, "schema": _HEAD | {"title": "an event of a run"} | _of_events()},
        "summary": {"version": summary.VERSION, "schema": _HEAD | {"title": "the summary of a run"} | figures},
        "guess": {"version": guess.VERSION, "schema": _HEAD | {"title": "what a learner predicted of a run"} | guessed},
    }


def _of_events() -> dict[str, Any]:
    """One definition for each kind, for each observation (`saw.model`, …), and for those of newer versions."""
    known = {kind: shape.json_schema() for kind, shape in kinds.EVENTS.items()}
    known |= {f"saw.{what}": shape.json_schema() for what, shape in kinds.SAW.items()}
    known["saw"]["properties"]["what"]["not"] = {"enum": list(kinds.SAW)}
    unknown = kinds.UNKNOWN.json_schema()
    unknown["properties"]["kind"]["not"] = {"enum": list(kinds.EVENTS)}
    defined = {**known, "unknown": unknown}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in defined], "$defs": defined}
