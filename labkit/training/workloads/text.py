"""The Python language reference as bytes; it is part of Python."""

from pydoc_data.topics import topics

import torch
from torch.utils.data import TensorDataset

CONTEXT = 128  # length of a sequence in bytes
SAMPLES = 20_000  # training sequences


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Train on sequences of the first 90% of the text, test on up to 256 of the rest."""
    text = "\n".join(topics[name] for name in sorted(topics))
    data = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    tests = min(1 + SAMPLES // 8, 256)
    return sequences(data[:cut], SAMPLES), sequences(data[cut:], tests)


def sequences(data: torch.Tensor, count: int) -> TensorDataset:
    """Evenly spaced sequences of CONTEXT bytes; the targets are shifted by one byte."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count).long()
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return TensorDataset(rows[:, :-1], rows[:, 1:])
