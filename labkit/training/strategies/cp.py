"""Context parallelism: each rank holds two chunks of every sequence, and attends to the keys and values of all.

The chunks of a rank are as far from the beginning of the sequence as from its end, so that every rank has as many
earlier positions to attend to. METHOD says how ranks get what they lack: `all_gather` is that of Llama 3, `ring` passes
keys and values from rank to rank (Ring Attention, Liu et al. 2023, with the two chunks of Llama 3), `ulysses` exchanges
positions for heads (Jacobs et al. 2023). `attend`, `positions` and `sequences`, which the modules of GPT and of the
text define for whole sequences, are defined for the chunks here.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import TensorDataset

from labkit.training.strategies.base import RANKS
from labkit.training.strategies.ddp import gradient_sync, parallelize
from labkit.training.strategies.ep import AllToAll
from labkit.training.strategies.fsdp2_tp import evaluate
from labkit.training.workloads.gpt import CONTEXT

__all__ = ["attend", "evaluate", "gradient_sync", "parallelize", "positions", "sequences"]

METHOD = "all_gather"  # of keys and values; or a "ring" of ranks, or "ulysses": by heads


def positions_of(rank: int) -> torch.Tensor:
    """The positions of a rank's two chunks in the sequence."""
    chunks = torch.arange(CONTEXT).chunk(2 * dist.get_world_size())
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def sequences(data: torch.Tensor, count: int) -> TensorDataset:
    """This rank's chunks of sequences of CONTEXT bytes; targets are the next bytes."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count).long()
    places = starts[:, None] + positions_of(dist.get_rank())
    return TensorDataset(data[places], data[places + 1])


def positions(tokens: torch.Tensor) -> torch.Tensor:
    """The position of each byte in the whole sequence."""
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


def send_on(tensor: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
    """Starts to send a tensor to the next rank of the ring and to receive that of the rank before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    return received, dist.batch_isend_irecv([send, receive])


def visitors(tensor: torch.Tensor):
    """The tensors of all ranks as they come around the ring, this rank's first: the next one travels while one is
    used, and none is kept."""
    for _ in range(dist.get_world_size() - 1):
        received, transfers = send_on(tensor)
        yield tensor
        for transfer in transfers:
            transfer.wait()
        tensor = received
    yield tensor


def seen(step: int, length: int) -> tuple[slice, slice]:
    """The queries that see keys of the rank `step` places before this one in the ring, and the keys that they see."""
    whole, first, second = slice(length), slice(length // 2), slice(length // 2, length)
    if step == 0:  # this rank's own, causally
        return whole, whole
    if step <= dist.get_rank():  # the first chunk of a lower rank is before both of ours
        return whole, first
    return second, whole  # both chunks of a higher rank are before our second one


def scores_of(query: torch.Tensor, key: torch.Tensor, step: int) -> torch.Tensor:
    """The scaled products of queries and keys; -inf for the later positions of this rank's own chunks."""
    scores = (query @ key.mT).float() / query.shape[-1] ** 0.5
    if step == 0:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


class RingAttention(torch.autograd.Function):
    """Causal attention to the chunks of one rank after the other, while those of the next one travel.

    Only what belongs to this rank is kept for backward: keys and values come around the ring again there, and the sums
    of their gradients travel behind them until they are home.
    """

    @staticmethod
    def forward(ctx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        own, output = torch.stack([key, value]), torch.zeros_like(query, dtype=torch.float32)
        # the logarithm of the sum of the exponentials so far
        total = output.new_full((*query.shape[:-1], 1), -torch.inf)
        for step, (its_key, its_value) in enumerate(visitors(own)):
            rows, columns = seen(step, query.shape[2])
            scores = scores_of(query[:, :, rows], its_key[:, :, columns], step)
            before = total[:, :, rows]
            now = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
            part = (scores - now).exp().to(value.dtype) @ its_value[:, :, columns]
            output[:, :, rows] = (before - now).exp() * output[:, :, rows] + part
            total[:, :, rows] = now
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        return output

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, output, total = ctx.saved_tensors
        own, of_query = torch.stack([key, value]), torch.zeros_like(query)
        sums, transfers = torch.zeros_like(own), []
        # what softmax takes from the gradients of all scores of a query
        shared = (gradient * output).sum(-1, keepdim=True)
        for step, (its_key, its_value) in enumerate(visitors(own)):
            rows, columns = seen(step, query.shape[2])
            its_key, its_value = its_key[:, :, columns], its_value[:, :, columns]
            scores = scores_of(query[:, :, rows], its_key, step)
            weights = (scores - total[:, :, rows]).exp().to(value.dtype)
            of_weights = gradient[:, :, rows] @ its_value.mT - shared[:, :, rows]
            of_scores = weights * of_weights / query.shape[-1] ** 0.5
            of_query[:, :, rows] += of_scores @ its_key
            for transfer in transfers:
                transfer.wait()
            sums[0, :, :, columns] += of_scores.mT @ query[:, :, rows]
            sums[1, :, :, columns] += weights.mT @ gradient[:, :, rows]
            sums, transfers = send_on(sums)
        for transfer in transfers:
            transfer.wait()
        return of_query, *sums


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """Exchange all heads at this rank's positions for some heads at all positions."""
    parts = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1)
    return AllToAll.apply(parts.contiguous()).movedim(0, 2).flatten(2, 3)


def by_positions(x: torch.Tensor) -> torch.Tensor:
    """The reverse of `by_heads`."""
    parts = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)
    return AllToAll.apply(parts.contiguous()).transpose(0, 1).flatten(1, 2)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention to the whole sequence: (batch, head, position, head width)."""
    if METHOD == "ring" and RANKS > 1:
        return RingAttention.apply(query, key, value)
    if METHOD == "ulysses":
        query, key, value = by_heads(query), by_heads(key), by_heads(value)
        places = whole_window(query.device)
        mask = places <= places[:, None]  # this position and earlier ones
        return by_positions(scaled_dot_product_attention(query, key, value, mask))
    keys, values = (AllGather.apply(part.contiguous()) for part in (key, value))
    own = positions_of(dist.get_rank()).to(query.device)
    mask = whole_window(query.device) <= own[:, None]  # this position and earlier ones
    return scaled_dot_product_attention(query, keys, values, mask)
