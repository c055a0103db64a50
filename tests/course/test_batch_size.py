"""Lab 24: the formulas, the pictures, and exercises that accept and reject on every draw."""

from __future__ import annotations

import random

import pytest
from answers import batch_size as answers

from labkit import check
from labkit.analysis.theory.batch_size import fitted, noise_scale, steps
from labkit.course.exercises import batch_size as exercises
from labkit.course.pictures.batch_size import hyperbola, noise, norms, seconds

# ---- formulas and pictures


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_noise_scale_is_that_of_the_squared_norms(ranks):
    signal, trace, batch = 0.5, 30.0, 16
    small, large = signal + trace / batch, signal + trace / (batch * ranks)
    assert noise_scale(small, large, batch, ranks) == pytest.approx(trace / signal)
    assert noise_scale(1.0, 1 / ranks, batch, ranks) == float("inf")


def test_a_fit_finds_the_limits_and_the_hyperbola_goes_through_its_points():
    pairs = [(batch, steps(batch, 30, 700)) for batch in (2, 16, 256)]
    assert fitted(pairs) == pytest.approx((30, 700))
    for batch, count in pairs:
        assert (count / 30 - 1) * (batch * count / 700 - 1) == pytest.approx(1)
    for unfit in ([(2, 5.0), (2, 6.0)], [(2, 5.0), (4, 5.0)], [(2, 5.0), (4, 6.0), (8, 9.0)]):
        with pytest.raises(ValueError, match="batches"):
            fitted(unfit)


def test_the_pictures_show_what_was_measured():
    parts = norms([(256, 1 + 60 / 256), (1, 61.0), (16, 1 + 60 / 16)])
    assert "at a batch of 60" in parts.layout.title.text and list(parts.data[3].x) == [1, 16, 256]
    trained = noise([31.0] * 3, [16.0] * 3, batch=2, ranks=2)
    assert list(trained.data[0].y) == pytest.approx([60] * 3)
    pairs = [(batch, steps(batch, 30, 600)) for batch in (2, 16, 256)]
    assert "critical batch: 20" in [trace.name for trace in hyperbola(pairs).data]
    modelled = seconds(pairs, batch=2, compute=0.1, transfer=0.0)
    assert "modelled" in modelled.layout.title.text
    assert modelled.data[1].y[1] == pytest.approx(steps(4, 30, 600) / steps(2, 30, 600))


# ---- exercises: on every draw a mistake is far from what is right


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_the_noise_of_a_draw_is_found_by_every_right_estimate_and_by_no_mistake(seed):
    case = exercises.draw_gradients(random.Random(seed))
    for right in (answers.noise_scale, answers.from_products):
        assert right(case.steps) == pytest.approx(case.noise, rel=exercises._NEAR)
    for wrong, words in answers.MISTAKES_OF_NOISE.values():
        value = wrong(case.steps)
        assert abs(value / case.noise - 1) > exercises._NEAR
        assert words in exercises._why(value, case)


@pytest.mark.parametrize("seed", range(20))
def test_the_ranks_of_a_draw_are_found_by_every_right_fit_and_by_no_mistake(seed):
    cases = exercises.draw_scalings(random.Random(seed))
    assert max(case.best for case in cases) > 2 * min(case.best for case in cases)
    for case in cases:
        for right in (answers.most_ranks, answers.by_a_line):
            assert right(*case.given) == pytest.approx(case.best, rel=exercises._NEAR)
        for wrong, words in answers.MISTAKES_OF_RANKS.values():
            ranks = wrong(*case.given)
            assert abs(ranks / case.best - 1) > exercises._NEAR
            assert words in exercises._why_not(ranks, case)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("noise", lambda steps: steps[0][0][1], "must be a number of samples"),
        ("noise", lambda steps: float("nan"), "the true noise scale is"),
        ("ranks", lambda *given: "many", "must return a number of ranks"),
        ("ranks", lambda *given: 0.5, "compare ranks × steps"),
    ],
)
def test_what_is_no_answer_is_rejected(name, answer, words):
    verdict = check(f"batch_size.{name}", answer)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
