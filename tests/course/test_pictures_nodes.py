"""Nodes and rails: which links a message passes, and what a two-level all-reduce sends over them."""

from __future__ import annotations

import pytest

from labkit.analysis.theory import collectives as plans
from labkit.course.pictures.clusters import _hops, all_reduces, rails, two_level


def used(figure, low: float = float("-inf"), high: float = float("inf")):
    """How many links are coloured between two heights: the spine is above the rails, at 0."""
    coloured = [line for line in figure.data if line.line.width > 1]
    return sum(low < sum(line.y) / 2 < high for line in coloured)


@pytest.mark.parametrize(
    ("source", "target", "passed"),
    [
        (0, 3, "gpu nvswitch gpu"),
        (1, 5, "gpu nic rail nic gpu"),
        (3, 4, "gpu nic rail spine rail nic gpu"),
    ],
)
def test_what_a_message_passes(source, target, passed):
    hops = _hops(source, target, per_node=4)
    assert [what for what, _, _ in hops] == passed.split()
    assert (hops[0][1] * 4 + hops[0][2], hops[-1][1] * 4 + hops[-1][2]) == (source, target)


def test_tensor_parallelism_stays_on_nvlink_and_data_parallelism_on_the_rails():
    axes = {"dp": 2, "tp": 8}
    inside, between = rails(axes, "tp"), rails(axes, "dp")
    assert "16 over NVLink, 0 between nodes" in inside.layout.title.text and used(inside) == 16
    assert "0 over NVLink, 16 between nodes" in between.layout.title.text
    assert used(between) == 2 * 16 and used(between, high=1.0) == 0, "NIC and rail of every rank, and no spine"


def test_an_axis_longer_than_a_node_crosses_the_spine():
    figure = rails({"tp": 16}, "tp")
    assert "14 over NVLink, 2 between nodes, of which 2 over the spine switch" in figure.layout.title.text
    assert used(figure, high=1.0) == 2


def test_one_node_has_no_network():
    texts = [note.text for note in rails({"tp": 8}, "tp").layout.annotations]
    assert "NVSwitch" in texts and "NIC" not in texts and "spine switch" not in texts


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (3, 2), (4, 4)])
def test_a_two_level_all_reduce_gives_the_sum_and_spares_the_network(nodes, per_node):
    plan = plans.two_level(nodes, per_node)
    assert len(plan.states()) == 1 + 2 * (per_node - 1) + 2 * (nodes - 1)
    ranks = nodes * per_node
    assert plan.sent(per_node, between=True) == pytest.approx([2 * (nodes - 1) / nodes / per_node] * ranks)
    assert plan.sent(per_node, between=False) == pytest.approx([2 * (per_node - 1) / per_node] * ranks)
    ring = plans.all_reduce(ranks, "ring")
    assert max(plan.sent(per_node, between=True)) < max(ring.sent(per_node, between=True))


def test_the_phases_use_nvlink_then_the_rails_then_nvlink():
    figure = two_level(2, 4)
    phases = [[line for line in figure.data if left < line.x[0] < left + 9] for left in (0, 9.5, 19)]
    heights = [{max(line.y) for line in lines if line.line.width > 1} for lines in phases]
    assert heights[0] == heights[2] == {4.6} and heights[1] == {2.6, 3.6}
    texts = " ".join(note.text for note in figure.layout.annotations)
    assert texts.count("3 rounds, a rank sends 0.75") == 2 and "2 rounds, a rank sends 0.25" in texts


def test_bytes_per_link_class_are_those_of_the_plans():
    inside, between = all_reduces(2, 4).data
    ring = inside.y.index("each chunk travels around the ring twice")
    assert (inside.x[ring], between.x[ring], between.customdata[ring]) == (1.75, 1.75, 3.5)
    assert (inside.x[-1], between.x[-1]) == (1.5, 0.25)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: rails({"dp": 3, "tp": 4}, "tp"), "whole nodes of at most 8 ranks, got 12 ranks with per_node=8"),
        (lambda: rails({"dp": 40}, "dp"), "got 40 ranks"),
        (lambda: rails({"dp": 2, "tp": 4}, "cp"), "axis must be one of dp, tp, got 'cp'"),
        (lambda: two_level(1, 4), "two levels need at least 2 nodes of 2 ranks, got 1 of 4"),
        (lambda: two_level(4, 8), "must be at most 16 ranks, got 4 × 8"),
        (lambda: all_reduces(5, 4), "got 20 ranks with per_node=4"),
    ],
)
def test_what_has_no_room_is_refused(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()
