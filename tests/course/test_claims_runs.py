"""Claims on trial: the runs behind them, the function, and the command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from places import ROOT
from rich.console import Console

import labkit.course.claims.computed
import labkit.course.claims.measured
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.course.claims import CLAIMS, on_trial
from labkit.course.claims.measured import FAILS, JOBS, OPEN, PARTLY, Claim, Ruling, Trials, Verdict, Verdicts
from labkit.plan.spec import SpecError
from labkit.setup.machine import Gpu, Machine


def machine(gpus: int = 0, cores: int = 2) -> Machine:
    return Machine(tuple(Gpu(index, "a GPU", 24 << 30, (8, 0)) for index in range(gpus)), cores, 16 << 30)


class Recorded:
    """Progress that records its steps."""

    def __init__(self):
        self.steps = []

    def step(self, text):
        self.steps.append(text)


class Done:
    """A run that has ended."""

    def __init__(self, spec, state="finished"):
        self.spec, self.name, self.words, self._state = spec, spec.name, "failed (rank 1: ValueError)", state

    def wait(self):
        return self

    def summary(self):
        return {"run": self.name, "state": self._state, "ranks": [{"step_seconds_median": 0.1}], "ledger": []}


def test_jobs_alternate_and_those_that_do_not_fit_are_skipped(monkeypatch):
    started, progress = [], Recorded()
    monkeypatch.setattr(
        labkit.course.claims.measured, "begin", lambda spec, guesses: started.append(spec) or Done(spec)
    )
    trials = Trials(machine())
    trials.run(["single", "ddp", "single", "ddp on 4", "pinned"], 2, progress)
    assert [spec.name for spec in started] == ["single-x1", "ddp-x2", "ddp-x2", "single-x1"]
    assert {spec.device for spec in started} == {"cpu"}
    assert progress.steps[0] == "round 1 of 2: single"
    assert trials.runs(["single", "ddp on 4"]) == ("single-x1", "single-x1")
    assert Trials(machine(cores=8)).lacks(["ddp on 4"]) == ""


def test_all_runs_of_a_comparison_use_gpus_if_there_are_enough(monkeypatch):
    started = []
    monkeypatch.setattr(labkit.course.claims.measured, "settle", lambda spec: spec)  # there may be no GPU here
    monkeypatch.setattr(
        labkit.course.claims.measured, "begin", lambda spec, guesses: started.append(spec) or Done(spec)
    )
    Trials(machine(gpus=2)).run(["single", "ddp", "pinned"], 1, Recorded())
    assert [spec.device for spec in started] == ["cuda"] * 3
    started.clear()
    Trials(machine(gpus=1)).run(["single", "ddp", "pinned"], 1, Recorded())
    assert [spec.device for spec in started] == ["cpu", "cpu", "cuda"]


def test_a_run_that_fails_or_cannot_start_is_reported(monkeypatch):
    def start(spec, guesses):
        if spec.strategy == "dp":
            raise SpecError("data", "the digits are not here")
        return Done(spec, "failed" if spec.strategy == "single" else "finished")

    monkeypatch.setattr(labkit.course.claims.measured, "begin", start)
    trials = Trials(machine())
    trials.run(["single", "dp", "ddp"], 1, Recorded())
    assert CLAIMS["ddp-dp"].judge(trials).evidence == "Not measured: the digits are not here."
    assert "the run single-x1 failed (rank 1: ValueError)" in CLAIMS["two-gpus"].judge(trials).evidence


def test_a_claim_is_measured_for_real(runs, capsys, monkeypatch):
    jobs = {name: replace(JOBS[name], batch_size=16, steps=6) for name in CLAIMS["fsdp-memory"].needs}
    monkeypatch.setattr(labkit.course.claims.measured, "JOBS", jobs)
    (verdict,) = on_trial("fsdp-memory", rounds=1)
    assert verdict.verdict == PARTLY
    halved = [verdict.ruling.figures[owner][0] for owner in ("parameters", "gradients", "optimizer")]
    assert halved == pytest.approx([0.5] * 3, abs=0.01)
    assert verdict.ruling.figures["activations"][0] == pytest.approx(1, abs=0.01)
    assert sorted(verdict.runs) == sorted(
        folder.name for folder in runs.iterdir() if (folder / "summary.json").exists()
    )
    assert capsys.readouterr().out == ""


# ---- the function and the command


def test_every_claim_has_a_sentence_and_needs_existing_jobs():
    assert len({claim.says for claim in CLAIMS.values()}) == len(CLAIMS)
    for claim in CLAIMS.values():
        assert set(claim.needs) <= set(JOBS)
        assert claim.how in ("computed", "modelled", "published", "asked", "measured", "documented", "argued")
        assert bool(claim.needs) == (claim.how == "measured")


def test_quick_runs_nothing(monkeypatch):
    monkeypatch.setattr(labkit.course.claims.measured, "begin", None)
    for module in (labkit.course.claims.computed, labkit.course.claims.computed, labkit.course.claims.measured):
        monkeypatch.setattr(module, "ask", lambda code: (None, "not asked"))
    verdicts = on_trial(quick=True)
    assert [one.claim.name for one in verdicts] == [name for name, claim in CLAIMS.items() if not claim.needs]
    assert all(one.runs == () for one in verdicts)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("scalling",), "unknown claim 'scalling' (did you mean scaling?); it must be one of cnn-parameters, batch, "),
        (("two-gpus", "--quick"), "two-gpus needs runs, which quick skips; remove quick"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_one_sentence(capsys, arguments, says):
    assert act(cli.parse(("claims", *arguments))) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"labkit: {says}") and error.count("\n") == 1


@pytest.mark.parametrize("rounds", [0, -1, 101, 1.5, "3", True])
def test_rounds_are_bounded(rounds):
    with pytest.raises(ValueError, match="rounds must be an integer from 1 to 100, got"):
        on_trial("batch", rounds=rounds)


def test_the_command_prints_one_object_or_a_table(capsys):
    assert act(cli.parse(("claims", "batch", "--json"))) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["name"] == "batch" and claim["verdict"] == FAILS and claim["figures"]["samples of a rank"] == [128.0]
    assert act(cli.parse(("claims", "batch"))) == 0
    assert "✗ does not hold" in capsys.readouterr().out


def test_displayed_text_is_escaped():
    hostile = Claim("x", "<script>alert(1)</script> [red]", "computed", lambda trials: None)
    page = Verdicts((Verdict(hostile, Ruling(OPEN, "<img src=x onerror=alert(1)> [/red]")),))
    html = page._repr_html_()
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    console = Console(width=200, file=io.StringIO())
    console.print(page)
    assert "[red]" in console.file.getvalue() and "[/red]" in console.file.getvalue()
    assert "? cannot be decided here (computed)" in repr(page)


def test_the_claims_load_no_torch():
    code = (
        "import sys, labkit.course.claims\n"
        "labkit.course.claims.on_trial(quick=True)\n"
        "print([name for name in ('torch', 'plotly', 'ipywidgets', 'IPython') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
