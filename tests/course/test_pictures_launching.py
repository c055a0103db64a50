"""What torchrun starts, and starts again: every rank, whichever of them was killed."""

from __future__ import annotations

import pytest

from labkit.course.pictures.launching import restart, torchrun


def boxes(figure, lane: int) -> list[str]:
    (trace,) = figure.data
    of_lane = [(base, text) for number, base, text in zip(trace.y, trace.base, trace.text) if number == lane]
    return [text for _, text in sorted(of_lane)]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 2), (2, 4), (4, 1)])
def test_one_rank_is_killed_and_all_start_again(nodes, per_node):
    figure = restart(nodes, per_node)
    names = figure.layout.yaxis.ticktext
    assert sum("agent" in name for name in names) == nodes and len(names) == nodes * (1 + per_node)
    ranks = [lane for lane, name in enumerate(names) if "rank" in name]
    assert [boxes(figure, lane).count("killed") for lane in ranks] == [0] * (len(ranks) - 1) + [1]
    for lane in ranks:
        assert boxes(figure, lane).count("start") == boxes(figure, lane).count("init group") == 2
        assert boxes(figure, lane)[-2:] == ["resume", "train"]
    for lane in set(range(len(names))) - set(ranks):
        assert boxes(figure, lane).count("rendezvous") == 2
    arrows = [note for note in figure.layout.annotations if note.showarrow]
    assert len(arrows) == 2 * (nodes - 1), "agents exchange at both rendezvous"


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (3, 4)])
def test_a_restart_needs_ranks_that_have_room(nodes, per_node):
    with pytest.raises(ValueError, match=f"must be 2 to 8 ranks, got {nodes} × {per_node}"):
        restart(nodes, per_node)


def test_every_process_has_its_numbers():
    texts = [note.text for note in torchrun(3).layout.annotations]
    assert all(f"RANK={rank} · LOCAL_RANK={rank} · WORLD_SIZE=3" in texts for rank in range(3))
    with pytest.raises(ValueError, match="ranks must be at most 8, got 9"):
        torchrun(9)
