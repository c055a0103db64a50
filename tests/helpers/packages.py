"""Packages that the tests of workloads use."""

from __future__ import annotations

import importlib

import pytest

from labkit.setup import preflight


def import_torchvision():
    """torchvision; a build for a different torch loads if its operators are registered first."""
    version, error = preflight.torchvision()
    if not version:
        pytest.skip(f"there is no torchvision here: {error}")
    if "torchvision::nms" in error:
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor d, Tensor s, float t) -> Tensor")
    return importlib.import_module("torchvision")


@pytest.fixture(scope="module")
def torchvision():
    return import_torchvision()
