"""Context parallelism: each rank holds two chunks of every window, and attends to the keys and values of all.

The chunks of a rank are as far from the beginning of the window as from its end, so that every rank has as many earlier
positions to attend to. METHOD says how ranks get what they lack: `all_gather` is that of Llama 3, `ring` passes keys
and values from rank to rank (Liu et al. 2023), `ulysses` exchanges positions for heads (Jacobs et al. 2023). `attend`,
`positions` and `windows`, which the modules of GPT and of the text define for whole windows, are defined for the chunks
here.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.data import TensorDataset

from labkit.training.strategies.ddp import gradient_sync, parallelize
from labkit.training.strategies.ep import AllToAll
from labkit.training.strategies.fsdp2_tp import evaluate
from labkit.training.workloads.gpt import CONTEXT

__all__ = ["attend", "evaluate", "gradient_sync", "parallelize", "positions", "windows"]

METHOD = "all_gather"  # of keys and values; or a "ring" of ranks, or "ulysses": by heads


def positions_of(rank: int) -> torch.Tensor:
    """The positions of a rank's two chunks in the window."""
    chunks = torch.arange(CONTEXT).chunk(2 * dist.get_world_size())
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def windows(data: torch.Tensor, count: int) -> TensorDataset:
    """This rank's chunks of windows of CONTEXT bytes; targets are the next bytes."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count).long()
    places = starts[:, None] + positions_of(dist.get_rank())
    return TensorDataset(data[places], data[places + 1])


def positions(tokens: torch.Tensor) -> torch.Tensor:
    """The position of each byte in the whole window."""
    return positions_of(dist.get_rank()).to(tokens.device)


def whole_window(device: torch.device) -> torch.Tensor:
    """The positions of all ranks, in the order of the ranks."""
    ranks = range(dist.get_world_size())
    return torch.cat([positions_of(rank) for rank in ranks]).to(device)


class AllGather(torch.autograd.Function):
    """All-gather along the sequence dimension; backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx, chunk: torch.Tensor) -> torch.Tensor:
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(chunks, chunk)
        return torch.cat(chunks, dim=2)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        chunks = gradient.chunk(dist.get_world_size(), dim=2)
        own = torch.empty_like(chunks[0]).contiguous()
        dist.reduce_scatter(own, [chunk.contiguous() for chunk in chunks])
        return own


class Shift(torch.autograd.Function):
    """Sends a tensor to the next rank of the ring; backward sends the gradient back."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
        ctx.by, received = by, torch.empty_like(tensor)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        send = dist.P2POp(dist.isend, tensor, (rank + by) % ranks)
        receive = dist.P2POp(dist.irecv, received, (rank - by) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Shift.apply(gradient.contiguous(), -ctx.by), None


def part_of_softmax(query, key, value, mask=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the positions, and the logarithm of their weight."""
    scores = (query @ key.mT).float() / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weight = scores.logsumexp(-1, keepdim=True)
    return ((scores - weight).exp() @ value.float()), weight


def through_ring(query, key, value) -> torch.Tensor:
    """Attend to the chunks of one rank after the other, as they arrive."""
    rank, ranks, length = dist.get_rank(), dist.get_world_size(), query.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    half, parts = length // 2, [part_of_softmax(query, key, value, causal)]
    passed = torch.stack([key, value])
    for step in range(1, ranks):
        passed = Shift.apply(passed)
        key, value = passed
        if step <= rank:  # of a lower rank: its first chunk is before both of ours
            part = part_of_softmax(query, key[:, :, :half], value[:, :, :half])
        else:  # of a higher rank: both of its chunks are before our second one
            part, weight = part_of_softmax(query[:, :, half:], key, value)
            part = (pad(part, (0, 0, half, 0)), pad(weight, (0, 0, half, 0), value=-1e9))
        parts.append(part)
    results, weights = (torch.stack(each) for each in zip(*parts))
    return (results * weights.softmax(0)).sum(0).to(query.dtype)


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """Exchange all heads at this rank's positions for some heads at all positions."""
    parts = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1)
    return AllToAll.apply(parts.contiguous()).movedim(0, 2).flatten(2, 3)


def by_positions(x: torch.Tensor) -> torch.Tensor:
    """The reverse of `by_heads`."""
    parts = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)
    return AllToAll.apply(parts.contiguous()).transpose(0, 1).flatten(1, 2)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention to the whole window: (batch, head, position, head width)."""
    if METHOD == "ring":
        return through_ring(query, key, value)
    elif METHOD == "ulysses":
        query, key, value = by_heads(query), by_heads(key), by_heads(value)
        places = whole_window(query.device)
        mask = places <= places[:, None]  # this position and earlier ones
        return by_positions(scaled_dot_product_attention(query, key, value, mask))
    else:
        keys, values = (AllGather.apply(each.contiguous()) for each in (key, value))
        own = positions_of(dist.get_rank()).to(query.device)
        mask = whole_window(query.device) <= own[:, None]  # this position and earlier ones
        return scaled_dot_product_attention(query, keys, values, mask)
