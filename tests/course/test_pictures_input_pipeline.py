"""The pictures of lab 09: the modelled timelines obey their rules, and the figures show these timelines."""

from __future__ import annotations

import itertools
import re

import pytest

from labkit.course.pictures import input_pipeline as pictures
from labkit.figures import colours

TIMES = [(0.2, 0.1), (0.03, 0.05), (0.1, 0.1), (0.0, 0.1), (0.1, 0.0)]


@pytest.mark.parametrize(("load", "compute"), TIMES)
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 5])
def test_the_timeline_of_loading_and_training(load, compute, workers):
    course = pictures.schedule(load, compute, workers, 40)
    for number, one in enumerate(course):
        assert one.fetch_end == pytest.approx(one.fetch_start + load)
        assert one.train_end == pytest.approx(one.train_start + compute)
        assert one.train_start >= one.fetch_end, "no batch is trained on before it is loaded"
        assert one.worker == (number % workers if workers else None)
        ahead = [other for other in course[:number] if other.train_start > one.fetch_start + 1e-9]
        assert len(ahead) < pictures.AHEAD * max(workers, 1), "at most this many batches are being loaded or ready"
    for before, after in itertools.pairwise(course):
        assert after.train_start >= before.train_end - 1e-9, "steps are sequential"
        if not workers:
            assert after.fetch_start >= before.train_end - 1e-9
    for mine in range(workers):
        for before, after in itertools.pairwise(one for one in course if one.worker == mine):
            assert after.fetch_start >= before.fetch_end - 1e-9, "a worker loads one batch at a time"


@pytest.mark.parametrize(("load", "compute"), TIMES)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_in_the_long_run_a_step_takes_what_the_formula_says(load, compute, workers):
    ends = [one.train_end for one in pictures.schedule(load, compute, workers, 60)]
    formula = max(compute, load / workers) if workers else load + compute
    assert (ends[-1] - ends[-31]) / 30 == pytest.approx(formula), "30 steps are whole rounds of 1, 2 and 3 workers"


def test_the_picture_has_a_bar_for_each_batch_that_is_fetched_and_trained_on():
    figure = pictures.workers(load=0.2, compute=0.1, counts=(0, 1, 2), batches=6)
    bars = {trace.name: trace for trace in figure.data}
    assert set(bars) == {"fetch", "train"}
    course = pictures.schedule(0.2, 0.1, 2, 6)
    for name, start, end in (("fetch", "fetch_start", "fetch_end"), ("train", "train_start", "train_end")):
        drawn = [
            (base, base + long)
            for lane, base, long in zip(bars[name].y, bars[name].base, bars[name].x)
            if lane.startswith("2 workers: ")
            and lane.partition(": ")[2].startswith("worker" if name == "fetch" else "training")
        ]
        assert drawn == [pytest.approx((1e3 * getattr(one, start), 1e3 * getattr(one, end))) for one in course]
        assert len(bars[name].x) == 18
        assert set(bars[name].text) == {"1", "2", "3", "4", "5", "6"}, "text in addition to the colour"
    assert len(figure.layout.yaxis.categoryarray) == 1 + 2 + 3
    assert [note.text.strip() for note in figure.layout.annotations] == [
        "300 ms per step",
        "200 ms per step",
        "100 ms per step",
    ]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("times", [(1, 3, 1, 5), (3, 3, 1, 4), (0, 1, 2, 0), (2, 2, 5, 1)])
def test_the_timeline_of_copies(times, waits):
    fetch, launch, copy, compute = times
    course = pictures.copying(*times, steps=20, waits=waits)
    for one in course:
        for span, long in ((one.fetch, fetch), (one.copy, copy), (one.launch, launch)):
            assert span[1] - span[0] == pytest.approx(long)
        assert one.train[0] >= one.copy[1] >= one.fetch[1], "copied after it is loaded, trained on after it is copied"
        assert one.train[1] >= one.launch[1] and one.train[1] - one.train[0] >= compute - 1e-9
        assert one.launch[0] == pytest.approx(one.copy[1] if waits else one.fetch[1])
    for before, after in itertools.pairwise(course):
        assert after.copy[0] >= before.train[1] - 1e-9, "the GPU is sequential"
        assert after.fetch[0] == pytest.approx(before.launch[1])
    steady = (course[-1].train[1] - course[9].train[1]) / 10
    formula = copy + max(compute, launch + fetch) if waits else max(copy + compute, fetch + launch)
    assert steady == pytest.approx(formula)


def test_the_picture_of_copies_shows_the_time_of_each_variant():
    figure = pictures.copies(fetch=0.003, launch=0.003, copy=0.001, compute=0.004, slower=2.5)
    assert [note.text.strip() for note in figure.layout.annotations] == [
        "8.5 ms per step",
        "7 ms per step",
        "6 ms per step",
    ]
    assert [trace.name for trace in figure.data] == ["fetch", "copy", "launch", "train"]
    assert all(len(trace.x) == 3 * 4 for trace in figure.data)


@pytest.mark.parametrize("figure", [pictures.workers(), pictures.copies()], ids=["workers", "copies"])
def test_a_picture_says_that_it_is_modelled_and_suits_light_and_dark_pages(figure):
    assert "modelled" in figure.layout.title.text
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.font.color == colours.INK


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pictures.workers(load=-0.1), "load must be a number from 0 to 1e+18, got -0.1"),
        (lambda: pictures.workers(counts=(-1,)), "each of counts must be an integer from 0 to 64, got -1"),
        (lambda: pictures.workers(batches=0), "batches must be an integer from 1 to 64, got 0"),
        (lambda: pictures.copies(copy=-1), "copy must be a number from 0 to 1e+18, got -1"),
        (lambda: pictures.copies(steps=0), "steps must be an integer from 1 to 64, got 0"),
    ],
)
def test_invalid_arguments_are_one_sentence(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_one_batch_can_be_shown():
    assert pictures.workers(counts=(1,), batches=1).layout.annotations[0].text.strip() == "300 ms per step"
