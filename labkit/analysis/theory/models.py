"""The models as parameter shapes, for the formulas; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from labkit.training.request import Request
from labkit.training.workloads import GPT_SIZES, GPT_VOCABULARY


@dataclass(frozen=True)
class Module:
    """The shapes of a module's own parameters, and its submodules. `cut` is the dimension that tensor parallelism
    splits.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    inside: tuple[Module, ...] = ()
    cut: int | None = None

    @property
    def parameters(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all parameters, in the order of the model."""
        return self.shapes + tuple(shape for module in self.inside for shape in module.parameters)

    @property
    def size(self) -> int:
        """The number of elements of all parameters."""
        return sum(map(math.prod, self.parameters))

    @property
    def multiplied(self) -> int:
        """Elements of linear layers and convolutions; an embedding is the only matrix without bias that is never
        split."""
        most = max(map(len, self.shapes), default=0)
        looked_up = most == 2 and len(self.shapes) == 1 and self.cut is None
        own = sum(map(math.prod, self.shapes)) if most > 1 and not looked_up else 0
        return own + sum(module.multiplied for module in self.inside)

    @property
    def leaves(self) -> tuple[Module, ...]:
        """The module itself and all submodules."""
        return self, *(leaf for module in self.inside for leaf in module.leaves)

    def part(self, ranks: int) -> Module:
        """The part of one of `ranks` tensor-parallel ranks: a bias is split if its matrix is split by rows, and whole
        otherwise.
        """
        shapes = self.shapes
        if self.cut == 0:
            shapes = tuple((shape[0] // ranks, *shape[1:]) for shape in shapes)
        elif self.cut == 1:
            shapes = tuple((shape[0], shape[1] // ranks) if len(shape) == 2 else shape for shape in shapes)
        return replace(self, shapes=shapes, inside=tuple(module.part(ranks) for module in self.inside))


def _linear(come: int, go: int, cut: int | None = None) -> Module:
    return Module(((go, come), (go,)), cut=cut)


def _norm(width: int) -> Module:
    return Module(((width,), (width,)))


def _convolution(come: int, go: int, side: int, bias: bool = False) -> Module:
    return Module(((go, come, side, side), *[(go,)] * bias))


def _cnn(options: Mapping[str, Any]) -> tuple[Module, ...]:
    convolutions = (
        Module(inside=(_convolution(come, go, 5, bias=True),)) for come, go in ((1, 32), (32, 64), (64, 128))
    )
    return (*convolutions, Module(inside=(_linear(1152, 128, cut=0),)), _linear(128, 10, cut=1))


def _mlp(options: Mapping[str, Any]) -> tuple[Module, ...]:
    return Module(inside=(_linear(784, 512, cut=0),)), Module(inside=(_linear(512, 512, cut=1),)), _linear(512, 10)


def _gpt(options: Mapping[str, Any]) -> tuple[Module, ...]:
    layers, width, _ = GPT_SIZES[options["size"]]
    norm = _norm(width)
    attention = Module(inside=(*[_linear(width, width, cut=0)] * 3, _linear(width, width, cut=1)))
    layer = Module(inside=(norm, attention, norm, _linear(width, 4 * width, cut=0), _linear(4 * width, width, cut=1)))
    embedding = Module(inside=(Module(((GPT_VOCABULARY, width),)), Module(((options["context"], width),))))
    head = Module(inside=(norm, Module(((GPT_VOCABULARY, width),), cut=0)))
    return embedding, *[layer] * layers, head


_RESNET18 = (64, 64, 64, 128, 128, 256, 256, 512, 512)  # channels after the stem and after each residual block


def _resnet18(options: Mapping[str, Any]) -> tuple[Module, ...]:
    blocks = []
    for come, go in pairwise(_RESNET18):
        shortcut = [Module(inside=(_convolution(come, go, 1), _norm(go)))] * (come != go)
        blocks.append(
            Module(inside=(_convolution(come, go, 3), _norm(go), _convolution(go, go, 3), _norm(go), *shortcut))
        )
    return Module(inside=(_convolution(3, 64, 3), _norm(64))), *blocks, Module(inside=(_linear(512, 10),))


MODELS: dict[str, Callable[[Mapping[str, Any]], tuple[Module, ...]]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "gpt": _gpt,
    "resnet18": _resnet18,
}


def borders(spec: Request) -> tuple[tuple[int, bool], ...]:
    """Elements per sample in the output of each block, and whether tensor-parallel ranks hold only a part of them."""
    options = spec.options
    if spec.workload == "cnn":
        return (32 * 14 * 14, False), (64 * 7 * 7, False), (128 * 3 * 3, False), (128, True), (10, False)
    if spec.workload == "mlp":
        return (512, True), (512, False), (10, False)
    if spec.workload == "resnet18":
        return *((channels * (2048 // channels) ** 2, False) for channels in _RESNET18), (10, False)
    layers, width, _ = GPT_SIZES[options["size"]]
    vectors = options["context"] * width, options.get("sequence_parallel", False)
    return *[vectors] * (layers + 1), (options["context"] * GPT_VOCABULARY, False)
