"""Memory that no trace shows: which kernels are executed to measure their temporary memory, the replay of the CUDA
caching allocator (by hand, and its invariants), and the estimates for a GPU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace

from labkit.analysis.prediction import notes
from labkit.analysis.theory.formulas import states
from labkit.common.units import size
from labkit.plan.spec import Spec
from labkit.prediction.devices import BEFORE_HOPPER, DEVICES, FROM_HOPPER
from labkit.prediction.predict import estimates, on_gpus
from labkit.prediction.tracing import kernels
from labkit.prediction.tracing.kernels import WORKSPACE, Allocator, Kernel, peaks, temporaries
from labkit.record.documents import AllocatorPeak, Plan, SpecFields, decoded, plain
from labkit.record.writer import OWNERS

MIB = 1 << 20
aten = torch.ops.aten


def of(function, *args) -> Kernel:
    return Kernel.of(function, args, None, function(*args))


def test_large_results_of_small_arguments_are_not_computed(monkeypatch):
    monkeypatch.setattr(kernels, "MOST", 1 << 20)
    small, gradient = (of(aten.mm.default, torch.ones(size, 2), torch.ones(2, size)) for size in (8, 512))
    assert (small.bytes, gradient.bytes) == (4 * 8 * (2 + 2 + 8), 4 * 512 * (2 + 2 + 512))
    assert temporaries([small, gradient]) == {small.key: 0}


def test_blocks_are_cut_from_segments_of_three_kinds():
    allocator = Allocator()
    for address, wanted, allocated, reserved in (
        (1, 1, 512, 2 * MIB),
        (2, MIB, 512 + MIB, 2 * MIB),
        (3, MIB, 512 + 2 * MIB, 4 * MIB),  # the rest of the first segment is too small
        (4, MIB + 1, 1024 + 3 * MIB, 24 * MIB),
        (5, 11 * MIB, 1024 + 14 * MIB, 24 * MIB),  # from the same segment of 20 MiB
        (6, 11 * MIB, 1024 + 26 * MIB, 36 * MIB),  # a segment of 12 MiB, whose rest is not split off
    ):
        allocator.allocate(address, wanted)
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved), address


def test_freed_neighbours_are_joined_and_the_smallest_block_that_fits_is_taken():
    allocator = Allocator()
    for address in range(5):
        allocator.allocate(address, 4 * MIB)
    assert allocator.reserved == 20 * MIB
    for address in (1, 3, 2):
        allocator.free(address)
    allocator.allocate(5, 12 * MIB - 512)
    assert allocator.reserved == 20 * MIB
    allocator.free(7)
    assert allocator.allocated == 20 * MIB, "the rest is less than 1 MiB, and is not split"


@pytest.mark.parametrize("seed", range(5))
def test_a_block_is_never_used_twice_and_everything_free_is_one_block_per_segment(seed):
    chance, allocator, held = random.Random(seed), Allocator(), {}
    for step in range(3000):
        if held and chance.random() < 0.5:
            allocator.free(address := chance.choice([*held]))
            del held[address]
        else:
            held[step] = chance.choice((1, 700, 40_000, MIB, 3 * MIB, 11 * MIB, 30 * MIB))
            allocator.allocate(step, held[step])
        assert sum(held.values()) <= allocator.allocated <= allocator.reserved
    taken = sorted((block.pool, block.start, block.size) for block in allocator._taken.values())
    assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(taken))
    for address in held:
        allocator.free(address)
    assert allocator.allocated == 0
    free = [block for blocks in allocator._free.values() for _, _, block in blocks]
    assert all(block.before is None and block.after is None for block in free)
    assert sum(block.size for block in free) == allocator.reserved


def test_streams_share_no_block():
    allocator = Allocator()
    allocator.allocate(1, 512, stream=1)
    allocator.free(1)
    allocator.allocate(2, 512, stream=2)
    assert allocator.reserved == 4 * MIB


def test_peaks_are_those_of_the_blocks_with_workspaces_of_the_size_of_the_device():
    history = [(1, 100, 0), (2, 3 * MIB, 0), (-1, WORKSPACE, 0), (3, 200, 0), (3, -200, 0), (4, 50, 0)]
    assert peaks([], 5 * MIB) == {"workspace": 5 * MIB, "allocated": 0, "reserved": 0}
    assert peaks(history, 5 * MIB)["allocated"] == 1024 + 8 * MIB
    assert peaks(history, 5 * MIB)["reserved"] == 22 * MIB
    assert peaks(history, 32 * MIB)["allocated"] == 1024 + 35 * MIB


def plan_of() -> Plan:
    """A plan of one rank on GPUs whose tensors take 100 bytes at the peak."""
    owners = dict.fromkeys(OWNERS, 0) | {"parameters": 60, "other": 40}
    step = {"peak": 100, "at_peak": owners, "owners": {owner: [0, size] for owner, size in owners.items()}}
    step |= {"times": [0.0, 1.0], "seconds": 1.0, "phases": []}
    sizes = ((BEFORE_HOPPER, 200), (FROM_HOPPER, 300))
    found = [{"workspace": workspace, "allocated": size, "reserved": 9000} for workspace, size in sizes]
    part = {"ranks": [0], "step": step, "ops": {}, "calls": [], "allocator": found}
    rank = {"rank": 0, "like": 0, "peak_memory_bytes": 100, "at_peak": owners, "phase_at_peak": "", "memory_bytes": {}}
    rank |= {"comm_bytes_per_step": 0}
    spec = Spec("ddp", workload="mlp", nproc=1, device="cuda", precision="fp32").to_json()
    return decoded({"spec": spec, "method": "simulated", "ranks": [rank], "classes": [part]}, Plan)


def test_the_peak_of_a_rank_is_that_of_the_allocator_on_the_gpus_of_the_machine():
    plan = plan_of()
    for machine, peak in (("t4x2", 200), ("h100x8", 300), ("a100x8", 200)):
        plan = on_gpus(plan, DEVICES[machine])
        step, (rank,) = plan.classes[0].step, plan.ranks
        assert rank.peak_memory_bytes == step.peak == sum(step.at_peak.values()) == peak
        assert step.owners["other"] == [peak - 100, peak - 60] and rank.at_peak["parameters"] == 60
        assert plan.classes[0].estimates[-1].high == 9000 - peak
    plan = plan_of()
    plan.classes[0].allocator = []
    assert on_gpus(plan, DEVICES["t4x2"]) == plan, "the plan of a run on CPUs"


def test_estimates_have_ranges_and_sources_and_name_nccl_only_with_collectives():
    reserved = AllocatorPeak(workspace=0, allocated=10, reserved=510)
    alone = estimates([("send", 8, 1)], reserved)
    assert [estimate.name for estimate in alone if "NCCL" in estimate.name] == []
    found = estimates([("all_reduce", 8, 4), ("all_gather", 8, 4), ("all_reduce", 8, 2)], reserved)
    (buffers,) = (estimate for estimate in found if "NCCL" in estimate.name)
    assert buffers.low == 2 * 16 * MIB
    for estimate in (*alone, *found):
        assert 0 <= estimate.low <= estimate.high and estimate.source
    assert found[-1].high == 500


def test_notes_say_why_the_trace_differs_from_the_formula_and_what_a_gpu_adds():
    spec = Spec("ddp", workload="mlp", nproc=2, device="cuda", precision="fp32")
    held = states(spec)[0]
    owners = {"parameters": int(held.parameters), "gradients": 0, "optimizer": int(held.optimizer) + 8}
    owners |= {"activations": 4096, "communication": 0, "other": 0}
    step = {"peak": sum(owners.values()), "at_peak": owners}
    step |= {"times": [], "seconds": 0.0, "phases": [], "owners": {}}
    allocator = AllocatorPeak(workspace=0, allocated=512, reserved=2 * MIB)
    part = {
        "ranks": [0, 1],
        "step": step,
        "ops": {},
        "calls": [],
        "estimates": [plain(estimate) for estimate in estimates([], allocator)],
    }
    plan = decoded({"spec": spec.to_json(), "classes": [part], "method": "simulated", "ranks": []}, Plan)
    formula, gpu = notes(plan)
    assert f"parameters {size(held.parameters)}" in formula and "16 bytes per parameter" in formula
    gap = f"gradients −{size(held.gradients, digits=2)} (not computed or already freed then)"
    differs = f"{gap}, optimizer +8 B (step counts, or other state), activations +4.00 KiB."
    assert f"The traced peak differs: {differs}" in formula
    assert "estimated and not traced" in gpu and "CUDA context and kernels" in gpu
    plan.classes[0].estimates = []
    assert len(notes(plan)) == 1
    assert notes(replace(plan, classes=[])) == []
    own = {"script": "train.py", "nproc": 2, "device": "cpu"}
    assert notes(replace(plan, spec=decoded(Spec(**own).to_json(), SpecFields))) == []
