"""zero1, deepspeed, fsdp, and the options of ddp and fsdp2: refusals, and the effects of options."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from weaving import record

from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.setup.machine import Gpu, Machine
from labkit.training.strategies import base, ddp

CPU = Machine(gpus=(), cores=8, memory=2**34, torch=(2, 13))


def refusal(strategy: str, nproc: int = 2, **fields) -> str:
    with pytest.raises(SpecError) as error:
        Spec(strategy, "mlp", nproc=nproc, **fields).on(CPU)
    return str(error.value)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_ranks_that_are_not_divisible_by_replicas_are_refused(strategy):
    told = refusal(strategy, 4, options={"replicas": 3})
    assert told == "4 ranks are not divisible by replicas=3; use replicas=2, or --nproc 6"
    assert "2 ranks are not divisible by replicas=8; use replicas=2, or --nproc 8" in refusal(
        strategy, options={"replicas": 8}
    )
    assert Spec(strategy, "mlp", nproc=4, options={"replicas": 2})


def test_sharding_and_replicas_that_contradict_each_other_are_refused():
    assert "HYBRID_SHARD with replicas=1 is the same as FULL_SHARD; use replicas=2" in refusal(
        "fsdp", options={"sharding": "HYBRID_SHARD"}
    )
    told = refusal("fsdp", options={"sharding": "NO_SHARD", "replicas": 2})
    assert (
        told
        == "replicas=2 needs sharding=HYBRID_SHARD, got sharding=NO_SHARD; use sharding=HYBRID_SHARD, or replicas=1"
    )
    source = write_script(Spec("fsdp", "mlp", nproc=4, options={"replicas": 2}))
    assert 'SHARDING = "HYBRID_SHARD"' in source
    assert "REPLICAS = 2" in source


def test_cpu_offload_names_its_limits():
    assert "the state of CPU ranks is already there" in refusal("fsdp2", options={"cpu_offload": True})
    assert "clip_norm=0.5; use only one of the two" in refusal("fsdp2", options={"cpu_offload": True, "clip_norm": 0.5})
    assert "use --precision fp32 or bf16" in refusal("fsdp2", options={"cpu_offload": True}, precision="fp16")
    gpus = Machine(
        gpus=tuple(Gpu(index, "GPU", 2**34, (9, 0)) for index in range(2)), cores=8, memory=2**34, torch=(2, 13)
    )
    settled = Spec("fsdp2", "mlp", nproc=2, options={"cpu_offload": True}).on(gpus)
    assert "CPUOffloadPolicy()" in write_script(settled)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_static_graph_and_accumulation_contradict_each_other(strategy):
    assert "accumulate=4 delays it; use only one of the two" in refusal(
        strategy, options={"static_graph": True, "accumulate": 4}
    )


def test_deepspeed_says_what_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else found(name, *rest)
    )
    said = refusal("deepspeed")
    assert said.endswith("add it with: python3 -m labkit setup --with deepspeed, or use the strategy zero1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: True)
    assert "counts micro-batches itself" in refusal("deepspeed", options={"accumulate": 2})


@pytest.mark.parametrize("compression", ["fp16", "powersgd"])
def test_compressed_gradients_train_nearly_the_same_and_say_why(compression, tmp_path):
    spec = Spec(
        "ddp", "mlp", nproc=2, batch_size=16, steps=4, samples=128, device="cpu", options={"compression": compression}
    )
    assert spec.strategy_row.differs(spec).startswith(f"compression={compression}: gradients are")
    plain = Spec("ddp", "mlp", nproc=2, batch_size=16, steps=4, samples=128, device="cpu")
    assert plain.strategy_row.differs(plain) is None
    losses, exact = (
        record(one, tmp_path / name)[0]["losses"] for one, name in ((spec, "compressed"), (plain, "plain"))
    )
    assert losses[0] == exact[0]
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.05)


def test_ddp_synchronizes_gradients_only_in_the_last_micro_batch(monkeypatch):
    calls = []

    class Replica(nn.Linear):
        def no_sync(self):
            calls.append("no_sync")
            return base.nullcontext()

    monkeypatch.setattr(base, "ACCUMULATE", 3)
    monkeypatch.setattr(base, "gradient_sync", ddp.gradient_sync)
    model = Replica(4, 10)
    base.train_step(model, torch.optim.SGD(model.parameters()), torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    assert calls == ["no_sync"] * 2
    base.train_step(model, torch.optim.SGD(model.parameters()), torch.randn(1, 4), torch.zeros(1, dtype=torch.long))
    assert len(calls) == 2, "a batch with one micro-batch synchronizes"
    assert "model.no_sync()" in write_script(Spec("ddp", nproc=2, options={"accumulate": 3}))


def test_join_trains_on_every_sample_once_though_one_rank_has_a_batch_more(tmp_path):
    spec = Spec("ddp", "mlp", nproc=2, batch_size=24, epochs=2, samples=97, device="cpu", options={"join": True})
    first, second = record(spec, tmp_path / "run")
    assert (len(first["losses"]), len(second["losses"])) == (6, 4), "49 and 48 samples, 24 at a time, twice"
    assert first["evaluations"] == second["evaluations"]
    source = write_script(spec)
    assert "with model.join():" in source
    assert "join" not in write_script(Spec("ddp", "mlp", nproc=2))


@pytest.mark.parametrize(("other", "value"), [("static_graph", True), ("accumulate", 2), ("lr_decay", "cosine")])
def test_join_names_the_options_that_it_excludes(other, value):
    assert f"join does not work with {other}={value}; use only one of the two" in refusal(
        "ddp", options={"join": True, other: value}
    )


def test_powersgd_on_cpu_ranks_has_one_bucket_and_takes_no_other_size():
    # PowerSGD waits for collectives in gloo's threads: with two buckets, training stopped at step 3.
    settings = {"workload": "mlp", "options": {"compression": "powersgd"}}
    assert "BUCKET_MB = 65_536 " in write_script(Spec("ddp", nproc=2, device="cpu", **settings))  # MiB
    assert "bucket_cap_mb" not in write_script(Spec("ddp", nproc=2, device="cuda", **settings))
    options = {"compression": "powersgd", "bucket_mb": 5}
    assert "bucket_mb=5 does not work with compression=powersgd on CPU ranks" in refusal(
        "ddp", device="cpu", options=options
    )
    assert Spec("ddp", nproc=2, device="cuda", options=options).options["bucket_mb"] == 5


def test_precision_is_a_policy_of_fsdp2():
    source = write_script(Spec("fsdp2", "mlp", nproc=2, precision="bf16"))
    policy = "MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32, output_dtype=torch.float32)"
    assert policy in " ".join(source.split()).replace("( ", "(").replace(" )", ")")
    assert "DTYPE = torch.bfloat16 " in source
    assert "autocast" not in source
