"""A byte-level transformer that predicts the next byte. The model is a sequence of blocks: embedding, equal layers,
head."""

import math

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn.functional import gelu, scaled_dot_product_attention

LAYERS = 5
WIDTH = 128
HEADS = 4
CONTEXT = 128  # context length in bytes
VOCABULARY = 256  # every byte is a token
LEARNING_RATE = 3e-4
SEQUENCE_PARALLEL = False  # split activations between the matrices by position
LOSS_PARALLEL = False  # keep the logits split over the vocabulary


class Embedding(nn.Module):
    """Maps bytes of (batch, context) to vectors of (batch, context, width)."""

    def __init__(self, width: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(positions(tokens))


def positions(tokens: torch.Tensor) -> torch.Tensor:
    """The position of each byte in its sequence."""
    return torch.arange(tokens.shape[1], device=tokens.device)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = (self.query(x), self.key(x), self.value(x))
        heads = (vector.unflatten(-1, (-1, self.head_width)) for vector in vectors)
        attended = attend(*(head.transpose(1, 2) for head in heads))
        return self.merge(attended.transpose(1, 2).flatten(-2))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention for tensors of (batch, head, position, head width)."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


class Layer(nn.Module):
    """Attention and MLP, each with a layer norm and a residual connection."""

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


def build_blocks():
    """Blocks that map bytes of (batch, context) to logits of (batch, context, 256)."""
    yield initialized(Embedding(WIDTH))
    for _ in range(LAYERS):
        yield initialized(Layer(WIDTH, HEADS))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    yield initialized(nn.Sequential(nn.LayerNorm(WIDTH), head))


def initialized(block: nn.Module) -> nn.Module:
    """As in GPT-2: scale down residual projections with the number of layers."""
    for name, weight in block.named_parameters():
        if weight.dim() == 2:
            residual = name.endswith(("merge.weight", "contract.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS if residual else 1))
    return block


def tensor_plans() -> dict[int, dict]:
    """Split attention by heads, and MLPs by hidden units."""
    layer = {
        "attention.query": parallel.ColwiseParallel(),
        "attention.key": parallel.ColwiseParallel(),
        "attention.value": parallel.ColwiseParallel(),
        "attention.merge": parallel.RowwiseParallel(),
        "expand": parallel.ColwiseParallel(),
        "contract": parallel.RowwiseParallel(),
    }
    head = {"1": parallel.ColwiseParallel(output_layouts=Replicate())}
    plans = {**dict.fromkeys(range(1, LAYERS + 1), layer), LAYERS + 1: head}
    if LOSS_PARALLEL:
        head["1"] = parallel.ColwiseParallel(use_local_output=False)
    if SEQUENCE_PARALLEL:
        # Between the split matrices, each rank holds the vectors of some positions.
        scatter = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
        plans[0] = {"": parallel.PrepareModuleOutput(**scatter)}
        layer["norm1"] = layer["norm2"] = head["0"] = parallel.SequenceParallel()
        gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        layer["attention"] = parallel.PrepareModuleInput(**gather)
        layer["attention.merge"] = parallel.RowwiseParallel(output_layouts=Shard(1))
        layer["contract"] = parallel.RowwiseParallel(output_layouts=Shard(1))
    return plans
