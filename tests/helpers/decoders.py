"""Transformers to estimate: published ones as a config.json, and the family of the papers' formulas."""

from __future__ import annotations

from dataclasses import replace

from labkit.prediction.scale.advice import training
from labkit.prediction.scale.model import Model
from labkit.prediction.scale.step import Training

GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257, "model_type": "gpt2"}
GPT3 = GPT2 | {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
LLAMA = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
    **{"vocab_size": 32000, "max_position_embeddings": 2048, "hidden_act": "silu", "model_type": "llama"},
}
LLAMA3 = LLAMA | {"intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 5e5}


def gpt(layers: int, width: int, heads: int, vocabulary: int, sequence: int, **more: bool) -> Model:
    """A model of the GPT family without biases: linear layers as in the formulas of the papers."""
    sizes = (layers, width, heads, heads, width // heads, 4 * width, vocabulary, sequence)
    return Model("gpt", *sizes, **{"gated": False, "learned": True, "biases": False, "tied": True, **more})


def of(model: Model, devices: int, batch: int, **more) -> Training:
    return replace(training("7B", devices=devices, batch=batch, machine="a100x8"), model=model, **more)
