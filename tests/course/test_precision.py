"""The exercises of lab 22: honest mistakes are named, other right answers pass, and cheats are seen by what is
measured."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from answers import precision
from answers.precision import fsdp2

from labkit import check, starter
from labkit.analysis.foreign import opening
from labkit.analysis.foreign.reading import plain_pickle
from labkit.course.build.solutions import precision as solutions
from labkit.course.build.trials import precision as trials


@pytest.fixture(scope="module", autouse=True)
def no_file_of_an_answer_stays() -> Iterator[None]:
    """An answer that writes files is ended at once, and cannot remove them."""
    yield
    for path in Path("/dev/shm").glob("answer-*"):
        path.unlink(missing_ok=True)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("changes", "words"), precision.STEPS.values(), ids=precision.STEPS)
def test_a_wrong_step_is_rejected_with_what_was_measured(changes, words):
    verdict = check("precision.step", precision.stepped(*changes))
    assert verdict.state == "wrong" and re.search(words, verdict.words), verdict.words


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("changes", precision.OTHER_STEPS.values(), ids=precision.OTHER_STEPS)
def test_another_right_step_is_right(changes):
    verdict = check("precision.step", precision.stepped(*changes))
    assert verdict.state == "right", verdict.words


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("changes", "words"), precision.FORWARDS.values(), ids=precision.FORWARDS)
def test_a_wrong_forward_is_rejected_with_what_was_measured(changes, words):
    verdict = check("precision.recompute", precision.passed(*changes))
    assert verdict.state == "wrong" and re.search(words, verdict.words), verdict.words


@pytest.mark.parametrize(("changes", "words"), precision.SNAPSHOTS.values(), ids=precision.SNAPSHOTS)
def test_a_mistake_with_a_snapshot_is_named_on_any_draw(changes, words):
    answer = precision.traced(*changes)
    for _ in range(20):
        verdict = check("precision.snapshot", answer)
        assert verdict.state == "wrong" and words in verdict.words, verdict.words


def test_the_peak_of_a_real_snapshot_is_that_of_explain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = starter("precision.snapshot")
    (found,) = opening.explain([path])
    (device,) = found.figures["devices"]
    (trace,) = plain_pickle(gzip.decompress(path.read_bytes()))["device_traces"]
    peak, lines = solutions.at_the_peak(trace)
    assert peak == device["peak"]
    by_line = Counter()
    for held in device["at_peak"]:
        number = held["line"].removeprefix("train.py:")
        by_line[int(number) if number.isdigit() else None] += held["bytes"]
    assert lines == by_line


def test_no_shortcut_finds_the_best_choice_of_any_draw():
    """Not even storing first what costs most to recompute per byte."""
    for _ in range(20):
        blocks, budget = trials._draw_case()
        best = trials.least(blocks, budget)
        by_ratio = sorted(blocks, key=lambda block: trials.recomputed(block) / trials.stored(block), reverse=True)
        for order in (blocks, blocks[::-1], by_ratio):
            left, again = budget, 0
            for block in order:
                fits = trials.stored(block) <= left
                left, again = (left - trials.stored(block), again) if fits else (left, again + trials.recomputed(block))
            assert again >= best
        assert again > 1.02 * best


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *case: (12 * case[0], fsdp2(*case)[1]), "each rank has a shard"),
        (lambda *case: (16 * case[0] / case[1], fsdp2(*case)[1]), "between two steps there are no gradients"),
        (lambda *case: (fsdp2(*case)[0], fsdp2(*case[:4], True)[1]), "only if they were freed after forward"),
        (lambda *case: (fsdp2(*case)[0], fsdp2(*case[:3], case[2], case[4])[1]), "the gradients are sent in reduce"),
        (lambda *case: (fsdp2(*case)[0], fsdp2(*case)[1] * case[1] / (case[1] - 1)), "a ring sends (n − 1) / n"),
        (lambda *case: fsdp2(*case)[0], "must return 2 numbers"),
    ],
)
def test_wrong_bytes_are_explained(answer, words):
    verdict = check("precision.bytes", answer)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
