"""Records are checked by their definitions when they are decoded, and the published JSON Schemas say the same."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from fabricate import FakeRun
from folded import events_in
from foreign import FINISHED, HANG, KILLED, RECORDED, THREADS, command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from labkit.analysis.summary import summarise
from labkit.record import events
from labkit.record.documents import SUMMARY, SpecFields, Status, Summary, decoded, plain, schemas
from labkit.record.events import KINDS, OBSERVATIONS, Unknown, checked, parse
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.writer import MEMORY, PHASES, VERSION

RUNS = [FINISHED, THREADS, HANG, KILLED]

# In JSON Schema 1.0 is an integer; the lab writes and reads integers without a decimal point.
Validator = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int),
)
EVENT, SUMMARIES = Validator(schemas()["events"]["schema"]), Validator(schemas()["summary"]["schema"])


def lines_of(run: str) -> list[dict[str, Any]]:
    folder = RunFolder(RECORDED / run)
    paths = (*folder.event_files().values(), folder.system)
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


# One recorded event of each kind, and of each observation.
RECORDED_KINDS = {(event["kind"], event.get("what")): event for run in RUNS for event in lines_of(run)}


# ---- the published schemas


def test_the_schemas_are_valid_and_versioned_and_the_command_prints_them():
    for name in ("events", "summary", "guess"):
        Draft202012Validator.check_schema(schemas()[name]["schema"])
    code, said = command("schema", "--json")
    assert (code, json.loads(said)) == (0, schemas())
    assert {name: one["version"] for name, one in schemas().items()} == {"events": 1, "summary": 1, "guess": 1}
    assert json.loads(command("schema")[1]) == schemas()


@pytest.mark.parametrize("run", RUNS)
def test_recorded_events_follow_the_published_schema(run):
    for event in lines_of(run):
        EVENT.validate(event)


def test_a_new_run_follows_the_published_schema(runs):
    run = FakeRun(runs, steps=10)
    run.start()
    run.step(10)
    run.end()
    run.close()
    seen = events_in(run.folder.events_of(0))
    assert {event["kind"] for event in seen} >= {"start", "activity", "step", "end"}
    for event in seen:
        EVENT.validate(event)
        assert event["v"] in (VERSION, None)
    follower = Follower(run.folder)
    follower.poll()
    figures = json.loads(json.dumps(plain(summarise(follower.state, run.folder.name))))
    SUMMARIES.validate(figures)
    assert figures["v"] == SUMMARY


def test_steps_have_every_phase_and_kind_of_memory():
    assert set(events.StepSeconds.__struct_fields__) == {"step", *PHASES}
    assert events.StepMemory.__struct_fields__ == MEMORY


# ---- decoding checks

WRONG = st.one_of(
    st.sampled_from(
        (None, True, -1, 0.5, 10**16, 2**70, 10**400, math.nan, math.inf, "", "x\0", "x" * 5_000, "\ud800")
    ),
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5), st.lists, max_leaves=8),
    st.dictionaries(st.sampled_from(["0", "01", "x", "-1", "1e9", "1024"]), st.integers() | st.none(), max_size=3),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every position inside a JSON value, as its container and key."""
    keys = list(value) if isinstance(value, dict) else range(min(3, len(value))) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(RECORDED_KINDS, key=str)), st.data())
def test_an_event_with_any_value_is_refused_or_follows_the_schema(name, data):
    event = copy.deepcopy(RECORDED_KINDS[name])
    holder, key = data.draw(st.sampled_from(places(event)))
    if data.draw(st.booleans()) and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = data.draw(WRONG)
    text = json.dumps(event).encode()
    found = events.decoded(text)
    if found is None:
        return
    value = parse(text)
    if not any(isinstance(number, float) and not math.isfinite(number) for number in leaves(value)):
        assert EVENT.is_valid(value), value
    json.dumps(plain(found)).encode()


def leaves(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if inner is None else [leaf for item in inner for leaf in leaves(item)]


@pytest.mark.parametrize("name", sorted(RECORDED_KINDS, key=str))
def test_every_required_field_of_an_event_is_required(name):
    event = RECORDED_KINDS[name]
    kind = type(checked(event))
    required = kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
    assert not issubclass(kind, Unknown)
    for field in {"t", *required} & event.keys():
        with pytest.raises(ValueError, match=field):
            checked({other: value for other, value in event.items() if other != field})


def test_all_kinds_are_known_by_their_name():
    assert all(kind.__struct_config__.tag == name for name, kind in {**KINDS, **OBSERVATIONS}.items())


@pytest.mark.thorough
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([(SpecFields, "spec.json"), (Status, "status.json"), (Summary, "summary.json")]), st.data())
def test_a_document_with_any_value_is_decoded_or_refused_in_one_clause(kind_and_name, data):
    kind, name = kind_and_name
    document = json.loads((RECORDED / FINISHED / name).read_text(encoding="utf-8"))
    holder, key = data.draw(st.sampled_from(places(document)))
    holder[key] = data.draw(WRONG)
    try:
        found = decoded(parse(json.dumps(document).encode()), kind)
    except ValueError as error:
        assert "\n" not in str(error) and str(error)
    else:
        json.dumps(plain(found)).encode()


def test_json_of_any_origin_can_be_encoded():
    assert parse(b'"\\ud83c\\udfd6 \\ud800"') == "🏖 \N{REPLACEMENT CHARACTER}"
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}
    for content in (b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"", b"\xed\xa0\x80", b"9" * 5_000):
        with pytest.raises(ValueError):
            parse(content)
    for value in ("1e999", "NaN", "9" * 400, "[" * 20 + "]" * 20):
        event = events.decoded(b'{"t": 1, "kind": "metric", "value": %s}' % value.encode())
        assert event is None or not math.isfinite(event.value)
