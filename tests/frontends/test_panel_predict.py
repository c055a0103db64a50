"""Predict in the panel, without a trace: the button, the strip above the charts, and the Memory tab before and after a
run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from conftest import wait_until
from fabricate import finished_folder
from folded import apply, fold, start, status, step

from labkit import figures
from labkit.common.units import size
from labkit.frontends.panel import predict as module
from labkit.frontends.panel.lab import Lab
from labkit.frontends.panel.view import RunView
from labkit.launch.job import Job
from labkit.plan.spec import Spec
from labkit.prediction.tracer import Cancelled
from labkit.record.documents import Guesses, Plan, decoded, plain
from labkit.record.folder import RunFolder
from labkit.runs.guesses import PENDING, attach, document, pending

MIB = 1 << 20
ASKED = {"workload": "mlp", "nproc": 2, "device": "cpu", "steps": 5}
AT_PEAK = {"parameters": 7 * MIB, "gradients": 3 * MIB}


def plan_of(spec: Spec, **more) -> Plan:
    ranks = [
        {
            "rank": rank,
            "like": 0,
            "peak_memory_bytes": sum(AT_PEAK.values()),
            "at_peak": AT_PEAK,
            "phase_at_peak": "backward",
            "memory_bytes": AT_PEAK,
            "comm_bytes_per_step": 5 * MIB,
        }
        for rank in range(spec.processes)
    ]
    return decoded({"spec": spec.to_json(), "method": "simulated", "ranks": ranks, "classes": [], **more}, Plan)


class Traces:
    """Stands for `predict` and its cache: a trace ends when it is cancelled, or when `go` is set and then does what
    `outcome` does."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.begun: list[Spec] = []
        self.cancelled: list[Spec] = []
        self.threads: set[int | None] = set()
        self.outcome = plan_of
        self.seconds = 0.0
        self.go, self.measured = threading.Event(), threading.Event()
        self.measured.set()

    def predict(self, spec: Spec, cancelled: Callable[[], bool]) -> Plan:
        self.begun.append(spec)
        self.threads.add(threading.get_ident())
        wait_until(lambda: self.go.is_set() or cancelled())
        if cancelled():
            self.cancelled.append(spec)
            raise Cancelled
        plan = self.outcome(spec)
        if plan.method == "simulated":
            self.plans[repr(spec)] = plan
        return plan

    def cached(self, spec: Spec) -> Plan | None:
        return self.plans.get(repr(spec))

    def timed(self, spec: Spec, plan: Plan, cancelled: Callable[[], bool]) -> None:
        wait_until(lambda: self.measured.is_set() or cancelled())
        if cancelled():
            raise Cancelled
        if not self.seconds:
            raise LookupError("communication has not been measured")
        time = {"seconds": self.seconds, "samples_per_second": 1000.0, "links": "some links"}
        self.plans[repr(spec)] = decoded(plain(plan) | {"time": time}, Plan)


@pytest.fixture
def traces(monkeypatch) -> Traces:
    found = Traces()
    monkeypatch.setattr(module, "predict", found.predict)
    monkeypatch.setattr(module, "cached", found.cached)
    monkeypatch.setattr(module, "timed", found.timed)
    return found


@pytest.fixture
def lab(traces) -> Lab:
    lab = Lab(strategy="ddp", **ASKED)
    wait_until(lambda: "What each rank will hold and send (by formula) DDP" in strip(lab))
    return lab


def strip(lab: Lab) -> str:
    return lab._view._before.widget.value.replace("<b>", "").replace("</b>", "")


def button(lab: Lab):
    return lab._view.predict.button


def bars(lab: Lab) -> tuple[str, ...]:
    """The categories of the chart of memory by owner."""
    return figures.CHARTS["memory_by_owner"](lab._view.state).x.categories


def test_predict_fills_the_strip_and_the_memory_tab_before_the_run(lab, traces):
    assert (button(lab).description, button(lab).disabled, bars(lab)) == ("Predict", False, ())
    button(lab).click()
    assert (button(lab).description, button(lab).disabled) == ("Predicting…", True)
    wait_until(lambda: "Predicting: the script is traced" in strip(lab))
    assert "What each rank will hold and send (by formula) DDP" in strip(lab), "the formulas stay until there is more"
    button(lab).click()
    traces.go.set()
    wait_until(lambda: "What each rank will hold and send (predicted) DDP · mlp on digits · 2 ranks" in strip(lab))
    assert "(simulated)" in strip(lab) and "Predicting" not in strip(lab)
    for cell in ("0–1", "backward", size(10 * MIB), size(7 * MIB), size(5 * MIB)):
        assert f"<td>{cell}</td>" in strip(lab)
    wait_until(lambda: bars(lab) == ("rank 0 predicted", "rank 1 predicted"))
    assert (button(lab).description, button(lab).disabled) == ("Predict", False)
    assert len(traces.begun) == 1 and threading.get_ident() not in traces.threads


