"""Findings about runs that train incorrectly."""

from __future__ import annotations

import math

import pytest
from diagnosed import (
    batches,
    ddp,
    epoch,
    first,
    fold,
    names,
    saw,
    script,
    spec,
    start,
    steps,
)

from labkit.analysis.diagnose import findings


def test_the_same_samples_on_every_rank():
    state = fold(spec(), start(0, 1), batches(0, "a", "b", "c"), batches(1, "a", "b", "c"))
    found = first(state, "same_samples")
    assert (
        found.ranks == (0, 1)
        and "all 3 recorded steps" in found.evidence
        and "1 different batch per step, expected 2" in found.evidence
    )
    assert "DistributedSampler" in found.fix


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
    """Sampler 0 is for training, sampler 1 for validation."""
    seen = [[epoch(rank, *one) for one in before] + ddp(rank) + [epoch(rank, *one) for one in after] for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), *seen), "no_set_epoch")
    assert (
        found.ranks == (0, 1)
        and f"started {times} epochs with the same epoch number, {before[-1][1]}" in found.evidence
    )


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
    assert (
        found.ranks == (0, 1)
        and "from step 6 on" in found.title
        and "in step 5 the gradient of at least one rank" in found.cause
    )


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


def parameters(rank: int, step: int, nan: int = 0, infinite: int = 0) -> dict:
    return saw(rank, "not_finite", step=step, parameters=8, nan=nan, infinite=infinite)


@pytest.mark.parametrize(
    ("asked", "losses", "seen", "shown"),
    [
        (
            spec(),
            (lambda step: -(10.0 ** (4 * step)) if step < 8 else -math.inf,) * 2,
            [],
            "-inf from step 8 on, on all 2 ranks",
        ),
        (spec(), (lambda step: 2.3 if step < 6 else math.inf,) * 2, [], "inf from step 6 on, on all 2 ranks"),
        (
            spec(),
            (lambda step: 2.0 if step < 6 else math.nan,) * 2,
            [parameters(0, 6), parameters(1, 6)],
            "nan from step 6 on",
        ),
        (
            spec(),
            (lambda step: 2.0 if step < 6 else math.nan,) * 2,
            [parameters(0, 6, infinite=3)],
            "nan from step 6 on",
        ),
        (
            spec(),
            (lambda step: 10.0**step if step < 6 else math.nan, lambda step: 9.0**step if step < 7 else math.nan),
            [],
            "on rank 0",
        ),
        (spec("single", 1), (lambda step: 10.0**step if step < 6 else math.nan,), [], "nan from step 6 on, on rank 0"),
        (
            spec("pp"),
            (lambda step: None, lambda step: 10.0**step if step < 6 else math.inf),
            [],
            "inf from step 6 on, on rank 1",
        ),
        (
            script(),
            (lambda step: -(10.0 ** (9 * step)) if step < 3 else -math.inf,) * 2,
            [],
            "-inf from step 3 on, on all 2 ranks",
        ),
    ],
)
def test_a_loss_that_diverges_is_no_ranks_gradient(asked, losses, seen, shown):
    ranks = range(len(losses))
    state = fold(asked, start(*ranks), *(steps(rank, loss=loss) for rank, loss in enumerate(losses)), ddp(*ranks), seen)
    found = first(state, "loss_diverged")
    assert found.title.startswith("the loss diverged: ") and shown in found.title and "gradient" not in found.cause
    assert "learning rate" in found.fix and ("no parameter contained NaN" in found.evidence) is bool(seen)


def test_parameters_with_nan_are_a_gradient_that_was_not_finite():
    spoilt = [steps(rank, loss=lambda step: 1.0 if step < 6 else math.nan) for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), *spoilt, parameters(0, 6, nan=8), parameters(1, 6, nan=8)), "nan_loss")
    assert "in step 5 the gradient of at least one rank" in found.cause and "contain NaN before step 6" in found.cause


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
        (
            spec("tp"),
            [*steps(0, loss=lambda step: 1 / step), *steps(1, first=4, loss=lambda step: 1 / step)],
        ),  # lines were lost
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
    assert (
        found.ranks == (0, 1)
        and "/runs/one/model.pt, after step 5" in found.evidence
        and "and 1 more time" in found.evidence
    )


@pytest.mark.parametrize(
    "saves",
    [
        [saw(0, "save", path="/runs/one/model.pt", step=5), saw(0, "save", path="/runs/one/model.pt", step=5)],
        [saw(rank, "save", path=f"/runs/one/rank{rank}.pt", step=5) for rank in (0, 1)],
        [
            *start(1, host="there"),
            *(saw(rank, "save", path="/tmp/model.pt", step=5) for rank in (0, 1)),
        ],  # two machines' own disks
    ],
)
def test_files_that_nobody_shares(saves):
    assert names(fold(spec(), start(0, 1), saves)) == []
