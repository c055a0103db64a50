"""The tables of workloads (models) and data sets. They do not import torch, so that listing them is fast.

A row contains every fact about a model or data set (`labkit.training.rows` has the fields). The module of the same name
in this package contains the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from labkit.setup.preflight import Files, Needs
from labkit.training.rows import Data, Mixture, Module, Option, Transformer, Workload, convolution, linear, norm

# ---- the models in numbers, without torch: the parameter shapes, outputs and costs of their blocks, for given options


GPT_VOCABULARY = 256
GPT_SIZES: dict[str, tuple[int, int, int]] = {  # name: layers, width, heads
    "1M": (5, 128, 4),
    "10M": (6, 384, 6),
    "30M": (10, 512, 8),
    "100M": (14, 768, 12),
    "300M": (24, 1024, 16),
    "1B": (20, 2048, 16),
    "3B": (38, 2560, 20),
    "7B": (35, 4096, 32),
}


# ---- cnn


def cnn_blocks(options: Mapping[str, Any]) -> tuple[Module, ...]:
    convolutions = (convolution(come, go, 5, bias=True) for come, go in ((1, 32), (32, 64), (64, 128)))
    blocks = (Module(inside=(layer,)) for layer in (*convolutions, linear(1152, 128, cut=0)))
    return (*blocks, linear(128, 10, cut=1))


def cnn_outputs(options: Mapping[str, Any]) -> tuple[tuple[int, bool], ...]:
    return (32 * 14 * 14, False), (64 * 7 * 7, False), (128 * 3 * 3, False), (128, True), (10, False)


def cnn_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block: 2·k²·in·out·side² for a convolution, with k = 5, and 2·in·out for a linear
    layer."""
    convolutions = ((1, 32, 28), (32, 64, 14), (64, 128, 7))
    return (
        *(2 * 25 * inputs * outputs * side**2 for inputs, outputs, side in convolutions),
        2 * 128 * 3 * 3 * 128,
        2 * 128 * 10,
    )


# ---- mlp


def mlp_blocks(options: Mapping[str, Any]) -> tuple[Module, ...]:
    return Module(inside=(linear(784, 512, cut=0),)), Module(inside=(linear(512, 512, cut=1),)), linear(512, 10)


def mlp_outputs(options: Mapping[str, Any]) -> tuple[tuple[int, bool], ...]:
    return (512, True), (512, False), (10, False)


def mlp_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block: 2·in·out for each linear layer."""
    return 2 * 28 * 28 * 512, 2 * 512 * 512, 2 * 512 * 10


# ---- gpt


def transformer(options: Mapping[str, Any]) -> Transformer:
    layers, width, heads = GPT_SIZES[options["size"]]
    return Transformer(layers, width, heads, options["context"], GPT_VOCABULARY)


def gpt_blocks(options: Mapping[str, Any]) -> tuple[Module, ...]:
    layers, width, _ = GPT_SIZES[options["size"]]
    attention = Module(inside=(*[linear(width, width, cut=0)] * 3, linear(width, width, cut=1)))
    mlp = linear(width, 4 * width, cut=0), linear(4 * width, width, cut=1)
    layer = Module(inside=(norm(width), attention, norm(width), *mlp))
    embedding = Module(inside=(Module(((GPT_VOCABULARY, width),)), Module(((options["context"], width),))))
    head = Module(inside=(norm(width), Module(((GPT_VOCABULARY, width),), cut=0)))
    return embedding, *[layer] * layers, head


def gpt_outputs(options: Mapping[str, Any]) -> tuple[tuple[int, bool], ...]:
    layers, width, _ = GPT_SIZES[options["size"]]
    vectors = options["context"] * width, options.get("sequence_parallel", False)
    return *[vectors] * (layers + 1), (options["context"] * GPT_VOCABULARY, False)


def gpt_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block, for T positions, width d and a vocabulary of V bytes.

    A layer needs 2·12·d²·T in its matrices and 2·2·T²·d in attention (the causal mask saves nothing), the head 2·d·V·T.
    The embedding multiplies nothing: T·d, one addition per value.
    """
    layers, width, _ = GPT_SIZES[options["size"]]
    positions = options["context"]
    layer = 24 * width**2 * positions + 4 * positions**2 * width
    return (positions * width, *[layer] * layers, 2 * width * GPT_VOCABULARY * positions)


