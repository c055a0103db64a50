"""Every exercise with a right, a plausible wrong and an empty answer; the learner's record; labs contain no
solution."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from commands import called
from fabricate import FakeRun
from places import ROOT

import labkit
from labkit import Run, check, my_progress
from labkit.analysis.guess import FIGURES
from labkit.course.answers import Wrong
from labkit.course.exercises import (
    LABS,
    Book,
    Exercise,
    Noted,
    Score,
    data_parallel,
    exercise,
    exercises,
    is_empty,
    layouts,
)
from labkit.record.folder import RunFolder
from labkit.runs.guesses import Guess, document
from labkit.runs.notebook import NAME

pytestmark = pytest.mark.usefixtures("forked_ranks")
NAMES = [name for topic in LABS for name in exercises(topic)]


def answers(topic):
    return importlib.import_module(f"answers.{topic}")


def value(answer):
    """The answer. A function without arguments creates it, because it needs a run or a file."""
    return answer() if inspect.isfunction(answer) and not answer.__code__.co_argcount else answer


@pytest.mark.parametrize("topic", LABS)
def test_every_exercise_has_a_right_and_a_wrong_answer_and_a_lab(topic):
    names = {name.removeprefix(f"{topic}.") for name in exercises(topic)}
    assert len(names) >= 2 or topic == "combine"
    assert set(answers(topic).RIGHT) == names == set(answers(topic).WRONG)
    lab = (ROOT / "labs" / f"{LABS[topic]}.py").read_text(encoding="utf-8")
    assert set(re.findall(r'check\("([a-z0-9_.]+)"', lab)) == {f"{topic}.{name}" for name in names}
    cells = [cell for cell in lab.split("# %%") if "check(" in cell and not cell.startswith(" [markdown]")]
    assert cells and all('tags=["exercise"]' in cell.splitlines()[0] for cell in cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_is_right(name):
    topic, _, short = name.partition(".")
    verdict = check(name, value(answers(topic).RIGHT[short]))
    assert verdict.state == "right", verdict.words
    assert verdict.words


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_gets_a_hint(name):
    topic, _, short = name.partition(".")
    answer, words = answers(topic).WRONG[short]
    verdict = check(name, value(answer))
    assert verdict.state == "wrong"
    assert words in verdict.words and "not a valid answer" not in verdict.words, verdict.words


@pytest.mark.parametrize("name", NAMES)
def test_any_answer_gets_a_verdict(name):
    for odd in ("three dots", -1, 1e9, ["a"], {"a": 1}, object(), lambda: 1 / 0):
        assert check(name, odd).state == "wrong"


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_answer_is_not_an_attempt(name):
    for empty in (..., None, "", []):
        assert check(name, empty).state == "empty"
    assert name not in Book.here().read()


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_not_in_the_lab(name):
    topic = name.partition(".")[0]
    lab = (ROOT / "labs" / f"{LABS[topic]}.py").read_text(encoding="utf-8")
    assert len(exercise(name).key) > 20
    assert exercise(name).key not in lab


def test_a_function_without_a_body_is_an_empty_answer():
    def blank(tensor, rank): ...

    def documented(tensor):
        """What it should do."""

    class Blank:
        def __init__(self, model): ...

        @contextmanager
        def no_sync(self): ...

    class Begun(Blank):
        def finish(self):
            return 1

    assert is_empty(blank) and is_empty(documented) and is_empty(Blank)
    assert not is_empty(Begun)
    assert not is_empty(lambda tensor: tensor) and not is_empty(0) and not is_empty(False)


def test_an_exception_in_a_check_is_a_verdict(monkeypatch):
    def fails(answer):
        raise ZeroDivisionError("<b>")

    monkeypatch.setitem(data_parallel.EXERCISES, "start.steps", Exercise("<Steps>", fails, "key"))
    verdict = check("start.steps", 3)
    data, metadata = verdict._repr_mimebundle_()
    assert verdict.state == "wrong" and "ZeroDivisionError" in verdict.words
    assert (
        "<b>\u003c" not in data["text/html"]
        and "&lt;b&gt;" in data["text/html"]
        and "&lt;Steps&gt;" in data["text/html"]
    )
    assert metadata == {"labkit": {"exercise": "start.steps", "state": "wrong"}}


@pytest.mark.parametrize("name", ["steps", "ddp", "nothing.here", "start.nothing"])
def test_an_unknown_exercise_is_an_error(name):
    with pytest.raises(LookupError, match=r"there is no exercise"):
        check(name, 1)


def test_progress_counts_attempts_and_keeps_what_is_done(runs):
    assert my_progress().done == 0
    check("start.steps", 156)
    check("start.steps", 157)
    check("start.steps", 1)
    assert Book.here().read() == {"start.steps": Noted(tries=3, done=True)}
    page = my_progress()
    assert page.done == 1 and page.words.startswith("1 of ")
    assert "✓ right" in repr(page) and "✓ right" in page._repr_html_()
    assert len(page.to_json()["exercises"]) == len(NAMES)
    assert (runs / "exercises.json").stat().st_mode & 0o077 == 0


def test_progress_has_the_error_of_predictions_by_lab(runs, monkeypatch, capsys):
    """50 ms per step were measured on both ranks; of several ranks the worst counts, and of a lab the median."""
    for notebook, figures, ended in (
        ("labs/06_tensor_parallel.py", {"step_ms": 60.0}, True),
        ("labs/06_tensor_parallel.py", {"step_ms": {"0": 50.0, "1": 45.0}, "exposed_ms": 1.0}, True),
        ("labs/06_tensor_parallel.py", {"step_ms": 1.0}, False),
        ("Untitled.ipynb", {"step_ms": 75.0, "speedup": 2.0}, True),
        ("", {"speedup": 2.0}, True),
    ):
        monkeypatch.setenv(NAME, notebook)
        fake = FakeRun(runs, steps=10)
        fake.start()
        fake.step(10)
        made = [Guess(FIGURES[name], value) for name, value in figures.items()]
        RunFolder.write_json(fake.folder.guess, document(made))
        if ended:
            fake.end()
            RunFolder.write_json(fake.folder.summary, Run.attach(fake.folder.path).summary())
        fake.close()
    page = my_progress()
    assert page.to_json()["predictions"] == [
        {"lab": "06_tensor_parallel", "made": 4, "measured": 2, "median_error": pytest.approx(0.15)},
        {"lab": "elsewhere", "made": 1, "measured": 1, "median_error": pytest.approx(0.5)},
    ]
    assert "06_tensor_parallel: 4 predictions, median error 15 % (2 measured)" in repr(page)
    assert "Your predictions, elsewhere: 1 prediction, median error 50 %</p>" in page._repr_html_()
    (runs / fake.folder.name / "guess.json").write_text("{")
    assert my_progress().predictions == page.predictions
    assert called("progress") == 0 and "  elsewhere: 1 prediction, median error 50 %" in capsys.readouterr().out


def test_predictions_without_a_measurement_or_without_a_limit_have_no_error():
    assert Score(2, ()).words == "2 predictions, not measured"
    assert Score(1, (math.inf,)).words == "1 prediction, median error without limit"
    assert Score(1, (math.inf,)).to_json() == {"made": 1, "measured": 1, "median_error": None}


def test_an_unreadable_record_is_renamed(runs):
    runs.mkdir()
    (runs / "exercises.json").write_text("{", encoding="utf-8")
    check("start.steps", 157)
    assert my_progress().done == 1
    assert (runs / "exercises.unreadable.json").read_text(encoding="utf-8") == "{"


def test_the_progress_command(runs):
    check("start.steps", 157)
    argv = [sys.executable, "-m", "labkit", "progress"]
    printed = subprocess.run(
        [*argv, "--json"], capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ)
    ).stdout
    assert json.loads(printed)["done"] == 1
    assert (
        "1 of "
        in subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ)).stdout
    )


def test_wrong_is_not_a_public_name():
    assert "Wrong" not in labkit.__all__ and issubclass(Wrong, Exception)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (16, "must be the name of a layout"),
        ("DDP 16", "not among the layouts that fit"),
        ("FSDP 2 × TP 8", "longer than the fastest"),
        ("FSDP 8 × TP 2", "more than the fastest (modelled)"),
    ],
)
def test_a_layout_of_the_capstone_is_judged_by_fit_axes_and_time(answer, words, monkeypatch):
    monkeypatch.setattr(layouts, "case_of_learner", lambda: {"devices": 16, "machine": "a100x8", "memory": "40GB"})
    assert words in check("capstone.layout", answer).words


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("choose", {"tp": 2, "zero": 1, "micro_batch": 2}, "of the fastest of 72 layouts that ran"),
        ("choose", "tp=16,zero=1,micro_batch=1", "reached 931 tokens/s per GPU, 14% of the fastest; by the formulas, "),
        ("choose", "dp=64,zero=0,micro_batch=1", "ran out of memory or crashed; by the formulas it needs "),
        ("choose", "dp=64,zero=0", "the layout needs micro_batch as well, such as "),
        ("choose", "tp=7,zero=1,micro_batch=1", "dp × tp × pp × cp must be the number of GPUs, 64, got 63"),
        ("choose", "tp=8,zero=1,micro_batch=3", "must divide the global batch of 256 samples, got 24"),
        ("choose", "tp=8", "the layout needs zero and micro_batch as well"),
        ("choose", "tp=two,zero=1,micro_batch=1", "tp of the layout must be an integer"),
        ("choose", "tp=0,zero=0,micro_batch=0", "must be the number of GPUs, 64, got 0"),
        ("choose", "zero=9,micro_batch=1", "zero must be 0 to 3, got 9"),
        ("capstone", "pp=64,zero=1,micro_batch=1", "no run with exactly this layout was published; the nearest, "),
        ("clusters", "dp=256,zero=1,micro_batch=1", "ran out of memory or crashed"),
    ],
)
def test_a_layout_is_answered_by_what_it_did_on_real_gpus(name, answer, words):
    verdict = check(f"{name}.published", answer)
    assert words in verdict.words and "not a valid answer" not in verdict.words
