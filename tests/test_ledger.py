"""The ledger: formulas compared with the traffic of real runs, to the byte, and the reasons for differences."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from labkit.analysis.ledger import CLOSE, Entry, ledger
from labkit.analysis.theory import TRAFFIC, theory
from labkit.plan.spec import Spec, SpecError
from labkit.record.state import RunState
from labkit.setup import preflight
from labkit.training.shapes import Module
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS
from labkit.training.workloads.models import GPT_SIZES

BATCH = {"cnn": 16, "mlp": 32, "gpt": 8, "resnet18": 8}
P = {name: 4 * WORKLOADS[name].parameters({"size": "1M", "context": 128}) for name in BATCH}  # bytes

# Bytes that all ranks sent in step 3 (or the one named) of runs on CPU ranks over gloo: strategy, workload, ranks, what
# else was asked for.
RECORDED: list[tuple[str, str, int, dict[str, Any], dict[str, float]]] = [
    ("ddp", "cnn", 2, {"batch_size": 128}, {"all_reduce": 3_247_184}),
    ("ddp", "cnn", 2, {"compression": "powersgd"}, {"all_reduce": 35_432}),
    ("ddp", "mlp", 2, {"batch_size": 128}, {"all_reduce": 5_357_648}),
    ("ddp", "mlp", 3, {"compression": "powersgd"}, {"all_reduce": 62_016}),
    ("ddp", "gpt", 2, {"batch_size": 16}, {"all_reduce": 8_588_288}),
    ("ddp", "gpt", 2, {"compression": "fp16"}, {"all_reduce": 4_294_144}),
    ("ddp", "gpt", 2, {"compression": "powersgd"}, {"all_reduce": 168_960}),
    ("ddp", "gpt", 2, {"accumulate": 4}, {"all_reduce": 8_588_288}),
    ("ddp", "gpt", 2, {"clip_norm": 1.0}, {"all_reduce": 8_588_288}),
    ("ddp", "gpt", 2, {"static_graph": True, "bucket_mb": 25}, {"broadcast": 348, "all_reduce": 8_588_288}),
    ("ddp", "gpt", 2, {"bucket_mb": 1}, {"all_reduce": 8_588_288}),
    ("ddp", "gpt", 2, {"precision": "bf16"}, {"all_reduce": 8_588_288}),
    ("ddp", "gpt", 2, {"compile": True}, {"all_reduce": 8_588_288}),
    (
        "ddp",
        "gpt",
        2,
        {"compression": "powersgd", "step": 2, "bucket_mb": 25},
        {"broadcast": 348, "all_reduce": 8_588_288},
    ),
    ("ddp", "gpt", 2, {"join": True, "samples": 20001}, {"all_reduce": 8_588_304}),
    ("ddp", "gpt", 2, {"bucket_mb": 1, "step": 2}, {"broadcast": 360, "all_reduce": 8_588_288}),
    ("ddp", "resnet18", 2, {}, {"broadcast": 38_560, "all_reduce": 89_391_696}),
    ("ddp", "resnet18", 2, {"bucket_mb": 25, "step": 2}, {"broadcast": 38_820, "all_reduce": 89_391_696}),
    ("ddp", "resnet18", 2, {"accumulate": 2}, {"broadcast": 38_560, "all_reduce": 89_391_696}),
    ("zero1", "cnn", 2, {"batch_size": 128}, {"all_reduce": 3_247_184, "broadcast": 1_623_592}),
    ("zero1", "mlp", 2, {"batch_size": 128}, {"all_reduce": 5_357_648, "broadcast": 2_678_824}),
    ("zero1", "mlp", 3, {}, {"all_reduce": 10_715_296, "broadcast": 5_357_648}),
    ("zero1", "gpt", 2, {}, {"all_reduce": 8_588_288, "broadcast": 4_294_144}),
    ("zero1", "gpt", 2, {"accumulate": 2}, {"all_reduce": 8_588_288, "broadcast": 4_294_144}),
    ("zero1", "gpt", 2, {"clip_norm": 1.0}, {"all_reduce": 8_588_288, "broadcast": 4_294_144}),
    ("zero1", "resnet18", 2, {}, {"broadcast": 44_734_408, "all_reduce": 89_391_696}),
    ("deepspeed", "cnn", 2, {"stage": 2}, {"all_gather": 1_623_600, "all_reduce": 3_247_192}),
    ("deepspeed", "cnn", 2, {"stage": 1, "batch_size": 128}, {"all_gather": 1_623_600, "all_reduce": 3_247_192}),
    ("deepspeed", "cnn", 2, {"stage": 3, "batch_size": 128}, {"all_gather": 1_623_592, "all_reduce": 3_247_200}),
    ("deepspeed", "mlp", 2, {"stage": 2}, {"all_gather": 2_678_832, "all_reduce": 5_357_656}),
    ("deepspeed", "mlp", 2, {"stage": 1, "batch_size": 128}, {"all_gather": 2_678_832, "all_reduce": 5_357_656}),
    ("deepspeed", "mlp", 2, {"stage": 3, "batch_size": 128}, {"all_gather": 2_678_824, "all_reduce": 5_357_664}),
    ("deepspeed", "mlp", 3, {"stage": 2}, {"all_gather": 5_357_664, "all_reduce": 10_715_312}),
    ("deepspeed", "mlp", 3, {"stage": 1}, {"all_gather": 5_357_664, "all_reduce": 10_715_312}),
    ("deepspeed", "mlp", 3, {"stage": 3}, {"all_gather": 5_357_712, "all_reduce": 10_715_456}),
    ("deepspeed", "gpt", 2, {"stage": 1}, {"all_gather": 4_294_144, "all_reduce": 8_588_296}),
    ("deepspeed", "gpt", 2, {"stage": 3}, {"all_gather": 4_294_144, "all_reduce": 8_588_304}),
    ("deepspeed", "gpt", 2, {"stage": 2}, {"all_gather": 4_294_144, "all_reduce": 8_588_296}),
    (
        "deepspeed",
        "gpt",
        2,
        {"stage": 3, "step": 2},
        {"all_gather": 4_294_144, "broadcast": 3_656, "all_reduce": 8_588_304},
    ),
    ("deepspeed", "gpt", 2, {"stage": 1, "clip_norm": 1.0}, {"all_gather": 4_294_144, "all_reduce": 8_588_296}),
    ("deepspeed", "gpt", 2, {"stage": 3, "clip_norm": 1.0}, {"all_gather": 4_294_144, "all_reduce": 8_588_304}),
    ("deepspeed", "gpt", 2, {"stage": 1, "precision": "bf16"}, {"all_gather": 4_294_144, "all_reduce": 4_502_024}),
    ("deepspeed", "gpt", 2, {"stage": 3, "precision": "bf16"}, {"all_gather": 4_294_144, "all_reduce": 4_502_032}),
    (
        "deepspeed",
        "gpt",
        2,
        {"size": "10M", "stage": 3, "batch_size": 2},
        {"all_gather": 43_573_248, "all_reduce": 87_146_512},
    ),
    ("deepspeed", "resnet18", 2, {"stage": 3}, {"all_gather": 44_695_848, "all_reduce": 89_391_712}),
    (
        "deepspeed",
        "resnet18",
        2,
        {"stage": 3, "step": 2},
        {"all_gather": 44_695_848, "broadcast": 3_192, "all_reduce": 89_391_712},
    ),
    ("fsdp", "cnn", 2, {"batch_size": 128}, {"all_gather": 3_238_696, "all_reduce": 3_247_184}),
    ("fsdp", "cnn", 2, {"checkpoint_activations": True}, {"all_gather": 4_853_800, "all_reduce": 3_247_184}),
    ("fsdp", "cnn", 3, {}, {"all_gather": 6_477_456, "all_reduce": 6_494_448}),
    ("fsdp", "mlp", 2, {"batch_size": 128}, {"all_gather": 5_337_128, "all_reduce": 5_357_648}),
    ("fsdp", "mlp", 2, {"checkpoint_activations": True}, {"all_gather": 7_995_432, "all_reduce": 5_357_648}),
    ("fsdp", "gpt", 2, {}, {"all_gather": 8_511_488, "all_reduce": 8_588_288}),
    ("fsdp", "gpt", 2, {"sharding": "SHARD_GRAD_OP"}, {"all_gather": 4_294_144, "all_reduce": 8_588_288}),
    ("fsdp", "gpt", 2, {"sharding": "NO_SHARD"}, {"all_reduce": 8_588_288}),
    ("fsdp", "gpt", 2, {"min_parameters": 1000000}, {"all_gather": 4_294_144, "all_reduce": 8_588_288}),
    ("fsdp", "gpt", 2, {"min_parameters": 1000}, {"all_gather": 8_577_024, "all_reduce": 8_588_288}),
    ("fsdp", "gpt", 2, {"accumulate": 2}, {"all_gather": 17_022_976, "all_reduce": 17_176_576}),
    ("fsdp", "gpt", 2, {"clip_norm": 1.0}, {"all_gather": 8_511_488, "all_reduce": 8_588_296}),
    ("fsdp", "gpt", 2, {"checkpoint_activations": True}, {"all_gather": 11_284_480, "all_reduce": 8_588_288}),
    ("fsdp", "gpt", 2, {"precision": "bf16"}, {"all_gather": 8_511_488, "all_reduce": 8_588_288}),
    (
        "fsdp",
        "gpt",
        2,
        {"checkpoint_activations": True, "min_parameters": 10000},
        {"all_gather": 11_350_016, "all_reduce": 8_588_288},
    ),
    (
        "fsdp",
        "gpt",
        2,
        {"checkpoint_activations": True, "min_parameters": 100000},
        {"all_gather": 8_259_584, "all_reduce": 8_588_288},
    ),
    (
        "fsdp",
        "gpt",
        2,
        {"checkpoint_activations": True, "sharding": "SHARD_GRAD_OP"},
        {"all_gather": 4_294_144, "all_reduce": 8_588_288},
    ),
    (
        "fsdp",
        "gpt",
        3,
        {"size": "10M", "checkpoint_activations": True, "batch_size": 2},
        {"all_gather": 231_770_112, "all_reduce": 174_292_992},
    ),
    ("fsdp", "gpt", 4, {"replicas": 2}, {"all_gather": 17_022_976, "all_reduce": 25_764_864}),
    ("fsdp", "gpt", 4, {"replicas": 2, "clip_norm": 1.0}, {"all_gather": 17_022_976, "all_reduce": 25_764_880}),
    ("fsdp", "resnet18", 2, {"checkpoint_activations": True}, {"all_gather": 133_890_344, "all_reduce": 89_391_696}),
    ("fsdp2", "cnn", 2, {"batch_size": 128}, {"all_gather": 3_247_184, "all_reduce": 3_247_184}),
    ("fsdp2", "cnn", 3, {}, {"all_gather": 6_568_608, "all_reduce": 6_568_608}),
    ("fsdp2", "mlp", 2, {"batch_size": 128}, {"all_gather": 5_357_648, "all_reduce": 5_357_648}),
    ("fsdp2", "mlp", 3, {}, {"all_gather": 10_752_480, "all_reduce": 10_752_480}),
    ("fsdp2", "gpt", 2, {}, {"all_gather": 8_588_288, "all_reduce": 8_588_288}),
    ("fsdp2", "gpt", 2, {"reshard_after_forward": False}, {"all_gather": 4_294_144, "all_reduce": 8_588_288}),
    ("fsdp2", "gpt", 2, {"accumulate": 2}, {"all_gather": 17_176_576, "all_reduce": 17_176_576}),
    ("fsdp2", "gpt", 2, {"clip_norm": 1.0}, {"all_gather": 8_588_288, "all_reduce": 8_588_968}),
    ("fsdp2", "gpt", 2, {"checkpoint_activations": True}, {"all_gather": 8_588_288, "all_reduce": 8_588_288}),
    ("fsdp2", "gpt", 2, {"precision": "bf16"}, {"all_gather": 4_294_144, "all_reduce": 8_588_288}),
    ("fsdp2", "gpt", 2, {"prefetch": 1}, {"all_gather": 8_588_288, "all_reduce": 8_588_288}),
    ("fsdp2", "gpt", 2, {"compile": True}, {"all_gather": 8_588_288, "all_reduce": 8_588_288}),
    ("fsdp2", "gpt", 2, {"accumulate": 3, "batch_size": 7}, {"all_gather": 25_764_864, "all_reduce": 25_764_864}),
    ("fsdp2", "gpt", 4, {}, {"all_gather": 25_764_864, "all_reduce": 25_764_864}),
    ("fsdp2", "gpt", 4, {"replicas": 2}, {"all_gather": 17_176_576, "all_reduce": 25_764_864}),
    ("fsdp2", "gpt", 4, {"replicas": 2, "clip_norm": 1.0}, {"all_gather": 17_176_576, "all_reduce": 25_766_224}),
    ("fsdp2", "resnet18", 2, {}, {"all_gather": 89_391_696, "all_reduce": 89_391_696}),
    ("tp", "cnn", 2, {"batch_size": 128}, {"all_reduce": 1_189_888}),
    ("tp", "cnn", 2, {"precision": "bf16"}, {"all_reduce": 74_368}),
    ("tp", "cnn", 2, {"checkpoint_activations": True}, {"all_reduce": 148_736}),
    ("tp", "mlp", 2, {"batch_size": 128}, {"all_reduce": 524_288}),
    ("tp", "mlp", 2, {"clip_norm": 1.0}, {"all_reduce": 131_104}),
    ("tp", "mlp", 2, {"checkpoint_activations": True}, {"all_reduce": 262_144}),
    ("tp", "mlp", 2, {"precision": "bf16"}, {"all_reduce": 65_536}),
    ("tp", "gpt", 2, {}, {"all_reduce": 32_505_856, "all_gather": 1_048_576}),
    ("tp", "gpt", 2, {"sequence_parallel": True}, {"all_gather": 15_728_640, "all_reduce": 22_087_680}),
    ("tp", "gpt", 2, {"loss_parallel": True}, {"all_reduce": 32_530_432}),
    ("tp", "gpt", 2, {"accumulate": 2}, {"all_reduce": 32_505_856, "all_gather": 1_048_576}),
    ("tp", "gpt", 2, {"clip_norm": 1.0}, {"all_reduce": 32_506_344, "all_gather": 1_048_576}),
    ("tp", "gpt", 2, {"checkpoint_activations": True}, {"all_reduce": 37_748_736, "all_gather": 1_048_576}),
    ("tp", "gpt", 2, {"precision": "bf16"}, {"all_reduce": 27_262_976, "all_gather": 524_288}),
    (
        "tp",
        "gpt",
        2,
        {"loss_parallel": True, "sequence_parallel": True},
        {"all_gather": 14_680_064, "all_reduce": 22_112_256},
    ),
    (
        "tp",
        "gpt",
        2,
        {"sequence_parallel": True, "precision": "bf16"},
        {"all_gather": 9_437_184, "all_reduce": 16_844_800},
    ),
    (
        "tp",
        "gpt",
        2,
        {"sequence_parallel": True, "checkpoint_activations": True},
        {"all_gather": 20_971_520, "all_reduce": 27_330_560},
    ),
    ("tp", "gpt", 2, {"samples": 12, "step": 2}, {"all_reduce": 16_252_928, "all_gather": 524_288}),
    ("tp", "gpt", 2, {"size": "10M", "batch_size": 2}, {"all_reduce": 29_097_984, "all_gather": 262_144}),
    (
        "tp",
        "gpt",
        2,
        {"context": 256, "sequence_parallel": True, "clip_norm": 1.0},
        {"all_gather": 31_457_280, "all_reduce": 44_130_968},
    ),
    ("tp", "gpt", 4, {}, {"all_reduce": 97_517_568, "all_gather": 3_145_728}),
    ("tp", "gpt", 4, {"sequence_parallel": True}, {"all_gather": 47_185_920, "all_reduce": 66_263_040}),
    ("fsdp2_tp", "cnn", 4, {}, {"all_gather": 5_303_456, "all_reduce": 5_600_928}),
    ("fsdp2_tp", "cnn", 6, {"accumulate": 2}, {"all_gather": 21_576_384, "all_reduce": 22_022_592}),
    ("fsdp2_tp", "mlp", 4, {}, {"all_gather": 5_402_784, "all_reduce": 5_664_928}),
    ("fsdp2_tp", "mlp", 4, {"precision": "bf16"}, {"all_gather": 2_701_392, "all_reduce": 5_533_856}),
    ("fsdp2_tp", "gpt", 4, {}, {"all_gather": 11_111_424, "all_reduce": 74_025_984}),
    ("fsdp2_tp", "gpt", 4, {"sequence_parallel": True}, {"all_gather": 40_471_552, "all_reduce": 53_099_520}),
    ("fsdp2_tp", "gpt", 4, {"clip_norm": 1.0}, {"all_gather": 11_111_424, "all_reduce": 74_028_320}),
    ("fsdp2_tp", "gpt", 4, {"accumulate": 2}, {"all_gather": 20_125_696, "all_reduce": 83_040_256}),
    ("fsdp2_tp", "gpt", 4, {"reshard_after_forward": False}, {"all_gather": 6_604_288, "all_reduce": 74_025_984}),
    ("fsdp2_tp", "gpt", 4, {"tp_size": 1}, {"all_gather": 25_764_864, "all_reduce": 25_764_864}),
    ("fsdp2_tp", "gpt", 4, {"precision": "bf16"}, {"all_gather": 5_555_712, "all_reduce": 41_520_128}),
    ("fsdp2_tp", "gpt", 4, {"checkpoint_activations": True}, {"all_gather": 11_111_424, "all_reduce": 84_511_744}),
    (
        "fsdp2_tp",
        "gpt",
        4,
        {"sequence_parallel": True, "checkpoint_activations": True, "precision": "bf16"},
        {"all_gather": 25_478_656, "all_reduce": 36_299_776},
    ),
    ("pp", "cnn", 2, {"batch_size": 128}, {"send": 3_211_264}),
    ("pp", "cnn", 2, {"precision": "bf16"}, {"send": 200_704}),
    ("pp", "mlp", 2, {"batch_size": 128}, {"send": 524_288}),
    ("pp", "mlp", 2, {"precision": "bf16"}, {"send": 65_536}),
    ("pp", "gpt", 2, {}, {"send": 1_048_576}),
    ("pp", "gpt", 2, {"schedule": "Interleaved1F1B"}, {"send": 3_145_728}),
    ("pp", "gpt", 2, {"schedule": "InterleavedZeroBubble"}, {"send": 3_145_728}),
    ("pp", "gpt", 2, {"clip_norm": 1.0}, {"all_reduce": 8, "send": 1_048_576}),
    ("pp", "gpt", 2, {"precision": "bf16"}, {"send": 1_048_576}),
    ("pp", "gpt", 2, {"checkpoint_activations": True}, {"send": 1_048_576}),
    ("pp", "gpt", 2, {"schedule": "GPipe", "micro_batches": 2}, {"send": 1_048_576}),
    ("pp", "gpt", 4, {}, {"send": 3_145_728}),
    ("pp", "resnet18", 2, {"precision": "bf16"}, {"send": 1_048_576}),
    ("pp_ddp", "cnn", 4, {}, {"all_reduce": 3_247_264, "send": 802_816}),
    ("pp_ddp", "mlp", 4, {}, {"all_reduce": 5_357_696, "send": 262_144}),
    ("pp_ddp", "mlp", 6, {"pp_size": 2}, {"all_reduce": 10_715_392, "send": 393_216}),
    ("pp_ddp", "gpt", 4, {}, {"all_reduce": 8_588_968, "send": 2_097_152}),
    ("pp_ddp", "gpt", 4, {"schedule": "Interleaved1F1B"}, {"all_reduce": 8_588_968, "send": 6_291_456}),
    ("pp_ddp", "gpt", 4, {"clip_norm": 1.0}, {"all_reduce": 8_588_984, "send": 2_097_152}),
    ("pp_ddp", "gpt", 4, {"precision": "bf16"}, {"all_reduce": 8_588_968, "send": 2_097_152}),
    ("pp_ddp", "resnet18", 4, {}, {"all_reduce": 89_392_192, "send": 4_194_304}),
    ("pp_fsdp2_tp", "cnn", 8, {}, {"all_gather": 2_651_728, "all_reduce": 5_600_928, "send": 1_605_632}),
    ("pp_fsdp2_tp", "mlp", 8, {}, {"all_gather": 2_701_392, "all_reduce": 5_664_928, "send": 262_144}),
    (
        "pp_fsdp2_tp",
        "gpt",
        4,
        {"precision": "bf16"},
        {"all_reduce": 16_252_928, "send": 1_048_576, "all_gather": 524_288},
    ),
    (
        "pp_fsdp2_tp",
        "gpt",
        4,
        {"pp_size": 2, "tp_size": 1},
        {"all_gather": 4_294_144, "all_reduce": 8_588_288, "send": 2_097_152},
    ),
    ("pp_fsdp2_tp", "gpt", 8, {}, {"all_gather": 6_604_288, "all_reduce": 74_025_984, "send": 4_194_304}),
    (
        "pp_fsdp2_tp",
        "gpt",
        8,
        {"sequence_parallel": True},
        {"all_gather": 35_964_416, "all_reduce": 53_099_520, "send": 2_097_152},
    ),
    (
        "pp_fsdp2_tp",
        "gpt",
        8,
        {"clip_norm": 1.0},
        {"all_gather": 6_604_288, "all_reduce": 74_028_352, "send": 4_194_304},
    ),
    (
        "pp_fsdp2_tp",
        "gpt",
        8,
        {"sequence_parallel": True, "precision": "bf16"},
        {"all_gather": 17_982_208, "all_reduce": 31_079_424, "send": 1_048_576},
    ),
    ("cp", "gpt", 2, {}, {"all_gather": 5_242_880, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"accumulate": 2}, {"all_gather": 5_242_880, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"clip_norm": 1.0}, {"all_gather": 5_242_880, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"checkpoint_activations": True}, {"all_gather": 10_485_760, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"precision": "bf16"}, {"all_gather": 2_621_440, "all_reduce": 13_831_168}),
    (
        "cp",
        "gpt",
        2,
        {"checkpoint_activations": True, "precision": "bf16"},
        {"all_gather": 5_242_880, "all_reduce": 13_831_168},
    ),
    ("cp", "gpt", 4, {}, {"all_gather": 15_728_640, "all_reduce": 57_222_144}),
]


def spec(strategy: str, workload: str = "gpt", nproc: int | None = 2, **asked: Any) -> Spec:
    fields = {name: asked.pop(name) for name in ("batch_size", "precision", "samples") if name in asked}
    fields = {
        "batch_size": BATCH[workload],
        "precision": "fp32",
        "device": asked.pop("device", "cpu"),
        "steps": 3,
    } | fields
    return Spec(strategy, workload, nproc=nproc, options=asked, **fields)


def state(asked: Spec, sent: dict[str, float], step: int = 3, ranks: int | None = None, calls: int = 1) -> RunState:
    """A run in which every rank recorded an equal part of the total traffic."""
    folded = RunState()
    folded.apply({"kind": "spec", "t": 0.0, "spec": asked.to_json()})
    count = ranks or asked.processes
    for rank in range(count):
        ops = {op: {"calls": calls, "bytes": size, "sent": size / count} for op, size in sent.items()}
        folded.apply({"kind": "start", "t": 0.0, "rank": rank})
        folded.apply({"kind": "traffic", "t": 1.0, "rank": rank, "step": step, "ops": ops})
    return folded


def entries(*given: Any, **more: Any) -> dict[str, Entry]:
    return {entry.op: entry for entry in ledger(state(*given, **more))}


@pytest.mark.parametrize(("strategy", "workload", "nproc", "asked", "sent"), RECORDED)
def test_formula_and_reasons_give_what_was_measured(strategy, workload, nproc, asked, sent):
    asked = dict(asked)
    step = asked.pop("step", 3)
    demanded = Counter()
    for flow in theory(spec(strategy, workload, nproc, **asked), step):
        demanded[flow.op] += flow.theory + sum(size for size, _ in flow.extra)
    assert {op: size for op, size in demanded.items() if size} == pytest.approx(sent, rel=1e-3)
    for entry in entries(spec(strategy, workload, nproc, **asked), sent, step=step).values():
        apart = abs(entry.measured - entry.theory) > CLOSE * max(entry.measured, entry.theory)
        assert bool(entry.reason) == apart, entry
        assert "not explained" not in entry.reason


def test_every_strategy_was_held_against_a_run():
    assert all(row.traffic is not None for row in STRATEGIES.values())
    assert {name for row in STRATEGIES.values() for name in row.traffic} == TRAFFIC.keys()
    assert {row[0] for row in RECORDED} == STRATEGIES.keys() - {"single", "dp"}  # which have no process group


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_workload_has_its_flows_on_gpus_too(strategy, precision):
    for workload in WORKLOADS:
        try:
            asked = spec(
                strategy, workload, STRATEGIES[strategy].default_nproc or 2, device="cuda", precision=precision
            )
        except SpecError:
            continue  # what cannot run sends nothing
        for flow in theory(asked):
            assert flow.theory >= 0
            assert flow.theory or flow.extra
            assert not any("gloo" in why for _, why in flow.extra)


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
    folded.ranks[1].traffic["ops"]["all_reduce"]["calls"] = 4
    found = ledger(folded)
    assert [(entry.op, entry.calls) for entry in found] == [("all_reduce", 3.5), ("broadcast", 3.0)]


def test_a_script_of_ones_own_has_no_theory():
    own = Spec(script="train.py", nproc=2, device="cpu")
    assert ledger(state(own, {"all_reduce": 100.0}, ranks=2)) == (Entry("all_reduce", 1.0, 100.0, None, "", ""),)


def test_it_waits_for_every_rank():
    assert ledger(RunState()) == ()
    assert ledger(state(spec("ddp"), {"all_reduce": 100.0}, ranks=1)) == ()


def test_one_process_owes_nothing():
    assert ledger(state(spec("single", nproc=1), {})) == ()


def test_replicas_in_threads_are_counted_where_they_are_seen():
    folded = state(spec("dp", "mlp"), {})
    one = {"device": "cpu", "forward": 0.1, "cpu": 0.1, "samples": 32, "memory": 1}
    extra = {"outputs": 2 * 32 * 10 * 4, "gradients": P["mlp"]}
    folded.apply(
        {
            "kind": "replica",
            "t": 2.0,
            "rank": 0,
            "step": 3,
            "replicas": [one | {"replica": n} for n in (0, 1)],
            "extra": extra,
        }
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
    plain = [
        entry.to_json() for entry in ledger(state(spec("fsdp2_tp", nproc=4), {"all_reduce": 5.0, "all_gather": 7.0}))
    ]
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain[0]) == {"op", "calls", "measured", "theory", "formula", "reason"}


def loaded(workload: str):
    """The module of a workload; torchvision loads where its operators are known."""
    if workload == "resnet18":
        version, error = preflight.torchvision()
        if not version:
            pytest.skip(f"there is no torchvision here: {error}")
        if "torchvision::nms" in error:
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor d, Tensor s, float t) -> Tensor")
    return importlib.import_module(f"labkit.training.workloads.{workload}")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_tables_are_the_models(workload):
    module, asked = loaded(workload), spec("ddp", workload)
    model, blocks = torch.nn.Sequential(*module.build_blocks()), WORKLOADS[workload].blocks(asked.options)
    assert [table.parameters for table in blocks] == [
        tuple(tuple(p.shape) for p in block.parameters()) for block in model
    ]
    values = {"gpt": torch.zeros(3, 128, dtype=torch.long), "resnet18": torch.zeros(3, 3, 32, 32)}.get(
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