def test_predict_shows_the_time_of_a_step_or_why_there_is_none(lab, traces):
    traces.go.set()
    button(lab).click()
    wait_until(lambda: "There is no time of a step: communication has not been measured." in strip(lab))
    traces.seconds = 0.153
    button(lab).click()
    wait_until(lambda: "By simulation, a step takes 153 ms, 1,000 samples/s" in strip(lab))
    assert "There is no time" not in strip(lab)


def test_a_step_on_another_machine_is_modelled_for_its_gpus(lab, traces, monkeypatch):
    asked = []

    def modelled(spec: Spec, plan: Plan, machine, cancelled) -> Plan:
        asked.append((spec.device, machine.name))
        time = {"seconds": 0.002, "low": 0.001, "high": 0.003, "samples_per_second": 9.0, "links": "8 × A100"}
        return decoded(plain(plan) | {"time": time | {"modelled": True}}, Plan)

    monkeypatch.setattr(module, "modelled", modelled)
    traces.go.set()
    lab._view.predict.machine.value = "a100x8"
    button(lab).click()
    wait_until(lambda: "a step takes 2 ms (1 ms to 3 ms), 9 samples/s" in strip(lab))
    assert "Modelled for 8 × A100" in strip(lab) and asked == [("cuda", "a100x8")]
    lab._view.predict.machine.value = "here"
    wait_until(lambda: "What each rank will hold and send (by formula) DDP" in strip(lab))
    lab._view.predict.machine.value = "a100x8"
    wait_until(lambda: "a step takes 2 ms" in strip(lab))
    assert len(asked) == 1, "it was kept"


def test_memory_is_shown_while_the_time_of_a_step_is_measured(lab, traces):
    traces.go.set()
    traces.measured.clear()
    traces.seconds = 0.153
    button(lab).click()
    wait_until(lambda: "The time of a step is being predicted" in strip(lab) and bars(lab))
    assert f"<td>{size(10 * MIB)}</td>" in strip(lab) and button(lab).description == "Predicting…"
    lab._choices.strategy.value = "zero1"
    wait_until(lambda: "What each rank will hold and send (by formula) ZeRO-1" in strip(lab))
    lab._choices.strategy.value = "ddp"
    wait_until(lambda: "What each rank will hold and send (predicted) DDP" in strip(lab))
    assert "being predicted" not in strip(lab), "it was cancelled"
    button(lab).click()
    traces.measured.set()
    wait_until(lambda: "By simulation, a step takes 153 ms" in strip(lab))
    wait_until(lambda: button(lab).description == "Predict")


def test_what_another_choice_was_predicted_is_not_shown(lab, traces):
    traces.go.set()
    button(lab).click()
    wait_until(lambda: "What each rank will hold and send (predicted) DDP" in strip(lab) and bars(lab))
    lab._choices.strategy.value = "zero1"
    wait_until(lambda: "What each rank will hold and send (by formula) ZeRO-1" in strip(lab))
    assert bars(lab) == ()
    lab._choices.strategy.value = "ddp"
    wait_until(lambda: "What each rank will hold and send (predicted) DDP" in strip(lab) and bars(lab))
    assert len(traces.begun) == 1, "it was in the cache"


def test_another_choice_cancels_the_prediction_and_can_be_predicted_at_once(lab, traces):
    button(lab).click()
    wait_until(lambda: "Predicting" in strip(lab))
    lab._choices.strategy.value = "zero1"
    assert (button(lab).description, button(lab).disabled) == ("Predict", False)
    wait_until(lambda: [spec.strategy for spec in traces.cancelled] == ["ddp"])
    wait_until(lambda: "What each rank will hold and send (by formula) ZeRO-1" in strip(lab))
    button(lab).click()
    traces.go.set()
    wait_until(lambda: "What each rank will hold and send (predicted) ZeRO-1" in strip(lab) and bars(lab))
    assert [spec.strategy for spec in traces.begun] == ["ddp", "zero1"] and not button(lab).disabled
    lab._choices.strategy.value = "ddp"
    wait_until(lambda: "What each rank will hold and send (by formula) DDP" in strip(lab))
    assert "failed" not in strip(lab), "a cancelled prediction can be made again"


