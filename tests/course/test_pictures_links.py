"""Links between accelerators: the figures of the table, and bus bandwidths that follow from the model."""

from __future__ import annotations

import pytest

from labkit.course.pictures.clusters import SIZES, TOKENS, bandwidths, bus, thresholds
from labkit.prediction.devices import DEVICES
from labkit.prediction.links import Balance, communication


def test_every_link_of_the_table_is_a_bar_with_its_source():
    (bars,) = bandwidths().data
    links = {link.name: link for one in DEVICES.values() for link in (one.inside, one.between) if link}
    assert dict(zip(bars.y, bars.x)) == {name: link.simple.bandwidth / 1e9 for name, link in links.items()}
    assert dict(zip(bars.y, bars.customdata)) == {name: link.source for name, link in links.items()}


@pytest.mark.parametrize(("machine", "devices", "nodes"), [("h100x8", 8, 1), ("a100x8", 16, 2)])
def test_the_best_line_is_what_predictions_use(machine, devices, nodes):
    figure, model = bus(machine=machine, devices=devices), communication(machine)
    best = [max(values) for values in zip(*(line.y for line in figure.data))]
    factor = 2 * (devices - 1) / devices / 1e9
    expected = [factor * size / model.seconds("all_reduce", size, devices, nodes) for size in SIZES]
    assert best == pytest.approx(expected)
    assert best[-1] < model._inside.simple.bandwidth / 1e9


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"devices": 1}, "devices must be at least 2, got 1"),
        ({"machine": "here"}, "machine must be one of t4x2"),
        ({"machine": "t4x2", "devices": 4}, "is one node"),
        ({"devices": 12}, "devices must be whole nodes of 8, or fewer than one has, got 12"),
    ],
)
def test_what_the_machine_lacks_is_refused(asked, words):
    with pytest.raises((ValueError, LookupError), match=words):
        bus(**asked)


def test_each_layout_is_a_line_with_its_threshold():
    balance, figure = Balance("a100x8", 16), thresholds("a100x8", 16)
    for line, (name, ratio) in zip(figure.data, balance.ratios().items(), strict=True):
        least = balance.thresholds()[name]
        assert line.name.startswith(f"{name}: ") and list(line.y) == [ratio(tokens) for tokens in TOKENS]
        assert ("tokens" in line.name) == (least is not None and least > TOKENS[0])
        assert "tokens" not in line.name or f"from {least:,} tokens" in line.name


def test_devices_that_are_not_whole_nodes_have_no_thresholds():
    for devices in (8, 12):
        with pytest.raises(ValueError, match=f"devices must be two or more nodes of 8, got {devices}"):
            thresholds("h100x8", devices)
