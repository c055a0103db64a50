"""The learner's own predictions in runs: what waits for the next one, and what is stored with it."""

from __future__ import annotations

import jsonschema
import pytest
from conftest import warm_run
from fabricate import FakeRun, finished_folder
from guessed import nothing_pending as nothing_pending

import labkit
from labkit import figures, guess
from labkit.analysis.comparison import guess_sentence
from labkit.analysis.comparison import sentences as comparison_sentences
from labkit.analysis.guess import FIGURES, outcomes, own_sentences, statement
from labkit.frontends.handout.execute import stand_in
from labkit.launch.job import Job
from labkit.plan.spec import Spec, SpecError
from labkit.prediction import predict as planning
from labkit.record.documents import GUESS, Guesses, decoded, plain, schemas
from labkit.record.folder import RunFolder
from labkit.runs import guesses
from labkit.runs.comparing import Comparing
from labkit.runs.handle import start

MIB = 1 << 20


def test_the_statement_becomes_the_outcome_once_the_run_is_over(runs):
    one = guess("step_ms", 100)
    assert repr(one) == "○ open You predict: step time 100 ms per rank. Run it to see."
    again = guess("step_ms", [100, 30])
    assert "A later prediction has replaced this one." in repr(one)
    assert repr(again) == "○ open You predict: step time 100 ms on rank 0, 30 ms on rank 1. Run it to see."
    fake = FakeRun(runs, steps=10)
    fake.start()
    guesses.attach(guesses.pending(2), fake.folder)
    assert guesses.PENDING == {}
    RunFolder.write_json(fake.folder.guess, guesses.document([again]))
    assert repr(again).endswith(f"Display it again when {fake.folder.name} is over.")
    fake.step(10)
    fake.end()
    fake.close()
    assert repr(again).startswith("✗ missed Step time: you predicted 100 ms on rank 0; it was 50 ms (+100 %).")
    assert 'class="labkit-guess labkit-wrong"' in again._repr_html_()


def test_three_dots_ask_for_a_value_and_withdraw_an_earlier_one():
    guess("step_ms", 100)
    asked = guess("step_ms", ...)
    assert repr(asked) == "○ open Replace the three dots with your prediction: step time (in ms)."
    assert guesses.document([asked]) is None and guesses.pending(2) == [] and guesses.PENDING == {}
    assert guesses.Guess(guesses.FIGURES["speedup"], None).of("ddp") == []


def test_nothing_runs_before_a_learner_has_replaced_the_dots(monkeypatch):
    monkeypatch.setattr(guesses, "in_notebook", lambda: True)
    monkeypatch.setattr(guesses, "headless", lambda: False)
    for figure in ("sent_mb", "speedup"):
        guess(figure, ...)
        with pytest.raises(SpecError, match=rf'replace the three dots in guess\("{figure}"'):
            start(Spec("ddp", nproc=2)) if figure == "sent_mb" else Comparing([]).start()
        assert guesses.PENDING == {}, "it is asked for once"
    guess("sent_mb", ...)
    again = guess("sent_mb", 3)
    assert guesses.pending(2) == [again]


def test_a_value_that_no_run_measures_is_given_by_the_learner():
    one = guess("steps", 100)
    assert repr(one.compared_with(125)) == "✗ missed Number of steps: you predicted 100; it was 125 (−20 %)."
    assert guesses.PENDING == {} and one.outcome()[0] == "wrong"
    assert repr(guess("steps", 120).compared_with(125)).startswith("✓ close")
    assert repr(guess("steps", ...).compared_with(125)).startswith("○ open Replace the three dots")
    with pytest.raises(ValueError, match="measured must be"):
        guess("steps", 100).compared_with(None)


def test_a_prediction_of_a_rank_that_the_run_lacks_is_refused_before_the_start(runs):
    guess("peak_mb", [1, 2, 3])
    with pytest.raises(SpecError, match="peak_mb was predicted for rank 2, but the last rank of this run is rank 1"):
        start(Spec("ddp", nproc=2, device="cpu", workload="mlp"))
    assert not runs.exists() or not list(runs.iterdir())
    assert list(guesses.PENDING) == ["peak_mb"]


def test_what_is_stored_follows_the_published_schema(runs):
    guess("peak_mb", {1: 3})
    guess("loss", 2)
    document = guesses.document(guesses.pending(2))
    stored = plain(document)
    assert stored == {"v": GUESS, "figures": {"peak_mb": {"1": 3.0}, "loss": 2.0}}
    jsonschema.validate(stored, schemas()["guess"]["schema"])
    assert decoded(stored, Guesses) == document
    assert guesses.document([]) is None


def test_a_run_has_guess_prediction_and_measurement(runs, warm_server, monkeypatch, tmp_path):
    """A comparison takes a speed-up, and leaves other figures to the run that the learner starts."""
    monkeypatch.setattr(planning, "user_cache", lambda: tmp_path)
    warm_server()
    own = guess("peak_mb", 1)
    asked = Spec("ddp", workload="mlp", nproc=2, device="cpu", precision="fp32", batch_size=16, steps=10)
    plan = planning.predict(asked)
    faster = guess("speedup", {"ddp": 50})
    assert repr(faster) == "○ open You predict: speed-up 50 × for ddp. Compare it to see."
    alone = Spec("single", workload="mlp", nproc=1, device="cpu", precision="fp32", batch_size=32, steps=10)
    compared = Comparing([alone, asked]).start().wait()
    assert [one.state.guess for one in compared.runs] == [{}, {"speedup": 50.0}]
    assert repr(faster).startswith("✗ missed DDP: you predicted a speed-up of 50 ×; it was ")
    assert guess_sentence(compared.rows[1]) in comparison_sentences(compared.rows, {})
    assert guess_sentence(compared.rows[0]) == "" and own_sentences(compared.runs[1].state) == []
    state = warm_run(asked).state
    assert (state.guess, guesses.PENDING) == ({"peak_mb": 1.0}, {})
    found = outcomes(state)
    assert [one.rank for one in found] == [0, 1]
    for one in found:
        assert one.predicted * MIB == plan.ranks[one.rank].peak_memory_bytes
        assert one.measured == pytest.approx(one.predicted, rel=0.02)
        assert one.missed and one.reason.startswith("at the peak of a step: ")
    chart = figures.chart("memory_by_owner", state)
    assert len(chart.x.categories) == 4 and chart.marks[0].values == (1.0,) * 4
    assert repr(own).startswith("✗ missed Peak memory: you predicted 1 MiB per rank; it was ")
    later = labkit.run(asked).wait()
    assert later.state.guess == {}


def test_a_handout_with_recorded_runs_judges_the_predictions_of_its_lab(runs, tmp_path, monkeypatch):
    recorded = finished_folder(tmp_path, "ddp", 2, 0.05)
    monkeypatch.setattr(Job, "start", Job.start)
    stand_in(str(tmp_path))
    own = guess("step_ms", 100)
    start(recorded.read_spec().to_spec())
    assert repr(own).startswith("✗ missed Step time: you predicted 100 ms per rank; it was 50 ms (+100 %).")
    assert not recorded.guess.exists()


def test_a_statement_names_the_value_of_each_rank():
    assert statement(FIGURES["loss"], 0.5) == "loss 0.5"
    assert (
        statement(FIGURES["sent_mb"], {"0": 3.0, "1": 4.25}) == "traffic per step 3 MiB on rank 0, 4.25 MiB on rank 1"
    )
