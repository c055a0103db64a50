"""Dispatch and combine: slots as the mixture of experts fills them, and what the all-to-all takes where."""

from __future__ import annotations

import random
import re

import pytest
import torch

from labkit.course.pictures.model_parallel import EXAMPLE, dispatch, route
from labkit.figures import rank_colour
from labkit.training.workloads import moe


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("top_k", [1, 2])
def test_slots_are_filled_as_the_script_fills_them(factor, top_k, monkeypatch):
    """The script's own Mixture gets one-hot tokens; the slots that its experts see are those of the picture."""
    drawn, experts, tokens = random.Random(0), 4, 6
    chosen = [drawn.sample(range(experts), top_k) for _ in range(tokens)]
    for name, value in {"EXPERTS": experts, "TOP_K": top_k, "CAPACITY_FACTOR": factor}.items():
        monkeypatch.setattr(moe, name, value)
    seen = []
    monkeypatch.setattr(moe, "apply_experts", lambda _, slots: seen.append(slots) or slots)
    mixture = moe.Mixture(tokens)
    with torch.no_grad():
        mixture.router.bias.zero_()
        for token, experts_of_token in enumerate(chosen):
            for place in range(experts):
                high = experts_of_token.index(place) if place in experts_of_token else 9
                mixture.router.weight[place, token] = -float(high)
        mixture(torch.eye(tokens)[None])
    choices = [number for experts_of_token in chosen for number in experts_of_token]
    for expert, slots in zip(route([choices, choices], experts, top_k, factor), seen[0][0], strict=True):
        assert expert.slots == len(slots)
        numbers = [number // top_k for number in expert.taken[0]]
        empty = torch.zeros(expert.slots - len(numbers), tokens)
        assert torch.equal(slots, torch.cat([torch.eye(tokens)[numbers], empty]))


def test_dropless_takes_every_token():
    rows = route(EXAMPLE, factor=None)
    assert sum(expert.rows(sender) for expert in rows for sender in range(2)) == 12
    assert not any(numbers for expert in rows for numbers in expert.dropped)
    assert [expert.rank for expert in rows] == [0, 0, 1, 1]


@pytest.mark.parametrize("factor", [1.0, None])
def test_a_line_goes_to_the_expert_and_one_comes_back(factor):
    figure, rows = dispatch(factor=factor), route(EXAMPLE, factor=factor)
    taken = [
        (number, sender, index)
        for index, expert in enumerate(rows)
        for sender in range(2)
        for number in expert.taken[sender]
    ]
    names = [f"token {number} of rank {sender}, expert {index}" for number, sender, index in taken]
    assert sorted(line.name for line in figure.data) == sorted(names * 2)
    assert all(line.line.color == rank_colour(int(re.search(r"rank (\d)", line.name)[1])) for line in figure.data)
    there, back = figure.data[::2], figure.data[1::2]
    assert all(go.y[0] == come.y[1] and go.y[1] == come.y[0] for go, come in zip(there, back))


def test_tokens_travel_to_the_experts_first_and_then_back():
    figure = dispatch()
    shown = [[line.visible for line in frame.data] for frame in figure.frames]
    half = len(shown) // 2
    assert all(there and not back for there, back in zip(shown[half - 1][::2], shown[half - 1][1::2]))
    assert all(map(all, shown[half:]))
    first, last = figure.frames[0].data[0], figure.frames[-1].data
    assert figure.data[0].x[0] < first.x[1] < figure.data[0].x[1]
    assert [(line.x, line.y) for line in last] == [(line.x, line.y) for line in figure.data]


def test_dropped_and_empty_slots_are_counted():
    texts = [note.text for note in dispatch().layout.annotations]
    assert texts.count("✕ full") == 2 and sum("residual only" in text for text in texts) == 2
    title = dispatch().layout.title.text
    assert "2 of 12 choices dropped; 6 of 16 slots empty" in title
    assert "rank 0 4 and 8, rank 1 4 and 8" in title, "slots are sent, empty or not"
    assert "rank 0 1 and 8, rank 1 3 and 4" in dispatch(factor=None).layout.title.text


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"choices": [[0, 1]]}, "a list for each of 2 to 4 ranks, got 1"),
        ({"choices": [[0, 1], [0]]}, "equally many per rank, .* got 2, 1"),
        ({"choices": [[0, 1, 2], [0, 1, 2]], "top_k": 2}, "a multiple of top_k=2, got 3, 3"),
        ({"choices": [[0, 4], [0, 1]]}, "numbers of the 4 experts, 0 to 3, got 4"),
        ({"experts": 3}, "a multiple of the 2 ranks of choices, got 3"),
        ({"factor": 0.0}, "factor must be more than 0 and at most the 4 experts, got 0"),
    ],
)
def test_choices_that_cannot_be_routed(asked, words):
    with pytest.raises(ValueError, match=words):
        dispatch(**asked)
