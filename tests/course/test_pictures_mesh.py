"""Pictures of meshes and of tensor parallelism: groups as in torch, modelled communication times, numbers and
colours."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from labkit.course.pictures import clusters, model_parallel
from labkit.course.pictures.canvas import EVERY
from labkit.figures.colours import rank_colour
from labkit.record.events import Call
from labkit.record.state import RunState

MESHES = [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"replicate": 2, "shard": 4}, {"pp": 2, "dp": 3, "tp": 4}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_groups_are_those_of_a_device_mesh(axes):
    """A device mesh numbers the ranks in row-major order; ranks that differ in only one axis form a group."""
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
    for place, axis in enumerate(axes):
        wanted = ranks.movedim(place, -1).reshape(-1, axes[axis]).tolist()
        assert sorted(clusters.groups(axes, axis)) == sorted(wanted)


def test_an_unknown_axis_is_rejected():
    with pytest.raises(ValueError, match=r"axis must be one of dp, tp, got 'cp'"):
        clusters.groups({"dp": 2, "tp": 2}, "cp")


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_grid_shows_every_rank_once_for_each_axis(axes):
    figure = clusters.grid(axes)
    ranks = math.prod(axes.values())
    cells = [note.text for note in figure.layout.annotations if note.text[:3] == "<b>" and note.text[3].isdigit()]
    assert len(cells) == len(figure.layout.shapes) == ranks * len(axes)
    for panel, axis in enumerate(axes):
        mine = cells[panel * ranks : (panel + 1) * ranks]
        by_letter: dict[str, list[int]] = {}
        for words in mine:
            number, letter = words.removeprefix("<b>").split("</b> ")
            by_letter.setdefault(letter, []).append(int(number))
        assert [sorted(group) for group in by_letter.values()] == clusters.groups(axes, axis)
        colours = Counter(shape.fillcolor for shape in figure.layout.shapes[panel * ranks : (panel + 1) * ranks])
        if ranks // axes[axis] <= 8:
            assert set(colours.values()) == {axes[axis]}, "one colour per group"


def test_nodes_are_rows_and_axes_between_nodes_are_named():
    texts = [note.text for note in clusters.grid({"replicate": 2, "shard": 4}, per_node=4).layout.annotations]
    assert "<b>replicate</b>: 4 groups, between nodes" in texts and "<b>shard</b>: 2 groups, within a node" in texts
    assert "node 1" in texts
    with pytest.raises(ValueError, match="per_node must be a divisor of the 4 ranks of the mesh, got 3"):
        clusters.grid({"dp": 2, "tp": 2}, per_node=3)


def test_an_axis_that_spans_nodes_uses_the_slow_interconnect():
    times = clusters.modelled({"pp": 2, "tp": 4}, {"pp": 100.0, "tp": 1000.0}, per_node=4, inside=100.0, between=10.0)
    assert times["pp", "tp"] == {"pp": (10.0, True), "tp": (10.0, False)}
    assert times["tp", "pp"] == {"tp": (100.0, True), "pp": (1.0, False)}


def test_the_fastest_order_of_axes_is_on_top():
    figure = clusters.wires({"pp": 2, "tp": 4}, {"pp": 100.0, "tp": 1000.0}, per_node=4, inside=100.0, between=10.0)
    assert list(figure.layout.yaxis.categoryarray) == ["pp × tp", "tp × pp"]
    bars = {bar.name: bar for bar in figure.data}
    assert list(bars["tp"].x) == [10_000, 100_000] and list(bars["tp"].marker.pattern.shape) == ["", "/"]
    assert "modelled" in figure.layout.title.text


def a_run(spans: list[list], world_size: int = 4) -> SimpleNamespace:
    state = RunState()
    state.ranks[0] = SimpleNamespace(timeline=SimpleNamespace(comm=[Call(*span) for span in spans]) if spans else None)
    return SimpleNamespace(name="a-run", state=SimpleNamespace(ranks=state.ranks, world_size=world_size))


def test_bytes_are_counted_along_their_axis():
    spans = [
        ["all_reduce", 0, 1, 100, "mesh_tp", [0, 1], 1],
        ["all_gather", 0, 1, 60, "mesh_dp", [0, 2], 1],
        ["all_reduce", 0, 1, 40, "default_pg", [0, 1, 2, 3], 1],
        ["send", 0, 1, 7, None, None, None],
        ["recv", 0, 1, 9, None, None, None],
        ["barrier", 0, 1, None, "default_pg", [0, 1, 2, 3], 2],
    ]
    assert clusters.by_axis(a_run(spans), {"dp": 2, "tp": 2}) == {"dp": 30.0, "tp": 100.0, "other": 60.0, "pp": 7.0}
    with pytest.raises(ValueError, match="no profiled step"):
        clusters.by_axis(a_run([]), {"dp": 2, "tp": 2})


# ---- splits

X, A = [[1, 2], [3, -1]], [[1, 0, 2, -1], [2, 1, -1, 0]]
B = [[1, 0], [2, 1], [0, 3], [1, 1]]


def numbers(figure) -> list[float]:
    """All numbers in cells, in order."""
    found = (note.text.replace("−", "-") for note in figure.layout.annotations if note.font.size == 13)
    return [float(text) for text in found]


def flat(*matrices) -> list[float]:
    return [float(value) for matrix in matrices for value in torch.as_tensor(matrix).flatten()]


def test_columns_have_the_product_in_it_and_the_colours_of_their_ranks():
    figure = model_parallel.column(X, A)
    assert numbers(figure) == flat(X, A, torch.tensor(X) @ torch.tensor(A))
    colours = [shape.fillcolor for shape in figure.layout.shapes]
    assert colours[:4] == [EVERY] * 4
    assert colours[4:8] == [rank_colour(0)] * 2 + [rank_colour(1)] * 2


def test_rows_add_up():
    hidden = torch.relu(torch.tensor(X) @ torch.tensor(A))
    figure = model_parallel.row(hidden.tolist(), B)
    partial_sums = hidden[:, :2] @ torch.tensor(B)[:2], hidden[:, 2:] @ torch.tensor(B)[2:]
    assert numbers(figure) == flat(hidden, B, *partial_sums, hidden @ torch.tensor(B))
    assert torch.equal(sum(partial_sums), hidden @ torch.tensor(B))


def test_a_pair_goes_from_x_to_partial_sums_rank_by_rank():
    hidden = torch.relu(torch.tensor(X) @ torch.tensor(A))
    figure = model_parallel.pair(X, A, B)
    assert numbers(figure)[-4:] == flat(hidden @ torch.tensor(B))
    texts = [note.text for note in figure.layout.annotations]
    assert "rank 0" in texts and "rank 1" in texts and "partial sum of rank 1" in texts


def test_an_uneven_split_is_rejected():
    with pytest.raises(ValueError, match="the number of columns must be a multiple of 3, the number of ranks, got 4"):
        model_parallel.column(X, A, ranks=3)
    with pytest.raises(ValueError, match="the number of rows must be a multiple"):
        model_parallel.pair(X, A, B, ranks=3)


def test_a_layer_communicates_after_each_pair_and_with_sequence_parallelism_around_it():
    sent = ("all-reduce", "all-gather", "reduce-scatter")
    plain, sequence = ([note.text for note in model_parallel.layer(each).layout.annotations] for each in (False, True))
    assert [text for text in plain if text in sent] == ["all-reduce"] * 2
    assert [text for text in sequence if text in sent] == ["all-gather", "reduce-scatter"] * 2
    assert plain.count("replicated") == 2 * 3 and sequence.count("its positions") == 2 * 3


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_has_the_counterpart_of_each_collective(sequence_parallel):
    """The collective of an autograd function's backward is the transpose of its forward's."""
    counterpart = {"identity": "all-reduce", "all-reduce": "identity"}
    counterpart |= {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
    notes = model_parallel.layer(sequence_parallel, backward=True).layout.annotations
    named = [note for note in notes if note.text[:8] in ("<b>f</b>", "<b>g</b>")]
    forward, backward = named[:4], named[4:]
    assert [note.text[3] for note in forward] == [*"fgfg"] and len(backward) == 4
    for there, back in zip(forward, backward):
        assert there.x == back.x and back.y > there.y
        assert counterpart[there.text[9:]] == back.text[9:]
