"""A byte-level transformer that predicts the next byte. The model is a sequence of blocks: embedding, layers all alike, head."""

import math

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.functional import gelu, scaled_dot_product_attention

LAYERS = 5
WIDTH = 128
HEADS = 4
CONTEXT = 128  # bytes that a prediction looks back on
VOCABULARY = 256  # every byte is a token
LEARNING_RATE = 3e-4
SEQUENCE_PARALLEL = False  # what stands between the split matrices is split by places
LOSS_PARALLEL = False  # the logits stay split by bytes


class Embedding(nn.Module):
    """Bytes of (batch, context) to vectors of (batch, context, width), by value and place."""

    def __init__(self, width: int):
        super().__init__()
        self.values = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(CONTEXT, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.values(tokens) + self.places(places(tokens))


def places(tokens: torch.Tensor) -> torch.Tensor:
    """The place of each byte in its window."""
    return torch.arange(tokens.shape[1], device=tokens.device)


class Attention(nn.Module):
    """Each place looks at itself and what came before, once for each head."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = (self.query(x), self.key(x), self.value(x))
        heads = (each.unflatten(-1, (-1, self.head_width)) for each in vectors)
        seen = attend(*(each.transpose(1, 2) for each in heads))
        return self.merge(seen.transpose(1, 2).flatten(-2))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What each place sees: tensors of (batch, head, place, width of a head)."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


class Layer(nn.Module):
    """Attention, then a perceptron on each vector; both add to what came in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.contract(gelu(self.expand(self.norm2(x))))


def build_model() -> nn.Sequential:
    """The model: bytes of (batch, context) to logits of (batch, context, 256)."""
    layers = [Layer(WIDTH, HEADS) for _ in range(LAYERS)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    model = nn.Sequential(Embedding(WIDTH), *layers, head)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            # What the layers add to one another must not grow with their number.
            adds = name.endswith(("merge.weight", "contract.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS if adds else 1))
    return model


def tensor_plans() -> dict[str, dict[str, ParallelStyle]]:
    """How the ranks split what is in each block: layers by heads and by units."""
    embedding = {}
    layer = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.merge": RowwiseParallel(),
        "expand": ColwiseParallel(),
        "contract": RowwiseParallel(),
    }
    head = {"1": ColwiseParallel(output_layouts=Replicate())}
    if LOSS_PARALLEL:
        head["1"] = ColwiseParallel(use_local_output=False)
    if SEQUENCE_PARALLEL:
        # Between the split matrices each rank has a part of the places, of all vectors.
        cut = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
        embedding[""] = PrepareModuleOutput(**cut)
        layer["norm1"] = layer["norm2"] = head["0"] = SequenceParallel()
        whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        layer["attention"] = PrepareModuleInput(**whole)
        layer["attention.merge"] = RowwiseParallel(output_layouts=Shard(1))
        layer["contract"] = RowwiseParallel(output_layouts=Shard(1))
    plans = {str(number): layer for number in range(1, LAYERS + 1)}
    return {"0": embedding, **plans, str(LAYERS + 1): head}
