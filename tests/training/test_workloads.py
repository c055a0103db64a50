"""Models and data sets: sizes, shapes and contents."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from places import SCRIPTS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from weaving import run_alone

from labkit.launch.job import draw_data
from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.setup import preflight
from labkit.setup.machine import Machine
from labkit.training.workloads import (
    DATA,
    GPT_SIZES,
    WORKLOADS,
    cnn,
    digits,
    gpt,
    mlp,
    text,
)
from labkit.training.workloads.draw_digits import draw_digits

BESIDE_CPU_TORCH = SCRIPTS / "beside_cpu_torch.py"

SIZES = {"M": 10**6, "B": 10**9}


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", WORKLOADS)
def test_table_counts_what_the_model_has(name, torchvision):
    row = WORKLOADS[name]
    with torch.device("meta"):
        model = torch.nn.Sequential(*importlib.import_module(row.module).build_blocks())
    assert parameters(model) == row.parameters({option.name: option.default for option in row.options})
    assert isinstance(model, torch.nn.Sequential), "a model is a sequence of blocks: FSDP2 and pipelines count on it"


INPUTS = {
    "gpt": lambda: torch.randint(256, (1, gpt.CONTEXT)),
    "moe": lambda: torch.randint(256, (1, gpt.CONTEXT)),
    "resnet18": lambda: torch.randn(1, 3, 32, 32),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_table_knows_what_each_block_costs(name, torchvision):
    row = WORKLOADS[name]
    model = torch.nn.Sequential(*importlib.import_module(row.module).build_blocks()).eval()
    values, counted = INPUTS.get(name, lambda: torch.randn(1, 1, 28, 28))(), []
    with sdpa_kernel(SDPBackend.MATH):  # the FLOP counter ignores the fused CPU kernel
        for block in model:
            with FlopCounterMode(display=False) as counter:
                values = block(values)
            counted.append(counter.get_total_flops())
    costs = row.costs({option.name: option.default for option in row.options})
    assert len(costs) == len(model) and min(costs) > 0
    assert all(cost == count for cost, count in zip(costs, counted) if count)
    assert sum(cost for cost, count in zip(costs, counted) if not count) < sum(counted) / 1000, (
        "what multiplies nothing costs next to nothing"
    )
    normalised = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert row.batch_norm == bool(normalised)


def test_resnet18_equals_torchvisions_except_for_the_stem(torchvision):
    from labkit.training.workloads import resnet18

    torch.manual_seed(0)
    ours, theirs = (
        torch.nn.Sequential(*resnet18.build_blocks()).eval(),
        importlib.import_module("torchvision.models").resnet18(num_classes=10).eval(),
    )
    stem, *blocks, head = ours
    theirs.conv1, theirs.bn1, theirs.maxpool, theirs.fc = stem[0], stem[1], torch.nn.Identity(), head[-1]
    layers = [*theirs.layer1, *theirs.layer2, *theirs.layer3, *theirs.layer4]
    for mine, other in zip(blocks, layers, strict=True):
        other.load_state_dict(mine.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images))
    assert stem(images).shape == (2, 64, 32, 32)
    assert ours(torch.zeros(0, 3, 32, 32)).shape == (0, 10)


def test_cnn_has_the_specified_layers():
    model = torch.nn.Sequential(*cnn.build_blocks())
    assert parameters(model) == 405_898
    convolutions = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [(layer.out_channels, layer.kernel_size) for layer in convolutions] == [
        (32, (5, 5)),
        (64, (5, 5)),
        (128, (5, 5)),
    ]


@pytest.mark.parametrize("module", [cnn, mlp])
def test_image_models_give_ten_logits(module):
    assert torch.nn.Sequential(*module.build_blocks())(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("size", GPT_SIZES)
def test_gpt_sizes_match_their_names(size, monkeypatch):
    with torch.device("meta"):
        for name, value in WORKLOADS["gpt"].constants({"size": size}).items():
            monkeypatch.setattr(gpt, name, value)
        model = torch.nn.Sequential(*gpt.build_blocks())
    count = parameters(model)
    assert count == WORKLOADS["gpt"].parameters({"size": size, "context": 128})
    assert count == pytest.approx(int(size[:-1]) * SIZES[size[-1]], rel=0.10)


def test_gpt_gives_a_logit_for_every_byte_and_does_not_look_ahead():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*gpt.build_blocks())
    tokens = torch.randint(256, (2, gpt.CONTEXT))
    logits = model(tokens)
    assert logits.shape == (2, gpt.CONTEXT, 256)
    assert torch.nn.functional.cross_entropy(logits.flatten(0, -2), tokens.flatten()).item() == pytest.approx(
        5.545, abs=0.2
    )  # ln 256
    later = tokens.clone()
    later[:, 64:] = 0
    torch.testing.assert_close(model(later)[:, :64], logits[:, :64])


def test_constants_of_the_same_name_agree():
    assert text.CONTEXT == gpt.CONTEXT
    assert WORKLOADS["gpt"].constants({"size": "1M"}) == {"LAYERS": gpt.LAYERS, "WIDTH": gpt.WIDTH, "HEADS": gpt.HEADS}


# ---- data


def read(samples: int, side: int = 28, channels: int = 1) -> tuple[TensorDataset, TensorDataset]:
    """What the ranks of a run load, after the lab has drawn the data."""
    name = {row.constants["SIDE"]: name for name, row in DATA.items() if row.drawn_by}[side]
    draw_data(Spec("single", "cnn" if side == 28 else "resnet18", data=name, samples=samples, nproc=1))
    with pytest.MonkeyPatch.context() as patch:
        values = {"SAMPLES": samples, "SIDE": side, "CHANNELS": channels}
        for constant, value in {**values, "DIGITS": f"{digits.CACHE}/labkit/digits-{side}.pt"}.items():
            patch.setattr(digits, constant, value)
        return digits.load_data()


def equal(one: TensorDataset, other: TensorDataset) -> bool:
    return all(map(torch.equal, one.tensors, other.tensors))


@pytest.fixture(scope="module")
def drawn() -> tuple[TensorDataset, TensorDataset]:
    return read(60_000)


def test_digits_are_as_many_as_the_table_says(drawn):
    train, test = drawn
    assert (len(train), len(test)) == (DATA["digits"].train, DATA["digits"].test)
    images, labels = train.tensors
    assert images.shape == (60_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert 0 <= images.min() <= images.max() <= 1.0001


def test_digits_are_the_same_each_time_and_as_many_as_asked(drawn):
    train, test = drawn
    images, labels, *rest = draw_digits(1, 28, 3000)
    few, its_test = read(3000)
    assert equal(few, TensorDataset(images, labels)) and equal(few, TensorDataset(*train[:3000]))
    assert equal(its_test, test) and equal(test, TensorDataset(*rest))


def test_digits_begin_with_the_real_ones_and_the_test_ones_stay_out(drawn):
    (images, labels), (_, test_labels) = (dataset.tensors for dataset in drawn)
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    pixels, classes = load_digits(return_X_y=True)
    assert labels[:1437].tolist() == classes[:1437].tolist()
    assert test_labels.tolist() == classes[1437:].tolist()
    means = images[:1437].mean((1, 2, 3)), torch.tensor(pixels[:1437]).float().mean(1) / 16
    torch.testing.assert_close(*means, atol=0.01, rtol=0.02)
    # each variant has the class of the training image that it is made from, and is closer to that image than to most
    # others
    assert torch.equal(labels, labels[:1437].repeat(42)[:60_000])
    variants, sources = images[1437:2874].flatten(1), images[:1437].flatten(1)
    distances = torch.cdist(variants, sources)
    ranks = (distances < distances.diagonal().unsqueeze(1)).sum(1)
    assert ranks.float().median() < 144
    assert (distances.diagonal() > 0.5).all(), "a variant is not the image itself"


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
def test_without_the_file_of_the_lab_the_originals_are_repeated(side, channels, monkeypatch):
    whole, test = read(2 * 1437, side, channels)
    for constant, value in {"SAMPLES": 2 * 1437, "SIDE": side, "CHANNELS": channels, "DIGITS": "/nowhere"}.items():
        monkeypatch.setattr(digits, constant, value)
    train, its_test = digits.load_data()
    assert len(train) == 2 * 1437 and equal(TensorDataset(*train[1437:]), TensorDataset(*train[:1437]))
    torch.testing.assert_close(train[:1437], whole[:1437])
    assert equal(its_test, test)


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


def test_digits32_are_the_digits_in_the_shape_of_cifar(drawn):
    train, test = (dataset.tensors for dataset in read(10_000, 32, 3))
    assert train[0].shape[1:] == test[0].shape[1:] == (3, 32, 32)
    assert torch.equal(train[0][:, 0], train[0][:, 2]) and train[0].stride(1) == 0, "the channels share their memory"
    plain, plain_test = (dataset.tensors for dataset in drawn)
    assert torch.equal(train[1][:1437], plain[1][:1437]) and torch.equal(test[1], plain_test[1])
    torch.testing.assert_close(train[0][:1437].mean((1, 2, 3)), plain[0][:1437].mean((1, 2, 3)), atol=0.01, rtol=0.02)


# ---- torchvision and torch


@pytest.fixture
def says(monkeypatch):
    """Fakes the error of importing torchvision, and counts the attempts."""
    asked = []

    def set_to(error):
        preflight._loaded.cache_clear()
        monkeypatch.setattr(preflight, "torchvision", lambda: asked.append(error) or ("0.28.0", error))
        return asked

    yield set_to
    preflight._loaded.cache_clear()


def test_torchvision_that_does_not_load_is_refused_before_a_run(torchvision, says):
    asked = says("RuntimeError: operator torchvision::nms does not exist")
    for fields in (
        {"workload": "resnet18"},
        {"workload": "cnn", "data": "mnist"},
        {"workload": "resnet18", "data": "cifar10"},
    ):
        with pytest.raises(SpecError) as refused:
            Spec("single", device="cpu", **fields).on(Machine.here())
        sentence = str(refused.value)
        assert refused.value.field == ("data" if fields["workload"] == "cnn" else "workload")
        assert "torchvision 0.28.0 does not load" in sentence and "built for a different torch" in sentence
        assert "from the same source, or use --" in sentence
    assert len(asked) == 1, "an import takes seconds, and the panel validates its Spec after every change"
    says("")
    assert Spec("single", "resnet18", device="cpu").on(Machine.here()).data == "digits32"


def test_torchvision_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    sentence = preflight.installed("resnet18", WORKLOADS["resnet18"].needs)
    assert "setup --with mnist" in sentence and "--workload cnn" in sentence


def test_resnet18_trains_under_torchrun(torchvision, tmp_path):
    spec = Spec("single", "resnet18", batch_size=4, steps=4, samples=16)
    source = (
        write_script(spec).replace("images[1437:]", "images[1777:]").replace("labels[1437:]", "labels[1777:]")
    )  # a shorter evaluation
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    said = run_alone([sys.executable, str(BESIDE_CPU_TORCH), "train.py"], tmp_path).splitlines()
    assert [line.partition(":")[0] for line in said] == [*(f"step {n}" for n in (1, 2, 3, 4)), "epoch 1"]


def test_no_default_imports_torchvision():
    modules = ("workloads.digits", "workloads.text", "strategies.base")
    code = (
        f"import sys, {', '.join(f'labkit.training.{name}' for name in modules)}; print('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
