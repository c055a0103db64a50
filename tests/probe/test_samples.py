"""The samples of a step, from the tensors of a model's call."""

from __future__ import annotations

import pytest
import torch

from labkit.probe.samples import ByIdentity, SampleCount, packed, shapes_in

ROWS, SAMPLES = 160, 16
NODES, GRAPH = torch.zeros(ROWS, 8), torch.zeros(ROWS, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "output", "samples"),
    [
        ((NODES, {0: (GRAPH[:30], GRAPH[:30])}, GRAPH, SAMPLES), torch.zeros(SAMPLES), SAMPLES),
        ((GRAPH, torch.arange(SAMPLES)), torch.zeros(SAMPLES, 4), SAMPLES),  # as for EmbeddingBag
        ((NODES, torch.arange(SAMPLES + 1, dtype=torch.int32)), {"logits": torch.zeros(SAMPLES, 2)}, SAMPLES),
        ((NODES, GRAPH), torch.zeros(ROWS, 4), 0),  # labels of nodes, or of samples
        ((NODES, GRAPH), (torch.zeros(()), torch.zeros(ROWS, 4)), 0),
        ((NODES, NODES[:, 0]), torch.zeros(SAMPLES, 4), 0),
        ((NODES,), torch.zeros(SAMPLES, 4), 0),
        ((torch.zeros(64, 32), torch.zeros(64, dtype=torch.int64)), torch.zeros(32, 64, 5), 0),  # sequences first
        ((3,), torch.zeros(4), 0),
        ((NODES, GRAPH), None, 0),
    ],
)
def test_packed_samples_are_told_from_rows(inputs, output, samples):
    assert packed(inputs, output) == samples


def test_a_batch_of_graphs_counts_graphs_also_from_a_loader():
    inputs = NODES, GRAPH
    count = SampleCount()
    count.called(1, shapes_in(inputs), SAMPLES)
    assert count.take() == SAMPLES
    count.restart()
    count.fetched(inputs)
    count.called(1, shapes_in(inputs), SAMPLES)
    assert count.take() == SAMPLES
    count.restart()
    count.fetched(inputs)
    count.called(1, shapes_in(inputs))
    assert count.take() == ROWS


def test_an_object_has_no_value_of_an_earlier_one_at_its_address():
    class Sampler:
        """Like torch's samplers, it is made anew for every evaluation."""

    values, addresses = ByIdentity(), set()
    for _ in range(100):
        sampler = Sampler()
        assert values.get(sampler) is None
        values.put(sampler, 1)
        assert values.get(sampler) == 1
        addresses.add(id(sampler))
        del sampler
    assert len(addresses) < 100, "no address was used twice"


def test_a_list_has_a_value_too():
    values, data = ByIdentity(), [1, 2]
    values.put(data, "seen")
    assert values.get(data) == "seen"
