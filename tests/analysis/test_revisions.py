"""What follows from a state is computed once per revision, however often it is drawn."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosed import fold, op, saw, script, spec, start, status, steps, waiting
from fabricate import FakeRun
from folded import apply
from rich.console import Console

import labkit
from labkit.analysis import comparison, diagnose
from labkit.analysis.comparison import rows
from labkit.analysis.diagnose import findings, training
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise
from labkit.figures.tables import ranks_html
from labkit.frontends.panel.compare import ComparisonView
from labkit.frontends.panel.view import RunView
from labkit.frontends.terminal import line, view
from labkit.record.follow import Follower
from labkit.record.state import RunState
from labkit.runs.handle import Run

ROOT = Path(labkit.__file__).parent


@pytest.fixture
def evaluated(monkeypatch):
    """How often each rule was evaluated."""
    counts: Counter[str] = Counter()

    def counted(rule):
        def of(state):
            counts[rule.__name__] += 1
            return rule(state)

        of.__name__ = rule.__name__
        return of

    monkeypatch.setattr(diagnose, "RULES", tuple(map(counted, diagnose.RULES)))
    return counts


@pytest.fixture
def under_way(runs):
    run = FakeRun(runs)
    run.start()
    run.step(20)
    yield run
    run.close()


def hanging() -> list:
    return [spec(), start(0, 1), steps(0, 4), steps(1, 4), waiting(0, op("all_reduce", seq=12)), status("running")]


def test_redraws_without_a_new_event_evaluate_no_rule_again(under_way, evaluated):
    follower = Follower(under_way.folder)
    follower.poll()
    console = Console(width=120, file=open("/dev/null", "w"))  # noqa: SIM115 closed with the process
    panel = RunView()
    for _ in range(5):
        assert not follower.poll()
        console.print(view(follower.state, under_way.folder))
        line(follower.state)
        ranks_html("a-run", follower.state)
        panel._begin(follower.state)
        panel._why.value = not panel._why.value
    assert set(evaluated.values()) == {1} and len(evaluated) == len(diagnose.RULES)
    under_way.step()
    assert follower.poll()
    panel._draw()
    assert set(evaluated.values()) == {2}


def test_a_revision_has_one_summary_one_tuple_of_findings_and_one_row(under_way, monkeypatch):
    follower = Follower(under_way.folder)
    follower.poll()
    state, folder = follower.state, under_way.folder
    assert findings(state) is findings(state) and ledger(state) is ledger(state)
    failed = fold(spec(), start(0, 1), status("failed", rank0=1))
    assert failed.failure is failed.failure is not None
    assert summarise(state, "a") is summarise(state, "a") is not summarise(state, "b")
    counts: Counter[str] = Counter()
    compute = comparison.efficiency
    monkeypatch.setattr(comparison, "efficiency", lambda state: counts.update(["rows"]) or compute(state))
    first = [rows([(folder, state)], {}) for _ in range(3)]
    assert counts["rows"] == 1 and first[0] == first[2] and first[0][0].steps == 20
    under_way.step()
    follower.poll()
    assert rows([(folder, state)], {})[0].steps == 21 and counts["rows"] == 2


def test_what_a_caller_does_with_its_summary_is_no_other_view_s(under_way):
    under_way.end()
    run = Run.attach(under_way.folder.path)
    run.summary()["ranks"].clear()
    assert len(run.summary()["ranks"]) == 2


def test_the_same_rows_are_drawn_once(monkeypatch):
    drawn = Counter()
    from labkit.frontends.panel import compare

    monkeypatch.setattr(compare, "comparison_html", lambda *_: drawn.update(["html"]) or str(drawn))
    shown, row = ComparisonView(), compare.Row("ddp", "DDP", "cnn")
    for _ in range(3):
        shown.show((row,), {})
    assert drawn["html"] == 1
    shown.show((replace(row, steps=1),), {})
    shown.say("nothing")
    shown.show((replace(row, steps=1),), {})
    assert drawn["html"] == 3 and "nothing" not in shown.widget.value


def test_every_change_is_a_revision():
    state = RunState()
    seen = [state.revision]
    apply(state, spec())
    seen.append(state.revision)
    state.broken += 1
    seen.append(state.revision)
    apply(state, {"kind": "of another version"})
    assert sorted(set(seen)) == seen and state.revision == seen[-1]


def test_a_value_derived_during_a_change_is_derived_again():
    """As by a thread that draws a state while another one changes it."""
    state = fold(spec(), start(0, 1))
    failed = status("failed", rank0=1)

    class Torn(dict):
        """A status during whose reading the state is drawn."""

        def __getitem__(self, name):
            findings(state)
            return super().__getitem__(name)

    assert state.failure is None
    apply(state, Torn(failed))
    assert state.failure is not None and [one.name for one in findings(state)] == ["first_failure"]


# ---- time


def sample(t: float) -> dict:
    return {"kind": "system", "t": t, "cpu_percent": 10.0, "memory_used": 1 << 30}


def test_a_hang_is_found_and_stays_while_no_event_arrives(evaluated):
    state = fold(*hanging())
    for _ in range(3):
        assert [one.name for one in findings(state)] == ["hang"]
    assert evaluated["hang"] == 1
    longer = waiting(0, op("all_reduce", seq=12)) | {"t": 160.0}
    before = findings(state)[0].title
    apply(state, longer)
    assert findings(state)[0].title != before and evaluated["hang"] == 2, "the rank says how long it has waited"


def test_time_passes_with_the_samples_of_the_supervisor_alone():
    """A rank that has started processes and does not train: a finding once enough time has passed, without any event of
    a rank."""
    state = fold(script(1), start(0), saw(0, "process", t=10.0, target="python", how="subprocess"), sample(11.0))
    assert findings(state) == () and state.now == 11.0
    apply(state, sample(10.0 + training._PATIENCE))
    assert findings(state) == ()
    apply(state, sample(10.1 + training._PATIENCE))
    assert [one.name for one in findings(state)] == ["trains_elsewhere"]


@pytest.mark.parametrize("room", ["analysis", "figures"])
def test_nothing_that_is_derived_reads_a_clock(room):
    """Otherwise a value could change without a revision."""
    reads = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            reads += [f"{path.name}: {name}" for name in modules if name in ("time", "datetime", "labkit.record.clock")]
    assert reads == []
