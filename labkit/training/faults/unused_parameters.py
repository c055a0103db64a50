"""The model has a parameter that its forward pass does not use."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn


class UnusedParameter(nn.Identity):
    """A block that passes on its inputs, and does not use its parameter."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(8, 8))


def fault_model(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Injected fault: a parameter that gets no gradient."""
    yield from blocks
    yield UnusedParameter()
