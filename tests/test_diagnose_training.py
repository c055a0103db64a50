"""Findings about runs that train something else than was meant, or are slower or larger than need be."""

from __future__ import annotations

import math

import pytest
from diagnosed import MIB, batches, ddp, epoch, first, fold, memory, names, saw, script, spec, start, steps, timeline, traffic

from labkit.diagnose import findings

# ---- another training than was meant


def test_the_same_samples_on_every_rank():
    state = fold(spec(), start(0, 1), batches(0, "a", "b", "c"), batches(1, "a", "b", "c"))
    found = first(state, "same_samples")
    assert found.ranks == (0, 1) and "all 3 steps" in found.evidence and "1 different batch a step, and 2 were meant" in found.evidence
    assert "DistributedSampler" in found.way_out


def test_two_of_four_ranks_with_the_same_samples():
    state = fold(spec(nproc=4), *(batches(rank, f"{min(rank, 2)}") for rank in range(4)))
    assert first(state, "same_samples").ranks == (2, 3)


def test_the_same_samples_in_a_script_of_ones_own():
    same = [*batches(0, "a", "b"), *batches(1, "a", "b")]
    assert "same_samples" in names(fold(script(), start(0, 1), ddp(0, 1), same))
    assert names(fold(script(), start(0, 1), same)) == []  # not known how it splits
    assert names(fold(script(), start(0, 1), ddp(0), saw(1, "model", name="Net", units=0, parameters=9), same)) == []


@pytest.mark.parametrize(
    ("asked", "digests"),
    [
        (spec(), ["ab", "cd"]),
        (spec(), ["ab", "ad"]),  # once alike is chance
        (spec(), ["ab", ""]),  # nothing known of one
        (spec("tp"), ["ab", "ab"]),
        (spec("fsdp2_tp", 4), ["ab", "ab", "cd", "cd"]),
        (spec("pp"), ["ab", "ab"]),
    ],
)
def test_samples_that_are_as_meant(asked, digests):
    assert names(fold(asked, *(start(rank) + batches(rank, *those) for rank, those in enumerate(digests)))) == []


@pytest.mark.parametrize(
    ("before", "after", "times"),
    [
        ([(0, 0)], [(0, 0)], 2),
        ([(0, 0)], [(1, 0), (0, 0), (1, 0)], 2),
        ([(1, 0), (0, 0)], [(1, 0), (0, 0)], 2),
        ([(0, 3)], [(0, 3)] * 3, 4),
    ],
)
def test_a_sampler_that_nobody_told_the_epoch(before, after, times):
    """Sampler 0 is the one whose samples the model is trained on; 1 is for validation."""
    seen = [[epoch(rank, *one) for one in before] + ddp(rank) + [epoch(rank, *one) for one in after] for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), *seen), "no_set_epoch")
    assert found.ranks == (0, 1) and f"began {times} epochs with the same epoch number, {before[-1][1]}" in found.evidence


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(0, 1)], [(0, 2), (0, 3)]),
        ([(0, 0)], [(1, 0), (0, 1), (1, 0)]),  # a validation sampler that shuffles
        ([(1, 0), (0, 0)], [(1, 0), (0, 1)]),  # one that is tried before the training
        ([(0, 0)], [(1, 0), (1, 0), (1, 0)]),  # evaluated often
        ([(0, 0), (0, 0)], [(0, 1)]),  # somebody had a look at one batch first
        ([], [(1, 0), (1, 0)]),  # training has no such sampler
        ([(0, 0, False)], [(0, 0, False)]),  # does not shuffle
    ],
)
def test_samplers_that_may_begin_so(before, after):
    seen = [[epoch(rank, *one) for one in before] + ddp(rank) + [epoch(rank, *one) for one in after] for rank in (0, 1)]
    assert names(fold(spec(), start(0, 1), *seen)) == []


def test_a_loss_that_is_no_number_on_all_ranks_at_once():
    spoilt = [steps(rank, loss=lambda step: 1.0 if step < 6 else math.nan) for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), *spoilt), "nan_loss")
    assert found.ranks == (0, 1) and "from step 6 on" in found.title and "in step 5 one rank's gradient" in found.cause


