"""Spec: the arithmetic of batches and steps, and one clear sentence for every invalid value."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from labkit.plan.spec import Spec, SpecError
from labkit.setup import preflight
from labkit.setup.machine import Gpu, Machine
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import MNIST_FILES

GIB = 2**30
T4 = (Gpu(0, "Tesla T4", 15 * GIB, (7, 5)), Gpu(1, "Tesla T4", 15 * GIB, (7, 5)))
A100 = (Gpu(0, "NVIDIA A100", 80 * GIB, (8, 0)),)
LAPTOP = Machine(gpus=(), cores=2, memory=8 * GIB)
KAGGLE = Machine(gpus=T4, cores=4, memory=31 * GIB)
SERVER = Machine(gpus=A100, cores=64, memory=512 * GIB)


def refused(field: str, machine: Machine | None = None, **asked) -> str:
    """The sentence of the `SpecError` that a Spec raises."""
    with pytest.raises(SpecError) as caught:
        spec = Spec(**asked)
        if machine is not None:
            spec.on(machine)
    assert caught.value.field == field
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    assert len(sentence) < 300
    return sentence


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
    assert f"{steps:,} steps per epoch" in spec.batch_sentence


def test_total_steps_are_epochs_or_the_steps_asked_for():
    assert Spec("ddp", nproc=2, epochs=3).total_steps == 3 * 235
    assert Spec("ddp", nproc=2, steps=10).total_steps == 10
    assert Spec(script="train.py").total_steps is None


# ---- refused on every machine


def test_unknown_names_list_the_valid_ones():
    sentence = refused("strategy", strategy="dpp")
    assert "'dpp'" in sentence
    assert all(name in sentence for name in STRATEGIES)
    assert "cnn, mlp, gpt, resnet18" in refused("workload", workload="resnet")
    assert "digits" in refused("data", data="cifar")
    assert "fp32, tf32, bf16, fp16" in refused("precision", precision="fp8")
    assert "auto, cpu, cuda" in refused("device", device="tpu")
    assert "weak, strong" in refused("scaling", scaling="square")


def test_data_set_that_a_workload_cannot_train_on():
    sentence = refused("data", workload="gpt", data="digits")
    assert sentence == "gpt cannot train on 'digits'; use --data text"


@pytest.mark.parametrize("field", ["nproc", "batch_size", "epochs", "steps", "samples"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "2", True])
def test_counts_are_positive_integers(field, value):
    sentence = refused(field, **{field: value})
    assert sentence.startswith(f"--{field.replace('_', '-')} must be an integer from 1 to ")
    assert sentence.endswith(f", got {value!r}")


def test_seed_is_not_negative():
    assert Spec(seed=0).seed == 0
    assert refused("seed", seed=-1) == "--seed must be an integer from 0 to 9223372036854775807, got -1"


def test_global_batch_that_is_not_divisible_by_the_ranks():
    sentence = refused("batch_size", strategy="ddp", nproc=3, batch_size=128, scaling="strong")
    assert (
        sentence
        == "a global batch of 128 is not divisible by 3 ranks; use --batch-size 126 or 129, or --scaling weak for a"
        " batch size per rank"
    )
    assert "use --batch-size 4," in refused("batch_size", strategy="ddp", nproc=4, batch_size=3, scaling="strong")


def test_fewer_samples_than_ranks():
    assert (
        refused("samples", strategy="ddp", nproc=4, samples=3)
        == "3 samples are too few for 4 ranks; use --samples 4 or more, or at most 3 ranks"
    )


def test_more_samples_than_the_data_set_has():
    assert (
        refused("samples", data="mnist", samples=70_000)
        == "--samples 70000 exceeds the 60000 training samples of mnist; use --samples 60000"
    )
    assert Spec(data="digits", samples=70_000).train_samples == 70_000


def test_epochs_and_steps_together():
    assert refused("steps", epochs=2, steps=10) == "epochs (2) and steps (10) exclude each other; give one of them"


def test_single_on_several_devices():
    assert (
        refused("strategy", strategy="single", nproc=2)
        == "single trains on one device, got --nproc 2; use --nproc 1, or the strategy ddp"
    )


def test_unknown_options_and_invalid_values():
    sentence = refused("options", strategy="ddp", options={"buckets": 1})
    assert sentence.startswith("ddp with cnn has no option 'buckets'; options: bucket_mb")
    assert refused("options", strategy="single", options={"bucket_mb": 1}).endswith(
        "; options: accumulate, clip_norm, checkpoint_activations, compile, fetch, workers, pin_memory, non_blocking"
    )
    assert (
        refused("options", strategy="ddp", options={"bucket_mb": -1})
        == "option bucket_mb must be an integer from 0 to 65536, got -1"
    )
    assert "true or false" in refused("options", strategy="fsdp2", options={"reshard_after_forward": "perhaps"})
    assert "one of 1M, 10M" in refused("options", workload="gpt", options={"size": "2M"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "ddp"),
        ("workload", "cnn"),
        ("data", "digits"),
        ("batch_size", 8),
        ("epochs", 1),
        ("steps", 5),
        ("samples", 9),
    ],
)
def test_strategy_settings_do_not_apply_to_a_user_script(field, value):
    sentence = refused(field, script="train.py", **{field: value})
    assert "train.py" in sentence
    assert "after --" in sentence


# ---- refused on a given machine


def test_cuda_without_a_gpu():
    assert (
        refused("device", LAPTOP, device="cuda")
        == "--device cuda is not available: this machine has no GPU; use --device cpu"
    )


def test_more_ranks_than_gpus():
    assert (
        refused("nproc", KAGGLE, nproc=4)
        == "--nproc 4 exceeds the 2 GPUs of this machine; use --nproc 2, or --device cpu for CPU ranks"
    )
    assert "exceeds the 1 GPU of" in refused("nproc", SERVER, nproc=2, device="cuda")


def test_too_many_cpu_ranks():
    sentence = refused("nproc", LAPTOP, nproc=100)
    assert sentence == "--nproc 100 exceeds the maximum of 8 CPU ranks for 2 cores; use --nproc 8"
    assert Spec("ddp", nproc=8).on(LAPTOP).nproc == 8


def test_bf16_on_a_t4():
    sentence = refused("precision", KAGGLE, precision="bf16")
    assert (
        sentence
        == "--precision bf16 needs a GPU of compute capability 8.0 or newer, and Tesla T4 has 7.5; use --precision fp16"
    )
    assert Spec(precision="fp16").on(KAGGLE).precision == "fp16"
    assert Spec(precision="bf16").on(SERVER).precision == "bf16"
    assert Spec(precision="bf16", device="cpu").on(KAGGLE).precision == "bf16"


def test_fp16_on_cpu_ranks():
    assert refused("precision", LAPTOP, precision="fp16").endswith("use --precision fp32 or bf16")


def test_global_batch_is_checked_once_the_ranks_are_known():
    open_ranks = {"strategy": "ddp", "batch_size": 129, "scaling": "strong"}
    assert Spec(**open_ranks).nproc is None
    assert "is not divisible by 2 ranks" in refused("batch_size", LAPTOP, **open_ranks)


def test_mnist_that_is_not_available(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    monkeypatch.setattr(preflight, "_not_loading", lambda name, package, needs: None)

    def no_network(*args, **kwargs):
        raise OSError("no network here")

    monkeypatch.setattr("labkit.setup.preflight.socket.create_connection", no_network)
    preflight.is_reachable.cache_clear()
    sentence = refused("data", LAPTOP, data="mnist", data_dir=str(tmp_path))
    assert str(tmp_path) in sentence
    assert "--data-dir" in sentence
    assert "--data digits" in sentence
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in MNIST_FILES:
        (raw / name).touch()
    assert Spec(data="mnist", data_dir=str(tmp_path)).on(LAPTOP).data == "mnist"


def test_fsdp2_on_cpu_ranks_with_an_old_torch():
    old = replace(LAPTOP, torch=(2, 6))
    sentence = refused("strategy", old, strategy="fsdp2")
    assert "torch 2.6" in sentence and "2.7" in sentence and "ddp" in sentence
    assert Spec("fsdp2").on(replace(LAPTOP, torch=(2, 13))).device == "cpu"
    assert Spec("ddp").on(old).nproc == 2


def test_data_whose_package_is_missing(monkeypatch):
    monkeypatch.setattr("labkit.setup.preflight.importlib.util.find_spec", lambda name: None)
    assert "python3 -m labkit setup" in refused("data", LAPTOP)
    assert "--data digits" in refused("data", LAPTOP, data="mnist")


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


# ---- every strategy's limit

LIMITS = {
    "single": ({"nproc": 2}, "use --nproc 1, or the strategy ddp"),
    "dp": ({"nproc": 1}, "use --nproc 2, or the strategy single"),
    "ddp": ({"options": {"static_graph": True, "accumulate": 2}}, "use only one of the two"),
    "zero1": ({"options": {"static_graph": True, "accumulate": 2}}, "use only one of the two"),
    "deepspeed": ({"options": {"accumulate": 2}}, "use zero1 or fsdp2"),
    "fsdp": ({"nproc": 4, "options": {"sharding": "HYBRID_SHARD", "replicas": 3}}, "use replicas=2, or --nproc 6"),
    "fsdp2": ({"nproc": 4, "options": {"replicas": 3}}, "use replicas=2, or --nproc 6"),
    "tp": ({"nproc": 3}, "128 units, which is not divisible by 3 tensor-parallel ranks; use --nproc 2"),
    "pp": (
        {"nproc": 6, "options": {"micro_batches": 8}},
        "cnn has 5 blocks, too few for the 6 stages of 1F1B on 6 ranks; use --nproc 5",
    ),
    "fsdp2_tp": ({"nproc": 3}, "3 ranks are not divisible by tp_size=2; use --nproc 2 or 4"),
    "pp_ddp": ({"nproc": 3}, "3 ranks are not divisible by pp_size=2; use --nproc 2 or 4"),
    "pp_fsdp2_tp": ({"nproc": 6}, "6 ranks are not divisible by pp_size=2 × tp_size=2; use --nproc 4 or 8"),
    "cp": ({"workload": "gpt", "nproc": 3}, "a context of 128 positions is not divisible by 3 ranks; use --nproc 2"),
}


def test_every_strategy_has_its_limit_tested():
    assert set(LIMITS) == set(STRATEGIES)


@pytest.mark.parametrize("strategy", LIMITS)
def test_a_limit_names_the_nearest_choice_that_works(strategy):
    fields, says = LIMITS[strategy]
    with pytest.raises(SpecError) as refused:
        Spec(strategy, **{"nproc": 2} | fields)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
