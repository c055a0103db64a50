"""Context parallelism: each rank holds a part of every window; keys and values of the other parts are gathered for attention.

The form is that of Llama 3's training: one all-gather of keys and values in a layer, a reduce-scatter of their gradients in backward.
What GPT's module and the text's define as `attend`, `places` and `windows` for whole windows is here defined for a part of them.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import TensorDataset

from labkit.training.strategies.ddp import cleanup, evaluate, exchange, parallelize, setup
from labkit.training.workloads.gpt import CONTEXT

__all__ = ["attend", "cleanup", "evaluate", "exchange", "parallelize", "places", "setup", "windows"]


def windows(data: torch.Tensor, count: int) -> TensorDataset:
    """This rank's part of windows of CONTEXT bytes; the targets are the same, one on."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count).long()
    length = CONTEXT // dist.get_world_size()
    first = dist.get_rank() * length
    window = data[starts[:, None] + torch.arange(first, first + length + 1)]
    return TensorDataset(window[:, :-1], window[:, 1:])


def places(tokens: torch.Tensor) -> torch.Tensor:
    """The place of each byte in the whole window."""
    length = tokens.shape[1]
    return torch.arange(length, device=tokens.device) + dist.get_rank() * length


class Gathered(torch.autograd.Function):
    """The parts of all ranks, in the order of places; backward adds up their gradients."""

    @staticmethod
    def forward(ctx, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        parts = gradient.chunk(dist.get_world_size(), dim=2)
        mine = torch.empty_like(parts[0]).contiguous()
        dist.reduce_scatter(mine, [part.contiguous() for part in parts])
        return mine


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What this rank's places see of the whole window: (batch, head, place, width)."""
    keys, values = (Gathered.apply(part.contiguous()) for part in (key, value))
    mine, length = query.shape[2], keys.shape[2]
    seen = torch.ones(mine, length, dtype=torch.bool, device=query.device)
    seen = seen.tril(dist.get_rank() * mine)  # itself and what came before
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen)