def gpt_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(("LAYERS", "WIDTH", "HEADS"), GPT_SIZES[options["size"]]))


# ---- moe


def mixture(options: Mapping[str, Any]) -> Mixture:
    layers, width, _ = GPT_SIZES[options["size"]]
    experts, chosen = options["experts"], options["top_k"]
    slots = math.ceil(options["capacity_factor"] * chosen * options["context"] / experts)
    return Mixture(layers, experts, chosen, slots, width)


def moe_blocks(options: Mapping[str, Any]) -> tuple[Module, ...]:
    """The GPT with a router and experts in place of each MLP."""
    embedding, *_, head = gpt_blocks(options)
    model = mixture(options)
    width = model.width
    attention = Module(inside=(linear(width, width),) * 4)
    expert = Module(inside=(linear(width, 4 * width), linear(4 * width, width)))
    experts = Module(inside=(expert,) * model.experts, experts=True)
    layer = (norm(width), attention, norm(width), Module(inside=(linear(width, model.experts), experts)))
    return embedding, *[Module(inside=layer)] * model.layers, head


def moe_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block, as `gpt_costs`: a layer with E experts of C slots each needs 2·4·d²·T in the
    matrices of attention, 2·2·T²·d in attention, 2·d·E·T in its router and 2·8·d²·E·C in its experts."""
    embedding, *_, head = gpt_costs(options)
    model, positions = mixture(options), options["context"]
    attention = 8 * model.width**2 * positions + 4 * positions**2 * model.width
    experts = 2 * model.width * model.experts * positions + 16 * model.width**2 * model.experts * model.slots
    return (embedding, *[attention + experts] * model.layers, head)


# ---- resnet18

# Input channels, output channels and output side length of each residual block.
_RESNET18 = (
    (64, 64, 32),
    (64, 64, 32),
    (64, 128, 16),
    (128, 128, 16),
    (128, 256, 8),
    (256, 256, 8),
    (256, 512, 4),
    (512, 512, 4),
)
_CHANNELS = (64, *(go for _, go, _ in _RESNET18))  # after the stem and after each residual block


def resnet18_blocks(options: Mapping[str, Any]) -> tuple[Module, ...]:
    blocks = []
    for come, go in pairwise(_CHANNELS):
        shortcut = [Module(inside=(convolution(come, go, 1), norm(go)))] if come != go else []
        blocks.append(Module(inside=(convolution(come, go, 3), norm(go), convolution(go, go, 3), norm(go), *shortcut)))
    return Module(inside=(convolution(3, 64, 3), norm(64))), *blocks, Module(inside=(linear(512, 10),))


def resnet18_outputs(options: Mapping[str, Any]) -> tuple[tuple[int, bool], ...]:
    return (64 * 32**2, False), *((go * side**2, False) for _, go, side in _RESNET18), (10, False)


def resnet18_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample: 2·side²·(9·in·out + 9·out²) per block, and 2·side²·in·out for a shortcut that changes
    channels.

    The stem needs 2·32²·9·3·64, pooling and head 2·512·10.
    """
    blocks = (
        2 * side**2 * (9 * (inputs + outputs) * outputs + (inputs != outputs) * inputs * outputs)
        for inputs, outputs, side in _RESNET18
    )
    return (2 * 32**2 * 9 * 3 * 64, *blocks, 2 * 512 * 10)


MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
_MNIST = Files(
    "MNIST",
    "MNIST/raw",
    tuple((f"MNIST/raw/{name}", f"MNIST/raw/{name}.gz") for name in MNIST_FILES),
    "ossci-datasets.s3.amazonaws.com",
    f"its four files ({MNIST_FILES[0]}.gz …)",
)
_CIFAR10 = Files(
    "CIFAR-10",
    "",
    tuple((f"cifar-10-batches-py/{name}", "cifar-10-python.tar.gz") for name in CIFAR10_FILES),
    "www.cs.toronto.edu",
    "cifar-10-python.tar.gz",
)
_SCIKIT_LEARN = Needs(module="sklearn", package="scikit-learn")


def _image(colours: int, side: int) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """An image of 32-bit floats."""
    return lambda options: (colours, side, side)


def _text(options: Mapping[str, Any]) -> tuple[int, ...]:
    """A sequence of text with a 64-bit integer per byte of text."""
    return (options["context"],)


