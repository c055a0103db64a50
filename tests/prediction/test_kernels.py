"""Temporary memory of kernels: which of them are executed to measure it."""

from __future__ import annotations

import torch

from labkit.prediction.tracing import kernels
from labkit.prediction.tracing.kernels import Kernel, temporaries

aten = torch.ops.aten


def of(function, *args) -> Kernel:
    return Kernel.of(function, args, None, function(*args))


def test_large_results_of_small_arguments_are_not_computed(monkeypatch):
    monkeypatch.setattr(kernels, "MOST", 1 << 20)
    small, gradient = (of(aten.mm.default, torch.ones(size, 2), torch.ones(2, size)) for size in (8, 512))
    assert (small.bytes, gradient.bytes) == (4 * 8 * (2 + 2 + 8), 4 * 512 * (2 + 2 + 512))
    assert temporaries([small, gradient]) == {small.key: 0}
