"""The tables of workloads (models) and data sets. They do not import torch, so that listing them is fast."""

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
    """A data set. `train` and `test` are numbers of samples.

    `missing` gives one sentence if the data set is not available, otherwise None. `most` is the maximum number of
    training samples that a Spec may use, None if any number can be generated. `sample_bytes` gives the bytes of one
    training sample with its target, for given options. `extra` is the optional extra of the project that the data set
    needs.
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
        """The module that loads the data set."""
        return f"{__name__}.{self.name}"


def _no_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Workload:
    """A model and the data sets that it can train on, the default first.

    - `parameters`: the number of parameters for given options.
    - `costs`: floating-point operations of one sample's forward pass, block by block; matrix products and convolutions
      only, with
      multiplication and addition counted separately.
    - `constants`: the settings of the model's module that follow from an option, by name.
    - `missing`: one sentence if the model cannot be built here, otherwise None.
    - `tensor_parts`: the dimension that tensor parallelism splits in each layer, as (size, name); None without a
      tensor-parallel plan
      (`tensor_plans` in the module).
    - `batch_norm`: whether the model uses batch norm, so that the output of a sample depends on the other samples of
      its batch.
    - `extra`: the optional extra of the project that the workload needs.
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
    """Parameters of the byte-level transformer: 12·L·d² in the blocks' matrices, the rest in biases, norms and
    embeddings."""
    layers, width, _ = GPT_SIZES[options["size"]]
    block = 12 * width**2 + 13 * width
    embeddings = (GPT_VOCABULARY + options["context"]) * width
    head = GPT_VOCABULARY * width
    return layers * block + embeddings + 2 * width + head


def gpt_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block, for T positions, width d and a vocabulary of V bytes.

    A layer needs 2·12·d²·T in its matrices and 2·2·T²·d in attention (the causal mask saves nothing), the head 2·d·V·T.
    The embedding multiplies nothing: T·d, one addition per value.
    """
    layers, width, _ = GPT_SIZES[options["size"]]
    positions = options["context"]
    layer = 24 * width**2 * positions + 4 * positions**2 * width
    return (positions * width, *[layer] * layers, 2 * width * GPT_VOCABULARY * positions)


def cnn_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block: 2·k²·in·out·side² for a convolution, with k = 5, and 2·in·out for a linear
    layer."""
    convolutions = ((1, 32, 28), (32, 64, 14), (64, 128, 7))
    return (
        *(2 * 25 * inputs * outputs * side**2 for inputs, outputs, side in convolutions),
        2 * 128 * 3 * 3 * 128,
        2 * 128 * 10,
    )


def mlp_costs(options: Mapping[str, Any]) -> tuple[float, ...]:
    """FLOPs of one sample, block by block: 2·in·out for each linear layer."""
    return 2 * 28 * 28 * 512, 2 * 512 * 512, 2 * 512 * 10


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


def resnet18_parameters(options: Mapping[str, Any]) -> int:
    """9·in·out per 3×3 convolution and 2·out for its norm, in stem and blocks; a shortcut that changes channels is
    1×1."""
    blocks = sum(
        9 * (inputs + outputs) * outputs + 4 * outputs + (inputs != outputs) * (inputs + 2) * outputs
        for inputs, outputs, _ in _RESNET18
    )
    return 9 * 3 * 64 + 2 * 64 + blocks + 512 * 10 + 10


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


def _gpt_constants(options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(("LAYERS", "WIDTH", "HEADS"), GPT_SIZES[options["size"]]))


def _needs_scikit_learn(spec: Request) -> str | None:
    if importlib.util.find_spec("sklearn") is None:
        return "the data set digits needs scikit-learn, which is not installed; add it with: python3 -m labkit setup"
    return None


def _needs_torchvision(what: str, instead: str) -> str | None:
    """Why torchvision does not load here, or None; tested in a separate process, once per installed version."""
    found = importlib.util.find_spec("torchvision")
    if found is None:
        return f"{what} needs torchvision, which is not installed; {how_to_add('mnist')}, or use {instead}"
    installed = [path for path in map(_version_file, ("torch", "torchvision")) if path.is_file()]
    version, error = _torchvision(tuple((str(path), path.stat().st_mtime_ns) for path in installed))
    if not error:
        return None
    if "torchvision::nms" in error:
        error = "it was built for a different torch"
    return (
        f"{what} needs torchvision, and torchvision {version} does not load with the installed torch ({error}); "
        f"install matching versions of both from the same source, or use {instead}"
    )


def _version_file(package: str) -> Path:
    """A file that every installation of the package rewrites."""
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
    refusal = _needs_torchvision("mnist", "--data digits")
    if refusal or there or _is_reachable(_MNIST_MIRROR, int(time.monotonic() / 60)):
        return refusal
    return (
        f"MNIST is not in {raw}, and its mirror {_MNIST_MIRROR} is not reachable; "
        f"put its four files there ({MNIST_FILES[0]}.gz …), name a folder with --data-dir, or use --data digits"
    )


def _cifar10_missing(spec: Request) -> str | None:
    folder = Path(spec.data_dir or "data")
    batches = folder / "cifar-10-batches-py"
    there = all((batches / name).exists() for name in CIFAR10_FILES) or (folder / "cifar-10-python.tar.gz").exists()
    refusal = _needs_torchvision("cifar10", "--data digits32")
    if refusal or there or _is_reachable(_CIFAR10_SOURCE, int(time.monotonic() / 60)):
        return refusal
    return (
        f"CIFAR-10 is not in {batches}, and {_CIFAR10_SOURCE} is not reachable; "
        f"put cifar-10-python.tar.gz into {folder}, name a folder with --data-dir, or use --data digits32"
    )


@lru_cache(maxsize=2)
def _is_reachable(host: str, minute: int) -> bool:
    """Tried at most once per minute, because the panel validates its Spec after every change."""
    try:
        socket.create_connection((host, 443), timeout=3).close()
    except OSError:
        return False
    return True


def _image_bytes(colours: int, side: int) -> Callable[[Mapping[str, Any]], int]:
    """Bytes of an image of 32-bit floats, and of its 64-bit label."""
    return lambda options: 4 * colours * side**2 + 8


def _window_bytes(options: Mapping[str, Any]) -> int:
    """Bytes of a window of text with a 64-bit integer per byte of text; inputs and targets share the memory."""
    return 8 * (options["context"] + 1)


DATA: dict[str, Data] = {
    row.name: row
    for row in (
        Data(
            "digits",
            "handwritten digits (scikit-learn: 1,797 images, augmented to 60,000)",
            60_000,
            360,
            _image_bytes(1, 28),
            _needs_scikit_learn,
        ),
        Data(
            "mnist",
            "MNIST (torchvision)",
            60_000,
            10_000,
            _image_bytes(1, 28),
            _mnist_missing,
            most=60_000,
            extra="mnist",
        ),
        Data("digits32", "handwritten digits as 3×32×32 images", 10_000, 360, _image_bytes(1, 32), _needs_scikit_learn),
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
                Option("size", "1M", "model size: number of parameters", choices=tuple(GPT_SIZES)),
                Option("context", 128, "context length in bytes", choices=(128, 256, 512, 1024, 2048, 4096)),
            ),
            constants=_gpt_constants,
            tensor_parts=lambda options: (GPT_SIZES[options["size"]][2], "heads"),
        ),
        Workload(
            "resnet18",
            "ResNet-18: torchvision's model with a 3×3 stem for small images",
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
