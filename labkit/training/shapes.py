"""Layers as parameter shapes, for formulas without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Module:
    """The shapes of a module's own parameters, and its submodules. `cut` is the dimension that tensor parallelism
    splits. `experts`: whether the submodules are experts, of which expert parallelism gives each rank some.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    inside: tuple[Module, ...] = ()
    cut: int | None = None
    experts: bool = False

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

    @property
    def dense(self) -> Module:
        """The module without experts."""
        return replace(self, inside=tuple(module.dense for module in self.inside if not module.experts))

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


def linear(come: int, go: int, cut: int | None = None) -> Module:
    """A linear layer with a bias."""
    return Module(((go, come), (go,)), cut=cut)


def norm(width: int) -> Module:
    """A norm with a weight and a bias per channel."""
    return Module(((width,), (width,)))


def convolution(come: int, go: int, side: int, bias: bool = False) -> Module:
    """A two-dimensional convolution with square kernels."""
    return Module(((go, come, side, side), *[(go,)] * bias))
