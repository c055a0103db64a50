"""Training for real: scripts as they were written out, run outside of the lab, against one process with the same global
batch and seed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from weaving import TORCHRUN, record, run_alone

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.training.strategies import STRATEGIES, base, fsdp2_tp
from labkit.training.workloads import WORKLOADS, cnn, gpt, mlp

BATCH = 48  # of all ranks together


@dataclass(frozen=True)
class Case:
    """A strategy that is compared with one process: on how many devices, with what, and how near its losses must be."""

    strategy: str
    nproc: int = 2
    workload: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    relative: float = 1e-5
    slow: bool = False  # left to the slow tier: the same code paths are in another case

    def __str__(self) -> str:
        return "-".join(
            [
                f"{self.strategy}-x{self.nproc}",
                self.workload,
                *(f"{name}={value}" for name, value in self.options.items()),
            ]
        )


SHORT = {"batch_size": 8, "samples": 20}  # of gpt: the third step has half a batch
UPDATE = {"clip_norm": 0.5, "warmup_steps": 2, "lr_decay": "linear"}
# Every strategy of the table, alone and with the options that could change what is computed.
EQUAL = (
    Case("single", 1, options={"accumulate": 3}),
    Case("single", 1, options={"checkpoint_activations": True, "compile": True}),
    Case("single", 1, options={"fetch": "batches", "workers": 1, "pin_memory": False, "non_blocking": False}),
    Case("ddp", workload="cnn"),
    Case("ddp", options={"accumulate": 2, "checkpoint_activations": True} | UPDATE),
    Case("ddp", options={"static_graph": True, "checkpoint_activations": True, "bucket_mb": 1}),
    Case("zero1", workload="cnn"),
    Case("zero1", options={"accumulate": 2} | UPDATE),
    Case("deepspeed", workload="cnn"),
    Case("deepspeed", options={"stage": 2, "clip_norm": 0.5}, slow=True),
    Case("deepspeed", options={"stage": 3, "checkpoint_activations": True} | UPDATE),
    *(
        Case("deepspeed", workload="gpt", options={"stage": stage}, fields=SHORT, slow=stage != 2)
        for stage in (1, 2, 3)
    ),
    Case("fsdp", workload="cnn"),
    Case(
        "fsdp", options={"sharding": "SHARD_GRAD_OP", "accumulate": 2, "clip_norm": 0.5, "checkpoint_activations": True}
    ),
    Case("fsdp", options={"sharding": "NO_SHARD", "clip_norm": 0.5}),
    Case("fsdp", 4, options={"replicas": 2, "clip_norm": 0.5}, fields={"samples": 108}),
    Case("dp"),
    Case("dp", 4, options={"accumulate": 2, "clip_norm": 0.5}, fields={"samples": 107}),
    Case("fsdp2", workload="cnn"),
    Case("fsdp2", options={"accumulate": 2, "checkpoint_activations": True, "compile": True} | UPDATE),
    Case("fsdp2", options={"prefetch": 2, "reshard_after_forward": False}),
    Case("fsdp2", 4, options={"replicas": 2, "prefetch": 1, "clip_norm": 0.5}, fields={"samples": 108}),
    Case("tp", workload="cnn", options={"clip_norm": 0.5}),
    Case("tp", options={"accumulate": 2, "checkpoint_activations": True, "compile": True}),
    Case(
        "tp", workload="gpt", options={"sequence_parallel": True, "loss_parallel": True, "clip_norm": 0.5}, fields=SHORT
    ),
    Case("tp", workload="gpt", options={"accumulate": 2, "loss_parallel": True}, fields=SHORT),
    Case("fsdp2_tp", 4, workload="cnn", options={"clip_norm": 0.5}, fields={"samples": 108}),
    Case(
        "fsdp2_tp", 4, workload="gpt", options={"sequence_parallel": True, "checkpoint_activations": True}, fields=SHORT
    ),
    Case("pp", workload="cnn", options={"schedule": "GPipe", "clip_norm": 0.5}),
    Case("pp", workload="gpt", options={"checkpoint_activations": True}, fields=SHORT),
    Case("pp", workload="cnn", options={"schedule": "Interleaved1F1B", "micro_batches": 8}),
    Case(
        "pp", 2, "gpt", {"schedule": "InterleavedZeroBubble", "clip_norm": 0.5, "checkpoint_activations": True}, SHORT
    ),
    Case("pp", workload="cnn", options={"schedule": "ZBVZeroBubble", "clip_norm": 0.5}),
    Case("pp", workload="gpt", options={"schedule": "DualPipeV", "checkpoint_activations": True}, fields=SHORT),
    *(
        Case("pp", 4, "gpt", {"schedule": each, "size": "10M", "micro_batches": 8}, SHORT, slow=True)
        for each in ("ZBVZeroBubble", "DualPipeV")
    ),
    Case("pp", 4, workload="cnn", options={"micro_batches": 4, "compile": True}),
    Case("pp_ddp", 4, "cnn", {"clip_norm": 0.5, "checkpoint_activations": True}, {"samples": 108}),
    Case("pp_ddp", 4, workload="gpt", options={"schedule": "Interleaved1F1B", "micro_batches": 2}, fields=SHORT),
    Case("pp_fsdp2_tp", 8, workload="gpt", options={"micro_batches": 2, "clip_norm": 0.5}, fields=SHORT),
    Case(
        "pp_fsdp2_tp",
        4,
        workload="gpt",
        options={"schedule": "Interleaved1F1B", "sequence_parallel": True},
        fields=SHORT,
    ),
    Case("fsdp2", workload="moe", options={"accumulate": 2}, fields=SHORT, slow=True),
    Case("ep", workload="moe", fields=SHORT, slow=True),
    Case("ep", 4, "moe", {"accumulate": 2, "clip_norm": 0.5, "checkpoint_activations": True}, SHORT),
    Case("ep", workload="moe", options={"dense": "sharded", "clip_norm": 0.5, "accumulate": 2}, fields=SHORT),
    Case("cp", workload="gpt", fields=SHORT),
    Case("cp", 4, workload="gpt", options={"method": "ring", "checkpoint_activations": True}, fields=SHORT),
    Case("cp", workload="gpt", options={"method": "ulysses", "accumulate": 2}, fields=SHORT),
    Case("cp", 4, "gpt", {"accumulate": 2, "clip_norm": 0.5, "checkpoint_activations": True}, SHORT),
)
# Workload: how it is run as a person would. cnn and moe are compared; resnet18, which needs torchvision, is run by
# test_workloads.py.
PLAIN = {"gpt": ("ddp", "fp32"), "mlp": ("ddp", "bf16"), "cnn": None, "moe": None, "resnet18": None}


def asked(case: Case) -> Spec:
    # 110 samples: the third step is a smaller one, the fourth the first of the next epoch.
    plain = {"batch_size": BATCH, "scaling": "strong", "steps": 4, "samples": 110, "seed": 3, "device": "cpu"}
    return Spec(case.strategy, case.workload, nproc=case.nproc, options=case.options, **plain | dict(case.fields))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[Case], dict]:
    """What one process gives for a case with the same workload and the same update; each is run once."""
    known: dict[str, dict] = {}

    def run(case: Case) -> dict:
        changing = {name: value for name, value in case.options.items() if name in (*UPDATE, "size")}
        plain = Case("single", 1, case.workload, changing, case.fields)
        name = f"{plain}-{dict(case.fields)}"
        if name not in known:
            known[name] = record(asked(plain), tmp_path_factory.mktemp("alone") / "run")[0]
        return known[name]

    return run


def test_every_strategy_and_workload_is_run_for_real():
    assert {case.strategy for case in EQUAL} == {*STRATEGIES} - {"diloco"}  # which differs
    assert set(PLAIN) == set(WORKLOADS)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case.slow else case for case in EQUAL], ids=str
)
def test_losses_are_those_of_one_process(alone, case, tmp_path):
    ranks, single = record(asked(case), tmp_path / "run"), alone(case)
    steps = list(zip(*(rank["losses"] for rank in ranks)))
    # Each rank's loss is the mean over its own share of the batch; where only the last stage has one, it is the whole
    # batch's.
    means = [sum(known) / len(known) for known in ([loss for loss in step if loss is not None] for step in steps)]
    assert means == pytest.approx(single["losses"], rel=case.relative)
    assert ranks[0]["evaluations"] == [
        pytest.approx(result, rel=10 * case.relative) for result in single["evaluations"]
    ]
    told = [list(chain.from_iterable(rank["evaluations"])) for rank in ranks]
    assert all(one == pytest.approx(told[0]) for one in told), "every rank knows the result"


def test_each_test_sample_counts_once(alone):
    for _, accuracy in alone(EQUAL[0])["evaluations"]:
        assert accuracy * 360 == pytest.approx(round(accuracy * 360), abs=1e-3)


def test_one_process_trains_over_epochs_and_stops_at_the_step_asked_for(alone):
    found = alone(EQUAL[0])
    assert len(found["losses"]) == 4  # three steps of the first epoch, one of the second
    assert len(found["evaluations"]) == 2
    assert all(math.isfinite(loss) for loss in found["losses"])


@pytest.mark.parametrize(
    "workload",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "gpt" else []) for name, how in PLAIN.items() if how],
)
def test_script_runs_as_a_person_would_run_it(workload, tmp_path):
    strategy, precision = PLAIN[workload]
    spec = Spec(strategy, workload, nproc=2, batch_size=2, epochs=1, samples=80, precision=precision)
    (tmp_path / "train.py").write_text(write_script(spec), encoding="utf-8")
    lines = run_alone([*TORCHRUN, "--nproc-per-node=2", "train.py"], tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == [*(f"step {n}" for n in (1, 4, 8, 12, 16, 20)), "epoch 1"]
    assert "%, test loss " in lines[-1]


def test_bf16_trains_what_is_sharded(tmp_path):
    ranks = record(
        Spec("fsdp2", "mlp", nproc=2, batch_size=16, steps=2, samples=64, precision="bf16"), tmp_path / "run"
    )
    for rank in ranks:
        assert rank["losses"] == pytest.approx([math.log(10)] * 2, abs=0.3)


def test_fp16_step_runs_where_there_is_no_gpu_to_scale_for(tmp_path):
    spec = Spec("single", "mlp", batch_size=16, steps=2, samples=64, precision="fp16")
    (tmp_path / "train.py").write_text(write_script(spec), encoding="utf-8")
    assert "epoch 1" in run_alone([sys.executable, "train.py"], tmp_path)


def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path):
    source = write_script(Spec("ddp", "mlp", nproc=1, samples=64))
    source = source.replace("    step = 0\n", "    raise KeyError('on purpose')\n")
    source = source.replace("dist.destroy_process_group()", "print('waits')")
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=1", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "KeyError: 'on purpose'" in done.stderr


# ---- the functions, as they stand


class Counted(nn.Module):
    """A model that gives the class that the input names, and counts its forward passes and samples."""

    def __init__(self):
        super().__init__()
        self.passes, self.largest, self.seen = 0, 0, []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.largest = max(self.largest, len(inputs))
        self.seen += inputs[:, 0].long().tolist()
        return nn.functional.one_hot(inputs[:, 1].long(), 10).float()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("samples", [5, 360, 1000, 257])
@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize(("module", "counted"), [(base, False), (fsdp2_tp, True)])
def test_evaluation_sees_each_sample_once_in_as_many_passes_on_each_rank(
    monkeypatch, ranks, samples, batch, module, counted
):
    numbers = torch.arange(samples)
    inputs, targets = torch.stack([numbers, numbers % 10], dim=1).float(), numbers * 7 % 10
    dataset, cpu = TensorDataset(inputs, targets), torch.device("cpu")
    monkeypatch.setattr(base, "BATCH_PER_RANK", batch)
    monkeypatch.setattr(base, "DISTRIBUTED", True)
    monkeypatch.setattr(base, "DATA_RANKS", ranks)
    models, total = [Counted() for _ in range(ranks)], torch.zeros(2 + counted)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    monkeypatch.setattr("torch.distributed.all_reduce", total.__iadd__)
    for rank, model in enumerate(models):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        module.evaluate(model, dataset, cpu)
    assert len({model.passes for model in models}) == 1, "a rank that made a pass more would wait for ever"
    assert sorted(chain.from_iterable(model.seen for model in models)) == numbers.tolist()
    assert max(model.largest for model in models) <= batch
    monkeypatch.setattr(base, "DATA_RANKS", 1)
    if ranks > 1 or counted:  # one rank of several, or one that adds up what all have counted
        assert (total[:2] / samples).tolist() == pytest.approx(base.evaluate(Counted(), dataset, cpu), rel=1e-5)
        assert total[1] == (numbers % 10 == targets).sum()
        assert total[2:].tolist() == [samples] * counted


def test_an_empty_share_goes_through_every_model():
    assert nn.Sequential(*cnn.build_blocks())(torch.zeros(0, 1, 28, 28)).shape == (0, 10)
    assert nn.Sequential(*mlp.build_blocks())(torch.zeros(0, 1, 28, 28)).shape == (0, 10)
    assert nn.Sequential(*gpt.build_blocks())(torch.zeros(0, 128, dtype=torch.long)).shape == (0, 128, 256)


def test_ranks_share_the_batch_that_one_process_has(monkeypatch):
    dataset = TensorDataset(torch.arange(100))
    monkeypatch.setattr(base, "BATCH_PER_RANK", 8)
    loader = base.load(dataset)
    loader.sampler.set_epoch(2)
    whole = [sorted(batch.tolist()) for (batch,) in loader]
    monkeypatch.setattr(base, "BATCH_PER_RANK", 4)
    monkeypatch.setattr(base, "DATA_RANKS", 2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    batches = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        loader = base.load(dataset)
        loader.sampler.set_epoch(2)
        batches.append([batch.tolist() for (batch,) in loader])
    assert [sorted(one + two) for one, two in zip(*batches)] == whole
