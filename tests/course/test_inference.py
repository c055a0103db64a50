"""The exercises of lab 25: honest mistakes are named, other right answers pass, and every draw has the cases it should
have."""

from __future__ import annotations

import math

import pytest
from answers import inference
from answers.inference import served

from labkit import check
from labkit.course.answers import Wrong
from labkit.course.exercises import inference as exercises


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("changes", "words"), inference.HANDOVERS.values(), ids=inference.HANDOVERS)
def test_a_wrong_hand_over_is_rejected_with_what_was_measured(changes, words):
    verdict = check("inference.weights", inference.handed(*changes))
    assert verdict.state == "wrong" and words in verdict.words, verdict.words


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("changes", inference.OTHER_HANDOVERS.values(), ids=inference.OTHER_HANDOVERS)
def test_another_right_hand_over_is_right(changes):
    verdict = check("inference.weights", inference.handed(*changes))
    assert verdict.state == "right", verdict.words


def changed(number, by):
    """The right answer with one of its four numbers changed."""

    def answer(model, gpu, tp, context):
        figures = list(served(model, gpu, tp, context))
        figures[number] = by(figures[number], model, gpu, tp)
        return tuple(figures)

    return answer


MISTAKES = [
    (changed(0, lambda right, model, gpu, tp: right * tp), "splits the weights over the GPUs"),
    (changed(0, lambda right, model, gpu, tp: right * 2), "has two bytes"),
    (changed(1, lambda right, model, gpu, tp: right / 2), "keys and values are both stored"),
    (changed(1, lambda right, model, gpu, tp: right * model["heads"] / model["kv_heads"]), "queries are not stored"),
    (changed(1, lambda right, model, gpu, tp: right * min(tp, model["kv_heads"])), "of its own heads only"),
    (changed(1, lambda right, model, gpu, tp: right / model["layers"]), "every layer"),
    (changed(1, lambda right, model, gpu, tp: right * min(1, model["kv_heads"] / tp)), "a head is not split"),
    (changed(2, lambda right, model, gpu, tp: right or -1), "the weights alone do not fit"),
    (changed(2, lambda right, model, gpu, tp: right + 2), "what the weights leave"),
    (changed(3, lambda right, model, gpu, tp: 2 * right if right < math.inf else right), "2 operations for each"),
    (changed(3, lambda right, model, gpu, tp: 1e9 if right == math.inf else right), "no batch is large enough"),
    (lambda *case: served(*case)[:3], "must return 4 numbers"),
]


@pytest.mark.parametrize(("answer", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_wrong_number_is_explained_in_every_draw(answer, words):
    for _ in range(40):
        with pytest.raises(Wrong) as wrong:
            exercises.EXERCISES["inference.memory"].check(answer)
        assert words in str(wrong.value)


def test_right_numbers_are_right_in_every_draw():
    for _ in range(200):
        cases = exercises.cases()
        bounds = [exercises.served(*case)[3] for case in cases]
        assert bounds[0] < math.inf == bounds[1]
        assert cases[2][0]["kv_heads"] < cases[2][2] and exercises.served(*cases[3])[2] == 0
        for answer in (served, changed(3, lambda right, *_: math.ceil(right) if right < math.inf else right)):
            assert exercises.EXERCISES["inference.memory"].check(answer)
