"""Predictions of scripts of the user's own: against their runs, what a trace refuses, and what is cached."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import psutil
import pytest
from commands import called
from conftest import warm_run
from places import BY_HAND, SCRIPTS
from traced import apart as apart

import labkit
from labkit.analysis.prediction import Outcome, outcomes, sentences
from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.prediction.predict import cached, predict
from labkit.prediction.tracer import MOST, TRACER, Cancelled, TraceFailed, classes, joined
from labkit.record.state import RunState

EXACT = 0.001  # of a measured peak

# Positions in the data come from random integers, an evaluation precedes the third step, gradients are accumulated, and
# a copy of another model, whose batch normalization counts batches, outlives the steps.
WINDOWS = """
from copy import deepcopy
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group()
data = torch.arange(4096) % 61

def batch():
    starts = torch.randint(len(data) - 32, (8,))
    return (torch.stack([data[start + shift : start + shift + 32] for start in starts]) for shift in (0, 1))

def model():
    layers = [torch.nn.Embedding(61, 64), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 61)]
    return torch.nn.Sequential(*layers)

net = model()
copy = deepcopy(torch.nn.Sequential(model(), torch.nn.BatchNorm1d(32)))
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(8):
    if step % 5 == 2:
        net.eval()
        with torch.no_grad():
            inputs, targets = batch()
            print(cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).item())
        net.train()
    for part in range(2):
        inputs, targets = batch()
        net.set_requires_gradient_sync(part == 1)
        (cross_entropy(net(inputs).flatten(0, 1), targets.flatten()) / 2).backward()
    copy[1](torch.ones(8, 32))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

# What scripts for GPUs do.
ON_GPUS = """
import argparse, os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Images(Dataset):
    def __init__(self):
        self.images, self.labels = torch.randn(512, 3, 16, 16), torch.randint(10, (512,))
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, required=True)
batch = parser.parse_args().batch
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
layers = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(2048, 10)
model = DDP(torch.compile(torch.nn.Sequential(*layers).cuda()), device_ids=[rank])
images = Images()
sampler = DistributedSampler(images)
loader = DataLoader(images, batch, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
for inputs, targets in loader:
    inputs, targets = inputs.to(device, non_blocking=True), targets.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

# Parameters that a step does not use, gradients that are views of buckets, a model in DDP that is called without it,
# gradients that the script reduces itself, a validated distribution, an LSTM and a CPU with a number.
KINDS = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
os.makedirs("checkpoints", exist_ok=True)
device = torch.device("cpu", 0)

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(128, 512) for _ in range(3))
    def forward(self, inputs, number):
        return {"outputs": self.experts[number](inputs)}

experts = DDP(Experts(), find_unused_parameters=True)
views = DDP(Experts(), find_unused_parameters=True, gradient_as_bucket_view=True)
policy, text, bypassed = DDP(nn.Linear(128, 8)), DDP(nn.LSTM(128, 64, batch_first=True)), DDP(nn.Linear(128, 512))
by_hand = nn.Linear(128, 512).to(device)
models = experts, views, policy, text, bypassed, by_hand
optimizer = torch.optim.Adam([parameter for model in models for parameter in model.parameters()])
assert len({parameter.data_ptr() for parameter in views.parameters()}) == 6
for step in range(6):
    inputs = torch.randn(64, 128, device=device)
    choice = torch.distributions.Categorical(logits=policy(inputs))
    loss = -choice.log_prob(choice.sample()).mean()
    outputs = [experts(inputs, 1)["outputs"], views(inputs, 1)["outputs"], by_hand(inputs), bypassed.module(inputs)]
    outputs += [text(inputs.view(8, 8, 128))[0]]
    loss = loss + sum(each.pow(2).mean() for each in outputs)
    if not torch.isfinite(loss):
        break
    optimizer.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in by_hand.parameters()]
    summed = parameters_to_vector(gradients)
    dist.all_reduce(summed)
    vector_to_parameters(summed, gradients)
    optimizer.step()
    print(f"{loss:.3f}")
dist.destroy_process_group()
"""

