"""From how many tokens per device on communication can be hidden: the closed formulas of the scaling book, where links
have no latency, and the tables of the lab."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.prediction import links
from labkit.prediction import links as subject
from labkit.prediction.devices import DEVICES, Rate
from labkit.prediction.links import Balance

WIDTH, INNER, EXPERT = 8192, 28672, 14336


@pytest.fixture
def without_latency(monkeypatch):
    """A machine of two nodes whose links have 300 GB/s and 50 GB/s and whose messages take no time to start."""
    row = DEVICES["h100x8"]
    inside, between = (
        replace(link, simple=Rate(0.0, rate), low_latency=Rate(0.0, rate / 2))
        for link, rate in ((row.inside, 300e9), (row.between, 50e9))
    )
    monkeypatch.setitem(subject.DEVICES, "h100x8", replace(row, inside=inside, between=between))
    monkeypatch.setattr(links, "_CALL", dict.fromkeys(links._CALL, 0.0))
    accelerator = row.accelerator
    return accelerator.peak("bf16") * accelerator.efficiency


def test_without_latency_they_are_the_formulas_of_the_scaling_book(without_latency):
    reached, devices, local = without_latency, 32, 8
    alpha, between = reached / 300e9, reached / 50e9
    nodes = devices // local
    least = Balance("h100x8", devices, WIDTH, INNER, EXPERT).thresholds()
    fsdp = alpha * (devices - 1) / devices
    assert between / local < alpha, "eight adapters together are faster than one link within the node"
    assert least["FSDP"] == pytest.approx(fsdp, abs=2)
    tensor = (local - 1) * alpha / INNER
    assert tensor < 1 and least["TP 8"] == 1
    assert least["FSDP × TP 8"] == pytest.approx(between / local * (nodes - 1) / nodes / (1 - tensor), abs=2)
    assert least["EP 8"] == (1 if alpha * (local - 1) / local <= EXPERT else None)
    assert least["EP 32"] == (1 if between * (devices - local) / devices <= EXPERT else None)


def test_the_threshold_is_where_the_ratio_passes_one():
    balance = Balance("a100x8")
    for name, least in balance.thresholds().items():
        ratio = balance.ratios()[name]
        if least is None:
            assert ratio(subject.MOST_TOKENS) > 1
        else:
            assert ratio(least) <= 1 and (least == 1 or ratio(least - 1) > 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"machine": "here"}, "machine must be one of t4x2"),
        ({"width": 0}, "width must be an integer from 1"),
        ({"devices": 20}, "devices must be two or more nodes of 8, got 20"),
        ({"machine": "t4x2", "devices": 4}, "bf16"),
    ],
)
def test_what_a_machine_lacks_is_refused(asked, words):
    with pytest.raises((ValueError, LookupError), match=words):
        Balance(**asked).thresholds()
