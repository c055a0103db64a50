"""Will it fit: bytes by formula, and the picture that shows the same numbers."""

from __future__ import annotations

import pytest

from labkit.course import pictures
from labkit.course.pictures import sharding
from labkit.course.pictures.sharding import RECIPES, states


def test_a_topic_of_the_pictures_is_imported_lazily():
    assert pictures.fit is pictures.sharding is sharding


def test_every_recipe_adds_up_to_sixteen_bytes():
    assert {sum(recipe.values()) for recipe in RECIPES.values()} == {16}


@pytest.mark.parametrize("recipe", RECIPES)
def test_bars_are_the_states_of_a_device(recipe):
    figure = states(7e9, devices=8, recipe=recipe)
    kept = {bar.name: list(bar.y) for bar in figure.data}
    assert list(kept) == ["parameters", "gradients", "optimizer"]
    mine, gradients, optimizer = RECIPES[recipe].values()
    totals = [sum(column) for column in zip(*kept.values())]
    by_stage = [16, mine + gradients + optimizer / 8, mine + (gradients + optimizer) / 8, 16 / 8]
    assert totals == pytest.approx([7 * each for each in by_stage])
    assert [name.split("<br>")[1] for name in figure.data[0].x] == [f"{total:,.1f} GB" for total in totals]


def test_small_models_are_shown_in_mib_and_the_line_is_the_memory():
    figure = states(669_706, devices=2, recipe="fp32", memory=12 << 20)
    assert figure.data[0].y[0] == pytest.approx(4 * 669_706 / 2**20)
    assert figure.layout.shapes[0].y0 == 12
    assert "12 MiB" in figure.layout.annotations[0].text


def test_an_unknown_recipe_is_rejected_with_its_value():
    with pytest.raises(ValueError, match="recipe must be one of fp32, mixed, got 'fp8'"):
        states(1e9, 4, recipe="fp8")


def test_pictures_have_no_background():
    layout = states(1e9, 4).layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
