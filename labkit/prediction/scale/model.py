"""A transformer in numbers: its parameters, floating-point operations, and the activations that it stores.

Symbols as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022: s positions, b
samples, h width, a heads, L layers, t ranks of tensor parallelism, v entries of the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from labkit.common.arguments import Number, check_choice, check_path, shown
from labkit.common.files import read_json_object
from labkit.common.text import visible_line
from labkit.common.units import size
from labkit.plan.spec import Spec
from labkit.training.workloads import WORKLOADS


@dataclass(frozen=True)
class Model:
    """A decoder of `layers` equal layers with attention and an MLP, an embedding before them and a head after them.

    - `heads` of `head_width` numbers; `kv_heads` of them for keys and values (grouped-query attention).
    - `hidden`: the width of the MLP; `gated`: it has three matrices instead of two (SwiGLU, Shazeer 2020).
    - `positions`: the maximum sequence; `learned`: they have an embedding.
    - `biases`: linear layers and norms have biases; otherwise norms have a scale only (RMSNorm).
    - `tied`: the head uses the matrix of the embedding.
    - `dropout`: each layer stores the masks of its dropouts.
    """

    title: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    positions: int
    gated: bool
    learned: bool
    biases: bool
    tied: bool
    dropout: bool = False

    # ---- parameters

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied matrix counts once."""
        return self.layers * self.of_layer() + self.before() + self.after() - self.tied * self.table

    def of_layer(self, tensor: int = 1) -> int:
        """Parameters of a layer on one of `tensor` ranks that split its matrices; norms and the biases of outputs are
        on all ranks."""
        whole = 2 * (1 + self.biases) * self.width + self.biases * 2 * self.width
        return self.of_matrices // tensor + self.biases * (self._projected + self._mlp_inputs) // tensor + whole

    def before(self, tensor: int = 1) -> int:
        """Parameters of the embedding, whose tokens are split by vocabulary."""
        return self.table // tensor + self.learned * self.positions * self.width

    def after(self, tensor: int = 1) -> int:
        """Parameters of the final norm and of the head."""
        return self.table // tensor + (1 + self.biases) * self.width

    @property
    def of_matrices(self) -> int:
        """Parameters in the matrices of a layer."""
        return (self._projected + self._attended) * self.width + (self._mlp_inputs + self.hidden) * self.width

    @property
    def table(self) -> int:
        """Parameters in the matrix of the embedding, and in that of the head."""
        return self.vocabulary * self.width

    @property
    def _attended(self) -> int:
        """Numbers per position in the queries, and in the output of attention."""
        return self.heads * self.head_width

    @property
    def keys_and_values(self) -> int:
        """Numbers per position in the keys and values of a layer."""
        return 2 * self.kv_heads * self.head_width

    @property
    def _projected(self) -> int:
        return self._attended + self.keys_and_values

    @property
    def _mlp_inputs(self) -> int:
        return (1 + self.gated) * self.hidden

    # ---- floating-point operations of one token, forward

    def layer_flops(self, sequence: int) -> int:
        """FLOPs of a layer per token of a sequence: 2 per parameter of a matrix, and 4·s per number of the queries in
        attention; the causal mask saves nothing (Narayanan et al. 2021, appendix)."""
        return 2 * self.of_matrices + 4 * sequence * self._attended

    @property
    def head_flops(self) -> int:
        """FLOPs of the head per token."""
        return 2 * self.table

    def training_flops(self, sequence: int) -> int:
        """FLOPs of forward and backward per token: three times those of forward. Recomputation is not included, as in
        MFU."""
        return 3 * (self.layers * self.layer_flops(sequence) + self.head_flops)

    # ---- activations, in bytes

    def layer_activations(
        self,
        tokens: float,
        sequence: int,
        tensor: int,
        wide: int,
        attention: str,
        kept: tuple[float, float] = (1.0, 1.0),
    ) -> float:
        """Bytes that a layer stores for backward, for `tokens` positions on a rank, `wide` bytes per number; `kept` are
        the numbers that a framework keeps in attention and in the MLP, relative to the formula.

        With eager attention, dropout and two matrices in the MLP, this is Korthikanti's formula for sequence
        parallelism, sbh/t · (34 + 5as/h) in 16 bits; fused attention (FlashAttention, Dao et al. 2022) stores one
        32-bit number per head and position instead of the matrices of attention.
        """
        norms = 4 * self.width  # inputs and outputs of both norms
        attended = 2 * self._attended + self.keys_and_values  # queries, keys, values, output
        mlp = (4 if self.gated else 2) * self.hidden  # inputs and outputs of the activation; up, and the product
        masks = 2 * self.width * self.dropout  # one byte per number
        numbers = wide * (norms + kept[0] * attended + kept[1] * mlp) + masks
        return tokens * (numbers + self.heads * _ATTENTION[attention](sequence, wide, self.dropout)) / tensor

    def layer_input(self, tokens: float, tensor: int, wide: int) -> float:
        """Bytes of a layer's input, all that it stores if backward recomputes it."""
        return tokens * wide * self.width / tensor

    def head_activations(self, tokens: float, tensor: int, wide: int, logits: float = 0.0) -> float:
        """Bytes that the end of the model stores: inputs of norm and head, and for each logit `logits` bytes, or 0 for
        itself, its log-softmax in 32 bits (torch also stores a 32-bit copy of 16-bit logits) and its gradient."""
        each = logits or wide + 4 + 4 + (4 if wide < 4 else 0)
        return tokens * (2 * wide * self.width + each * self.vocabulary) / tensor

    # ---- what the kernels of a layer move and multiply

    def products(self, tokens: float, tensor: int) -> tuple[tuple[float, float, float], ...]:
        """Rows, columns and inner width of the matrix products of a layer in forward, on one of `tensor` ranks."""
        return (
            (tokens, self._projected / tensor, self.width),
            (tokens, self.width, self._attended / tensor),
            (tokens, self._mlp_inputs / tensor, self.width),
            (tokens, self.width, self.hidden / tensor),
        )

    @property
    def moved(self) -> int:
        """Numbers per token that the operations between the matrix products of a layer read and write, forward and
        backward, if each reads its inputs and writes its outputs once: norms, residuals and rotations, activation."""
        return 20 * self.width + (10 if self.gated else 6) * self.hidden


