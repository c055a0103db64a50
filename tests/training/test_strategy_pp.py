"""pp and the strategies built on it: stage boundaries, refusals, and the padding of small batches."""

from __future__ import annotations

import itertools
import random
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import weaving
from torch import nn
from torch.distributed.pipelining import schedules as of_torch
from torch.utils.data import TensorDataset
from weaving import record

from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.setup.machine import Machine
from labkit.training.strategies import SCHEDULE, STRATEGIES, pp
from labkit.training.strategies.rules import cut, holder
from labkit.training.workloads import WORKLOADS, gpt


def refusal(strategy: str, workload: str = "cnn", **fields) -> str:
    with pytest.raises(SpecError) as error:
        Spec(strategy, workload, **fields)
    return str(error.value)


# ---- stage boundaries


def costliest(costs: tuple[float, ...], starts: tuple[int, ...]) -> float:
    return max(sum(costs[first:last]) for first, last in itertools.pairwise(starts))


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_of_the_most_expensive_stage_is_minimal(seed):
    chance = random.Random(seed)
    costs = tuple(chance.randint(1, 100) for _ in range(chance.randint(2, 9)))
    stages = chance.randint(1, len(costs))
    ways = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), stages - 1)]
    found = cut(costs, stages)
    assert found in ways
    assert costliest(costs, found) == min(costliest(costs, way) for way in ways)


def test_equal_layers_are_divided_evenly():
    constants = STRATEGIES["pp"].constants(Spec("pp", "gpt", nproc=4, options={"size": "7B"}))
    begins = constants["STAGES"]
    assert (
        max(last - first for first, last in itertools.pairwise(begins))
        - min(last - first for first, last in itertools.pairwise(begins))
        <= 2
    )
    assert constants["LOSS_RANK"] == 3
    assert begins[-1] == len(WORKLOADS["gpt"].costs({"size": "7B", "context": 128}))


ONE, ROUND, DOWN_AND_UP = [[0], [1], [2]], [[0, 3], [1, 4], [2, 5]], [[0, 5], [1, 4], [2, 3]]  # stages of three ranks
ON_RANKS = {
    **{"GPipe": ONE, "1F1B": ONE, "Interleaved1F1B": ROUND, "InterleavedZeroBubble": ROUND},
    **{"ZBVZeroBubble": DOWN_AND_UP, "DualPipeV": DOWN_AND_UP},
}