@pytest.mark.parametrize(
    ("asked", "losses", "ranks", "step"),
    [
        (spec(), (lambda step: 1.0, lambda step: 1.0 if step < 9 else math.inf), (1,), 9),
        (spec(), (lambda step: math.nan,) * 2, (0, 1), 1),
        (spec("tp"), (lambda step: 1.0 if step < 6 else math.nan,) * 2, (0, 1), 6),
        (spec("pp"), (lambda step: None, lambda step: 1.0 if step < 6 else math.nan), (1,), 6),
    ],
)
def test_a_loss_that_is_no_number_where_no_exchange_spoilt_it(asked, losses, ranks, step):
    state = fold(asked, start(0, 1), *(steps(rank, loss=loss) for rank, loss in enumerate(losses)))
    found = next(one for one in findings(state) if one.name == "nan_loss")
    assert found.ranks == ranks and f"from step {step} on" in found.title and "this rank" in found.cause
    assert ("were finite" in found.evidence) == (step > 1)


@pytest.mark.parametrize("loss", [None, 0.5, lambda step: None if step % 2 else 1e30])
def test_losses_that_are_null_or_finite(loss):
    assert names(fold(spec(), start(0, 1), steps(0, loss=loss), steps(1, loss=loss))) == []


def test_ranks_that_must_have_one_loss():
    state = fold(spec("tp"), start(0, 1), steps(0, loss=0.5), steps(1, loss=lambda step: 0.5 if step < 3 else 0.6))
    found = first(state, "loss_differs")
    assert found.ranks == (0, 1) and found.evidence == "step 3: 0.500000, 0.600000"
    state = fold(spec("fsdp2_tp", 4), *(steps(rank, loss=(0.5, 0.5, 0.7, 0.8)[rank]) for rank in range(4)))
    assert first(state, "loss_differs").ranks == (2, 3)


@pytest.mark.parametrize(
    ("asked", "events"),
    [
        (spec(), [*steps(0, loss=0.5), *steps(1, loss=0.7)]),  # each its own share of the batch
        (spec("tp"), [*steps(0, loss=0.5), *steps(1, loss=0.50001)]),  # rounding
        (spec("tp"), [*steps(0, loss=0.5), *steps(1, loss=None)]),
        (spec("pp"), [*steps(0, loss=None), *steps(1, loss=0.5)]),
        (spec("tp"), [*steps(0, loss=lambda step: 1 / step), *steps(1, first=4, loss=lambda step: 1 / step)]),  # lines were lost
        (
            spec("tp"),  # one wrote a step less before the restart
            [
                *(one for rank in (0, 1) for one in steps(rank, 5 - rank, loss=lambda step: 1 / step)),
                *start(0, 1, attempt=1),
                *(one for rank in (0, 1) for one in steps(rank, 5, loss=lambda step: 1 / step)),
            ],
        ),
    ],
)
def test_losses_that_may_differ(asked, events):
    assert names(fold(asked, start(0, 1), events)) == []


def test_one_file_of_several_ranks():
    saves = [saw(rank, "save", path="/runs/one/model.pt", step=step) for step in (5, 10) for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), saves), "one_file")
    assert found.ranks == (0, 1) and "/runs/one/model.pt, after step 5" in found.evidence and "1 time more" in found.evidence


@pytest.mark.parametrize(
    "saves",
    [
        [saw(0, "save", path="/runs/one/model.pt", step=5), saw(0, "save", path="/runs/one/model.pt", step=5)],
        [saw(rank, "save", path=f"/runs/one/rank{rank}.pt", step=5) for rank in (0, 1)],
        [*start(1, host="there"), *(saw(rank, "save", path="/tmp/model.pt", step=5) for rank in (0, 1))],  # two machines' own disks
    ],
)
def test_files_that_nobody_shares(saves):
    assert names(fold(spec(), start(0, 1), saves)) == []


# ---- slower, or larger, than need be


def test_steps_that_wait_for_data():
    found = first(fold(spec(), start(0, 1), steps(0, data=0.2), steps(1, data=0.2)), "input_bound")
    assert found.ranks == (0, 1) and "68%" in found.title and "200.0 ms of 295.0 ms" in found.evidence


def test_data_that_are_slow_at_first_only_are_no_finding():
    assert names(fold(spec(), start(0, 1), *(steps(rank, 2, data=5.0) + steps(rank, 10, first=3) for rank in (0, 1)))) == []
    assert names(fold(spec(), start(0, 1), *(steps(rank, 7, data=0.2) for rank in (0, 1)))) == []  # too few to judge by


