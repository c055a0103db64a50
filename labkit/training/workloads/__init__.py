"""The tables of workloads (models) and data sets. They do not import torch, so that listing them is fast.

A row contains every fact about a model or data set (`labkit.training.rows` has the fields). The module of the same name
in this package contains the code; `models.py` has the models in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from labkit.setup.preflight import Files, Needs
from labkit.training.options import Option
from labkit.training.rows import Data, Workload
from labkit.training.workloads import models

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


def _window(options: Mapping[str, Any]) -> tuple[int, ...]:
    """A window of text with a 64-bit integer per byte of text."""
    return (options["context"],)


_GPT_OPTIONS = (
    Option("size", "1M", "model size: number of parameters", choices=tuple(models.GPT_SIZES)),
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
        Data(
            "text",
            "the Python language reference (pydoc_data.topics), as bytes",
            20_000,
            256,
            _window,
            number_bytes=8,
        ),
    )
}

WORKLOADS: dict[str, Workload] = {
    row.name: row
    for row in (
        Workload(
            "cnn",
            "CNN: three 5×5 convolutions",
            ("digits", "mnist"),
            models.cnn,
            models.cnn_outputs,
            models.cnn_costs,
            visited=lambda options: 36,
            tensor_parts=lambda options: (128, "units"),
            partial_sums=(1152, 10),
        ),
        Workload(
            "mlp",
            "MLP: two hidden layers",
            ("digits", "mnist"),
            models.mlp,
            models.mlp_outputs,
            models.mlp_costs,
            visited=lambda options: 17,
            tensor_parts=lambda options: (512, "units"),
            partial_sums=(512,),
            recomputed_sums=512,
        ),
        Workload(
            "gpt",
            "GPT: a byte-level transformer",
            ("text",),
            models.gpt,
            models.gpt_outputs,
            models.gpt_costs,
            visited=lambda options: 2 * (10 * models.transformer(options).layers + 7),
            batch_size=16,
            options=_GPT_OPTIONS,
            constants=models.gpt_constants,
            tensor_parts=lambda options: (models.transformer(options).heads, "heads"),
            transformer=models.transformer,
            wide_outputs=True,
            ends_in_layer=True,
        ),
        Workload(
            "moe",
            "MoE: the GPT with a mixture of experts in place of each MLP",
            ("text",),
            models.moe,
            models.gpt_outputs,
            models.moe_costs,
            visited=lambda options: 2 * ((10 + 3 * options["experts"]) * models.transformer(options).layers + 7),
            batch_size=16,
            options=(
                replace(_GPT_OPTIONS[0], help="number of parameters of the GPT whose MLPs become experts"),
                *_GPT_OPTIONS[1:],
                Option("experts", 8, "number of experts in each layer", choices=(4, 8, 16, 32, 64)),
                Option("top_k", 2, "number of experts that each vector is sent to", choices=(1, 2, 4)),
                Option(
                    "capacity_factor",
                    1.25,
                    "slots of each expert per window, relative to an even load; further vectors are dropped",
                    minimum=0.25,
                    maximum=64.0,
                ),
                Option("balance", 0.01, "weight of the loss that balances the experts", minimum=0.0, maximum=10.0),
            ),
            constants=models.gpt_constants,
            transformer=models.transformer,
            mixture=models.mixture,
            wide_outputs=True,
            ends_in_layer=True,
        ),
        Workload(
            "resnet18",
            "ResNet-18: torchvision's model with a 3×3 stem for small images",
            ("digits32", "cifar10"),
            models.resnet18,
            models.resnet18_outputs,
            models.resnet18_costs,
            visited=lambda options: 148,
            batch_size=64,
            batch_norm=True,
            needs=Needs("mnist", instead="--workload cnn"),
        ),
    )
}
DEFAULT = WORKLOADS["cnn"]  # if a Spec names no workload
