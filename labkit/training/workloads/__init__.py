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

from labkit.setup import preflight
from labkit.setup.environment import how_to_add
from labkit.training.options import Option

if TYPE_CHECKING:
    from labkit.training.request import Request


@dataclass(frozen=True)
class Data:
    """A data set. `train` and `test` count samples; `missing` gives one sentence where the data cannot be had, else None.

    A Spec may ask for fewer training samples, or, where more can be made, for more: `most` is None there. `sample_bytes` gives the memory
    that one training sample takes, with its target, for given options. `extra` is the optional extra of the project that it needs.
    """

    name: str
    title: str
    train: int
    test: int
    sample_bytes: Callable[[Mapping[str, Any]], int]
    missing: Callable[[Request], str | None] = lambda spec: None
    most: int | None = None
    extra: str | None = None

    @property
    def module(self) -> str:
        """The module that loads it."""
        return f"{__name__}.{self.name}"


def _no_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Workload:
    """A model and the data sets it can learn from, the default first. `parameters` counts them for given options.

    `costs` gives the floating-point operations of one sample's forward, block by block: those of matrix products and convolutions, a
    multiplication and an addition each. `constants` gives the settings of the model's module that stand behind an option, by name.
    `missing` gives one sentence where the model cannot be built here, else None. `tensor_parts` says how many parts tensor parallelism
    can split a layer into, and what they are; None where there is no plan for it (`tensor_plans` in the module). `batch_norm` says that it
    normalises over a batch, so that what a sample gives depends on those beside it. `extra` is the optional extra of the project that it
    needs.
    """

    name: str
    title: str
    data: tuple[str, ...]
    parameters: Callable[[Mapping[str, Any]], int]
    costs: Callable[[Mapping[str, Any]], tuple[float, ...]]
    batch_size: int = 128
    options: tuple[Option, ...] = ()
    constants: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_constants
    missing: Callable[[Request], str | None] = lambda spec: None
    tensor_parts: Callable[[Mapping[str, Any]], tuple[int, str]] | None = None
    batch_norm: bool = False
    extra: str | None = None

    @property
    def module(self) -> str:
        """The module that builds the model."""
        return f"{__name__}.{self.name}"


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
    embeddings = (GPT_VOCABULARY + options["context"]) * width
    head = GPT_VOCABULARY * width
    return layers * block + embeddings + 2 * width + head


def gpt_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block, for T places, width d and V bytes.

    A layer has 2·12·d²·T in its matrices and 2·2·T²·d in attention (no place is left out for being later), the head 2·d·V·T. The
    embedding multiplies nothing: T·d, one addition for each value.
    """
    layers, width, _ = GPT_SIZES[options["size"]]
    places = options["context"]
    layer = 24 * width**2 * places + 4 * places**2 * width
    return (places * width, *[layer] * layers, 2 * width * GPT_VOCABULARY * places)


def cnn_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block: 2·k²·in·out·side² for a convolution, with k = 5, and 2·in·out for a linear layer."""
    convolutions = ((1, 32, 28), (32, 64, 14), (64, 128, 7))
    return (*(2 * 25 * come * go * side**2 for come, go, side in convolutions), 2 * 128 * 3 * 3 * 128, 2 * 128 * 10)


def mlp_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block: 2·in·out for each linear layer."""
    return 2 * 28 * 28 * 512, 2 * 512 * 512, 2 * 512 * 10


# Channels in and out, and the side of the images that come out, of each residual block.
_RESNET18 = ((64, 64, 32), (64, 64, 32), (64, 128, 16), (128, 128, 16), (128, 256, 8), (256, 256, 8), (256, 512, 4), (512, 512, 4))


def resnet18_parameters(options: Mapping[str, Any]) -> int:
    """9·in·out for a 3×3 convolution and 2·out for the norm behind it, in stem and blocks; a shortcut that changes channels is 1×1."""
    blocks = sum(9 * (come + go) * go + 4 * go + (come != go) * (come + 2) * go for come, go, _ in _RESNET18)
    return 9 * 3 * 64 + 2 * 64 + blocks + 512 * 10 + 10


def resnet18_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample: 2·side²·(9·in·out + 9·out²) in a block, and 2·side²·in·out for a shortcut that changes channels.

    The stem has 2·32²·9·3·64, pooling and head 2·512·10.
    """
    blocks = (2 * side**2 * (9 * (come + go) * go + (come != go) * come * go) for come, go, side in _RESNET18)
    return (2 * 32**2 * 9 * 3 * 64, *blocks, 2 * 512 * 10)


def _gpt_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(("LAYERS", "WIDTH", "HEADS"), GPT_SIZES[options["size"]]))


def _needs_scikit_learn(spec: Request) -> str | None:
    if importlib.util.find_spec("sklearn") is None:
        return "the digits come with scikit-learn, which is not installed; add it with: python3 -m labkit setup"
    return None


