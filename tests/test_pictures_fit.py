"""Will it fit: bytes by formula, the decision tree as a function, and pictures that show the same numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from labkit.course import pictures
from labkit.course.pictures import fit
from labkit.course.pictures.fit import QUESTIONS, RECIPES, Case, advise, states, tree

GB = 1e9
LARGE = Case(parameters=5e9, memory=24 * GB, activations=9 * GB, least=2 * GB, block=0.4 * GB, devices=8)


def test_a_topic_of_the_pictures_is_imported_lazily():
    assert pictures.fit is fit


def test_every_recipe_adds_up_to_sixteen_bytes():
    assert {sum(recipe) for recipe in RECIPES.values()} == {16}


@pytest.mark.parametrize("recipe", RECIPES)
def test_bars_are_the_states_of_a_device(recipe):
    figure = states(7e9, devices=8, recipe=recipe)
    kept = {bar.name: list(bar.y) for bar in figure.data}
    assert list(kept) == ["parameters", "gradients", "optimizer"]
    mine, gradients, optimizer = RECIPES[recipe]
    totals = [sum(column) for column in zip(*kept.values())]
    by_stage = [16, mine + gradients + optimizer / 8, mine + (gradients + optimizer) / 8, 16 / 8]
    assert totals == pytest.approx([7 * each for each in by_stage])
    assert [name.split("<br>")[1] for name in figure.data[0].x] == [f"{total:,.1f} GB" for total in totals]


def test_small_models_are_shown_in_mib_and_the_line_is_the_memory():
    figure = states(669_706, devices=2, recipe="fp32", memory=12 << 20)
    assert figure.data[0].y[0] == pytest.approx(4 * 669_706 / 2**20)
    assert figure.layout.shapes[0].y0 == 12
    assert "12 MiB" in figure.layout.annotations[0].text


@pytest.mark.parametrize(
    "change, use",
    [
        ({"memory": 90 * GB}, "DDP"),
        ({"memory": 90 * GB, "devices": 1}, "one device, no strategy"),
        ({"memory": 83 * GB}, "DDP with activation checkpointing, smaller micro-batches"),
        ({"memory": 38 * GB}, "ZeRO-1"),
        ({}, "FSDP2"),
        ({"machines": 2}, "HSDP: FSDP2 in a machine, replicas between machines"),
        ({"parameters": 13e9, "machines": 2, "fast": True}, "FSDP2 over all machines"),
        ({"parameters": 13e9, "machines": 2}, "PP between machines, FSDP2 in a machine"),
        ({"block": 40 * GB}, "FSDP2 × TP, TP in a machine"),
        ({"devices": 1}, "more devices, offload to CPU memory, or a smaller model"),
    ],
)
def test_the_advice_of_the_tree(change, use):
    assert repr(advise(replace(LARGE, **change))) == use


def test_every_leaf_of_the_tree_is_reached_by_some_case():
    some = (
        (1e8, 1e9, 5e9, 13e9, 70e9),
        (1, 8),
        (1, 2, 8),
        (False, True),
        (0.1 * GB, 15 * GB, 60 * GB),
        (1 * GB, 40 * GB),
    )
    ends = set()
    for parameters, devices, machines, fast, activations, block in itertools.product(*some):
        way = advise(
            Case(parameters, 24 * GB, activations, min(activations, 2 * GB), block, devices, machines, fast)
        ).way
        ends.add(len(way) if way[-1][1] else None)
    assert ends == {*range(1, len(QUESTIONS) + 1), None}


def test_more_memory_never_needs_a_later_question():
    lengths = [len(advise(replace(LARGE, memory=memory * GB)).way) for memory in range(1, 120)]
    assert lengths == sorted(lengths, reverse=True)


def test_what_the_tree_recommends_fits_by_its_own_formula():
    question, yes = advise(LARGE).way[-1]
    assert yes
    assert question.holds(LARGE) == 16 * 5e9 / 8 + 0.4 * GB + 2 * GB <= LARGE.memory


@pytest.mark.parametrize("wrong", [{"recipe": "fp8"}, {"memory": 0}, {"devices": 0}, {"parameters": math.nan}])
def test_an_invalid_case_is_rejected_with_its_value(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be .*got {value!r}"):
        replace(LARGE, **wrong)


def test_the_drawn_tree_has_every_question_and_the_path():
    figure = tree(LARGE)
    said = [note.text for note in figure.layout.annotations]
    assert all(any(question.text in text for text in said) for question in QUESTIONS)
    assert figure.layout.title.text == "<b>Which strategy to use: FSDP2</b>"
    assert [text for text in said if "✓" in text] == ["<b>✓ FSDP2</b>"]
    strong = [shape for shape in figure.layout.shapes if shape.type == "rect" and shape.line.width > 1]
    assert len(strong) == len(advise(LARGE).way) + 1
    assert "11.5 GiB ≤ 22.4 GiB" in "".join(said)


def test_a_tree_without_a_case_has_no_path():
    figure = tree()
    assert not [shape for shape in figure.layout.shapes if shape.line.width > 1]
    assert "4Ψ + 12Ψ/n" in "".join(note.text for note in figure.layout.annotations)


@pytest.mark.parametrize("figure", [tree(LARGE), tree(replace(LARGE, devices=1)), states(1e9, 4)])
def test_pictures_have_no_background(figure):
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
