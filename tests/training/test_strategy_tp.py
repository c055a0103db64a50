"""tp, fsdp2_tp and cp: refusals with all numbers, and the correctness of what is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from weaving import record

from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.training.strategies import cp, tp
from labkit.training.workloads import WORKLOADS


def refusal(strategy: str, workload: str = "gpt", **fields) -> str:
    with pytest.raises(SpecError) as error:
        Spec(strategy, workload, **fields)
    return str(error.value)


def test_heads_that_are_not_divisible_by_the_ranks_are_refused_with_a_number_that_works():
    told = refusal("tp", nproc=8, options={"size": "100M"})
    assert told == "gpt has 12 heads, which is not divisible by 8 tensor-parallel ranks; use --nproc 6"
    assert Spec("tp", "gpt", nproc=6, options={"size": "100M"})
    assert refusal("fsdp2_tp", nproc=6, options={"tp_size": 3}).endswith(
        "4 heads, which is not divisible by 3 tensor-parallel ranks; use tp_size=2"
    )
    assert "128 units, which is not divisible by 3 tensor-parallel ranks" in refusal("tp", "cnn", nproc=3)
    sequence = refusal("tp", nproc=6, options={"size": "10M", "sequence_parallel": True})
    assert sequence == "gpt has 128 positions, which is not divisible by 6 tensor-parallel ranks; use --nproc 2"


def test_workloads_without_a_plan_or_a_sequence_are_refused():
    assert "there is no tensor-parallel plan for resnet18" in refusal("tp", "resnet18", nproc=2)
    assert "sequence_parallel needs a sequence dimension, and cnn has none" in refusal(
        "tp", "cnn", nproc=2, options={"sequence_parallel": True}
    )
    assert "loss_parallel needs a sequence dimension, and mlp has none" in refusal(
        "tp", "mlp", nproc=2, options={"loss_parallel": True}
    )
    assert "cp splits the sequence dimension, and cnn has none" in refusal("cp", "cnn", nproc=2)


def test_ranks_that_form_no_mesh_are_refused():
    assert refusal("fsdp2_tp", nproc=5) == "5 ranks are not divisible by tp_size=2; use --nproc 4 or 6"
    assert (
        refusal("fsdp2_tp", nproc=2, options={"tp_size": 4}) == "2 ranks are not divisible by tp_size=4; use --nproc 4"
    )
    assert (
        refusal("cp", nproc=3)
        == "a context of 128 positions is not divisible into two chunks for each of 3 ranks; use --nproc 2"
    )


@pytest.mark.parametrize("strategy", ["tp", "fsdp2_tp"])
def test_fp16_is_refused_and_not_the_default_of_a_t4(strategy):
    assert "gradients together; use --precision bf16 or fp32" in refusal(strategy, nproc=4, precision="fp16")


def test_every_plan_names_parts_of_the_model():
    for row in (row for row in WORKLOADS.values() if row.tensor_parts):
        module = __import__(row.module, fromlist=["build_blocks"])
        model = nn.Sequential(*module.build_blocks())
        for block, plan in module.tensor_plans().items():
            for part in plan:
                model.get_submodule(f"{block}.{part}".rstrip("."))


def test_gradients_are_clipped_by_the_norm_over_all_ranks(monkeypatch):
    monkeypatch.setattr(tp, "CLIP_NORM", 0.5)
    model, same = nn.Linear(3, 2), nn.Linear(3, 2)
    for one in (model, same):
        for number, parameter in enumerate(one.parameters(), 1):
            parameter.grad = torch.full_like(parameter, number)
    tp.clip_gradients(model)
    nn.utils.clip_grad_norm_(same.parameters(), 0.5)
    assert all(torch.equal(mine.grad, its.grad) for mine, its in zip(model.parameters(), same.parameters()))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_attention_of_a_chunk_equals_attention_of_the_whole_window(monkeypatch, rank):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 16, 8)  # batch, heads, positions, head width
    whole = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    monkeypatch.setattr(cp, "CONTEXT", 16)
    monkeypatch.setattr(cp.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(cp.dist, "get_world_size", lambda: 4)
    order, own = cp.whole_window(torch.device("cpu")), cp.positions_of(rank)
    gathered = iter([key[:, :, order], value[:, :, order]])
    monkeypatch.setattr(cp.AllGather, "apply", lambda chunk: next(gathered))
    attended = cp.attend(query[:, :, own], key[:, :, own], value[:, :, own])
    torch.testing.assert_close(attended, whole[:, :, own])
    assert own.sum() == 4 * 15 / 2, "every rank has the same number of earlier positions"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_chunks_of_a_window_are_the_window(monkeypatch, ranks):
    from labkit.training.workloads import text

    data = torch.arange(1000)
    inputs, targets = text.sequences(data, 7).tensors
    monkeypatch.setattr(cp.dist, "get_world_size", lambda: ranks)
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(cp.dist, "get_rank", lambda rank=rank: rank)
        parts.append(cp.sequences(data, 7).tensors)
        assert torch.equal(inputs[:, cp.positions(parts[-1][0])], parts[-1][0])
    order = cp.whole_window(inputs.device).argsort()
    assert torch.equal(torch.cat([part[0] for part in parts], 1)[:, order], inputs)
    assert torch.equal(torch.cat([part[1] for part in parts], 1)[:, order], targets)


@pytest.mark.parametrize("strategy", ["tp", "fsdp2_tp"])
def test_bf16_trains_what_is_split(strategy, tmp_path):
    nproc = 2 if strategy == "tp" else 4
    spec = Spec(strategy, "mlp", nproc=nproc, batch_size=16, steps=2, samples=64, precision="bf16", device="cpu")
    losses = record(spec, tmp_path / "run")[0]["losses"]
    assert losses == pytest.approx([2.3, 2.3], abs=0.3)


def test_the_script_shows_the_order():
    source = write_script(Spec("fsdp2_tp", "gpt", nproc=4, options={"checkpoint_activations": True}))
    body = source[source.index("def parallelize") :]
    assert body.index("parallelize_module(") < body.index("transform(") < body.index("fully_shard(")
    assert "PrepareModuleInput" not in source, "sequence parallelism was not asked for"
    assert "SequenceParallel()" in write_script(Spec("tp", "gpt", nproc=2, options={"sequence_parallel": True}))
