"""Models and data sets as they stand: their counts, shapes, and what is in them."""

from __future__ import annotations

import importlib
import struct
import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from labkit import preflight
from labkit.workloads import DATA, GPT_SIZES, MNIST_FILES, WORKLOADS, cnn, digits, gpt, gpt_parameters, mlp, text

SIZES = {"M": 10**6, "B": 10**9}


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", WORKLOADS)
def test_table_counts_what_the_model_has(name):
    row = WORKLOADS[name]
    with torch.device("meta"):
        model = importlib.import_module(row.module).build_model()
    assert parameters(model) == row.parameters({option.name: option.default for option in row.options})
    assert isinstance(model, torch.nn.Sequential), "a model is a sequence of blocks: FSDP2 and pipelines count on it"


def test_cnn_is_the_one_that_was_asked_for():
    model = cnn.build_model()
    assert parameters(model) == 405_898
    convolutions = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [(layer.out_channels, layer.kernel_size) for layer in convolutions] == [(32, (5, 5)), (64, (5, 5)), (128, (5, 5))]


@pytest.mark.parametrize("module", [cnn, mlp])
def test_image_models_give_ten_logits(module):
    assert module.build_model()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("size", GPT_SIZES)
def test_gpt_sizes_are_true_to_their_names(size):
    with torch.device("meta"):
        model = gpt.GPT(*GPT_SIZES[size])
    count = parameters(model)
    assert count == gpt_parameters({"size": size})
    assert count == pytest.approx(int(size[:-1]) * SIZES[size[-1]], rel=0.10)


def test_gpt_gives_a_logit_for_every_byte_and_does_not_look_ahead():
    torch.manual_seed(0)
    model = gpt.build_model()
    tokens = torch.randint(256, (2, gpt.CONTEXT))
    logits = model(tokens)
    assert logits.shape == (2, gpt.CONTEXT, 256)
    assert torch.nn.functional.cross_entropy(logits.flatten(0, -2), tokens.flatten()).item() == pytest.approx(5.545, abs=0.2)  # ln 256
    later = tokens.clone()
    later[:, 64:] = 0
    torch.testing.assert_close(model(later)[:, :64], logits[:, :64])


def test_constants_of_the_same_name_agree():
    assert text.CONTEXT == gpt.CONTEXT
    assert WORKLOADS["gpt"].constants({"size": "1M"}) == {"LAYERS": gpt.LAYERS, "WIDTH": gpt.WIDTH, "HEADS": gpt.HEADS}


# ---- data


@pytest.fixture(scope="module")
def drawn() -> tuple[TensorDataset, TensorDataset]:
    return digits.load_data()


def test_digits_are_as_many_as_the_table_says(drawn):
    train, test = drawn
    assert (len(train), len(test)) == (DATA["digits"].train, DATA["digits"].test)
    images, labels = train.tensors
    assert images.shape == (60_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert 0 <= images.min() <= images.max() <= 1.0001


def test_digits_are_the_same_each_time_and_as_many_as_asked(drawn, monkeypatch):
    monkeypatch.setattr(digits, "SAMPLES", 3000)
    (once, _), (again, _) = digits.load_data(), digits.load_data()
    assert len(once) == 3000
    assert torch.equal(once.tensors[0], again.tensors[0])
    monkeypatch.setattr(digits, "SAMPLES", 100)
    few, test = digits.load_data()
    assert (len(few), len(test)) == (100, 360)
    torch.testing.assert_close(few.tensors[0], drawn[0].tensors[0][:100])


def test_digits_begin_with_the_real_ones_and_the_test_ones_stay_out(drawn):
    (images, labels), (_, test_labels) = (dataset.tensors for dataset in drawn)
    pixels, classes = load_digits(return_X_y=True)
    assert labels[:1437].tolist() == classes[:1437].tolist()
    assert test_labels.tolist() == classes[1437:].tolist()
    means = images[:1437].mean((1, 2, 3)), torch.tensor(pixels[:1437]).float().mean(1) / 16
    torch.testing.assert_close(*means, atol=0.01, rtol=0.02)
    # every variant is made of a training image: its class is that image's, and it is nearer to that one than to most others
    assert torch.equal(labels, labels[:1437].repeat(42)[:60_000])
    variants, sources = images[1437:2874].flatten(1), images[:1437].flatten(1)
    distances = torch.cdist(variants, sources)
    ranks = (distances < distances.diagonal().unsqueeze(1)).sum(1)
    assert ranks.float().median() < 144
    assert (distances.diagonal() > 0.5).all(), "a variant is not the image itself"


def test_text_windows_are_one_byte_apart_and_apart_from_the_test():
    train, test = text.load_data()
    assert (len(train), len(test)) == (DATA["text"].train, DATA["text"].test)
    inputs, targets = train.tensors
    assert inputs.shape == targets.shape == (20_000, 128)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    whole = "\n".join(text.topics[name] for name in sorted(text.topics)).encode()
    assert bytes(inputs[0].tolist()) == whole[:128]
    assert bytes(test.tensors[1][-1].tolist()) == whole[-128:]
    assert bytes(inputs[-1].tolist()) in whole[: len(whole) * 9 // 10]


def test_text_has_as_many_windows_as_asked(monkeypatch):
    monkeypatch.setattr(text, "SAMPLES", 50)
    assert len(text.load_data()[0]) == 50


# ---- MNIST, on files of our own


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
def mnist(tmp_path, monkeypatch):
    version, error = preflight.torchvision()
    if not version:
        pytest.skip(f"there is no torchvision here: {error}")
    if "torchvision::nms" in error:  # built for CUDA, it loads beside torch for the CPU only where its operators are known
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor d, Tensor s, float t) -> Tensor")
    write_mnist(tmp_path, train=50, test=20)
    module = importlib.import_module("labkit.workloads.mnist")
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


def test_no_default_imports_torchvision():
    code = "import sys, labkit.workloads.digits, labkit.workloads.text, labkit.strategies.base; print('torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
