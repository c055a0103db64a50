"""Spec: its defaults, the arithmetic of batches and steps, and its form as JSON."""

from __future__ import annotations

import json

import pytest
from machines import KAGGLE, LAPTOP, SERVER, refused

from labkit.plan.spec import Spec

# ---- defaults


def test_defaults_are_ddp_with_the_cnn_on_digits():
    spec = Spec()
    assert (spec.strategy, spec.workload, spec.data) == ("ddp", "cnn", "digits")
    assert (spec.batch_size, spec.epochs, spec.steps, spec.nproc) == (128, 1, None, None)
    assert spec.options["bucket_mb"] == 0
    common = {"accumulate": 1, "clip_norm": 0.0, "checkpoint_activations": False, "compile": False}
    assert spec.options.items() >= common.items()


def test_default_precision_depends_on_the_device():
    assert Spec("ddp").precision is None
    assert Spec("ddp").on(LAPTOP).precision == "fp32"
    assert Spec("ddp").on(KAGGLE).precision == "fp16", "a T4 is made for it"
    assert Spec("ddp").on(SERVER).precision == "fp32"
    assert Spec("ddp", precision="fp32").on(KAGGLE).precision == "fp32"
    assert Spec("fsdp2", options={"cpu_offload": True}).on(KAGGLE).precision == "fp32", "it cannot be scaled there"
    sentence = refused("precision", LAPTOP, precision="tf32")
    assert sentence == "--precision tf32 is not supported on CPU ranks, only on GPUs; use --precision fp32"
    assert "and Tesla T4 has 7.5; use --precision fp16" in refused("precision", KAGGLE, precision="tf32")


def test_a_compiler_is_missing(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    sentence = refused("options", LAPTOP, options={"compile": True})
    assert sentence.startswith("compile needs a C++ compiler, and no-such-compiler is not on the PATH; install it")


def test_single_has_one_process_and_gpt_its_own_batch():
    assert Spec("single").nproc == 1
    gpt = Spec("ddp", "gpt")
    assert (gpt.data, gpt.batch_size, gpt.options["size"]) == ("text", 16, "1M")


def test_options_are_read_from_text():
    assert Spec("ddp", options={"bucket_mb": "5"}).options["bucket_mb"] == 5
    assert Spec("fsdp2", options={"reshard_after_forward": "false"}).options["reshard_after_forward"] is False


@pytest.mark.parametrize(
    ("machine", "device", "nproc"),
    [(LAPTOP, "cpu", 2), (KAGGLE, "cuda", 2), (SERVER, "cuda", 1)],
)
def test_machine_determines_device_and_ranks(machine, device, nproc):
    spec = Spec("ddp").on(machine)
    assert (spec.device, spec.nproc) == (device, nproc)


def test_cpu_ranks_on_a_machine_with_gpus():
    spec = Spec("ddp", device="cpu", nproc=4).on(KAGGLE)
    assert (spec.device, spec.nproc) == ("cpu", 4)


# ---- arithmetic


@pytest.mark.parametrize(
    ("asked", "per_rank", "all_ranks", "steps"),
    [
        ({"strategy": "single"}, 128, 128, 469),
        ({"strategy": "ddp", "nproc": 2}, 128, 256, 235),
        ({"strategy": "ddp", "nproc": 2, "scaling": "strong"}, 64, 128, 469),
        ({"strategy": "fsdp2", "nproc": 4, "scaling": "strong", "batch_size": 256}, 64, 256, 235),
        ({"strategy": "ddp", "nproc": 3, "batch_size": 100, "samples": 1000}, 100, 300, 4),
        ({"strategy": "ddp", "nproc": 2, "batch_size": 100, "samples": 200}, 100, 200, 1),
        ({"strategy": "ddp", "nproc": 2, "batch_size": 128, "samples": 10}, 5, 10, 1),
    ],
)
def test_batches_and_steps(asked, per_rank, all_ranks, steps):
    spec = Spec(**asked)
    assert (spec.batch_per_rank, spec.global_batch, spec.steps_per_epoch) == (per_rank, all_ranks, steps)
    assert spec.total_steps == steps
    assert f"{per_rank} per rank" in spec.batch_sentence
    assert spec.batch_sentence.endswith(f" {steps:,} step per epoch" if steps == 1 else f" {steps:,} steps per epoch")


def test_total_steps_are_epochs_or_the_steps_asked_for():
    assert Spec("ddp", nproc=2, epochs=3).total_steps == 3 * 235
    assert Spec("ddp", nproc=2, steps=10).total_steps == 10
    assert Spec(script="train.py").total_steps is None


# ---- to and from JSON


def test_json_round_trip():
    spec = Spec("fsdp2", "gpt", nproc=2, steps=5, options={"size": "10M"}, seed=7)
    plain = json.loads(json.dumps(spec.to_json()))
    assert Spec.from_json(plain) == spec
    assert Spec.from_json(plain | {"of a later version": 1}) == spec


def test_a_spec_cannot_be_changed():
    spec = Spec()
    with pytest.raises(AttributeError):
        spec.nproc = 3
    with pytest.raises(TypeError):
        spec.options["bucket_mb"] = 1


def test_checkpoints_and_restarts():
    spec = Spec("ddp", nproc=2, save_every=10, max_restarts=2)
    assert (spec.save_every, spec.max_restarts, spec.resume) == (10, 2, None)
    assert refused("save_every", save_every=0) == "--save-every must be an integer from 1 to 1000000000, got 0"
    assert refused("max_restarts", max_restarts=-1) == "--max-restarts must be an integer from 0 to 1000, got -1"
    assert "there are no checkpoints in /nowhere" in refused("resume", LAPTOP, resume="/nowhere")
    assert "applies only to a strategy" in refused("save_every", script="train.py", save_every=3)
