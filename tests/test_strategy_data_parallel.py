"""zero1, deepspeed, fsdp, and the options of ddp and fsdp2: what is refused and why, and that an option does what it says."""

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
def test_a_mesh_that_does_not_multiply_to_the_ranks_says_all_numbers(strategy):
    told = refusal(strategy, 4, options={"replicas": 3})
    assert told == "a mesh of 3 replicas × 1 shards has 3 ranks, and there are 4; use replicas=2, or --nproc 6"
    assert "8 replicas × 1 shards has 8 ranks, and there are 2; use replicas=2, or --nproc 8" in refusal(strategy, options={"replicas": 8})
    assert Spec(strategy, "mlp", nproc=4, options={"replicas": 2})


def test_sharding_and_replicas_that_contradict_each_other_are_refused():
    assert "HYBRID_SHARD with replicas=1 is FULL_SHARD; use replicas=2" in refusal("fsdp", options={"sharding": "HYBRID_SHARD"})
    told = refusal("fsdp", options={"sharding": "NO_SHARD", "replicas": 2})
    assert told == "replicas=2 goes with HYBRID_SHARD, and sharding is NO_SHARD; use sharding=HYBRID_SHARD, or replicas=1"
    source = write_script(Spec("fsdp", "mlp", nproc=4, options={"replicas": 2}))
    assert 'SHARDING = "HYBRID_SHARD"' in source
    assert "REPLICAS = 2" in source


def test_cpu_offload_says_what_it_cannot_do():
    assert "CPU ranks have it there already" in refusal("fsdp2", options={"cpu_offload": True})
    assert "clip_norm=0.5; leave one of the two out" in refusal("fsdp2", options={"cpu_offload": True, "clip_norm": 0.5})
    assert "use --precision bf16" in refusal("fsdp2", options={"cpu_offload": True}, precision="fp16")
    gpus = Machine(gpus=tuple(Gpu(index, "GPU", 2**34, (9, 0)) for index in range(2)), cores=8, memory=2**34, torch=(2, 13))
    settled = Spec("fsdp2", "mlp", nproc=2, options={"cpu_offload": True}).on(gpus)
    assert "CPUOffloadPolicy()" in write_script(settled)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_static_graph_and_accumulation_contradict_each_other(strategy):
    assert "accumulate=4 holds them back; leave one of the two out" in refusal(strategy, options={"static_graph": True, "accumulate": 4})


def test_deepspeed_says_what_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else found(name, *rest))
    assert refusal("deepspeed").endswith("is not installed; add it with: python3 -m labkit setup --with deepspeed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not on the PATH" in refusal("deepspeed")
    assert "counts micro-batches by itself" in refusal("deepspeed", options={"accumulate": 2})


@pytest.mark.parametrize("compression", ["fp16", "powersgd"])
def test_compressed_gradients_train_nearly_the_same_and_say_why(compression, tmp_path):
    spec = Spec("ddp", "mlp", nproc=2, batch_size=16, steps=4, samples=128, device="cpu", options={"compression": compression})
    assert spec.strategy_row.differs(spec).startswith(f"compression={compression}: gradients are")
    plain = Spec("ddp", "mlp", nproc=2, batch_size=16, steps=4, samples=128, device="cpu")
    assert plain.strategy_row.differs(plain) is None
    losses, exact = (record(one, tmp_path / name)[0]["losses"] for one, name in ((spec, "compressed"), (plain, "plain")))
    assert losses[0] == exact[0]
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.05)


def test_ddp_holds_gradients_back_until_the_last_part(monkeypatch):
    calls = []

    class Replica(nn.Linear):
        def no_sync(self):
            calls.append("held back")
            return base.nullcontext()

    monkeypatch.setattr(base, "ACCUMULATE", 3)
    monkeypatch.setattr(base, "exchange", ddp.exchange)
    model = Replica(4, 10)
    base.train_step(model, torch.optim.SGD(model.parameters()), torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    assert calls == ["held back"] * 2
    base.train_step(model, torch.optim.SGD(model.parameters()), torch.randn(1, 4), torch.zeros(1, dtype=torch.long))
    assert len(calls) == 2, "a batch that makes one part sends it"
    assert "model.no_sync()" in write_script(Spec("ddp", nproc=2, options={"accumulate": 3}))


def test_join_trains_on_every_sample_once_though_one_rank_has_a_batch_more(tmp_path):
    spec = Spec("ddp", "mlp", nproc=2, batch_size=24, epochs=2, samples=97, device="cpu", options={"join": True})
    first, second = record(spec, tmp_path / "run")
    assert (len(first["losses"]), len(second["losses"])) == (6, 4), "49 and 48 samples, 24 at a time, twice"
    assert first["evaluations"] == second["evaluations"]
    source = write_script(spec)
    assert "with model.join():" in source
    assert "join" not in write_script(Spec("ddp", "mlp", nproc=2))


@pytest.mark.parametrize(("other", "value"), [("static_graph", True), ("accumulate", 2)])
def test_join_says_what_it_does_not_go_with(other, value):
    assert f"{other}={value} forbids; leave one of the two out" in refusal("ddp", options={"join": True, other: value})


def test_precision_is_a_policy_of_fsdp2():
    source = write_script(Spec("fsdp2", "mlp", nproc=2, precision="bf16"))
    assert '"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32' in source
    assert "autocast" not in source
