"""Every field of every event and document, one after another, is missing, null, not a number, empty, of another type or
huge: nothing that reads runs raises, and what is refused is refused with one sentence."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import fuzz
from foreign import FINISHED, HANG, command, copy_of
from hostile import diverged_run, documents, events, full_run

from labkit.record.documents import Unreadable
from labkit.record.folder import RunFolder

pytestmark = pytest.mark.thorough

MISSING = object()
VALUES = {
    **{"missing": MISSING, "null": None, "nan": math.nan, "infinity": math.inf, "-1": -1, "0": 0, "1": 1, "7": 7},
    **{"0.5": 0.5, "1e18": 1e18, "2**53": 2**53, "empty text": "", "text": "x", "'nan'": "nan", "flag": True},
    **{"empty list": [], "empty object": {}, "list of lists": [[]], "object": {"x": 1}, "numbers": [0.0, 1.0]},
}


def last_word(path: str) -> str:
    """A harmless text for a field."""
    return path.rpartition(".")[2]


def places(value: Any, above: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside of `value`; of a list, its first element stands for all."""
    keys = value if isinstance(value, dict) else range(len(value[:1])) if isinstance(value, list) else ()
    for key in list(keys):
        yield (*above, key)
        yield from places(value[key], (*above, key))


def mutated(value: Any, path: tuple, new: Any) -> Any:
    """A copy in which the value at `path` is another one, or missing."""
    changed = holder = copy.deepcopy(value)
    for key in path[:-1]:
        holder = holder[key]
    if new is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return changed


def read(folder: RunFolder, slow: bool = False) -> bool:
    """Reads a run as everything does; False if it was refused."""
    with fuzz.time_limit():
        try:
            fuzz.read(folder, slow)
        except Unreadable as error:
            assert "\n" not in str(error)
            return False
    return not folder.trouble()


def append(folder: RunFolder, mutations: list[dict[str, Any]]) -> None:
    """Appends events to the file of the rank that they name, or else to that of rank 0."""
    for event in mutations:
        system = event.get("kind") == "system"
        path = folder.system if system else folder.events_of(1 if event.get("rank") == 1 else 0)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


# ---- events


@pytest.fixture(params=[FINISHED, HANG, "full", "diverged"])
def base(request, runs) -> RunFolder:
    made = {"full": lambda: full_run(runs, last_word), "diverged": lambda: diverged_run(runs)}
    return made.get(request.param, lambda: copy_of(runs, request.param))()


@pytest.mark.parametrize("order", ["first to last", "last to first"])
@pytest.mark.parametrize("new", VALUES.values(), ids=VALUES)
def test_a_value_in_every_field_of_every_event(runs, new, order):
    """All fields are mutated in one run, in two orders, because a later event may hide an earlier one."""
    folder = full_run(runs, last_word)
    mutations = [mutated(event, path, new) for event in events(last_word).values() for path in places(event)]
    append(folder, mutations if order == "first to last" else mutations[::-1])
    assert read(folder, slow=order == "first to last")


@pytest.mark.parametrize("name", events(last_word))
def test_every_field_of_one_event_with_every_value(base, name):
    """In runs that are otherwise as they were recorded."""
    event = events(last_word)[name] | {"t": 1.8e9}
    append(base, [mutated(event, path, new) for path in places(event) for new in VALUES.values()])
    read(base)


@pytest.mark.parametrize("name", events(last_word))
def test_an_event_that_lacks_one_field(runs, name):
    """One after another, because any other event of its kind could hide what is missing."""
    folder, event = diverged_run(runs), events(last_word)[name]
    paths = [folder.system, *(folder.events_of(rank) for rank in range(2))]
    before = {path: path.read_bytes() for path in paths if path.exists()}
    for field in event:
        append(folder, [mutated(event, (field,), MISSING) | ({"rank": rank} if rank else {}) for rank in range(2)])
        assert read(folder), f"without {field}"
        for path, content in before.items():
            path.write_bytes(content)


# ---- documents

_READERS = {
    "spec.json": RunFolder.read_spec,
    "status.json": RunFolder.read_status,
    "launch.json": RunFolder.read_launch,
    "plan.json": RunFolder.read_prediction,
    "guess.json": RunFolder.read_guess,
    "summary.json": RunFolder.read_summary,
}
_EVERY = 5  # of the mutations that are accepted, one in five is read by everything


@pytest.mark.parametrize("name", documents(last_word))
def test_every_field_of_a_document_with_every_value(runs, name, capsys):
    """A document that is refused is refused at once by every command; any other one is read by everything."""
    folder = full_run(runs, last_word)
    path: Path = folder.path / name
    document = json.loads(path.read_text(encoding="utf-8"))
    accepted = 0
    for place in places(document):
        for what, new in VALUES.items():
            path.write_text(json.dumps(mutated(document, place, new)), encoding="utf-8")
            try:
                _READERS[name](folder)
            except Unreadable as error:
                assert "\n" not in str(error) and name in str(error), (place, what)
                continue
            accepted += 1
            if accepted % _EVERY == 0:
                try:
                    read(folder)
                except Exception as error:
                    raise AssertionError(f"{name}: {place} is {what}") from error
    assert accepted


@pytest.mark.parametrize("how", ["{", "[]", "null", '"x"', "\0", "[" * 100_000, ""])
@pytest.mark.parametrize("name", documents(last_word))
def test_a_document_that_is_none(runs, name, how):
    folder = full_run(runs, last_word)
    (folder.path / name).write_text(how, encoding="utf-8")
    for arguments in (["show"], ["show", "--json"], ["handout", "-o", str(runs / "x.html")], ["logs"]):
        code, said = command(arguments[0], folder.name, *arguments[1:])
        last = said.strip().splitlines()[-1]
        refused = json.loads(last)["error"] if code and "--json" in arguments else last.removeprefix("labkit: ")
        assert code == 0 or (code == 1 and refused.startswith(f"run {folder.name} cannot be read: {name}")), said
    assert command("compare", folder.name)[0] in (0, 1)
