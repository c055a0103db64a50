"""The ledger's rules without a run: reasons, order, ranks that are missing; and tables that agree with the models."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from folded import apply
from ledgers import BATCH, entries, spec, state
from packages import import_torchvision

from labkit.analysis.ledger import Entry, ledger
from labkit.analysis.theory.formulas import theory
from labkit.plan.spec import Spec
from labkit.record.documents import plain
from labkit.record.state import RunState
from labkit.training.rows import Module
from labkit.training.workloads import GPT_SIZES, WORKLOADS

P = {name: 4 * WORKLOADS[name].parameters(spec("ddp", name).options) for name in BATCH}  # bytes


def test_textbook_figures_of_one_rank():
    def one(strategy, op, nproc=4, **asked):
        return (
            sum(flow.theory for flow in theory(spec(strategy, "gpt", nproc, device="cuda", **asked)) if flow.op == op)
            / nproc
        )

    vectors = 4 * BATCH["gpt"] * 128 * 128  # bytes
    assert one("ddp", "all_reduce") == 2 * 3 / 4 * P["gpt"]
    assert one("zero1", "broadcast") == 3 / 4 * P["gpt"]
    assert one("fsdp2", "all_gather") == 2 * 3 / 4 * P["gpt"]
    assert one("fsdp2", "reduce_scatter") == 3 / 4 * P["gpt"]
    assert one("fsdp2", "all_gather", precision="bf16") == 3 / 4 * P["gpt"]
    assert one("fsdp2", "all_reduce", replicas=2) == P["gpt"] / 2
    assert one("tp", "all_reduce") == 2 * 3 / 4 * vectors * 21
    assert one("pp", "send") == 2 * 3 / 4 * vectors
    assert one("cp", "all_gather") == 3 / 4 * 2 * 5 * vectors


def test_gloo_sends_a_reduce_scatter_twice_and_nccl_once():
    sent = {"all_gather": 2.0 * P["gpt"], "all_reduce": 2.0 * P["gpt"]}
    by_gloo = entries(spec("fsdp2"), sent)
    assert by_gloo["all_gather"] == Entry(
        "all_gather", 1.0, 2.0 * P["gpt"], 2.0 * P["gpt"], "2(n−1)/n · 4P per rank", ""
    )
    assert by_gloo["all_reduce"].theory == P["gpt"]
    assert by_gloo["all_reduce"].formula == "reduce-scatter (n−1)/n · 4P per rank"
    assert by_gloo["all_reduce"].reason == "+4.10 MiB: gloo implements reduce-scatter as an all-reduce"
    by_nccl = entries(spec("fsdp2", device="cuda"), {"all_gather": 2.0 * P["gpt"], "reduce_scatter": float(P["gpt"])})
    assert set(by_nccl) == {"all_gather", "reduce_scatter"}
    assert not any(entry.reason for entry in by_nccl.values())


def test_reasons_are_ordered_and_numbers_told():
    padded = entries(spec("fsdp2", "cnn", 3), {"all_gather": 6568608.0, "all_reduce": 6568608.0})
    assert (
        padded["all_gather"].reason
        == "+72.50 KiB: FSDP2 pads the rows of every parameter to a multiple of the number of shards"
    )
    once = entries(spec("deepspeed", stage=3), {"all_gather": float(P["gpt"]), "all_reduce": 2.0 * P["gpt"] + 16})
    why = "DeepSpeed keeps parameters gathered from forward to backward, so they are gathered only once"
    assert once["all_gather"].reason == f"−4.10 MiB: {why}"


def test_what_nothing_explains_is_said_with_its_size():
    found = entries(spec("ddp"), {"all_reduce": 2.0 * P["gpt"] + (1 << 20), "all_to_all": 512.0})
    assert found["all_reduce"].reason == "+1.00 MiB: not explained by the formulas"
    assert found["all_to_all"].theory == 0
    assert found["all_to_all"].formula == ""
    assert found["all_to_all"].reason == "+512 B: not explained by the formulas"
    missing = entries(spec("zero1"), {"all_reduce": 2.0 * P["gpt"]})["broadcast"]
    assert (missing.calls, missing.measured, missing.theory) == (0.0, 0.0, P["gpt"])
    assert missing.reason == "−4.10 MiB: not explained by the formulas"


def test_within_one_per_cent_needs_no_reason():
    near = entries(spec("ddp"), {"all_reduce": 2.019 * P["gpt"]})["all_reduce"]
    assert near.reason == ""
    assert entries(spec("ddp"), {"all_reduce": 2.021 * P["gpt"]})["all_reduce"].reason


def test_calls_are_the_mean_of_the_ranks_and_the_largest_comes_first():
    folded = state(spec("zero1"), {"broadcast": float(P["gpt"]), "all_reduce": 2.0 * P["gpt"]}, calls=3)
    folded.ranks[1].traffic.ops["all_reduce"].calls = 4
    found = ledger(folded)
    assert [(entry.op, entry.calls) for entry in found] == [("all_reduce", 3.5), ("broadcast", 3.0)]


def test_a_script_of_ones_own_has_no_theory():
    own = Spec(script="train.py", nproc=2, device="cpu")
    assert ledger(state(own, {"all_reduce": 100.0}, ranks=2)) == (Entry("all_reduce", 1.0, 100.0, None, "", ""),)


def test_it_waits_for_every_rank():
    assert ledger(RunState()) == ()
    assert ledger(state(spec("ddp"), {"all_reduce": 100.0}, ranks=1)) == ()


def test_some_ranks_of_ones_own_script_may_never_take_a_step():
    folded = state(Spec(script="train.py", nproc=4, device="cpu"), {"all_reduce": 100.0}, ranks=2)
    assert ledger(folded) == ()
    apply(folded, {"kind": "status", "t": 2.0, "status": {"state": "finished"}})
    assert ledger(folded) == (Entry("all_reduce", 1.0, 100.0, None, "", ""),)


def test_one_process_owes_nothing():
    assert ledger(state(spec("single", nproc=1), {})) == ()


def test_replicas_in_threads_are_counted_where_they_are_seen():
    folded = state(spec("dp", "mlp"), {})
    one = {"device": "cpu", "forward": 0.1, "cpu": 0.1, "samples": 32, "memory": 1}
    extra = {"outputs": 2 * 32 * 10 * 4, "gradients": P["mlp"]}
    apply(
        folded,
        {
            "kind": "replica",
            "t": 2.0,
            "rank": 0,
            "step": 3,
            "replicas": [one | {"replica": n} for n in (0, 1)],
            "extra": extra,
        },
    )
    found = {entry.op: entry for entry in ledger(folded)}
    assert {op: entry.theory for op, entry in found.items()} == {
        "reduce": P["mlp"],
        "broadcast": P["mlp"],
        "scatter": 32 * 784 * 4,
        "gather": 32 * 10 * 4,
    }
    assert {op for op, entry in found.items() if entry.measured == entry.theory and not entry.reason} == {
        "reduce",
        "gather",
    }
    assert found["broadcast"].reason == "−2.55 MiB: copies from device 0 within its process are not measured"


def test_an_epoch_ends_with_a_smaller_batch():
    short = spec("tp", samples=12)
    whole, rest = (sum(flow.theory for flow in theory(short, step) if flow.op == "all_gather") for step in (1, 2))
    assert rest == whole / 2


def test_entries_are_plain_values():
    rows = [
        plain(entry.recorded())
        for entry in ledger(state(spec("fsdp2_tp", nproc=4), {"all_reduce": 5.0, "all_gather": 7.0}))
    ]
    assert json.loads(json.dumps(rows)) == rows
    assert set(rows[0]) == {"op", "calls", "measured", "theory", "formula", "reason"}


def loaded(workload: str):
    """The module of a workload; torchvision loads where its operators are known."""
    if workload == "resnet18":
        import_torchvision()
    return importlib.import_module(f"labkit.training.workloads.{workload}")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_tables_are_the_models(workload):
    module, asked = loaded(workload), spec("ddp", workload)
    model, blocks = torch.nn.Sequential(*module.build_blocks()), WORKLOADS[workload].blocks(asked.options)
    assert [table.parameters for table in blocks] == [
        tuple(tuple(p.shape) for p in block.parameters()) for block in model
    ]
    tokens = torch.zeros(3, 128, dtype=torch.long)
    values = {"gpt": tokens, "moe": tokens, "resnet18": torch.zeros(3, 3, 32, 32)}.get(
        workload, torch.zeros(3, 1, 28, 28)
    )
    for (size, _), block in zip(WORKLOADS[workload].outputs(asked.options), model, strict=True):
        values = block(values)
        assert values[0].numel() == size
    multiplied = [each for each in model.modules() if isinstance(each, (torch.nn.Linear, torch.nn.Conv2d))]
    assert sum(block.multiplied for block in blocks) == sum(p.numel() for each in multiplied for p in each.parameters())


@pytest.mark.parametrize("workload", [name for name, row in WORKLOADS.items() if row.tensor_parts])
def test_layers_are_split_as_in_the_plans(workload):
    plans = importlib.import_module(f"labkit.training.workloads.{workload}").tensor_plans().values()
    styles = Counter(type(style).__name__ for plan in plans for style in plan.values())
    blocks = WORKLOADS[workload].blocks(spec("ddp", workload).options)
    cuts = Counter(module.cut for block in blocks for module in block.leaves)
    assert (cuts[0], cuts[1]) == (styles["ColwiseParallel"], styles["RowwiseParallel"])


@pytest.mark.parametrize("size", GPT_SIZES)
def test_sizes_of_transformers_are_those_of_the_workload(size):
    options = {"size": size, "context": 256}
    layers, width, _ = GPT_SIZES[size]  # 12·L·d² in the matrices of the layers; the rest: biases, norms, embeddings
    rest = layers * 13 * width + (256 + 256) * width + 2 * width + 256 * width
    assert WORKLOADS["gpt"].parameters(options) == 12 * layers * width**2 + rest


def test_a_part_of_a_layer():
    column, row = (Module(((8, 4), (8,)), cut=cut) for cut in (0, 1))
    assert column.part(2).parameters == ((4, 4), (4,))
    assert row.part(2).parameters == ((8, 2), (8,))
    assert Module(((8, 4),)).part(2).parameters == ((8, 4),)


def test_it_loads_no_torch():
    code = "import sys, labkit.analysis.ledger; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
