"""One folder with invalid values is listed with the reason, and everything else works; folders of earlier versions keep
opening."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest
from bench.fuzz import time_limit
from conftest import wait_until
from fabricate import FakeRun
from foreign import FINISHED, HANG, KILLED, RECORDED, THREADS, command, copy_of, everything

from labkit import Lab, SpecError, show
from labkit.analysis.comparison import alike, recorded
from labkit.analysis.diagnose import findings
from labkit.analysis.summary import recorded_summary, summarise
from labkit.frontends.handout.execute import RecordedRuns
from labkit.plan.spec import Spec
from labkit.record.documents import LaunchPlan, SpecFields, Status, Unreadable, plain, read_document
from labkit.record.events import Activity, Unknown, decoded
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.packed import shipped
from labkit.runs.handle import Run

BAD = "20261123-000000-bad"
DEEP = "[" * 100_000 + "]" * 100_000


def changed(name: str, **fields) -> dict:
    return json.loads((RECORDED / FINISHED / name).read_text(encoding="utf-8")) | fields


# what is wrong, the file's new content (a dict for JSON), and what the reason says
WRONG = {
    "nproc 1000000": (
        "spec.json",
        changed("spec.json", nproc=1_000_000),
        "spec.json: nproc must be an integer <= 1024, got 1000000",
    ),
    "nproc two": (
        "spec.json",
        changed("spec.json", nproc="two"),
        "nproc must be an integer or null, got 'two'",
    ),
    "nproc 1e400": (
        "spec.json",
        '{"strategy": "ddp", "nproc": 1e400}',
        "nproc must be an integer or null, got inf",
    ),
    "nproc of 5000 digits": ("spec.json", '{"nproc": ' + "9" * 5_000 + "}", "spec.json is not JSON"),
    "deep": ("spec.json", DEEP, "spec.json is not JSON: it is nested too deeply"),
    "deep inside": ("spec.json", '{"options": {"x": ' + "[" * 40 + "]" * 40 + "}}", "options.… must be"),
    "no object": ("spec.json", "[1, 2]", "spec.json: it must be an object, got a list of 2 values"),
    "cut": ("spec.json", '{"strategy": "dd', "spec.json is not JSON"),
    "not UTF-8": ("spec.json", b"\xff\xfe\x00", "spec.json is not JSON"),
    "large": ("spec.json", b" " * (1 << 20) + b"{}", "spec.json is larger than 1,048,576 bytes"),
    "options": ("spec.json", changed("spec.json", options={"bucket_mb": [1]}), "options.… must be"),
    "guess without figures": ("guess.json", {"v": 1}, "guess.json: figures is missing"),
    "guess of a text": ("guess.json", {"figures": {"peak_mb": "40"}}, "guess.json: figures.… must be"),
    "guess of infinity": ("guess.json", '{"figures": {"loss": Infinity}}', "guess.json: figures.… must be"),
    "guess of a flag": ("guess.json", {"figures": {"loss": True}}, "guess.json: figures.… must be"),
    "guess of a rank": ("guess.json", {"figures": {"peak_mb": {"01": 3}}}, "guess.json: a name in figures.… must be"),
    "guess of many figures": (
        "guess.json",
        {"figures": dict.fromkeys(map(str, range(101)), 1)},
        "of length <= 100, got an object of 101 entries",
    ),
    "script": ("spec.json", {"script": "a\0b", "nproc": 2}, "script must be a text without NUL, got 'a\\x00b'"),
    "started 1e18": (
        "status.json",
        changed("status.json", started=1e18),
        "started must be a number <= 32000000000.0, got 1e+18",
    ),
    "ended NaN": ("status.json", changed("status.json", ended=math.nan), "ended must be a number"),
    "state": ("status.json", changed("status.json", state="fine"), "state must be one of the known values, got 'fine'"),
    "no state": (
        "status.json",
        {"started": 1.0},
        "state is missing",
    ),
    "failures": (
        "status.json",
        changed("status.json", failures={"x": {}}),
        "a name in failures must be an integer",
    ),
    "exit code": (
        "status.json",
        changed("status.json", failures={"0": {"exit_code": "\x1b]0;x\x07"}}),
        "failures.….exit_code must be an integer or null",
    ),
    "pid": (
        "status.json",
        changed("status.json", supervisor={"pid": 2**40, "create_time": 1.0}),
        "supervisor.pid must be",
    ),
}


@pytest.fixture(params=WRONG)
def bad(request, runs):
    """A valid and an invalid run in the same runs folder, and the reason that must be reported for the invalid one."""
    copy_of(runs)
    folder = copy_of(runs, name=BAD)
    name, content, reason = WRONG[request.param]
    text = json.dumps(content) if isinstance(content, dict) else content
    (folder.path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder, reason


def test_a_bad_folder_is_listed_with_the_reason_and_the_rest_works(bad, runs):
    folder, reason = bad
    with time_limit():
        code, said = command("runs")
        assert code == 0 and "".join(reason.split()) in "".join(said.split()) and FINISHED in said and "75.8%" in said
        rows = json.loads(command("runs", "--json")[1])["runs"]
        assert [row["state"] for row in rows] == ["finished", "unreadable"] and reason in rows[1]["reason"]
        for words in (
            ("show", BAD),
            ("replay", BAD),
            ("compare", BAD),
            ("handout", BAD),
            ("stop", BAD),
            ("export", BAD, "--to", "csv"),
        ):
            code, said = command(*words)
            assert (code, said.count("\n")) == (1, 1), said
            assert said.startswith(f"labkit: run {BAD} cannot be read: ") and reason in said
        assert command("show", FINISHED)[0] == 0
        code, said = command("compare")
        assert code == 0 and f"{BAD} is left out: it cannot be read" in " ".join(said.split()) and "DDP" in said
        code, said = command("clean", "--yes")
        assert code == 0 and "is kept because it cannot be read" in said and folder.path.is_dir()


def test_python_refuses_a_bad_folder_and_lists_it(bad, runs):
    folder, reason = bad
    for call in (lambda: Run.attach(BAD), lambda: show(BAD), lambda: recorded([folder])):
        with pytest.raises(LookupError) as refused:
            call()
        assert reason in str(refused.value) and type(refused.value) is Unreadable
    readable, why = RunFolder.readable(RunFolder.all())
    assert [one.name for one in readable] == [FINISHED] and reason in why[BAD]
    assert [one.name for one in alike(readable)] == [FINISHED]
    assert [one.name for one in RecordedRuns(runs)._runs] == [FINISHED]


def test_the_panel_opens_beside_a_bad_folder_and_says_what_is_wrong_with_it(bad):
    folder, reason = bad
    lab = Lab(strategy="ddp", nproc=2)
    labels = {path: words for words, path in lab._recorded.which.options}
    assert len(labels) == 3 + len(shipped()) and reason.split(", got")[0] in labels[str(folder.path)]
    lab._recorded.which.value = str(folder.path)
    wait_until(lambda: "cannot be read" in lab._view.finding.value)
    assert not lab._run_button.disabled
    with pytest.raises(SpecError, match="cannot be read"):
        Lab(recorded=BAD)
    lab._compare().show_recorded()
    assert f"{BAD} is left out: it cannot be read" in lab._compare()._view.widget.value


@pytest.mark.parametrize("content", ["{}", '{"hello": 1}', "[]", DEEP, '{"run": 5}', "\xff"])
def test_a_foreign_summary_is_computed_again(runs, content):
    folder = copy_of(runs)
    folder.summary.write_text(content, encoding="latin-1")
    code, said = command("runs")
    assert code == 0 and "finished" in said and "1,059" in said
    assert json.loads(command("show", "last", "--json")[1])["state"] == "finished"


@pytest.mark.parametrize(
    "line",
    [
        '{"t": 1795314402.0, "rank": 1000000, "kind": "step", "step": 1}',
        '{"t": 1795314402.0, "rank": 0, "kind": "step", "step": 1e400}',
        '{"t": 1e400, "rank": 0, "kind": "step", "step": 7}',
        '{"t": NaN, "rank": 0, "kind": "step", "step": 7}',
        '{"t": 1795314402.0, "rank": 0, "kind": "start", "device": 5}',
        '{"t": 1795314402.0, "rank": 0, "kind": "memory", "owners": {"parameters": "much"}}',
        '{"t": 1795314402.0, "rank": 0, "kind": "saw", "what": "save", "step": 1}',
        '{"t": 1795314402.0, "rank": 0, "kind": "saw", "what": "loader", "samples": 1, "sampler": "x"}',
        (
            '{"t": 1795314402.0, "rank": 0, "kind": "timeline", "step": 7, "t0": 1, "seconds": 1, "phases": [], "comm":'
            ' [], "marks": [], "busy": [[0, 1, 2]], "exposed": {}}'
        ),
        '{"t": 1795314402.0, "rank": 0, "kind": "error", "message": 7}',
        '{"t": 1795314402.0, "rank": 0, "kind": "metric", "name": "accuracy", "value": {"x": 1}}',
        '{"t": 1795314402.0, "kind": "system", "ranks": {"x": {"rss": 1}}}',
        DEEP,
        "\udcff",
    ],
)
def test_a_line_with_invalid_values_is_counted_as_broken(runs, line):
    folder = copy_of(runs)
    with open(folder.events_of(0), "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line + "\n")
    follower = Follower(folder)
    follower.poll()
    assert follower.state.broken == 1 and len(follower.state.ranks[0].steps) == 12
    assert [one.name for one in findings(follower.state) if one.name.startswith("not_")] == ["not_readable"]
    assert summarise(follower.state).state == "finished"


def test_a_deep_value_of_a_later_version_is_ignored(runs):
    folder = copy_of(runs)
    with open(folder.events_of(0), "a", encoding="utf-8") as file:
        file.write('{"t": 1795314402.0, "rank": 0, "kind": "later", "x": ' + "[" * 40 + "]" * 40 + "}\n")
    follower = Follower(folder)
    follower.poll()
    assert follower.state.broken == 0 and len(follower.state.ranks[0].steps) == 12
    assert not [one.name for one in findings(follower.state) if one.name.startswith("not_")]
    assert summarise(follower.state).state == "finished"


def test_a_line_of_gigabytes_is_given_up(runs, monkeypatch):
    monkeypatch.setattr("labkit.record.reader.LONGEST", 1_000)
    folder = copy_of(runs)
    whole = folder.events_of(0).read_bytes()
    folder.events_of(0).write_bytes(whole + b"x" * 9_000_000 + b"\n" + whole.splitlines(keepends=True)[-1])
    reader = folder.reader(folder.events_of(0))
    events = []
    while block := list(reader.poll(limit=100_000)):
        events += block
        assert len(reader._rest) <= 1_000
    while reader._offset < folder.events_of(0).stat().st_size:
        events += reader.poll(limit=100_000)
        assert len(reader._rest) <= 1_000
    assert reader.broken == 1 and len(events) == whole.count(b"\n") + 1


def test_unknown_fields_are_dropped_and_unknown_kinds_pass(runs):
    folder = copy_of(runs)
    asked = folder.read_spec()
    RunFolder.write_json(folder.spec, plain(asked) | {"of_another_time": {"x": [1]}})
    assert folder.read_spec() == asked
    known = decoded(b'{"t": 1, "rank": 0, "kind": "activity", "name": "x", "more": 1}')
    assert known == Activity(t=1.0, rank=0, name="x")
    for line in (
        b'{"t": 1, "kind": "of another time", "more": [1]}',
        b'{"t": 1, "rank": 0, "kind": "saw", "what": "of another time", "x": 1}',
    ):
        assert isinstance(decoded(line), Unknown)


# ---- folders of earlier versions


@pytest.mark.parametrize(
    ("run", "state"), [(FINISHED, "finished"), (THREADS, "finished"), (HANG, "stopped"), (KILLED, "failed")]
)
def test_folders_of_earlier_versions_open(runs, run, state):
    folder = copy_of(runs, run)
    assert folder.trouble() == ""
    follower = Follower(folder)
    follower.poll()
    assert (follower.state.status.state, follower.state.broken) == (state, 0)
    summary = recorded_summary(folder)
    assert (summary.state, summary.steps) == (state, summarise(follower.state, folder.name).steps)
    assert everything(folder)


def same(recorded, again) -> bool:
    """Whether what was read and written again is what was recorded; an empty text, zero or none may be left out."""
    if not isinstance(recorded, dict):
        return recorded == again
    return again.keys() <= recorded.keys() and all(
        same(value, again[name]) if name in again else not value for name, value in recorded.items()
    )


@pytest.mark.parametrize("run", [FINISHED, THREADS, HANG, KILLED])
def test_every_field_that_is_recorded_has_a_definition(run):
    folder = RunFolder(RECORDED / run)
    for path in (*folder.event_files().values(), folder.system):
        for line in path.read_bytes().splitlines():
            event = decoded(line)
            assert json.loads(line).keys() - {"kind", "what"} <= set(event.__struct_fields__), line
            assert not isinstance(event, Unknown)
    for path, kind in ((folder.spec, SpecFields), (folder.status, Status), (folder.launch, LaunchPlan)):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        assert recorded.keys() <= set(kind.__struct_fields__)
        again = plain(read_document(path, kind))
        assert same(recorded, again), "values stay as they are"


def test_every_field_of_a_spec_has_a_definition():
    assert set(SpecFields.__struct_fields__) == {field.name for field in fields(Spec)}
    assert SpecFields.of(Spec("ddp", nproc=2)).to_spec() == Spec("ddp", nproc=2)


def test_a_summary_is_read_as_it_was_written(runs):
    run = FakeRun(runs, steps=10)
    run.start()
    run.step(10)
    run.end()
    run.close()
    follower = Follower(run.folder)
    follower.poll()
    summary = summarise(follower.state, run.folder.name)
    RunFolder.write_json(run.folder.summary, summary)
    assert run.folder.read_summary() == summary
