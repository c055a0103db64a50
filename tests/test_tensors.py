"""What LABKIT_TENSORS=1 keeps: the pieces of all ranks, put together, are the single model's gradients and parameters."""

from __future__ import annotations

import json

import numpy
import pytest
from test_traffic import exchange


def together(run, what):
    """The whole model's tensors from every rank's pieces; each element must be held by some rank."""
    whole = {}
    for file in sorted((run / "tensors").glob(f"rank*-{what}.npz")):
        with numpy.load(file) as arrays:
            for piece in json.loads(arrays["index"].tobytes()):
                array, shape = arrays[piece["key"]], piece["shape"]
                target = whole.setdefault(piece["name"], numpy.full(shape, numpy.nan, dtype=numpy.float32))
                if piece["kind"] == "flat":
                    target.reshape(-1)[piece["start"] : piece["start"] + array.size] = array
                else:
                    assert piece["kind"] == "block"
                    target[tuple(slice(begin, begin + size) for begin, size in zip(piece["offset"], array.shape))] = array
    return whole


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return exchange("single", tmp_path_factory.mktemp("single"), LABKIT_TENSORS="1")


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp_orig", "fsdp2", "tp", "pp"])
def test_the_pieces_are_the_single_model(way, single, tmp_path):
    run = exchange(way, tmp_path, LABKIT_TENSORS="1")
    for what in ("gradients", "parameters"):
        expected, found = together(single, what), together(run, what)
        assert set(found) == set(expected) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name, tensor in expected.items():
            numpy.testing.assert_allclose(found[name], tensor, rtol=1e-4, atol=1e-6, err_msg=f"{what} of {name}")


def test_nothing_is_kept_unasked(tmp_path):
    assert not (exchange("single", tmp_path) / "tensors").exists()
