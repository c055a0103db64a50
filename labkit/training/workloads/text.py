"""The Python language reference, as bytes: it comes with Python itself."""

from pydoc_data.topics import topics

import torch
from torch.utils.data import TensorDataset

from labkit.training.workloads.cache import cached

CONTEXT = 128  # bytes that a prediction looks back on
SAMPLES = 20_000  # training windows


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Windows of the first nine tenths to train on, and up to 1,000 of the last tenth to test on."""
    (data,) = cached(read_text)
    cut = len(data) * 9 // 10
    return windows(data[:cut], SAMPLES), windows(data[cut:], min(SAMPLES, 1000))


def read_text() -> tuple[torch.Tensor]:
    """The text as numbers, one for each byte."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return (torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long(),)


def windows(data: torch.Tensor, count: int) -> TensorDataset:
    """Windows of CONTEXT bytes, evenly spread; the targets are the same, one byte on."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count).long()
    window = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return TensorDataset(window[:, :-1], window[:, 1:])