def test_what_cannot_run_cannot_be_predicted(lab, traces):
    lab._choices.scaling.value = "strong"
    lab._choices.batch.value = 255
    assert button(lab).disabled and lab._run_button.disabled
    lab._choices.batch.value = 256
    assert not button(lab).disabled


def test_a_trace_that_fails_is_one_sentence_above_the_formulas(lab, traces):
    reason = "rank 0 ended with ValueError: <odd>"
    traces.outcome = lambda spec: plan_of(spec, method="formula", reason=reason)
    traces.go.set()
    button(lab).click()
    wait_until(lambda: "Predicted by formulas, because rank 0 ended with ValueError: &lt;odd&gt;." in strip(lab))
    assert "What each rank will hold and send (by formula) DDP" in strip(lab) and bars(lab) == ()
    assert not button(lab).disabled


def test_an_error_of_the_prediction_itself_is_one_sentence(lab, traces):
    def fails(spec: Spec) -> Plan:
        raise OSError("no process can be started")

    traces.outcome = fails
    traces.go.set()
    button(lab).click()
    wait_until(lambda: "The prediction failed: OSError: no process can be started" in strip(lab))
    assert not button(lab).disabled


def test_a_recorded_run_is_not_predicted(lab, runs):
    folder = finished_folder(runs, "ddp", 2, 0.05)
    lab._recorded.refresh()
    lab._recorded.choose(str(folder.path))
    wait_until(lambda: lab._open is not None and not lab._starting)
    assert button(lab).disabled and lab._own.layout.display == "none"
    lab._choose("")
    assert not button(lab).disabled


# ---- the learner's own prediction


def own(lab: Lab):
    return lab._view.guess


def test_what_is_entered_is_stored_with_the_run_and_the_fields_are_empty_again(lab, runs, monkeypatch):
    started = []

    def started_with(spec, **options):
        started.append(document(pending(spec.processes)))
        folder = finished_folder(runs, "ddp", 2, 0.05)
        attach(pending(spec.processes), folder)
        return Job(folder)

    monkeypatch.setattr("labkit.frontends.panel.lab.start", started_with)
    wait_until(lambda: own(lab).widget.layout.display == "")
    own(lab).fields["peak_mb"].value = " 12.5 "
    lab._run_button.click()
    wait_until(lambda: lab.run is not None)
    assert started == [Guesses(v=1, figures={"peak_mb": 12.5})]
    assert [field.value for field in own(lab).fields.values()] == ["", ""]
    assert not PENDING
    lab._view.wait(30)


def test_an_impossible_entry_is_one_sentence_and_nothing_starts(lab, runs):
    wait_until(lambda: own(lab).widget.layout.display == "")
    for text in ("much", "-1", "nan", "12,5", "<b>"):
        own(lab).fields["step_ms"].value = text
        assert "step time (ms) must be a number from 0 to 1e+15, got" in own(lab).widget.children[-1].value, "at once"
        lab._run_button.click()
        wait_until(lambda: not lab._run_button.disabled)
        assert "step_ms (ms) must be a number from 0 to 1e+15, got" in lab._view.finding.value
        assert "<b>" not in lab._view.finding.value
    assert lab.run is None and not PENDING and not RunFolder.all(runs)
    own(lab).fields["step_ms"].value = "30"
    assert own(lab).widget.children[-1].value == ""
    own(lab).enter()
    own(lab).fields["step_ms"].value = ""
    own(lab).enter()
    assert not PENDING, "an entry that was deleted does not wait for a later run"


def test_the_outcome_stands_above_the_charts_of_a_run_that_is_over():
    steps = [one for rank in (0, 1) for one in (start(rank), step(rank, 1), step(rank, 2))]
    state = fold({"kind": "spec", "spec": Spec("ddp", **ASKED).to_json()}, *steps)
    apply(state, {"kind": "guess", "guess": {"figures": {"step_ms": 400.0}}})
    before = RunView()._before
    before.draw(state)
    assert "You predict: step time 400 ms per rank." in before.widget.value and before.widget.layout.display == ""
    apply(state, status("finished", started=0.1))
    before.draw(state)
    assert "you predicted 400 ms per rank; it was 500 ms (−20 %)" in before.widget.value
