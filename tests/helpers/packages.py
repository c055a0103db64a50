"""Packages that the tests of workloads use."""

from __future__ import annotations

import importlib
from functools import cache

import pytest

from labkit.setup import preflight


@cache
def operators():
    """The operators of torchvision that a build for a different torch misses; they exist as long as this library."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor d, Tensor s, float t) -> Tensor")
    return library


def import_torchvision():
    """torchvision; a build for a different torch loads if its operators are registered first."""
    version, error = preflight.torchvision()
    if not version:
        pytest.skip(f"there is no torchvision here: {error}")
    if "torchvision::nms" in error:
        operators()
    return importlib.import_module("torchvision")


@pytest.fixture(scope="module")
def torchvision():
    return import_torchvision()
