"""The learner's own predictions: the table of figures, the outcome, and how it is shown."""

from __future__ import annotations

import json
import math

import pytest
from commands import called
from diagnosed import memory
from fabricate import FakeRun, finished_folder
from folded import apply, fold, spec, status, step
from guessed import nothing_pending as nothing_pending
from guessed import over

from labkit import Run, figures
from labkit.analysis.guess import FIGURES, NEAR, outcomes, own_sentences, sentences, statement
from labkit.analysis.summary import recorded_summary, summarise
from labkit.common.units import significant
from labkit.figures.charts import OWN
from labkit.figures.tables import guess_html, ranks_html
from labkit.frontends.terminal import view
from labkit.record.documents import GUESS, Summary, decoded, plain
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording

MIB = 1 << 20


# ---- the table


def test_every_figure_is_one_of_the_summary_of_the_same_run(runs):
    """In its unit, and of every figure that this run has."""
    fake = FakeRun(runs, steps=12)
    fake.start()
    fake.step(12)
    for rank, writer in enumerate(fake.writers):
        writer.write("memory", t=fake.newest, step=3, owners={"parameters": 4 * MIB, "activations": MIB})
        writer.write("traffic", t=fake.newest, step=3, ops={"all_reduce": {"calls": 1, "bytes": 2, "sent": 3.0 * MIB}})
        comm = [["all_reduce", 0.01, 0.02], ["all_reduce", 0.03, 0.04]]
        spans = {"phases": [], "comm": comm, "marks": [], "busy": [], "exposed": {"backward": 0.005 + rank / 1000}}
        writer.write("timeline", t=fake.newest, step=8, t0=fake.newest, seconds=0.05, **spans)
    fake.writers[0].write("metric", t=fake.newest, name="accuracy", value=0.75)
    fake.end()
    fake.close()
    RunFolder.write_json(fake.folder.guess, {"v": 1, "figures": dict.fromkeys(FIGURES, 1.0)})
    follower = Follower(fake.folder)
    follower.poll()
    state = follower.state
    figures_of, ranks = summarise(state), summarise(state).ranks
    found = {(one.figure, one.rank): one.measured for one in outcomes(state)}
    for rank, one in enumerate(ranks):
        assert found["peak_mb", rank] * MIB == one.peak_memory_bytes
        assert found["parameters_mb", rank] * MIB == one.memory_bytes["parameters"]
        assert found["activations_mb", rank] * MIB == one.memory_bytes["activations"]
        assert found["gradients_mb", rank] is None and "gradients" not in one.memory_bytes
        assert found["sent_mb", rank] * MIB == one.comm_bytes_per_step
        assert found["step_ms", rank] / 1000 == pytest.approx(one.step_seconds_median, abs=1e-6)
        assert found["data_ms", rank] / 1000 == pytest.approx(one.phase_seconds["data"], abs=1e-6)
        assert found["exposed_ms", rank] / 1000 == pytest.approx(one.communication.open_seconds, abs=1e-6)
        assert found["overlapped_percent", rank] / 100 == pytest.approx(one.communication.hidden, abs=1e-3)
    assert found["samples_per_second", None] == pytest.approx(figures_of.samples_per_second, abs=1e-3)
    assert found["steps", None] == figures_of.steps
    assert found["loss", None] == pytest.approx(figures_of.loss, abs=1e-6)
    assert found["accuracy_percent", None] / 100 == figures_of.accuracy
    assert {figure for figure, _ in found} == {name for name, figure in FIGURES.items() if not figure.compared}
    recorded = decoded(json.loads(json.dumps(plain(figures_of))), Summary)
    assert {(outcome.figure, outcome.rank): outcome.measured for outcome in recorded.guess} == found


def test_numbers_have_three_significant_digits_and_no_zeros_at_the_end():
    cases = (
        (40, "40"),
        (52.345, "52.3"),
        (1234.5, "1,234"),
        (0.0071349, "0.00713"),
        (0, "0"),
        (4.10, "4.1"),
        (100, "100"),
    )
    for value, text in cases:
        assert significant(value) == text
    assert significant(math.nan) == "–"


# ---- the outcome


def test_a_miss_is_one_sentence_with_its_size_and_reason():
    state = over(step_ms=400.0)
    (said,) = own_sentences(state)
    assert said.startswith("Step time: you predicted 400 ms per rank; it was 500 ms (−20 %). Median of each phase: ")
    assert said.endswith("backward 200 ms, forward 100 ms, data 100 ms.")
    (said,) = own_sentences(over(step_ms=500.0 * (1 + NEAR - 0.01)))
    assert said == "Step time: you predicted 545 ms per rank; it was 500 ms (+9 %)."


def test_ranks_with_different_predictions_have_a_sentence_each():
    state = over(step_ms={"0": 250.0, "1": 505.0})
    first, second = own_sentences(state)
    assert "250 ms on rank 0; it was 500 ms (−50 %)" in first
    assert second == "Step time: you predicted 505 ms on rank 1; it was 500 ms (+1 %)."
    assert [one.missed for one in outcomes(state)] == [True, False]


def test_many_predictions_are_not_all_put_into_words():
    guessed = {str(rank): 100.0 + rank for rank in range(1_024)}
    assert statement(FIGURES["step_ms"], guessed).endswith("107 ms on rank 7, …")
    events = [one for rank in range(20) for one in (step(rank, 1), step(rank, 2))]
    told = {"kind": "guess", "guess": {"figures": {"step_ms": guessed}}}
    said = own_sentences(fold(spec(nproc=20), told, *events, status("finished")))
    assert len(said) == 9 and said[-1] == "Step time: 12 more predictions are in the summary."