# Bytes per head and position that attention stores: fused, the logarithm of each row's sum; eager, the matrix of its
# weights, with dropout also its mask and the masked weights.
_ATTENTION: dict[str, Callable[[int, int, bool], int]] = {
    "fused": lambda sequence, wide, dropout: 4,
    "eager": lambda sequence, wide, dropout: sequence * (wide + dropout * (1 + wide)),
}
ATTENTIONS = tuple(_ATTENTION)


# ---- where the model comes from: a number of parameters, a workload of the lab, or a Hugging Face style config.json

# ---- a number of parameters

# Parameters and layers: Brown et al. 2020, table 2.1 (125M to 175B), and Llama (65B: Touvron et al. 2023; 405B: 2024).
_DEPTHS = (
    *((125e6, 12), (350e6, 24), (1.3e9, 24), (2.7e9, 32), (6.7e9, 32), (13e9, 40), (65e9, 80)),
    *((175e9, 96), (405e9, 126), (4e12, 160)),
)
_STEPS = ((1024, 128), (4096, 512), (math.inf, 1024))  # widths below a bound are multiples of a step
_VOCABULARY, _HEAD, _HIDDEN = 32_000, 128, 64  # of Llama; hidden widths are multiples of 64
_POSITIONS = 4096
_PARAMETERS = Number(float, 125e6, 4e12)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def of_parameters(value: Any) -> Model:
    """A Llama-like model with about as many parameters as asked: a number, or a text such as `7B`.

    Layers are interpolated between published models; the width follows from 12·L·h² + 2·v·h, and the hidden width then
    makes up the difference. Raises `ValueError`.
    """
    asked = _PARAMETERS.check("params", _count(value))
    layers = _layers(asked)
    ends = 2 * _VOCABULARY
    width = _rounded((math.sqrt(ends**2 + 48 * layers * asked) - ends) / (24 * layers))
    per_hidden = 3 * layers * width
    hidden = _HIDDEN * round((asked - 4 * layers * width**2 - ends * width) / per_hidden / _HIDDEN)
    heads = width // (_HEAD if width >= 2048 else _HEAD // 2)
    return _llama(layers, width, heads, hidden)


