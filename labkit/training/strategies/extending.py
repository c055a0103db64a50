"""What a fault or a workload may add to a program: each function is called only if a module of the Spec replaces it."""

from collections.abc import Iterable

from torch import nn
from torch.utils.data import TensorDataset


def fault_data(dataset: TensorDataset) -> TensorDataset:
    """Inject a fault into the training set: none by default."""
    return dataset


def fault_model(blocks: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Inject a fault into the model: none by default."""
    return blocks


def fault_step(model: nn.Module, step: int) -> None:
    """Inject a fault before a step: none by default."""


def report(model: nn.Module) -> None:
    """Log more about a step whose loss is printed: nothing by default."""
