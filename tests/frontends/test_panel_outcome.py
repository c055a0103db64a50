"""Bars of predicted memory next to measured ones, and what is said about them."""

from __future__ import annotations

import pytest
from diagnosed import memory
from folded import apply, fold
from test_panel_predict import ASKED, AT_PEAK, MIB, plan_of

from labkit import figures
from labkit.analysis.prediction import sentences
from labkit.figures.tables import ranks_html
from labkit.frontends.panel.view import RunView
from labkit.plan.spec import Spec


def test_how_close_it_was_stands_below_the_measured_bars_and_the_table_of_ranks():
    spec = Spec("ddp", **ASKED)
    peaks = memory(0, 10 * MIB, **AT_PEAK), memory(1, 12 * MIB, parameters=7 * MIB, gradients=5 * MIB)
    state = fold({"kind": "spec", "spec": spec.to_json()}, *peaks)
    view = RunView()
    view.memory.draw(state)
    assert (view.memory._outcome.value, view.memory._outcome.layout.display) == ("", "none")
    assert "predicted" not in ranks_html("a-run", state)
    apply(state, {"kind": "prediction", "prediction": plan_of(spec)})
    view.memory.draw(state)
    assert len(sentences(state)) == 2, "the error, and the miss of rank 1"
    for html in (view.memory._outcome.value, ranks_html("a-run", state)):
        assert "with an error of at most 16.67%" in html and "gradients +2.00 MiB" in html
    assert view.memory._outcome.layout.display == ""


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_bar_has_a_label_below_it(ranks):
    spec = Spec("ddp", **{**ASKED, "nproc": ranks})
    told = [memory(rank, 10 * MIB, **AT_PEAK) for rank in range(ranks)]
    state = fold({"kind": "spec", "spec": spec.to_json()}, *told, {"kind": "prediction", "prediction": plan_of(spec)})
    below = figures.figure("memory_by_owner", state).layout.xaxis.ticktext
    assert below[:2] == ("rank 0<br>predicted", "rank 0<br>measured")
    equal = sum("predicted" in label for label in below)
    assert (equal, len(below) - equal) == (2 if ranks == 2 else 1, ranks), "of many equal ranks, one is predicted"
    drawn = figures.svg("memory_by_owner", state)
    assert drawn.count(">predicted</text>") == equal and drawn.count(">measured</text>") == ranks