# Adapters of frozen layers in another type, whose gathered parameters gloo copies, and a static graph.
ADAPTERS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(512, 512).requires_grad_(False)
        self.down, self.up = nn.Linear(512, 8, bias=False), nn.Linear(8, 512, bias=False)
    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs))

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(512, 16), nn.Linear(512, 16)
    def forward(self, inputs):
        return self.used(inputs)

body, head = nn.Sequential(*(Adapted() for _ in range(3))), DDP(Head(), static_graph=True)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in body:
    fully_shard(layer, mp_policy=policy)
fully_shard(body, mp_policy=policy)
trained = [parameter for parameter in [*body.parameters(), *head.parameters()] if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained)
for step in range(6):
    head(body(torch.randn(32, 512)).float()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

# The hook keeps DDP's bucket until the next step.
HOOKED = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)))
model.register_comm_hook(power.PowerSGDState(None), power.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(6):
    optimizer.zero_grad()
    cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
    optimizer.step()
dist.destroy_process_group()
"""

# Workers make the samples; a batch that they deliver early, and what they need for one, are not the rank's.
WORKERS = """
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Samples(Dataset):
    def __len__(self):
        return 2048
    def __getitem__(self, index):
        return {"x": torch.randn(512) * 2 + index, "y": index % 10}

if __name__ == "__main__":
    dist.init_process_group()
    samples = Samples()
    loader = DataLoader(samples, 128, sampler=DistributedSampler(samples), num_workers=4)
    model = DDP(torch.nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
    dist.destroy_process_group()
"""

# Two replicas of two ranks each.
IN_PAIRS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
model = DDP(model, process_group=pairs[dist.get_rank() // 2])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
"""

DECIDING = """
import math
import torch, torch.distributed as dist

dist.init_process_group()
model, best, total = torch.nn.Linear(4, 1), math.inf, 0.0
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    total += loss.item()
    DECISION
    optimizer.step()
"""

# A pipeline whose stages know their shapes.
STAGES = """
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
inputs, outputs = torch.randn(4, 16, requires_grad=rank > 0), torch.randn(4, 16, requires_grad=True)
stage = PipelineStage(layers, rank, ranks, torch.device("cpu"), input_args=(inputs,), output_args=(outputs,))
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.AdamW(layers.parameters())
for step in range(3):
    schedule.step(*([torch.randn(8, 16)] if rank == 0 else []), target=torch.randn(8, 16))
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINING = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
"""


# As many samples as some random number leaves.
COUNTED = TRAINING.replace("zeros(2, 4)", "zeros(9, 4)[: int((torch.rand(9) < 0.5).sum())]") + "step()\n" * 3

# A model that is converted twice.
CONVERTED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
layers = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
model = DDP(torch.nn.Sequential(*layers).half().bfloat16().cpu())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

# DDP is not told that a step does not use all parameters.
UNUSED = """
import torch, torch.distributed as dist
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)))
model.module.forward = lambda inputs: model.module[0](inputs)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a script into a folder of its own, which is the working folder; returns its Spec."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, nproc: int = 1, **fields) -> Spec:
        (tmp_path / "train.py").write_text(source)
        return Spec(script="train.py", nproc=nproc, **({"device": "cpu"} | fields))

    return write


def test_a_trace_is_cancelled_and_the_process_answers_the_next_one(written):
    def has_begun() -> bool:
        return TRACER._process is not None and bool(psutil.Process(TRACER._process.pid).children())

    with pytest.raises(Cancelled):
        predict(written("while True:\n    pass\n"), cancelled=has_begun)
    process = TRACER._process
    assert process and not psutil.Process(process.pid).children()
    process.stdin.write(b"null\n")  # a cancellation that comes too late
    plan = predict(written(TRAINING + "for _ in range(3):\n    step()\n"))
    assert plan.method == "simulated" and TRACER._process is process


def measured(spec: Spec) -> tuple[RunState, tuple[Outcome, ...]]:
    """A run of a script after its prediction, which has its peaks."""
    plan = predict(spec)
    assert plan.method == "simulated" and not plan.reason
    state = warm_run(spec).state
    assert state.prediction == plan, "the run has the cached prediction"
    assert "with an error of at most 0.00%" in sentences(state)[0], sentences(state)
    found = outcomes(state)
    assert len(found) == spec.processes
    for one in found:
        assert abs(one.error) <= EXACT, (one.peak_predicted, one.peak_measured)
    return state, found


def check(spec: Spec) -> None:
    """The prediction of a script is what its run then measures."""
    state, found = measured(spec)
    for one in found:
        assert one.sent_predicted == one.sent_measured
    for part in state.prediction.classes:
        for rank in part.ranks:
            assert state.ranks[rank].traffic.ops == part.ops


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp"])
def test_a_script_by_hand_needs_what_was_predicted(name, written):
    source = (BY_HAND / f"{name}.py").read_text()
    check(written(re.sub(r"STEPS = \d+", "STEPS = 4", source), nproc=2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_generated_script_is_predicted_from_its_first_line_as_from_its_functions(strategy, written):
    asked = Spec(strategy, workload="mlp", nproc=2, batch_size=16, steps=4, device="cpu", precision="fp32")
    spec = written(write_script(asked), nproc=2)
    check(spec)
    ours, theirs = predict(spec).ranks[0], predict(asked).ranks[0]
    assert ours.peak_memory_bytes == pytest.approx(theirs.peak_memory_bytes, rel=EXACT)
    assert ours.comm_bytes_per_step == theirs.comm_bytes_per_step


def test_positions_in_data_evaluations_accumulation_and_copies_are_traced(written):
    check(written(WINDOWS, nproc=2))


def test_what_people_write_around_ddp_is_predicted(written):
    check(written(KINDS, nproc=2))


def test_adapters_in_another_type_and_a_static_graph_are_predicted(written):
    _, found = measured(written(ADAPTERS, nproc=2))
    for one in found:  # DDP also broadcasts which buckets it rebuilds in the step that is measured
        assert one.sent_predicted == pytest.approx(one.sent_measured, rel=EXACT)


@pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed")
def test_a_framework_that_joins_the_ranks_itself_needs_what_was_predicted(written, tmp_path):
    frameworks = SCRIPTS / "frameworks"
    (tmp_path / "whole_torchvision.py").write_text((frameworks / "whole_torchvision.py").read_text())
    source = (frameworks / "lightning_fit.py").read_text()
    check(
        written(source.replace("Linear(8, 16)", "Linear(8, 1600)").replace("Linear(16, 1)", "Linear(1600, 1)"), nproc=2)
    )


CLEANS_UP = """
class Trainer:
    def fit(self):
        try:
            open("log.txt", "w")
        finally:
            raise RuntimeError("cannot clean up")

Trainer().fit()
"""


def test_a_model_that_is_converted_is_predicted(written):
    plan, elements = predict(written(CONVERTED, nproc=2)), 64 + 64 + 64 * 256 + 256 + 256 * 64 + 64
    assert plan.method == "simulated" and not plan.reason
    for rank in plan.ranks:
        assert rank.memory_bytes["parameters"] == rank.comm_bytes_per_step == 2 * elements
        assert 0 <= rank.memory_bytes["optimizer"] - 2 * 2 * elements < 64  # AdamW, and its numbers of steps


def test_a_refusal_is_named_even_if_cleaning_up_fails(written):
    with pytest.raises(TraceFailed, match=r"train.py:5 writes to log.txt, which a trace refuses"):
        predict(written(CLEANS_UP))


def test_buffers_are_broadcast_in_a_group_without_rank_0(written):
    plan = predict(written(IN_PAIRS, nproc=4))
    assert plan.method == "simulated", plan.reason
    parameters, buffers = 4 * (8 * 4 + 4 + 4 + 4), 4 * (4 + 4) + 8  # bytes; batches are counted in an integer
    for rank in plan.ranks:
        assert rank.comm_bytes_per_step == parameters + buffers / 2  # one rank of each pair sends the buffers


def test_a_bucket_that_a_hook_keeps_is_counted_once(written):
    check(written(HOOKED, nproc=2))


def test_batches_that_wait_in_a_loader_with_workers_are_not_counted(written):
    check(written(WORKERS, nproc=2))


@pytest.mark.parametrize(
    ("decision", "matters"),
    [
        ("if total / (step + 1) < 1.5: dist.all_reduce(torch.zeros(4))", True),
        ("if loss.item() < 0.01: break", True),
        ("best = min(best, loss.item())", False),
        ("if loss.item() != loss.item(): break", False),
        ("if math.isfinite(loss.item()) and step > 5: break", False),
        ("if float(loss.detach()) > 0.01: dist.all_reduce(torch.zeros(4))", True),
        ("if math.exp(loss.item()) > 20: dist.all_reduce(torch.zeros(4))", True),
        ("if round(float(loss), 3) > 2: dist.all_reduce(torch.zeros(4))", True),
        ("import numpy as np\n    if np.mean([loss.item()] * 3) > 0.5: dist.all_reduce(torch.zeros(4))", True),
        (
            "from statistics import fmean\n    from collections import deque\n"
            "    if fmean(deque([loss.item()])) > 0.5: dist.all_reduce(torch.zeros(4))",
            True,
        ),
        ("if loss.tolist() > 0.01: dist.all_reduce(torch.zeros(4))", True),
        ("if bool(loss.item()): dist.all_reduce(torch.zeros(4))", True),
        (
            "rate = float('inf') if float(3) > 2 else float(); assert rate == float('inf') and type(rate) is float",
            False,
        ),
        ("if float(loss) > float(1e4): optimizer.param_groups[0]['lr'] /= float('2')", False),
    ],
)
def test_a_decision_by_a_number_of_the_data_is_named_if_the_step_depends_on_it(written, decision, matters):
    plan = predict(written(DECIDING.replace("DECISION", decision), nproc=2))
    assert plan.method == "simulated"
    line = 1 + DECIDING.splitlines().index("    DECISION") + decision.count("\n")
    said = f"train.py:{line} decides by a number that depends on the data; the prediction has 1 for it"
    assert plan.reason == (said if matters else "")


def test_a_decision_in_a_module_beside_the_script_is_named(written, tmp_path):
    (tmp_path / "judge.py").write_text("def is_large(loss):\n    return float(loss) > 0.5\n")
    decision = "from judge import is_large\n    if is_large(loss): dist.all_reduce(torch.zeros(4))"
    plan = predict(written(DECIDING.replace("DECISION", decision), nproc=2))
    assert plan.reason == "judge.py:2 decides by a number that depends on the data; the prediction has 1 for it"


def test_stages_that_know_their_shapes_are_predicted(written):
    plan = predict(written(STAGES, nproc=2))
    assert [rank.comm_bytes_per_step for rank in plan.ranks] == [2 * 4 * 16 * 4] * 2


def test_a_later_step_that_sends_something_else_is_named(written):
    period = "import torch.distributed as dist\ndist.init_process_group()\n" + TRAINING
    period += "for number in range(8):\n    step()\n"
    period += "    if number == 4:\n        dist.all_reduce(torch.empty(1 << 20))\n"
    usual = predict(written(period.replace("== 4", "== 8"), nproc=2))
    plan = predict(written(period, nproc=2))
    assert not usual.reason
    assert plan.reason == "its steps differ: step 6 has collectives of 4.0 MiB, the one predicted of 0 B"
    assert plan.ranks[0].comm_bytes_per_step == 0
    assert plan.ranks[0].peak_memory_bytes >= usual.ranks[0].peak_memory_bytes + (3 << 20)


def test_a_script_for_gpus_is_traced_without_one(written):
    plan = predict(written(ON_GPUS, nproc=4, device="cuda", args=("--batch", "32")))
    assert [part.ranks for part in plan.classes] == [[0, 1, 2, 3]]
    parameters = 8 * 3 * 9 + 8 + 16 + 2048 * 10 + 10
    owners = plan.ranks[0].memory_bytes
    assert owners["parameters"] == owners["communication"] == 4 * parameters
    assert plan.classes[0].ops["all_reduce"].bytes == 4 * parameters
    names = [one.name for one in plan.classes[0].estimates]
    assert names == ["CUDA context and kernels", "NCCL buffers", "cached by the allocator"]
    assert owners["other"] < 32 * 3 * 16 * 16 * 4 * 2, "the batch, without the data set"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import os\nos.mkdir('out')\nopen('out/log', 'w')",
            r"train.py:3 writes to out/log, .* do this after that step",
        ),
        ("import os\nos.remove('train.py')", r"train.py:2 removes train.py, which a trace refuses"),
        ("open('log.txt', 'w')", r"train.py:1 writes to log.txt, which a trace refuses"),
        ("import os\nos.open('train.py', os.O_RDWR | os.O_TRUNC)", r"train.py:2 writes to train.py"),
        ("import torch\ntorch.save({}, 'model.pt')", r"train.py:2 saves a file with torch.save"),
        ("import os\nos.rename('train.py', 'other.py')", r"train.py:2 renames train.py"),
        ("import subprocess\nsubprocess.run(['ls'])", r"train.py:2 starts the program ls"),
        ("import os\nos.system('ls')", r"train.py:2 starts a process"),
        ("import torch\ntorch.multiprocessing.spawn(print, nprocs=2)", r"starts a process, .* leave it to torchrun"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", r"train.py:2 opens a connection"),
        ("import torch\nx = torch.randn(4)\nx[x > 0]", r"train.py:3 needs the values of a tensor \(aten.nonzero"),
        ("import torch\nif torch.rand(()) < 0.5:\n    pass", r"train.py:2 needs the values of a tensor .* integers"),
        (COUNTED, r"train.py:6 reads a number that depends on the data, .* compute sizes from shapes"),
        (TRAINING + "step()", r"the script ended in the step after the first one, which is not a typical one"),
        (
            UNUSED,
            r"train.py:8 raised RuntimeError: parameters .* no gradient in the last step, .* find_unused_parameters",
        ),
        ("import sys\nsys.exit(3)", r"train.py:2 ended the script with exit code 3 before the first optimizer step"),
        ("1 / 0", r"train.py:1 raised ZeroDivisionError: division by zero, before"),
        (
            "try:\n    open('x', 'w')\nexcept OSError:\n    1 / 0",
            r"train.py:2 writes to x, which a trace refuses, .* do this after that step",
        ),
        ("x = 1", r"the script ended before the first optimizer step; a trace needs one"),
        ("import os\nos._exit(4)", r"exit code 4, without a result"),
        ("input()", r"train.py:1 raised EOFError"),
    ],
)
def test_what_ends_a_trace_is_named_with_its_line_and_changes_nothing(written, tmp_path, source, said):
    spec = written(source)
    with pytest.raises(TraceFailed, match=said):
        predict(spec)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == source
    assert cached(spec) is None


def test_a_pipeline_needs_the_shapes_of_its_stages():
    spec = Spec(script=str(BY_HAND / "pp.py"), nproc=2, device="cpu")
    with pytest.raises(TraceFailed, match=r"pp.py:\d+ exchanges Python objects .* input_args and output_args"):
        predict(spec)


def test_a_script_that_takes_too_long_is_ended_with_its_line(written, monkeypatch):
    TRACER.end()
    monkeypatch.setattr("labkit.prediction.tracer._LIMIT", 1)
    with pytest.raises(TraceFailed, match=r"train.py:\d was reached when the time .* use a smaller model"):
        predict(written("while True:\n    pass"))


def test_steps_before_the_end_of_a_trace_stand(written, tmp_path):
    plan = predict(written(TRAINING + "step()\nstep()\nopen('log.txt', 'w')\n"))
    assert plan.reason == "the trace has 2 of 3 steps: train.py:10 writes to log.txt, which a trace refuses"
    assert plan.ranks[0].memory_bytes["parameters"] == 4 * (16 + 4)
    assert plan.reason in repr(labkit.predict("train.py", nproc=1, device="cpu"))
    assert not (tmp_path / "log.txt").exists()


def test_a_script_that_can_do_without_a_file_continues(written):
    plan = predict(written(TRAINING + "try:\n    open('x', 'w')\nexcept OSError:\n    pass\n" + "step()\n" * 3))
    assert not plan.reason


def test_numbers_that_are_only_counted_do_no_harm(written):
    counted = TRAINING + "right = 0\nfor _ in range(3):\n    step()\n    right += int((model.weight > 0).sum())\n"
    assert predict(written(counted + "    print(right / 16)\n")).method == "simulated"


def test_a_prediction_is_cached_until_something_it_read_changes(written, tmp_path, monkeypatch):
    (tmp_path / "sizes.py").write_text("WIDTH = 4")
    spec = written("from sizes import WIDTH\n" + TRAINING.replace("4, 4", "4, WIDTH") + "step()\n" * 3)
    plan = predict(spec)
    assert cached(spec) == plan
    assert cached(Spec(script="train.py", nproc=1, device="cpu", args=("x",))) is None
    monkeypatch.setenv("SIZE", "large")
    assert cached(spec) is None
    monkeypatch.delenv("SIZE")
    (tmp_path / "sizes.py").write_text("WIDTH = 16")
    assert cached(spec) is None
    assert predict(spec).ranks[0].memory_bytes["parameters"] == 4 * (4 * 16 + 16)


def test_a_module_and_ranks_that_differ(written, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import os\n" + TRAINING.replace("(4, 4)", "(4, 4 << (os.environ['RANK'] == '1'))") + "step()\n" * 3
    )
    written("")
    plan = predict(Spec(script="package", as_module=True, nproc=3, device="cpu"))
    assert [part.ranks for part in plan.classes] == [[0, 2], [1]]
    assert [rank.memory_bytes["parameters"] for rank in plan.ranks] == [80, 160, 80]


def test_many_ranks_of_a_script_are_traced_at_equal_distances():
    groups = classes(Spec(script="train.py", nproc=100, device="cpu"))
    assert len(groups) == MOST and groups[0][0] == 0 and groups[-1] == [99]
    assert [rank for ranks in groups for rank in ranks] == [*range(100)]
    assert joined([[0, 1], [2], [3]], {0: {"a": 1}, 2: {"a": 2}, 3: {"a": 1}}) == [[0, 1, 3], [2]]


def test_command_predicts_a_script_with_its_arguments(written, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    written(TRAINING + "import sys\nassert sys.argv[1:] == ['--lr', '1']\n" + "step()\n" * 3)
    asked = ["predict", "train.py", "--nproc", "1", "--device", "cpu"]
    assert called(*asked, "--json", "--", "--lr", "1") == 0
    assert json.loads(capsys.readouterr().out)["spec"]["args"] == ["--lr", "1"]
    assert called(*asked, "--", "--lr", "1") == 0
    assert "train.py on 1 rank: predicted by tracing the script" in capsys.readouterr().out
    assert called(*asked) != 0
    assert "rank 0: train.py:9 raised AssertionError" in capsys.readouterr().err
