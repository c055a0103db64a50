"""Exercises in which a strategy is written: naive, wrong and cheating answers get a sentence that says what failed."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
from answers import build_data_parallel, cheats, variants
from conftest import processes_of

from labkit import Run, check
from labkit.course.answers import Wrong
from labkit.course.build import criteria
from labkit.course.build.criteria import Answer, source_of
from labkit.course.build.record import Record

TOPICS = ("collectives", "build_data_parallel", "build_model_parallel")
MORE = [
    (f"{topic}.{name}", answer, words)
    for topic in TOPICS
    for name, answer, words in importlib.import_module(f"answers.{topic}").MORE
]


def a_record(rank, **fields):
    return Record(rank, losses=[1.0, 0.5], expected=[1.0, 0.5], **fields)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([a_record(0), None], "rank 1 ended without a result"),
        ([None, None], "rank 0 ended without a result"),
        ([a_record(0, error="late", at=2.0), a_record(1, error="first", at=1.0)], "rank 1 raised first"),
        ([a_record(0, stuck="waits in recv from rank 1"), None], "hangs: rank 0 waits in recv from rank 1"),
        ([a_record(0, stuck="is"), a_record(1, error="ValueError")], "rank 1 raised ValueError"),
        ([a_record(0, stuck="waits", at=1.0), a_record(1, error="closed", at=2.0)], "hangs: rank 0 waits$"),
        ([a_record(0, error="late", finished_api="DDP"), None], "rank 0 calls DDP"),
    ],
)
def test_the_first_cause_is_named(found, words):
    with pytest.raises(Wrong, match=words):
        criteria.ended(found)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([1.0], "rank 1 has 1 losses, expected 2"),
        ([1.0, 0.50002], "in step 1, rank 1 has 0.500020, expected 0.500000"),
        ([float("nan"), 0.5], "in step 0, rank 1 has nan"),
    ],
)
def test_a_loss_is_compared_on_every_rank_and_in_every_step(got, words):
    criteria.results([a_record(0), a_record(1)])
    with pytest.raises(Wrong, match=words):
        criteria.results([a_record(0), replace(a_record(1), losses=got)])


FACTOR, LOST = 2.0, object()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "answer", "words"), MORE, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(MORE)]
)
def test_an_answer_is_rejected_for_the_right_reason(name, answer, words):
    verdict = check(name, answer)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words


def test_an_answer_is_an_ordinary_run_with_a_timeline(runs, server):
    verdict = check("build_data_parallel.hooks", build_data_parallel.RIGHT["hooks"])
    assert verdict.state == "right", verdict.words
    run = Run.attach("last")
    assert run.state.status.state == "finished" and run.state.world_size == 4
    assert "class Overlapped" in run.folder.script.read_text(encoding="utf-8")
    bars = {bar for trace in run.figure("timeline").data for bar in [trace.name] if bar}
    assert any("all_reduce" in bar or "communication" in bar.lower() for bar in bars), bars
    assert not processes_of(str(runs))


def twice(value):
    return FACTOR * value


def four_times(value):
    """Uses a function, which uses a number, of this module."""
    return twice(twice(value)) + len(pytest.__name__)


def loses(value):
    return LOST


def test_the_source_of_an_answer_has_everything_that_it_uses():
    names: dict = {}
    exec(source_of(four_times), names)
    assert names["four_times"](1.5) == 12.0
    with pytest.raises(Wrong, match="uses LOST, a object of the notebook; create it inside the answer"):
        source_of(loses)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("exercise", "name", "text", "words"),
    [*cheats.SIX, *cheats.MORE],
    ids=[
        label for *_, text, _ in (*cheats.SIX, *cheats.MORE) for label, value in vars(cheats).items() if value is text
    ],
)
def test_a_cheat_is_rejected_with_what_was_measured(exercise, name, text, words):
    verdict = check(f"{topic_of(exercise)}.{exercise}", Answer(name, cheats.HEAD + text))
    assert verdict.state == "wrong" and words in verdict.words, verdict.words


def topic_of(exercise):
    return "build_data_parallel" if exercise in build_data_parallel.RIGHT else "build_model_parallel"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("exercise", "answer"), variants.RIGHT, ids=[f"{name}-{index}" for index, (name, _) in enumerate(variants.RIGHT)]
)
def test_another_right_answer_is_right(exercise, answer):
    verdict = check(f"{topic_of(exercise)}.{exercise}", answer)
    assert verdict.state == "right", verdict.words


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    variants.MISTAKES,
    ids=[f"{name}-{index}" for index, (name, *_) in enumerate(variants.MISTAKES)],
)
def test_an_honest_mistake_is_named(exercise, answer, words):
    verdict = check(f"{topic_of(exercise)}.{exercise}", answer)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