@pytest.mark.parametrize(("phase", "way_out"), [("other", "logging"), ("forward", "device or core"), ("optimizer", "device or core")])
def test_a_rank_that_the_others_wait_for(phase, way_out):
    others = [steps(rank, backward=0.25) for rank in (0, 2)]
    found = first(fold(spec(nproc=3), start(0, 1, 2), *others, steps(1, **{phase: 0.25})), "straggler")
    assert found.ranks == (1,) and f"in {phase}" in found.title and way_out in found.way_out and "the others' 50.0 ms" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [*steps(0), *steps(1, backward=0.3)],  # backward is where the others wait
        [*steps(0), *steps(1, forward=0.04)],
        [*steps(0, backward=0.9), *steps(1, backward=0.9, other=0.05)],  # slower, and little of the step
        [*steps(0, forward=0.9), *steps(1, forward=0.9, other=0.3)],  # much of the step, and little slower
        [*steps(0, 7), *steps(1, 7, other=0.3)],  # too few to judge by
        [*steps(0), *steps(1, other=0.3), *(traffic(rank, send=(4, 524288)) for rank in (0, 1))],  # stages, which are unlike
        [*steps(0, loss=None), *steps(1, other=0.3)],  # the same, before the first look at what is sent
    ],
)
def test_ranks_of_one_pace(events):
    assert names(fold(spec(), start(0, 1), events)) == []


def test_a_run_of_one_rank_has_no_straggler():
    assert names(fold(spec("single", 1), start(0), steps(0, other=0.3))) == []


def test_communication_that_nothing_hides():
    found = first(fold(spec(), start(0, 1), timeline(0), timeline(1, exposed=0.06)), "communication_bound")
    assert found.ranks == (0, 1) and "50%" in found.title and "50%, 60%; most of it in all_reduce (gloo)" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [timeline(0), timeline(1, exposed=0.01)],  # one that is not held up
        [timeline(0), *start(1)],  # nothing known of the other
        [timeline(0, step=2), timeline(1, step=2)],  # the first steps order their buckets
        [timeline(0, op="recv"), timeline(1, op="recv")],  # the bubble of a pipeline
    ],
)
def test_communication_that_is_no_finding(events):
    assert names(fold(spec(), start(0, 1), events)) == []


def test_many_small_buckets():
    found = first(fold(spec(), start(0, 1), ddp(0, 1), traffic(0, all_reduce=(16, 4 * MIB))), "small_buckets")
    assert found.ranks == (0,) and "16 buckets of 256.0 KiB" in found.title and "4.0 MiB in all" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [*ddp(0), traffic(0, all_reduce=(2, 4096))],
        [*ddp(0), traffic(0, all_reduce=(16, 64 * MIB))],
        [*ddp(0), traffic(0)],
        [traffic(0, all_reduce=(16, 4 * MIB))],
        [saw(0, "model", name="Sequential", units=0, parameters=9), traffic(0, all_reduce=(16, 4 * MIB))],  # tp's own all-reduces
    ],
)
def test_buckets_that_are_as_they_should_be(events):
    assert names(fold(spec(), start(0, 1), events)) == []


@pytest.mark.parametrize(("device", "cause"), [("cuda:0", "no work is queued"), ("cpu", "costs nothing")])
def test_a_value_read_in_every_step(device, cause):
    found = first(fold(spec(), start(0, device=device), saw(0, "item", calls=20, steps=20)), "synchronised")
    assert found.ranks == (0,) and "20 of 20 steps" in found.evidence and cause in found.cause
    assert names(fold(spec(), start(0), saw(0, "item", calls=1, steps=20))) == []


def test_fsdp_with_one_unit():
    wrapped = [saw(0, "model", name="FSDPSequential", units=units, parameters=1073536) for units in (1, 8)]
    found = first(fold(spec("fsdp2"), start(0, 1), wrapped[0]), "one_unit")
    assert found.ranks == (0,) and "1,073,536 parameters" in found.evidence and found.kind == "memory"
    assert names(fold(spec("fsdp2"), start(0, 1), wrapped[1])) == [] == names(fold(spec(), start(0, 1), ddp(0, 1)))


def test_a_peak_of_activations():
    found = first(fold(spec(), start(0, 1), memory(0, 50 * MIB), memory(1, 200 * MIB, activations=150 * MIB)), "activations")
    assert found.ranks == (1,) and "75%" in found.title and "150.0 MiB of 200.0 MiB, in step 2" in found.evidence
    assert names(fold(spec(), start(0), memory(0, 200 * MIB, activations=100 * MIB))) == []
    assert names(fold(spec(), start(0), memory(0, 20 * MIB, activations=18 * MIB))) == []  # nobody needs to save that
