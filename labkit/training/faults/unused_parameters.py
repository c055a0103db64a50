"""The model has parameters that its forward does not use."""

import torch
from torch import nn


class WithSpare(nn.Sequential):
    """The blocks, and a parameter that none of them uses."""

    def __init__(self, model: nn.Sequential):
        super().__init__(*model)
        self.register_parameter("spare", nn.Parameter(torch.zeros(8, 8)))


def extend(model: nn.Sequential) -> nn.Sequential:
    """The fault: parameters that get no gradient."""
    return WithSpare(model)
