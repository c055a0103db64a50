"""The model has a parameter that its forward pass does not use."""

import torch
from torch import nn


class WithUnusedParameter(nn.Sequential):
    """The blocks, and a parameter that no block uses."""

    def __init__(self, model: nn.Sequential):
        super().__init__(*model)
        self.register_parameter("unused", nn.Parameter(torch.zeros(8, 8)))


def fault_model(model: nn.Sequential) -> nn.Sequential:
    """Injected fault: a parameter that gets no gradient."""
    return WithUnusedParameter(model)
