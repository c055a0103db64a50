"""Every exercise against a right, a plausible wrong and an empty answer; the learner's record; the teacher's key stays out of labs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit import check, my_progress
from labkit.course.exercises import LABS, Exercise, Wrong, exercise, exercises, is_empty
from labkit.course.exercises.book import Book

ROOT = Path(__file__).parents[1]
NAMES = [f"{topic}.{own}" for topic in LABS for own in exercises(topic)]


def answers(topic):
    return importlib.import_module(f"answers.{topic}")


def value(answer):
    """An answer; a function of no argument that is no answer itself makes it, where it needs a run or a file."""
    return answer() if callable(answer) and not answer.__code__.co_argcount else answer


@pytest.mark.parametrize("topic", LABS)
def test_every_exercise_has_a_right_and_a_wrong_answer_and_a_lab(topic):
    own = set(exercises(topic))
    assert len(own) >= 2 or topic == "combine"
    assert set(answers(topic).RIGHT) == own == set(answers(topic).WRONG)
    lab = (ROOT / "labs" / f"{LABS[topic]}.py").read_text(encoding="utf-8")
    assert set(re.findall(r'check\("([a-z_.]+)"', lab)) == {f"{topic}.{name}" for name in own}
    cells = [cell for cell in lab.split("# %%") if "check(" in cell and not cell.startswith(" [markdown]")]
    assert cells and all('tags=["exercise"]' in cell.splitlines()[0] for cell in cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_is_right(name):
    topic, _, own = name.partition(".")
    verdict = check(name, value(answers(topic).RIGHT[own]))
    assert verdict.state == "right", verdict.words
    assert verdict.words


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(name):
    topic, _, own = name.partition(".")
    answer, words = answers(topic).WRONG[own]
    verdict = check(name, value(answer))
    assert verdict.state == "wrong"
    assert words in verdict.words and "could not be read" not in verdict.words, verdict.words


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_answered_gets_a_verdict(name):
    for odd in ("three dots", -1, 1e9, ["a"], {"a": 1}, object(), lambda: 1 / 0):
        assert check(name, odd).state == "wrong"


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_is_open_and_no_try(name):
    for empty in (..., None, "", []):
        assert check(name, empty).state == "empty"
    assert name not in Book.here().read()


@pytest.mark.parametrize("name", NAMES)
def test_the_key_is_not_in_the_lab(name):
    topic = name.partition(".")[0]
    lab = (ROOT / "labs" / f"{LABS[topic]}.py").read_text(encoding="utf-8")
    assert len(exercise(name).key) > 20
    assert exercise(name).key not in lab


def test_a_function_without_a_body_is_no_answer():
    def blank(tensor, rank): ...

    def told(tensor):
        """What it should do."""

    assert is_empty(blank) and is_empty(told)
    assert not is_empty(lambda tensor: tensor) and not is_empty(0) and not is_empty(False)


def test_a_check_that_fails_is_a_verdict(monkeypatch):
    def fails(answer):
        raise ZeroDivisionError("<b>")

    monkeypatch.setitem(exercises("start"), "steps", Exercise("<Steps>", fails, "key"))
    verdict = check("start.steps", 3)
    data, metadata = verdict._repr_mimebundle_()
    assert verdict.state == "wrong" and "ZeroDivisionError" in verdict.words
    assert "<b>\u003c" not in data["text/html"] and "&lt;b&gt;" in data["text/html"] and "&lt;Steps&gt;" in data["text/html"]
    assert metadata == {"labkit": {"exercise": "start.steps", "state": "wrong"}}


@pytest.mark.parametrize("name", ["steps", "ddp", "nothing.here", "start.nothing"])
def test_an_exercise_that_there_is_not(name):
    with pytest.raises(LookupError, match=r"there is no exercise"):
        check(name, 1)


def test_progress_counts_tries_and_keeps_what_is_done(runs):
    assert my_progress().done == 0
    check("start.steps", 156)
    check("start.steps", 157)
    check("start.steps", 1)
    assert Book.here().read() == {"start.steps": {"tries": 3, "done": True}}
    page = my_progress()
    assert page.done == 1 and page.words.startswith("1 of ")
    assert "✓ right" in repr(page) and "✓ right" in page._repr_html_()
    assert len(page.to_json()["exercises"]) == len(NAMES)
    assert (runs / "exercises.json").stat().st_mode & 0o077 == 0


def test_a_record_that_cannot_be_read_is_kept_aside(runs):
    runs.mkdir()
    (runs / "exercises.json").write_text("{", encoding="utf-8")
    check("start.steps", 157)
    assert my_progress().done == 1
    assert (runs / "exercises.unreadable.json").read_text(encoding="utf-8") == "{"


def test_the_progress_command(runs):
    check("start.steps", 157)
    argv = [sys.executable, "-m", "labkit", "progress"]
    told = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ)).stdout
    assert json.loads(told)["done"] == 1
    assert "1 of " in subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ)).stdout


def test_wrong_is_no_public_name():
    assert "Wrong" not in labkit.__all__ and issubclass(Wrong, Exception)
