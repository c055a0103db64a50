"""Data sets that are downloaded, from generated files."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import struct

import numpy
import pytest
import torch

from labkit.plan.spec import Spec, SpecError, check_available
from labkit.setup import preflight
from labkit.training.workloads import (
    CIFAR10_FILES,
    MNIST_FILES,
)

# ---- MNIST, with generated files


def write_mnist(folder, train: int, test: int) -> None:
    """Files in MNIST's format: image i is filled with i % 256, and its label is i % 10."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in zip(MNIST_FILES, (train, train, test, test)):
        if "images" in name:
            pixels = b"".join(bytes([index % 256]) * 784 for index in range(count))
            (raw / name).write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels)
        else:
            (raw / name).write_bytes(struct.pack(">II", 2049, count) + bytes(index % 10 for index in range(count)))


@pytest.fixture
def mnist(tmp_path, monkeypatch, torchvision):
    write_mnist(tmp_path, train=50, test=20)
    module = importlib.import_module("labkit.training.workloads.mnist")
    monkeypatch.setattr(module, "DATA_DIR", str(tmp_path))
    return module


def test_mnist_is_read_from_its_folder(mnist, monkeypatch):
    train, test = mnist.load_data()
    assert (len(train), len(test)) == (50, 20)
    images, labels = train.tensors
    assert images.shape == (50, 1, 28, 28)
    assert images[7, 0, 3, 3].item() == pytest.approx(7 / 255)
    assert labels.tolist() == [index % 10 for index in range(50)]
    monkeypatch.setattr(mnist, "SAMPLES", 8)
    assert len(mnist.load_data()[0]) == 8


def test_mnist_is_downloaded_by_one_process_while_the_others_wait(mnist, monkeypatch):
    done = []
    real = mnist.MNIST

    def noted(folder, train=True, download=False):
        done.append("download" if download else "read")
        return real(folder, train=train)

    monkeypatch.setattr(mnist, "MNIST", noted)
    monkeypatch.setattr(mnist.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(mnist.dist, "barrier", lambda: done.append("barrier"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    mnist.load_data()
    assert done == ["download", "barrier", "read", "read"]
    done.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    mnist.load_data()
    assert done == ["barrier", "read", "read"]


# ---- CIFAR-10, with generated files


@pytest.fixture
def cifar10(tmp_path, monkeypatch, torchvision):
    """The module, and a folder in CIFAR's format: the channels of image i are i, i + 1 and i + 2, and its label is i %
    10."""
    module = importlib.import_module("labkit.training.workloads.cifar10")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    sums = {}
    for name in CIFAR10_FILES:
        first = int(name[-1]) * 4 - 4 if name[-1].isdigit() else 0
        rows = [
            numpy.repeat(numpy.arange(index, index + 3, dtype=numpy.uint8), 1024) for index in range(first, first + 4)
        ]
        content = {"data": numpy.stack(rows), "labels": [index % 10 for index in range(first, first + 4)]}
        written = pickle.dumps({"label_names": list("abcdefghij")} if name == "batches.meta" else content)
        (folder / name).write_bytes(written)
        sums[name] = hashlib.md5(written).hexdigest()
    monkeypatch.setattr(module.CIFAR10, "train_list", [[name, sums[name]] for name in CIFAR10_FILES[:5]])
    monkeypatch.setattr(module.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(module.CIFAR10, "meta", module.CIFAR10.meta | {"md5": sums["batches.meta"]})
    monkeypatch.setattr(module, "DATA_DIR", str(tmp_path))
    return module


def test_cifar10_is_read_from_its_folder(cifar10, monkeypatch):
    train, test = cifar10.load_data()
    assert (len(train), len(test)) == (20, 4)
    images, labels = train.tensors
    assert (images.shape, images.dtype, images.is_contiguous()) == ((20, 3, 32, 32), torch.float32, True)
    assert images[7, :, 5, 9].tolist() == pytest.approx([7 / 255, 8 / 255, 9 / 255])
    assert labels.tolist() == [index % 10 for index in range(20)]
    monkeypatch.setattr(cifar10, "SAMPLES", 6)
    assert len(cifar10.load_data()[0]) == 6


def test_cifar10_is_downloaded_by_one_process_while_the_others_wait(cifar10, monkeypatch):
    done, real = [], cifar10.CIFAR10

    def noted(folder, train=True, download=False):
        done.append("download" if download else "read")
        return real(folder, train=train)

    monkeypatch.setattr(cifar10, "CIFAR10", noted)
    monkeypatch.setattr(cifar10.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cifar10.dist, "barrier", lambda: done.append("barrier"))
    for rank, expected in ((0, ["download", "barrier", "read", "read"]), (1, ["barrier", "read", "read"])):
        done.clear()
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        cifar10.load_data()
        assert done == expected


def test_cifar10_that_is_not_available(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no network here")

    monkeypatch.setattr(preflight.socket, "create_connection", no_network)
    monkeypatch.setattr(preflight, "_not_loading", lambda name, package, needs: None)
    preflight.is_reachable.cache_clear()
    asked = Spec("single", "resnet18", data="cifar10", data_dir=str(tmp_path))
    with pytest.raises(SpecError) as refused:
        check_available(asked)
    sentence = str(refused.value)
    assert refused.value.field == "data"
    assert str(tmp_path) in sentence and "--data-dir" in sentence and "--data digits32" in sentence
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in CIFAR10_FILES:
        (tmp_path / "cifar-10-batches-py" / name).touch()
    check_available(asked)
