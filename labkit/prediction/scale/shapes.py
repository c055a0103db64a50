"""Where the model comes from: a number of parameters, a workload of the lab, or a Hugging Face style config.json."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from labkit.common.arguments import Number, check_choice, check_path, shown
from labkit.common.text import visible_line
from labkit.common.units import size
from labkit.plan.spec import Spec
from labkit.prediction.scale.model import Model
from labkit.training.workloads import WORKLOADS

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
    fields = {**vars(model), "title": f"{title} ({model.layers} layers × {model.width:,})"}
    return Model(**fields)


# ---- a workload of the lab


def of_workload(name: Any, options: Mapping[str, Any]) -> Model:
    """The dense transformer of a workload with some of its options. Raises `ValueError`, `SpecError`."""
    transformers = [workload.name for workload in WORKLOADS.values() if workload.transformer and not workload.mixture]
    row = WORKLOADS[check_choice("workload", name, transformers)]
    settled = Spec("single", row.name, options={**options}).options
    assert row.transformer
    one = row.transformer(settled)
    sizes = (one.layers, one.width, one.heads, one.heads, one.width // one.heads, 4 * one.width)
    model = Model("", *sizes, one.vocabulary, one.positions, gated=False, learned=True, biases=True, tied=False)
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
    said = _read(path)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        found = path / "config.json" if path.is_dir() else path
        if found.exists() and not found.is_file():  # a pipe would block
            raise ValueError(f"config {shown(os.fspath(path))} must be a file")
        with found.open("rb") as file:
            text = file.read(_LIMIT + 1)
    except OSError as error:
        raise ValueError(f"config {shown(os.fspath(path))} cannot be read: {error.strerror}") from None
    try:
        said = json.loads(text) if len(text) <= _LIMIT else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ValueError(f"config {shown(os.fspath(path))} must be a JSON object of at most {size(_LIMIT, 0)}")
    return said


def _size(path: Path, said: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        if said.get(name) is not None:
            return int(_SIZES.check(f"{path}: {name}", said[name]))
    return None