def _needs_torchvision(what: str, instead: str) -> str | None:
    """Why torchvision does not load here; torch is asked in a process of its own, once for what is installed."""
    found = importlib.util.find_spec("torchvision")
    if found is None:
        return f"{what} comes from torchvision, which is not installed; {how_to_add('mnist')}, or use {instead}"
    installed = [path for path in map(_version_file, ("torch", "torchvision")) if path.is_file()]
    version, error = _torchvision(tuple((str(path), path.stat().st_mtime_ns) for path in installed))
    if not error:
        return None
    if "torchvision::nms" in error:
        error = "it was built for another torch"
    return (
        f"{what} comes from torchvision, and torchvision {version} does not load beside the torch that is installed here ({error}); "
        f"install both from the same source and of matching versions, or use {instead}"
    )


def _version_file(package: str) -> Path:
    """Written anew with every installation of the package."""
    found = importlib.util.find_spec(package)
    return Path(found.origin).with_name("version.py") if found else Path()


@lru_cache(maxsize=1)
def _torchvision(installed: tuple[tuple[str, int], ...]) -> tuple[str, str]:
    return preflight.torchvision()


def _resnet18_missing(spec: Request) -> str | None:
    return _needs_torchvision("resnet18", "--workload cnn")


MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
_MNIST_MIRROR = "ossci-datasets.s3.amazonaws.com"
_CIFAR10_SOURCE = "www.cs.toronto.edu"


def _mnist_missing(spec: Request) -> str | None:
    raw = Path(spec.data_dir or "data") / "MNIST" / "raw"
    there = all((raw / name).exists() or (raw / f"{name}.gz").exists() for name in MNIST_FILES)
    unfit = _needs_torchvision("mnist", "--data digits")
    if unfit or there or _answers(_MNIST_MIRROR, int(time.monotonic() / 60)):
        return unfit
    return (
        f"MNIST is not in {raw} and its mirror {_MNIST_MIRROR} cannot be reached from here; "
        f"put its four files there ({MNIST_FILES[0]}.gz …), name a folder with --data-dir, or use --data digits"
    )


def _cifar10_missing(spec: Request) -> str | None:
    folder = Path(spec.data_dir or "data")
    batches = folder / "cifar-10-batches-py"
    there = all((batches / name).exists() for name in CIFAR10_FILES) or (folder / "cifar-10-python.tar.gz").exists()
    unfit = _needs_torchvision("cifar10", "--data digits32")
    if unfit or there or _answers(_CIFAR10_SOURCE, int(time.monotonic() / 60)):
        return unfit
    return (
        f"CIFAR-10 is not in {batches} and {_CIFAR10_SOURCE} cannot be reached from here; "
        f"put cifar-10-python.tar.gz into {folder}, name a folder with --data-dir, or use --data digits32"
    )


@lru_cache(maxsize=2)
def _answers(host: str, minute: int) -> bool:
    """Asked once a minute at the most: a panel checks its Spec at every choice."""
    try:
        socket.create_connection((host, 443), timeout=3).close()
    except OSError:
        return False
    return True


def _image_bytes(colours: int, side: int) -> Callable[[Mapping[str, Any]], int]:
    """Memory of an image as 32-bit numbers, and of its label as one of 64 bits."""
    return lambda options: 4 * colours * side**2 + 8


def _window_bytes(options: Mapping[str, Any]) -> int:
    """Memory of a window of text, each byte as a number of 64 bits; inputs and targets share it."""
    return 8 * (options["context"] + 1)


DATA: dict[str, Data] = {
    row.name: row
    for row in (
        Data(
            "digits",
            "handwritten digits (scikit-learn, 1,797 real ones, augmented to 60,000)",
            60_000,
            360,
            _image_bytes(1, 28),
            _needs_scikit_learn,
        ),
        Data("mnist", "MNIST (torchvision)", 60_000, 10_000, _image_bytes(1, 28), _mnist_missing, most=60_000, extra="mnist"),
        Data("digits32", "the digits as images of 3×32×32", 10_000, 360, _image_bytes(1, 32), _needs_scikit_learn),
        Data(
            "cifar10",
            "CIFAR-10 (torchvision)",
            50_000,
            10_000,
            _image_bytes(3, 32),
            _cifar10_missing,
            most=50_000,
            extra="mnist",
        ),
        Data(
            "text",
            "the Python language reference (pydoc_data.topics), as bytes",
            20_000,
            1_000,
            _window_bytes,
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
            lambda options: 405_898,
            cnn_costs,
            tensor_parts=lambda options: (128, "units"),
        ),
        Workload(
            "mlp",
            "MLP: two hidden layers",
            ("digits", "mnist"),
            lambda options: 669_706,
            mlp_costs,
            tensor_parts=lambda options: (512, "units"),
        ),
        Workload(
            "gpt",
            "GPT: a byte-level transformer",
            ("text",),
            gpt_parameters,
            gpt_costs,
            batch_size=16,
            options=(
                Option("size", "1M", "parameters, by name", choices=tuple(GPT_SIZES)),
                Option("context", 128, "bytes that a prediction looks back on", choices=(128, 256, 512, 1024, 2048, 4096)),
            ),
            constants=_gpt_constants,
            tensor_parts=lambda options: (GPT_SIZES[options["size"]][2], "heads"),
        ),
        Workload(
            "resnet18",
            "ResNet-18: torchvision's, with the 3×3 stem for small images",
            ("digits32", "cifar10"),
            resnet18_parameters,
            resnet18_costs,
            batch_size=64,
            missing=_resnet18_missing,
            batch_norm=True,
            extra="mnist",
        ),
    )
}