def _count(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", value.strip().upper())
    if not found:
        raise ValueError(f"params must be a number of parameters such as 7B or 124M, got {shown(value)}")
    return float(found[1]) * _FACTORS[found[2]]


def _layers(parameters: float) -> int:
    """Layers on a logarithmic scale between the rows of the table, as a multiple of 4, which pipelines can split."""
    (low, few), (high, many) = next(pair for pair in pairwise(_DEPTHS) if parameters <= pair[1][0])
    exact = few + (many - few) * math.log(parameters / low) / math.log(high / low)
    return 4 * round(exact / 4)


def _rounded(width: float) -> int:
    step = next(step for bound, step in _STEPS if width < bound)
    return int(step * round(width / step))


def _llama(layers: int, width: int, heads: int, hidden: int) -> Model:
    sizes = (layers, width, heads, heads, width // heads, hidden, _VOCABULARY, _POSITIONS)
    model = Model("", *sizes, gated=True, learned=False, biases=False, tied=False)
    return _titled(model, f"a model of {parameters_in_words(model.parameters)} parameters")


def parameters_in_words(count: float) -> str:
    """`6.74B`, `124M`."""
    name, each = next((name, factor) for name, factor in reversed(_FACTORS.items()) if count >= 0.9995 * factor)
    return f"{count / each:.3g}{name}"


def _titled(model: Model, title: str) -> Model:
    return replace(model, title=f"{title} ({model.layers} layers × {model.width:,})")


# ---- a workload of the lab


def of_workload(name: Any, options: Mapping[str, Any]) -> Model:
    """The dense transformer of a workload with some of its options. Raises `ValueError`, `SpecError`."""
    transformers = [workload.name for workload in WORKLOADS.values() if workload.transformer and not workload.mixture]
    row = WORKLOADS[check_choice("workload", name, transformers)]
    settled = Spec("single", row.name, options={**options}).options
    assert row.transformer
    shape = row.transformer(settled)
    sizes = (shape.layers, shape.width, shape.heads, shape.heads, shape.width // shape.heads, 4 * shape.width)
    model = Model("", *sizes, shape.vocabulary, shape.positions, gated=False, learned=True, biases=True, tied=False)
    return _titled(model, f"{row.name} with {parameters_in_words(model.parameters)} parameters")


# ---- a config.json

_LIMIT = 1 << 20  # bytes of a file
_SIZES = Number(int, 1, 1 << 24)
_NAMES = {  # what it is: the names that models use for it
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_GATED = ("silu", "swish", "swiglu", "geglu")
_GATED_TYPES = ("gemma",)  # whose activation does not show it
_DROPOUTS = ("resid_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout", "dropout")


def of_config(value: Any) -> Model:
    """The decoder that a Hugging Face style config.json describes, by its path or that of its folder. Raises
    `ValueError`, one sentence."""
    path = Path(check_path("config", value))
    said = read_json_object("config", path, _LIMIT, f"of at most {size(_LIMIT, 0)}", in_folder="config.json")
    said = said["text_config"] if isinstance(said.get("text_config"), dict) else said  # of a model with images
    for name in _EXPERTS:
        if said.get(name):
            raise ValueError(f"{path} describes a mixture of experts ({name}), and only dense models can be estimated")
    sizes = {what: _size(path, said, names) for what, names in _NAMES.items()}
    for what in ("layers", "width", "heads", "vocabulary", "positions"):
        if sizes[what] is None:
            raise ValueError(f"{path} has no {_NAMES[what][0]}; it must be the config.json of a decoder")
    kind, activation = str(said.get("model_type", "")), str(said.get("hidden_act", said.get("hidden_activation", "")))
    gated = activation in _GATED or kind.startswith(_GATED_TYPES)
    width, heads = sizes["width"] or 1, sizes["heads"] or 1
    kv_heads = sizes["kv_heads"] or heads
    if sizes["head_width"] is None and width % heads:
        raise ValueError(f"{path}: the width {width} must be a multiple of the number of heads {heads}")
    if heads % kv_heads:
        raise ValueError(f"{path}: the number of heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    found = Model(
        "",
        sizes["layers"] or 1,
        width,
        heads,
        kv_heads,
        sizes["head_width"] or width // heads,
        sizes["hidden"] or 4 * width,
        sizes["vocabulary"] or 1,
        sizes["positions"] or 1,
        gated=gated,
        learned=not gated and "rope_theta" not in said,
        biases=not gated,
        tied=bool(said.get("tie_word_embeddings", not gated)),
        dropout=any(isinstance(said.get(name), float) and said[name] > 0 for name in _DROPOUTS),
    )
    name = kind or visible_line(path.stem)
    return _titled(found, f"{name} with {parameters_in_words(found.parameters)} parameters")


def _size(path: Path, said: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        if said.get(name) is not None:
            return int(_SIZES.check(f"{path}: {name}", said[name]))
    return None