def on_rank(monkeypatch, rank: int, ranks: int = 3) -> None:
    """Makes pp believe that it runs on a rank of a process group."""
    monkeypatch.setattr(pp, "RANKS", ranks)
    monkeypatch.setattr(pp.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(pp.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(pp.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(size=lambda: ranks)))


@pytest.mark.parametrize("schedule", SCHEDULE.choices)
def test_every_schedule_has_its_stages_and_its_ranks_get_them_all(schedule, monkeypatch):
    source, wanted = write_script(Spec("pp", "gpt", nproc=2, options={"schedule": schedule})), ON_RANKS[schedule]
    assert f"Schedule{schedule}(" in source
    assert set(re.findall(r"Schedule\w+", source)) == {f"Schedule{schedule}"}, "no other schedule is left in the script"
    begins = STRATEGIES["pp"].constants(
        Spec("pp", "gpt", nproc=3, batch_size=12, options={"schedule": schedule, "micro_batches": 6})
    )["STAGES"]
    assert len(begins) - 1 == sum(map(len, wanted))
    held = []
    monkeypatch.setattr(pp, "STAGES", begins)
    monkeypatch.setattr(pp, "SCHEDULE", schedule)
    monkeypatch.setattr(pp, f"Schedule{schedule}", lambda own, *args, **options: own)
    monkeypatch.setattr(pp, "PipelineStage", lambda stage, number, *args, **_: held[-1].update({number: stage}))
    model = [*gpt.build_blocks()]
    for rank in range(3):
        held.append({})
        on_rank(monkeypatch, rank)
        assert [*pp.parallelize(model, torch.device("cpu"))] == [*held[-1].values()]
    assert [sorted(stages) for stages in held] == wanted
    stages = range(len(begins) - 1)
    assert [[stage for stage in stages if holder(stage, 3, schedule) == rank] for rank in range(3)] == wanted
    blocks = [
        block
        for _, stage in sorted((number, stage) for stages in held for number, stage in stages.items())
        for block in stage
    ]
    assert blocks == model


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_script_for_another_number_of_ranks_says_so(ranks, monkeypatch):
    on_rank(monkeypatch, 0, ranks)
    monkeypatch.setattr(pp, "RANKS", 3)
    with pytest.raises(SystemExit, match=f"STAGES is for 3 ranks, got {ranks}"):
        pp.parallelize(iter([]), torch.device("cpu"))


def test_blocks_of_other_ranks_are_freed_before_all_are_built(monkeypatch):
    monkeypatch.setattr(pp, "STAGES", (0, 4, 6))
    monkeypatch.setattr(pp, "PipelineStage", lambda *args, **_: None)
    monkeypatch.setattr(pp, "Schedule1F1B", lambda own, *args, **options: own)
    on_rank(monkeypatch, 1, 2)
    alive, counts = weakref.WeakSet(), []

    def blocks():
        for _ in range(6):
            block = nn.Linear(1, 1)
            alive.add(block)
            counts.append(len(alive))
            yield block

    (stage,) = pp.parallelize(blocks(), torch.device("cpu"))
    assert [*stage._modules] == ["4", "5"], "blocks keep their numbers in the whole model"
    assert max(counts) <= 3, "its own, and at most two that are being passed on"


@pytest.mark.parametrize(("rank", "loaded"), [(0, (True, False)), (1, (False, False)), (2, (False, True))])
def test_only_the_first_stage_loads_inputs_and_only_the_last_targets(rank, loaded, monkeypatch):
    on_rank(monkeypatch, rank)
    dataset = pp.stage_data(TensorDataset(torch.ones(7, 4), torch.ones(7)))
    assert len(dataset) == 7
    assert tuple(tensor.numel() > 0 for tensor in dataset.tensors) == loaded


@pytest.mark.parametrize(("rank", "loaded"), [(0, (True, True)), (1, (False, False)), (2, (False, False))])
def test_the_first_rank_of_a_v_loads_both(rank, loaded, monkeypatch):
    monkeypatch.setattr(pp, "SCHEDULE", "ZBVZeroBubble")
    on_rank(monkeypatch, rank)
    dataset = pp.stage_data(TensorDataset(torch.ones(7, 4), torch.ones(7)))
    assert tuple(tensor.numel() > 0 for tensor in dataset.tensors) == loaded


def test_an_evaluation_has_only_forwards_and_their_messages():
    action = of_torch._Action.from_str
    both = action("(1F2;2B0)OVERLAP_F_B")
    own = [action("1RECV_F2"), both, action("1SEND_F2"), action("1RECV_B0"), action("1I0"), action("1W0")]
    kept = pp.forward_only({1: own})
    assert list(map(str, kept[1])) == ["1RECV_F2", "1F2", "1SEND_F2"]


# ---- limits


def test_more_stages_than_blocks_are_refused_with_a_number_that_works():
    told = refusal("pp", nproc=6, options={"micro_batches": 8})
    assert told == "cnn has 5 blocks, too few for the 6 stages of 1F1B on 6 ranks; use --nproc 5"
    told = refusal("pp", "mlp", nproc=2, options={"schedule": "Interleaved1F1B"})
    assert (
        told
        == "mlp has 3 blocks, too few for the 4 stages of Interleaved1F1B on 2 ranks; use schedule=1F1B with --nproc 2"
    )
    assert "use pp_size=2" in refusal(
        "pp_ddp", nproc=6, options={"pp_size": 3, "schedule": "Interleaved1F1B", "micro_batches": 3}
    )


def test_a_pipeline_needs_two_ranks():
    assert refusal("pp", nproc=1).endswith(
        "needs at least 2 ranks, got --nproc 1; use --nproc 2, or the strategy single"
    )


def test_micro_batches_that_do_not_fit_are_refused():
    refused = refusal("pp", nproc=2, batch_size=50)
    assert (
        refused == "a batch of 50 is not divisible by micro_batches=4; use micro_batches=2, or a batch of 52 per rank"
    )
    refused = refusal("pp", nproc=4, options={"micro_batches": 2})
    assert refused.endswith("got micro_batches=2 for 4 stages; use micro_batches=4, or schedule=GPipe")
    told = refusal("pp", nproc=2, batch_size=50, options={"schedule": "Interleaved1F1B", "micro_batches": 5})
    assert (
        told
        == "Interleaved1F1B runs the micro-batches in 2 equal rounds, and micro_batches=5 is not divisible by 2; use"
        " micro_batches=4 or 6"
    )
    told = refusal("pp", "gpt", nproc=2, batch_size=12, options={"schedule": "DualPipeV", "micro_batches": 3})
    assert told.endswith("got micro_batches=3 for 4 stages; use micro_batches=4, or schedule=ZBVZeroBubble")
    assert Spec("pp", nproc=2, batch_size=50, options={"schedule": "ZBVZeroBubble", "micro_batches": 5}).nproc == 2
    assert "a pipeline already splits the batch into micro-batches; set micro_batches" in refusal(
        "pp", nproc=2, options={"accumulate": 2}
    )


def test_ranks_that_form_no_mesh_are_refused():
    assert refusal("pp_ddp", nproc=5) == "5 ranks are not divisible by pp_size=2; use --nproc 4 or 6"
    assert refusal("pp_fsdp2_tp", nproc=6) == "6 ranks are not divisible by pp_size=2 × tp_size=2; use --nproc 4 or 8"
    assert "there is no tensor-parallel plan for resnet18" in refusal("pp_fsdp2_tp", "resnet18", nproc=8)
    assert "12 heads, which is not divisible by 8 tensor-parallel ranks" in refusal(
        "pp_fsdp2_tp", "gpt", nproc=16, options={"size": "100M", "tp_size": 8}
    )


def test_zero_bubble_schedules_do_not_work_with_wrapped_stages():
    for strategy in ("pp_ddp", "pp_fsdp2_tp"):
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            told = refusal(strategy, options={"schedule": schedule})
            assert told == f"option schedule must be one of GPipe, 1F1B, Interleaved1F1B, got '{schedule}'"


@pytest.mark.parametrize("strategy", ["pp", "pp_ddp", "pp_fsdp2_tp"])
def test_a_torch_whose_schedules_cannot_evaluate_is_refused(strategy):
    machine = Machine(gpus=(), cores=8, memory=8 * 2**30, torch=(2, 8))
    with pytest.raises(
        SpecError, match=f"{strategy} evaluates with schedule.eval, .* 2.9 .* torch 2.8 is installed; use a newer torch"
    ):
        Spec(strategy).on(machine)
    assert Spec(strategy).on(replace(machine, torch=(2, 9))).strategy == strategy


# ---- the functions of the script


def test_a_small_batch_is_padded_without_changing_loss_and_gradients(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(pp, "BATCH_PER_RANK", 8)
    inputs, targets = torch.randn(5, 4), torch.arange(5)
    model = nn.Linear(4, 10)
    expected = nn.functional.cross_entropy(model(inputs), targets)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]

    def step(inputs, target, losses):
        assert len(inputs) == len(target) == 8
        losses += [pp.micro_batch_loss(model(part), wanted) for part, wanted in zip(inputs.chunk(4), target.chunk(4))]
        assert losses[3].item() == 0, "it contains only padding"
        sum(losses).backward()

    model.schedule = SimpleNamespace(step=step)
    loss = pp.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), inputs, targets)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


