"""A byte-level transformer that predicts the next byte. The model is a sequence of blocks: embedding, layers all alike, head."""

import math

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

LAYERS = 5
WIDTH = 128
HEADS = 4
CONTEXT = 128  # bytes that a prediction looks back on
VOCABULARY = 256  # every byte is a token
LEARNING_RATE = 3e-4


class Embedding(nn.Module):
    """Bytes of (batch, context) to vectors of (batch, context, width), by value and place."""

    def __init__(self, width: int):
        super().__init__()
        self.values = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(CONTEXT, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.values(tokens) + self.places(places)


class Layer(nn.Module):
    """Attention, then a perceptron on each vector; both add to what came in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.merge(self.attention(self.norm1(x)))
        return x + self.contract(gelu(self.expand(self.norm2(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Each place looks at itself and what came before, once for each head."""
        vectors = (self.query(x), self.key(x), self.value(x))
        heads = (each.unflatten(-1, (-1, self.head_width)) for each in vectors)
        by_head = (each.transpose(1, 2) for each in heads)
        seen = scaled_dot_product_attention(*by_head, is_causal=True)
        return seen.transpose(1, 2).flatten(-2)


class GPT(nn.Sequential):
    """The model: bytes of (batch, context) to logits of (batch, context, 256)."""

    def __init__(self, layers: int, width: int, heads: int):
        logits = nn.Linear(width, VOCABULARY, bias=False)
        head = nn.Sequential(nn.LayerNorm(width), logits)
        blocks = [Layer(width, heads) for _ in range(layers)]
        super().__init__(Embedding(width), *blocks, head)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What the layers add to one another must not grow with their number.
                adds = name.endswith(("merge.weight", "contract.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers if adds else 1))


def build_model() -> nn.Sequential:
    """A transformer of the size that the settings name."""
    return GPT(LAYERS, WIDTH, HEADS)
