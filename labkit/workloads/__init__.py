"""The tables of workloads (what is trained) and data sets (on what): light, so that asking what there is loads no torch."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.options import Option

if TYPE_CHECKING:
    from labkit.spec import Spec


@dataclass(frozen=True)
class Data:
    """A data set. `train` and `test` count samples; `missing` gives one sentence where the data cannot be had, else None.

    A Spec may ask for fewer training samples, or, where more can be made, for more: `most` is None there.
    """

    name: str
    title: str
    train: int
    test: int
    missing: Callable[[Spec], str | None] = lambda spec: None
    most: int | None = None

    @property
    def module(self) -> str:
        """The module that loads it."""
        return f"{__name__}.{self.name}"


def _no_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Workload:
    """A model and the data sets it can learn from, the default first. `parameters` counts them for given options.

    `constants` gives the settings of the model's module that stand behind an option, by name.
    """

    name: str
    title: str
    data: tuple[str, ...]
    parameters: Callable[[Mapping[str, Any]], int]
    batch_size: int = 128
    options: tuple[Option, ...] = ()
    constants: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_constants

    @property
    def module(self) -> str:
        """The module that builds the model."""
        return f"{__name__}.{self.name}"


GPT_CONTEXT = 128
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


def gpt_parameters(options: Mapping[str, Any]) -> int:
    """Parameters of the byte-level transformer: 12·L·d² in the blocks' matrices, the rest in biases, norms and embeddings."""
    layers, width, _ = GPT_SIZES[options["size"]]
    block = 12 * width**2 + 13 * width
    embeddings = (GPT_VOCABULARY + GPT_CONTEXT) * width
    head = GPT_VOCABULARY * width
    return layers * block + embeddings + 2 * width + head


def _gpt_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(("LAYERS", "WIDTH", "HEADS"), GPT_SIZES[options["size"]]))


def _needs_scikit_learn(spec: Spec) -> str | None:
    if importlib.util.find_spec("sklearn") is None:
        return "the digits come with scikit-learn, which is not installed here; pip install scikit-learn"
    return None


MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_MNIST_MIRROR = "ossci-datasets.s3.amazonaws.com"


def _mnist_missing(spec: Spec) -> str | None:
    if importlib.util.find_spec("torchvision") is None:
        return "mnist is read through torchvision, which is not installed here; install the one that fits your torch, or use --data digits"
    raw = Path(spec.data_dir or "data") / "MNIST" / "raw"
    if all((raw / name).exists() or (raw / f"{name}.gz").exists() for name in MNIST_FILES):
        return None
    if _mnist_mirror_answers(int(time.monotonic() / 60)):
        return None
    return (
        f"MNIST is not in {raw} and its mirror {_MNIST_MIRROR} cannot be reached from here; "
        f"put its four files there ({MNIST_FILES[0]}.gz …), name a folder with --data-dir, or use --data digits"
    )


@lru_cache(maxsize=1)
def _mnist_mirror_answers(minute: int) -> bool:
    """Asked once a minute at the most: a panel checks its Spec at every choice."""
    try:
        socket.create_connection((_MNIST_MIRROR, 443), timeout=3).close()
    except OSError:
        return False
    return True


DATA: dict[str, Data] = {
    row.name: row
    for row in (
        Data("digits", "handwritten digits (scikit-learn, 1,797 real ones, augmented to 60,000)", 60_000, 360, _needs_scikit_learn),
        Data("mnist", "MNIST (torchvision)", 60_000, 10_000, _mnist_missing, most=60_000),
        Data("text", "the Python language reference (pydoc_data.topics), as bytes", 20_000, 1_000),
    )
}

WORKLOADS: dict[str, Workload] = {
    row.name: row
    for row in (
        Workload("cnn", "CNN: three 5×5 convolutions", ("digits", "mnist"), lambda options: 405_898),
        Workload("mlp", "MLP: two hidden layers", ("digits", "mnist"), lambda options: 669_706),
        Workload(
            "gpt",
            "GPT: a byte-level transformer",
            ("text",),
            gpt_parameters,
            batch_size=16,
            options=(Option("size", "1M", "parameters, by name", choices=tuple(GPT_SIZES)),),
            constants=_gpt_constants,
        ),
    )
}