def test_the_rank_with_the_last_stage_has_the_loss(tmp_path):
    ranks = record(
        Spec("pp", "mlp", nproc=2, batch_size=16, steps=2, samples=40, precision="bf16", device="cpu"), tmp_path / "run"
    )
    assert ranks[0]["losses"] == [None, None]
    assert ranks[1]["losses"] == pytest.approx([2.3, 2.3], abs=0.3)
    assert "LOSS_RANK = 0 " in write_script(Spec("pp", "gpt", nproc=2, options={"schedule": "ZBVZeroBubble"}))
    assert "LOSS_RANK = 2 " in write_script(Spec("pp_ddp", "mlp", nproc=4))
    assert "LOSS_RANK = 4 " in write_script(Spec("pp_fsdp2_tp", "gpt", nproc=8))


def test_fp16_steps_on_the_ranks_without_a_loss_too(tmp_path, monkeypatch):
    spec = Spec("pp", "mlp", nproc=2, batch_size=32, steps=12, samples=400, device="cpu", options={"clip_norm": 0.5})
    whole = record(spec, tmp_path / "fp32")[1]["losses"]
    on_cpu = "ShardedGradScaler()", 'ShardedGradScaler(device="cpu", init_scale=1024.0)'
    monkeypatch.setattr(weaving, "write_script", lambda spec: write_script(spec).replace(*on_cpu))
    ranks = record(replace(spec, precision="fp16"), tmp_path / "fp16")
    assert ranks[0]["losses"] == [None] * 12
    assert ranks[1]["losses"] == pytest.approx(whole, rel=0.02), "reported without the loss scale"
    assert ranks[1]["losses"][-1] < ranks[1]["losses"][0] - 0.1, "both ranks stepped"


def test_the_script_shows_the_order():
    source = write_script(Spec("pp_fsdp2_tp", "gpt", nproc=8, options={"checkpoint_activations": True}))
    steps = (
        "parallelize_module(block",
        "transform(block",
        "fully_shard(block",
        "wrap_stage(stage",
        "PipelineStage(stage",
    )
    body = source[source.index("def wrap_stage") + len("def wrap_stage") :]
    positions = [body.index(step) for step in steps]
    assert positions == sorted(positions)
