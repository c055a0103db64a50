"""Ring attention drawn turn by turn: the mask as the script of context parallelism computes it."""

from __future__ import annotations

import pytest
import torch

from labkit.course.pictures.model_parallel import held, ring, work
from labkit.figures import rank_colour
from labkit.training.strategies import cp


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_pair_of_the_mask_is_computed_once(ranks, zigzag):
    assert sum(map(sum, work(ranks, zigzag))) == (2 * ranks) ** 2 / 2
    assert sorted(chunk for chunks in held(ranks, zigzag) for chunk in chunks) == list(range(2 * ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_zigzag_is_what_the_script_does(ranks, monkeypatch):
    monkeypatch.setattr(cp.dist, "get_world_size", lambda: ranks)
    length = cp.CONTEXT // (2 * ranks)
    for rank in range(ranks):
        expected = torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in held(ranks)[rank]])
        assert torch.equal(cp.positions_of(rank), expected)
        monkeypatch.setattr(cp.dist, "get_rank", lambda rank=rank: rank)
        for turn in range(1, ranks):
            rows, columns = cp.seen(turn, 2)
            assert work(ranks)[turn][rank] == len(range(2)[rows]) * len(range(2)[columns])


def test_in_order_the_first_ranks_are_idle_and_zigzag_is_even():
    assert work(4, zigzag=False)[3] == [0, 0, 0, 4] and work(4) == [[2] * 4] * 4
    title = ring(4).layout.title.text
    assert "2 + 4 + 4 + 4 = <b>14</b>" in title and "2 + 2 + 2 + 2 = <b>8</b>" in title


def test_a_panel_shows_who_computes_what_with_whose_keys():
    figure = ring(2)
    masks, texts, bars = (figure.data[start::3] for start in range(3))
    assert len(masks) == 4, "two orders, two turns"
    in_order = masks[1]  # second turn: rank 1 computes with the keys of rank 0, and rank 0 nothing
    assert [list(row) for row in in_order.z] == [
        [1, None, None, None],
        [1, 1, None, None],
        [4, 4, 2, None],
        [4, 4, 2, 2],
    ]
    assert set(texts[1].text) == {"1"} and list(bars[1].x) == [0, 4] and list(bars[1].text) == ["idle", "4"]
    assert list(bars[0].marker.color) == [rank_colour(0), rank_colour(1)]
    whose = [axis.ticktext for axis in figure.select_yaxes() if axis.ticktext and "has" in axis.ticktext[0]]
    assert [[words.split("</span> ")[2].strip() for words in of_ranks] for of_ranks in whose] == [
        ["0", "1"],
        ["1", "0"],
    ] * 2


def test_it_plays_turn_by_turn_and_is_whole_before():
    figure = ring(3)
    shown = [[trace.visible for trace in frame.data].count(True) for frame in figure.frames]
    assert [frame.name for frame in figure.frames] == ["turn 1", "turn 2", "turn 3"]
    assert shown == [6, 12, 18] and all(trace.visible is None for trace in figure.data)
    assert [step.label for step in figure.layout.sliders[0].steps] == [frame.name for frame in figure.frames]


@pytest.mark.parametrize("ranks", [1, 5])
def test_a_ring_without_room_is_refused(ranks):
    with pytest.raises(ValueError, match=f"ranks must be 2 to 4, got {ranks}"):
        ring(ranks)