def test_different_measurements_are_a_range_with_the_worst_rank():
    measured = memory(0, 10 * MIB, activations=10 * MIB), memory(1, 20 * MIB, activations=15 * MIB, gradients=5 * MIB)
    state = fold(spec(), {"kind": "guess", "guess": {"figures": {"peak_mb": 10.0}}}, *measured)
    for rank, peak in ((0, 10), (1, 20)):
        held = {"allocated": 100, "reserved": None, "peak": peak * MIB}
        apply(state, step(rank, 1, memory=held))
    assert own_sentences(state) == ["You predict: peak memory 10 MiB per rank."]
    apply(state, status("finished"))
    (said,) = own_sentences(state)
    assert said == (
        "Peak memory: you predicted 10 MiB per rank; it was 10 to 20 MiB (−50 % on rank 1). At the peak of a step:"
        " activations 15.0 MiB, gradients 5.0 MiB."
    )


def test_percentages_differ_in_points_and_what_was_not_measured_is_said():
    state = over(accuracy_percent=90.0, overlapped_percent=50.0)
    apply(state, {"kind": "metric", "t": 4.0, "rank": 0, "name": "accuracy", "value": 0.5})
    overlapped, accuracy = own_sentences(state)
    assert accuracy == "Accuracy: you predicted 90 %; it was 50 % (+40 points)."
    assert overlapped == "Overlapped communication: you predicted 50 % per rank; it was not measured."
    assert [one.missed for one in outcomes(state)] == [False, False, True]


def test_the_prediction_of_the_lab_is_next_to_the_own_one():
    state = over(sent_mb=8.0)
    rank = {"like": 0, "peak_memory_bytes": None, "at_peak": {}, "phase_at_peak": "", "memory_bytes": {}}
    ranks = [rank | {"rank": number, "comm_bytes_per_step": 4 * MIB} for number in (0, 1)]
    plan = {"spec": plain(state.spec), "method": "simulated", "ranks": ranks, "classes": []}
    apply(state, {"kind": "prediction", "prediction": plan})
    for number in (0, 1):
        ops = {"all_reduce": {"calls": 1, "bytes": 4 * MIB, "sent": 4.0 * MIB}}
        apply(state, {"kind": "traffic", "t": 3.0, "rank": number, "step": 3, "ops": ops})
    assert own_sentences(state) == [
        "Traffic per step: you predicted 8 MiB per rank; it was 4 MiB (+100 %); the lab predicted 4 MiB. Sent per step:"
        " all_reduce 4.0 MiB."
    ]
    assert sentences(state)[1:] == ["The prediction was made by tracing the script without data (simulated)."]


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e15])
def test_extreme_predictions_are_valid_figures(value):
    state = over(**dict.fromkeys(FIGURES, value))
    assert len(own_sentences(state)) == len(FIGURES) - 1, "a speed-up needs a comparison"
    assert decoded(json.loads(json.dumps(plain(summarise(state)))), Summary) == summarise(state)


def test_figures_of_another_version_and_ranks_that_do_not_exist_are_ignored():
    state = over(peak_gb=4.0, loss={"0": 1.0}, step_ms={"7": 3.0})
    assert outcomes(state) == () and own_sentences(state) == []
    assert figures.chart("phases", state).marks[0].values == (None, None)


# ---- charts and front ends


def test_charts_have_a_mark_at_the_predicted_value():
    state = over(step_ms={"1": 400.0}, peak_mb=3.0, loss=0.5, samples_per_second=20.0)
    (marks,) = figures.chart("phases", state).marks
    assert (marks.name, marks.values) == (OWN, (None, 400.0))
    drawn = figures.svg("phases", state)
    assert drawn.count(f"{OWN} 400") == 1
    mark = figures.figure("phases", state).data[-1]
    assert (mark.name, mark.x, mark.text) == (OWN, ("rank 1",), ("400 ms",))
    assert mark.base[0] + mark.y[0] / 2 == pytest.approx(400, rel=1e-3)
    assert not figures.chart("memory_by_owner", state).marks, "nothing is profiled yet"
    apply(state, memory(0, 2 * MIB, activations=2 * MIB))
    chart = figures.chart("memory_by_owner", state)
    assert chart.marks[0].values == (3.0,) and chart.bar_height > 3.0
    for name, level in (("loss", 0.5), ("throughput", 20.0)):
        line = figures.chart(name, state).lines[-1]
        assert (line.name, [*line.x], [*line.y]) == (OWN, [0.0, 10.0], [level, level])
    assert not any(chart(over()).marks for chart in figures.CHARTS.values())


def test_every_front_end_has_the_outcome(runs, capsys):
    folder = finished_folder(runs, "ddp", 2, 0.05)
    RunFolder.write_json(folder.guess, {"v": GUESS, "figures": {"step_ms": 100.0}})
    said = "Step time: you predicted 100 ms per rank; it was 50 ms (+100 %)"
    run = Run.attach(folder.path)
    assert said in ranks_html(run.name, run.state)
    assert said in guess_html(run.state)
    assert called("show", folder.name, "--json") == 0
    found = json.loads(capsys.readouterr().out)["guess"]
    assert [one["measured"] for one in found] == pytest.approx([50.0, 50.0])
    assert recorded_summary(folder).guess[0].guessed == 100.0
    from labkit.frontends.console import Console

    Console(width=300).print(view(run.state, folder))
    assert said in capsys.readouterr().out
    recording = Recording(folder, speed=1e9)
    recording.poll()
    assert recording.state.guess == {"step_ms": 100.0}
