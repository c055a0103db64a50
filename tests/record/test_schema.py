"""The schemas: shapes and types, the checks that follow from them, and the published JSON Schema, which must agree."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Annotated, Any, Literal

import pytest
from fabricate import FakeRun
from foreign import FINISHED, HANG, KILLED, RECORDED, THREADS, command
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from typing_extensions import NotRequired, TypedDict, get_type_hints

from labkit.analysis.summary import summarise
from labkit.record import events, kinds
from labkit.record.documents import DOCUMENTS, read_document
from labkit.record.events import PHASES
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.plain import DEEPEST, parse
from labkit.record.published import schemas
from labkit.record.schema import Limits, Row, Sequence, Table, shape_of
from labkit.record.shapes import Choice, Either, Flag, Null, Number, Text
from labkit.record.stepfile import MEMORY
from labkit.record.types import measured, summary

RUNS = [FINISHED, THREADS, HANG, KILLED]

# In JSON Schema 1.0 is an integer; the lab writes and reads integers without a decimal point.
Validator = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int),
)
EVENT = Validator(schemas()["events"]["schema"])
SUMMARY = Validator(schemas()["summary"]["schema"])


class Fields(TypedDict):
    a: float
    b: NotRequired[float]
    c: float | None
    d: NotRequired[float | None]


# ---- shapes and types


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        (Number(0, 5), (0, 5, 2.5), (-1, 5.1, True, "1", None, math.nan, math.inf, 10**400, [])),
        (Number(0, 5, whole=True), (0, 5), (2.0, True, math.nan, 6)),
        (Number(-1e300, 1e300, any_float=True), (math.nan, -math.inf, 3, 0.5), (10**301, "x", None, True)),
        (Text(3, inline=True), ("", "abc"), ("abcd", "\0", 3, None)),
        (Flag(), (True, False), (0, 1, None, "x")),
        (Null(), (None,), (0, False, "", [])),
        (Choice(("a", "b")), ("a",), ("c", None, ["a"], {})),
        (Either((Text(), Null())), ("a", None), (1, False, [])),
        (Sequence(Number(), most=2, least=1), ([1], [1, 2]), ([], [1, 2, 3], [None], {}, "ab", (1,))),
        (Row((Text(), Number()), least=1), (["a"], ["a", 1]), ([], [1], ["a", "b"], ["a", 1, None], {})),
        (Table(Number(), most=1), ({}, {"x": 1}), ({"x": "y"}, {"x": 1, "y": 2}, [])),
        (
            Table(Number(), numbers=1_024),
            ({"0": 1, "9": 1, "999": 1, "1023": 1},),
            ({"1024": 1}, {"x": 1}, {"-1": 1}, {"01": 1}, {"٣": 1}, {"1" * 20: 1}, {"": 1}),
        ),
        (
            shape_of(Fields),
            ({"a": 1, "c": None}, {"a": 1, "b": 1, "c": 1, "d": None}),
            ({}, {"a": None, "c": 1}, {"a": 1}, {"a": 1, "b": None, "c": 1}, []),
        ),
    ],
)
def test_shapes_tell_right_from_wrong_and_the_json_schema_says_the_same(shape, right, wrong):
    schema = Validator(shape.json_schema())
    assert all(shape.check(value) for value in right)
    for value in wrong:
        assert not shape.check(value), value
        assert shape.problem(value, "field").startswith("field")
    for value in (*right, *wrong):
        if _is_json(value):
            assert schema.is_valid(value) == shape.check(value), value


def _is_json(value: object) -> bool:
    """Whether standard JSON has the value: neither a tuple, nor NaN, nor an integer beyond what a float holds."""
    return not isinstance(value, (int, float, tuple)) or (not isinstance(value, tuple) and abs(value) < 1e300)


@pytest.mark.parametrize("end", [1, 2, 10, 11, 99, 1_024])
def test_names_that_are_numbers_end_where_they_should(end):
    table = Table(Flag(), numbers=end)
    assert [number for number in range(end + 1_100) if table.check({str(number): True})] == list(range(end))


def test_shapes_follow_from_types():
    assert shape_of(Annotated[list[str], Limits(most=2, least=1)]) == Sequence(Text(), most=2, least=1)
    assert shape_of(dict[str, bool]) == Table(Flag())
    assert shape_of(tuple[float, None]) == Row((Number(), Null()), least=2)
    assert shape_of(Literal["a", "b"]) == Choice(("a", "b"))
    assert shape_of(str | None) == Either((Text(), Null()))
    with pytest.raises(TypeError, match="has no shape"):
        shape_of(bytes)


def test_types_of_steps_have_every_phase():
    assert set(get_type_hints(measured.StepSeconds)) == {"step", *PHASES}
    assert set(get_type_hints(measured.StepMemory)) == set(MEMORY)


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
    for event in _events(RunFolder(RECORDED / run)):
        EVENT.validate(event)
    SUMMARY.validate(read_document(RECORDED / run / "summary.json"))


def test_a_new_run_follows_the_published_schema(runs):
    run = FakeRun(runs, steps=10)
    run.start()
    run.step(10)
    run.end()
    run.close()
    seen = _events(run.folder)
    assert {event["kind"] for event in seen} >= {"start", "activity", "step", "end"}
    for event in seen:
        EVENT.validate(event)
        assert event["v"] == events.VERSION
    follower = Follower(run.folder)
    follower.poll()
    figures = json.loads(json.dumps(summarise(follower.state, run.folder.name)))
    SUMMARY.validate(figures)
    assert figures["v"] == summary.VERSION


def _events(folder: RunFolder) -> list[dict[str, Any]]:
    """All events of a run, steps included."""
    paths = (*folder.event_files().values(), folder.system)
    return [dict(event) for path in paths for event in folder.reader(path).poll()]


def test_reader_and_schema_accept_and_refuse_the_same_events():
    """Changes one value of a recorded event at a time, at any depth, and asks both."""
    choose = random.Random(0)
    recorded = {}
    for run in RUNS:
        for event in _events(RunFolder(RECORDED / run)):
            recorded[event["kind"], event.get("what")] = event
    assert len(recorded) > 10
    refused = 0
    for event in recorded.values():
        for changed in _changes(event, choose):
            accepted = kinds.checked(copy.deepcopy(changed)) is not None
            assert EVENT.is_valid(changed) == accepted, changed
            refused += not accepted
    assert refused > 300


def test_reader_and_schema_accept_and_refuse_the_same_summaries():
    check = DOCUMENTS["summary.json"].shape.check
    for run in RUNS:
        for changed in _changes(read_document(RECORDED / run / "summary.json"), random.Random(1)):
            assert SUMMARY.is_valid(changed) == check(changed), changed


WRONG = (None, True, -1, 0.5, 10**16, 2**70, "", "x\0", "x" * 5_000, [], [None], [[0, 1, 2]], {}, {"x": 1}, {"01": {}})


def _changes(value: dict[str, Any], choose: random.Random) -> list[Any]:
    """Copies of a JSON object in which one value is replaced or missing."""
    found = []
    for path in _paths(value):
        for new in ("missing", *choose.sample(WRONG, 3)):
            changed = copy.deepcopy(value)
            place = changed
            for step in path[:-1]:
                place = place[step]
            if new == "missing":
                del place[path[-1]]
            else:
                place[path[-1]] = new
            if not _has_columns(changed):
                found.append(changed)
    return found


def _paths(value: Any) -> list[tuple[Any, ...]]:
    """The paths of all values inside of a JSON value; of a list, of its first and last."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(index, value[index]) for index in sorted({0, len(value) - 1} if value else ())]
    else:
        return []
    return [path for name, inner in items for path in [(name,), *((name, *more) for more in _paths(inner))]]


def _has_columns(event: dict[str, Any]) -> bool:
    """Whether only the reader compares the lengths of the lists in an event, which JSON Schema cannot express."""
    return event.get("kind") == "memory_step"


def test_json_is_bounded_and_can_be_encoded():
    assert parse(b'"\\ud83c\\udfd6 \\ud800"') == "🏖 \N{REPLACEMENT CHARACTER}"
    assert parse(b"[" * DEEPEST + b"]" * DEEPEST) is not None
    for content in (
        b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1),
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"",
        b"\xed\xa0\x80",
        b"9" * 5_000,
    ):
        with pytest.raises(ValueError):
            parse(content)
