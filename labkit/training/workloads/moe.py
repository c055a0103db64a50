"""A byte-level transformer whose MLPs are mixtures of experts: a router sends each token to TOP_K of EXPERTS MLPs.

Capacity and balance loss are those of one sequence (a group, in GShard's terms), so neither depends on how a batch is
split over ranks or micro-batches.
"""

import math
from datetime import datetime

import torch
from torch import nn
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy, gelu, pad

from labkit.training.strategies.base import forward
from labkit.training.workloads.gpt import (
    CONTEXT,
    HEADS,
    LAYERS,
    LEARNING_RATE,
    VOCABULARY,
    WIDTH,
    Attention,
    Embedding,
    attend,
    initialized,
    positions,
)

__all__ = ["CONTEXT", "LEARNING_RATE", "attend", "build_blocks", "loss_of", "positions", "report"]

EXPERTS = 8  # MLPs in each layer
TOP_K = 2  # experts per token
CAPACITY_FACTOR = 1.25  # slots of each expert, relative to an even load
BALANCE = 0.01  # weight of the loss that balances the load of the experts


class Expert(nn.Module):
    """An MLP."""

    def __init__(self, width: int):
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(gelu(self.expand(x)))


def apply_experts(experts: nn.ModuleDict, slots: torch.Tensor) -> torch.Tensor:
    """The output of each expert for its slots: (sequence, expert, slot, width)."""
    outputs = [expert(slots[:, n]) for n, expert in enumerate(experts.values())]
    return torch.stack(outputs, dim=1)


class Mixture(nn.Module):
    """A router and its experts. Each expert has equally many slots per sequence; a token
    that finds no free slot is dropped: it keeps only the residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleDict({str(n): Expert(width) for n in range(EXPERTS)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        capacity = math.ceil(CAPACITY_FACTOR * TOP_K * x.shape[1] / EXPERTS)
        probabilities = self.router(x).float().softmax(-1)
        weights, chosen = (part.flatten(1) for part in probabilities.topk(TOP_K))
        sent = chosen.unsqueeze(-1) == torch.arange(EXPERTS, device=x.device)
        numbers = sent.cumsum(1)  # of each choice among those of the same expert
        number = numbers.gather(2, chosen.unsqueeze(-1)).squeeze(-1) - 1
        slot = (chosen * capacity + number).where(number < capacity, EXPERTS * capacity)
        index = slot.unsqueeze(-1).expand(-1, -1, width)
        slots = x.new_zeros(len(x), EXPERTS * capacity + 1, width)  # the last: dropped
        slots = slots.scatter(1, index, x.repeat_interleave(TOP_K, 1))[:, :-1]
        outputs = apply_experts(self.experts, slots.unflatten(1, (EXPERTS, capacity)))
        results = pad(outputs.flatten(1, 2), (0, 0, 0, 1)).gather(1, index)
        # Switch Transformer (Fedus et al. 2021), section 2.2: 1 if the load is even.
        share = sent.float().mean(1) * probabilities.mean(1)
        self.balance = EXPERTS * share.sum(-1).mean()
        self.load = numbers[:, -1].sum(0)  # choices per expert
        return (results * weights.unsqueeze(-1)).unflatten(1, (-1, TOP_K)).sum(2)


class Layer(nn.Module):
    """Attention and a mixture of experts, each with a norm and a residual connection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mixture = Mixture(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


def build_blocks():
    """Blocks that map bytes of (batch, context) to logits of (batch, context, 256)."""
    yield initialized(Embedding(WIDTH))
    for _ in range(LAYERS):
        yield initialized(Layer(WIDTH, HEADS))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    yield initialized(nn.Sequential(nn.LayerNorm(WIDTH), head))


def mixtures(model: nn.Module) -> list[Mixture]:
    """The mixtures of experts of all layers."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch, and the balance losses of all layers."""
    loss = cross_entropy(forward(model, inputs).flatten(0, -2), targets.flatten())
    return loss + BALANCE * sum(mixture.balance for mixture in mixtures(model))


def report(model: nn.Module) -> None:
    """Log how often this rank's routers chose each expert, in all layers."""
    load = sum(mixture.load for mixture in mixtures(model)).tolist()
    tokens = {f"expert {number}": count for number, count in enumerate(load)}
    log_event(Event("experts", datetime.now(), tokens))