_GPT_OPTIONS = (
    Option("size", "1M", "model size: number of parameters", choices=tuple(GPT_SIZES)),
    Option("context", 128, "context length in bytes", choices=(128, 256, 512, 1024, 2048, 4096)),
)
DATA: dict[str, Data] = {
    row.name: row
    for row in (
        Data(
            "digits",
            "handwritten digits (scikit-learn: 1,797 images, augmented to 60,000)",
            60_000,
            360,
            _image(1, 28),
            constants={"SIDE": 28, "CHANNELS": 1},
            drawn_by="draw_digits",
            needs=_SCIKIT_LEARN,
        ),
        Data(
            "mnist",
            "MNIST (torchvision)",
            60_000,
            10_000,
            _image(1, 28),
            most=60_000,
            needs=Needs("mnist", files=_MNIST, instead="--data digits"),
        ),
        Data(
            "digits32",
            "handwritten digits as 3×32×32 images",
            10_000,
            360,
            _image(3, 32),
            shared=3,
            code="digits",
            constants={"SIDE": 32, "CHANNELS": 3},
            drawn_by="draw_digits",
            needs=_SCIKIT_LEARN,
        ),
        Data(
            "cifar10",
            "CIFAR-10 (torchvision)",
            50_000,
            10_000,
            _image(3, 32),
            most=50_000,
            needs=Needs("mnist", files=_CIFAR10, instead="--data digits32"),
        ),
        Data("text", "the Python language reference (pydoc_data.topics), as bytes", 20_000, 256, _text, number_bytes=8),
    )
}

WORKLOADS: dict[str, Workload] = {
    row.name: row
    for row in (
        Workload(
            "cnn",
            "CNN: three 5×5 convolutions",
            ("digits", "mnist"),
            cnn_blocks,
            cnn_outputs,
            cnn_costs,
            visited=lambda options: 36,
            tensor_parts=lambda options: (128, "units"),
            partial_sums=(1152, 10),
        ),
        Workload(
            "mlp",
            "MLP: two hidden layers",
            ("digits", "mnist"),
            mlp_blocks,
            mlp_outputs,
            mlp_costs,
            visited=lambda options: 17,
            tensor_parts=lambda options: (512, "units"),
            partial_sums=(512,),
            recomputed_sums=512,
        ),
        Workload(
            "gpt",
            "GPT: a byte-level transformer",
            ("text",),
            gpt_blocks,
            gpt_outputs,
            gpt_costs,
            visited=lambda options: 2 * (10 * transformer(options).layers + 7),
            batch_size=16,
            options=_GPT_OPTIONS,
            constants=gpt_constants,
            tensor_parts=lambda options: (transformer(options).heads, "heads"),
            transformer=transformer,
            wide_outputs=True,
            ends_in_layer=True,
        ),
        Workload(
            "moe",
            "MoE: the GPT with a mixture of experts in place of each MLP",
            ("text",),
            moe_blocks,
            gpt_outputs,
            moe_costs,
            visited=lambda options: 2 * ((10 + 3 * options["experts"]) * transformer(options).layers + 7),
            batch_size=16,
            options=(
                replace(_GPT_OPTIONS[0], help="number of parameters of the GPT whose MLPs become experts"),
                *_GPT_OPTIONS[1:],
                Option("experts", 8, "number of experts in each layer", choices=(4, 8, 16, 32, 64)),
                Option("top_k", 2, "number of experts that each token is sent to", choices=(1, 2, 4)),
                Option(
                    "capacity_factor",
                    1.25,
                    "slots of each expert per sequence, relative to an even load; further tokens are dropped",
                    minimum=0.25,
                    maximum=64.0,
                ),
                Option("balance", 0.01, "weight of the loss that balances the experts", minimum=0.0, maximum=10.0),
            ),
            constants=gpt_constants,
            transformer=transformer,
            mixture=mixture,
            wide_outputs=True,
            ends_in_layer=True,
        ),
        Workload(
            "resnet18",
            "ResNet-18: torchvision's model with a 3×3 stem for small images",
            ("digits32", "cifar10"),
            resnet18_blocks,
            resnet18_outputs,
            resnet18_costs,
            visited=lambda options: 148,
            batch_size=64,
            batch_norm=True,
            needs=Needs("mnist", instead="--workload cnn"),
        ),
    )
}
DEFAULT = WORKLOADS["cnn"]  # if a Spec names no workload
