"""The tape of a trace: which storages count."""

from __future__ import annotations

import torch

from labkit.prediction.tracing.tape import Tape
from labkit.prediction.tracing.torch_private import FAKE_MODE


def test_a_storage_counts_until_it_is_released_and_none_on_the_meta_device():
    with FAKE_MODE.get()(), Tape() as tape:
        tensor = torch.zeros(8)
        shape = torch.zeros_like(tensor, device="meta")  # DeepSpeed stores such tensors for all parameters
        assert [*tape.allocated.values()] == [32]
        view = tensor[2:]
        del tensor
        assert [*tape.allocated.values()] == [32]
        del view
        assert not tape.allocated and shape.numel() == 8
