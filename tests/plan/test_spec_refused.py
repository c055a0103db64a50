"""Spec: one clear sentence for every invalid value, on every machine and on a given one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import KAGGLE, LAPTOP, SERVER, refused

from labkit.plan.spec import Spec, SpecError
from labkit.setup import preflight
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import MNIST_FILES

# ---- refused on every machine


def test_unknown_names_list_the_valid_ones():
    sentence = refused("strategy", strategy="dpp")
    assert "'dpp'" in sentence
    assert all(name in sentence for name in STRATEGIES)
    assert "cnn, mlp, gpt, moe, resnet18" in refused("workload", workload="resnet")
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
        "; options: accumulate, clip_norm, warmup_steps, lr_decay, checkpoint_activations, compile, fetch, workers,"
        " pin_memory, non_blocking"
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
    "diloco": ({"save_every": 5}, "a checkpoint would hold one of the replicas; use ddp"),
    "ep": ({"workload": "moe", "nproc": 3}, "8 experts are not divisible by 3 ranks; use --nproc 2"),
    "cp": (
        {"workload": "gpt", "nproc": 3},
        "a context of 128 positions is not divisible into two chunks for each of 3 ranks; use --nproc 2",
    ),
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
