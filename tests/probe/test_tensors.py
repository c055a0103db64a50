"""What LABKIT_TENSORS=1 keeps: the pieces of all ranks, put together, are the single model's gradients and
parameters."""

from __future__ import annotations

import json

import numpy
import pytest
from weaving import exchange


def together(folder, what):
    """The whole model's tensors from every rank's pieces; each element must be held by some rank."""
    whole = {}
    for file in sorted(folder.tensors.glob(f"rank*-{what}.npz")):
        with numpy.load(file) as arrays:
            for piece in json.loads(arrays["index"].tobytes()):
                array, shape = arrays[piece["key"]], piece["shape"]
                target = whole.setdefault(piece["name"], numpy.full(shape, numpy.nan, dtype=numpy.float32))
                if piece["kind"] == "flat":
                    target.reshape(-1)[piece["start"] : piece["start"] + array.size] = array
                else:
                    assert piece["kind"] == "block"
                    target[tuple(slice(begin, begin + size) for begin, size in zip(piece["offset"], array.shape))] = (
                        array
                    )
    return whole


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp_orig", "fsdp2", "tp", "pp"])
def test_the_pieces_are_the_single_model(way, shared_run):
    single, split = exchange(shared_run, "single"), exchange(shared_run, way)
    for what in ("gradients", "parameters"):
        expected, found = together(single, what), together(split, what)
        assert set(found) == set(expected) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name, tensor in expected.items():
            numpy.testing.assert_allclose(found[name], tensor, rtol=1e-4, atol=1e-6, err_msg=f"{what} of {name}")


def test_nothing_is_kept_unasked(shared_run):
    assert not exchange(shared_run, "single", tensors=False).tensors.exists()
