"""The figures of speed: what counts in them, and that every place shows the same ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from diagnosed import fold, script, spec, start, status, steps
from fabricate import FakeRun
from folded import apply
from rich.console import Console

import labkit
from labkit.analysis.comparison import recorded
from labkit.analysis.diagnose import findings
from labkit.analysis.metrics import (
    RECENT,
    counted_steps,
    median,
    percentile_95,
    phase_seconds,
    phase_shares,
    rank_throughput,
    step_seconds,
    throughput,
    throughput_of_median_steps,
)
from labkit.analysis.summary import summarise
from labkit.course.claims.measured import JOBS, Trials
from labkit.figures.charts import phases as phases_chart
from labkit.figures.charts import throughput as throughput_chart
from labkit.figures.tables import ranks_html
from labkit.frontends.terminal import view
from labkit.record.documents import plain
from labkit.record.follow import Follower
from labkit.setup.machine import Machine

ROOT = Path(labkit.__file__).parent


class Uneven(FakeRun):
    """A run whose steps take 40, 80 and 60 ms in turn, the first one 9 s; a third of each is waiting for data."""

    def measured(self, rank):
        self.step_seconds = 9.0 if self.done == 1 else (0.06, 0.04, 0.08)[self.done % 3]
        told = super().measured(rank)
        told["seconds"] |= {"data": self.step_seconds / 2, "backward": self.step_seconds / 4}
        return told


@pytest.fixture
def uneven(runs):
    run = Uneven(runs, strategy="single", nproc=1, steps=400)
    run.start()
    run.step(400)
    run.end()
    run.close()
    return run.folder


def test_every_place_shows_the_same_figures(uneven):
    follower = Follower(uneven)
    follower.poll()
    state = follower.state
    summary, (row,) = summarise(state, uneven.name), recorded([uneven])
    (rank,) = summary.ranks
    assert counted_steps(state.ranks[0]) == 399 > RECENT
    assert rank.step_seconds_median == 0.06 and rank.phase_seconds["data"] == 0.03
    assert rank.step_seconds_p95 == 0.08 and "<td>60.00</td><td>80.00</td>" in ranks_html("uneven", state)
    speed = 128 / 0.06
    assert summary.samples_per_second == pytest.approx(speed)
    assert row.samples_per_second == pytest.approx(speed) and row.phases == phase_shares(state)
    chart = {bars.name: bars.values for bars in phases_chart(state).bars}
    assert chart["data"] == pytest.approx([30.0]) and chart["backward"] == pytest.approx([15.0])
    assert row.phases["data"] == pytest.approx(30.0 / sum(values[0] for values in chart.values()))
    (line,) = throughput_chart(state).drawn().points
    assert line[1][-1] == pytest.approx(128 * 10 / sum((0.06, 0.04, 0.08)[number % 3] for number in range(391, 401)))
    (found,) = [one for one in findings(state) if one.name == "input_bound"]
    assert "30.0 ms of 60.0 ms per step" in found.evidence
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 closed with the process
    console.print(view(state, uneven))
    text = console.export_text()
    assert re.search(r"■ 0 .* 2,133 +60\.0 ", text) and "2,133 samples/s" in text
    assert "<td>60.00</td>" in ranks_html("a-run", state) and "2,133 samples/s" in ranks_html("a-run", state)
    trials = Trials(Machine.here(), {"single": [plain(summary)], "ddp": [plain(summary)]})
    assert trials.ratios("ddp", "single") == (JOBS["ddp"].global_batch / JOBS["single"].global_batch,)


def test_the_first_step_of_each_attempt_counts_in_no_figure():
    slow = steps(0, 1, data=5.0)
    state = fold(spec("single", 1), start(0), slow)
    assert (step_seconds(state, 0), throughput(state), phase_shares(state)) == (None, None, {})
    state = fold(spec("single", 1), start(0), slow, steps(0, 9, first=2))
    assert step_seconds(state, 0) == pytest.approx(0.1) and throughput(state) == pytest.approx(80)
    again = [event | {"attempt": 1} for event in start(0)]
    state = fold(spec("single", 1), start(0), slow, steps(0, 9, first=2), again, slow, steps(0, 3, first=2, data=0.1))
    assert step_seconds(state, 0) == pytest.approx(0.195), "of the newest attempt alone"
    assert phase_seconds(state, 0)["data"] == pytest.approx(0.1) and counted_steps(state.ranks[0]) == 3


def test_what_happens_now_is_of_the_newest_steps_until_the_run_is_over():
    events = [spec("single", 1), start(0), steps(0, 300), steps(0, RECENT, first=301, data=0.2)]
    state = fold(*events)
    assert step_seconds(state, 0) == pytest.approx(0.1) and step_seconds(state, 0, now=True) == pytest.approx(0.295)
    assert rank_throughput(state, 0, now=True) == pytest.approx(8 / 0.295) == pytest.approx(throughput(state, now=True))
    assert [one.name for one in findings(state)] == ["input_bound"], "it is slow now"
    apply(state, status("finished"))
    assert step_seconds(state, 0, now=True) == step_seconds(state, 0) == pytest.approx(0.1)
    assert throughput(state, now=True) == throughput(state)
    assert findings(state) == (), "the run was not slow"


def test_medians_of_a_long_run_are_estimated_until_it_is_over():
    rows = [steps(0, 1, first=number, data=0.001 * (number % 100))[0] for number in range(1, 5002)]
    state = fold(spec("single", 1), start(0), rows)
    assert phase_seconds(state, 0)["data"] == pytest.approx(0.0495, rel=0.1)
    apply(state, status("finished"))
    assert phase_seconds(state, 0)["data"] == pytest.approx(0.0495)


def test_a_median_is_of_what_is_known():
    assert median([1.0, float("nan"), 2.0]) == 1.5 and median(iter([3])) == 3.0
    assert percentile_95([float("nan"), *range(101)]) == 95.0
    assert str(median([])) == str(percentile_95([])) == "nan"
    assert throughput_of_median_steps(64, (0.1, 0.2)) == 320.0
    assert throughput_of_median_steps(64, (0.1, None)) is None and throughput_of_median_steps(64, ()) is None


def test_an_unknown_rank_has_no_figures():
    state = fold(script(2), start(0))
    assert step_seconds(state, 1) is None and set(phase_seconds(state, 1).values()) == {None}


# ---- the rule

OTHERS = ("analysis/metrics.py", "course/build/starters/sampler.py")  # a script of learners imports nothing of the lab
MIDDLES = {"median", "median_low", "median_high", "quantiles", "nanmedian", "percentile", "quantile", "nanpercentile"}


def own_statistics(tree: ast.AST) -> list[str]:
    """Where a module computes a middle itself, or reads the times of steps."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="statistics" | "numpy" | "np"), attr=name) if name in MIDDLES:
                found.append(f"line {node.lineno}: {name}")
            case ast.ImportFrom(module="statistics" | "numpy", names=names):
                found += [f"line {node.lineno}: {one.name}" for one in names if one.name in MIDDLES]
            case ast.Subscript(value=ast.Call(func=ast.Name(id="sorted")), slice=index) if "// 2" in ast.unparse(index):
                found.append(f"line {node.lineno}: the middle of sorted()")
            case ast.Attribute(value=ast.Name(id="steps") | ast.Attribute(attr="steps"), attr="seconds" | "phases"):
                found.append(f"line {node.lineno}: the column steps.{node.attr}")
    return found


def test_no_other_module_computes_the_middle_or_reads_the_time_of_steps():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        wrong = own_statistics(ast.parse(path.read_text(encoding="utf-8")))
        if wrong and not name.startswith(OTHERS):
            found[name] = wrong
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "statistics.median(times)",
        "from statistics import quantiles",
        "numpy.percentile(rank.steps.seconds, 95)",
        "sorted(times)[len(times) // 2]",
        "max(steps.phases['data'])",
    ],
)
def test_a_module_that_does_is_found(line):
    assert own_statistics(ast.parse(line))
    assert own_statistics(ast.parse((ROOT / "analysis" / "metrics.py").read_text(encoding="utf-8")))
