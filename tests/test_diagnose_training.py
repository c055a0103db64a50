"""Findings about runs that train incorrectly, or are slower or larger than they need to be."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from diagnosed import (
    MIB,
    batches,
    ddp,
    epoch,
    first,
    fold,
    memory,
    names,
    saw,
    script,
    spec,
    start,
    steps,
    timeline,
    traffic,
)

from labkit import run
from labkit.analysis.diagnose import findings
from labkit.analysis.diagnose.advice import _ADVICE, advice
from labkit.training.strategies import STRATEGIES

SCRIPTS = Path(__file__).parent / "scripts"

# ---- incorrect training


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


# ---- slow, or large


def test_steps_that_wait_for_data():
    found = first(fold(spec(), start(0, 1), steps(0, data=0.2), steps(1, data=0.2)), "input_bound")
    assert found.ranks == (0, 1) and "68%" in found.title and "200.0 ms of 295.0 ms per step" in found.evidence


def test_data_that_are_slow_at_first_only_are_no_finding():
    assert (
        names(fold(spec(), start(0, 1), *(steps(rank, 2, data=5.0) + steps(rank, 10, first=3) for rank in (0, 1))))
        == []
    )
    assert names(fold(spec(), start(0, 1), *(steps(rank, 7, data=0.2) for rank in (0, 1)))) == []  # too few to judge by


@pytest.mark.parametrize(
    ("phase", "fix"), [("other", "logging"), ("forward", "device or core"), ("optimizer", "device or core")]
)
def test_a_rank_that_the_others_wait_for(phase, fix):
    where = "outside the measured phases" if phase == "other" else f"in {phase}"
    others = [steps(rank, backward=0.25) for rank in (0, 2)]
    found = first(fold(spec(nproc=3), start(0, 1, 2), *others, steps(1, **{phase: 0.25})), "straggler")
    assert (
        found.ranks == (1,)
        and found.title.endswith(f", {where}")
        and fix in found.fix
        and "the other ranks' 50.0 ms" in found.evidence
    )


@pytest.mark.parametrize(
    "events",
    [
        [*steps(0), *steps(1, backward=0.3)],  # backward is where the others wait
        [*steps(0), *steps(1, forward=0.04)],
        [*steps(0, backward=0.9), *steps(1, backward=0.9, other=0.05)],  # slower, and little of the step
        [*steps(0, forward=0.9), *steps(1, forward=0.9, other=0.3)],  # much of the step, and little slower
        [*steps(0, 7), *steps(1, 7, other=0.3)],  # too few to judge by
        [
            *steps(0),
            *steps(1, other=0.3),
            *(traffic(rank, send=(4, 524288)) for rank in (0, 1)),
        ],  # stages, which are unlike
        [*steps(0, loss=None), *steps(1, other=0.3)],  # the same, before the first look at what is sent
    ],
)
def test_ranks_of_one_pace(events):
    assert names(fold(spec(), start(0, 1), events)) == []


def test_a_run_of_one_rank_has_no_straggler():
    assert names(fold(spec("single", 1), start(0), steps(0, other=0.3))) == []


COMMUNICATING = {
    "data": 0.0,
    "forward": 0.0,
    "backward": 0.1,
    "optimizer": 0.0,
    "other": 0.0,
}  # seconds of the phases of a step


def profiled(*ranks: int, exposed: float = 0.05, every: int = 50, times: int = 1, **more) -> list[dict]:
    return [
        timeline(rank, step=every * number, exposed=exposed, **more) for rank in ranks for number in range(1, times + 1)
    ]


def test_communication_that_nothing_hides():
    """One profiled step, and 12 others whose backward takes as long."""
    usual = [*steps(0, **COMMUNICATING), *steps(1, **COMMUNICATING)]
    found = first(fold(spec(), start(0, 1), usual, timeline(0), timeline(1, exposed=0.06)), "communication_bound")
    assert (
        found.ranks == (0, 1) and found.title == "communication is exposed for at least 50% of each step, on every rank"
    )
    assert "of 100.0 ms per step (median): 50%, 60%, from 1 profiled step; mostly all_reduce (gloo)" in found.evidence


def test_communication_that_several_profiled_steps_agree_on():
    found = first(fold(spec(), start(0, 1), profiled(0, 1, times=3)), "communication_bound")
    assert "50%, 50%, from 3 profiled steps" in found.evidence


@pytest.mark.parametrize(
    ("asked", "words", "foreign"),
    [
        (spec(), ["--batch-size", "--option accumulate=4", "--option compression=fp16"], False),
        (spec("fsdp2"), ["--batch-size", "--option accumulate=4"], False),
        (script(), ["a larger batch per rank", "model.no_sync()", "register_comm_hook", "fewer ranks"], True),
    ],
)
def test_advice_is_in_the_terms_of_the_script(asked, words, foreign):
    found = first(fold(asked, start(0, 1), profiled(0, 1, times=3)), "communication_bound")
    assert all(word in found.fix for word in words) and ("--option" in found.fix) is not foreign
    assert ("compression" in found.fix) is ("compression" in " ".join(words))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_finding_advises_an_option_that_the_strategy_does_not_have(strategy):
    asked = spec(strategy, nproc=STRATEGIES[strategy].default_nproc or 2, workload="gpt" if strategy == "cp" else "mlp")
    state = fold(asked)
    for name in _ADVICE:
        for option in re.findall(r"--option (\w+)", " ".join(advice(state, name))):
            assert option in state.asked.options
    assert all("--" not in text or "--nproc-per-node" in text for text in advice(fold(script()), *_ADVICE))


@pytest.mark.parametrize(
    "events",
    [
        [timeline(0), timeline(1, exposed=0.01)],  # one that is not held up
        [timeline(0), *start(1)],  # nothing known of the other
        [timeline(0, step=2), timeline(1, step=2)],  # the first steps order their buckets
        profiled(0, 1, op="recv", times=3),  # the bubble of a pipeline
        profiled(0, 1, exposed=0.09),  # one profiled step alone
        [
            *profiled(0, 1, exposed=0.09),
            *steps(0, backward=0.012),
            *steps(1, backward=0.012),
        ],  # held up once, as the others are not
        [*profiled(0, exposed=0.09), *profiled(1, exposed=0.09, times=3)],  # one rank is known from one step only
    ],
)
def test_communication_that_is_no_finding(events):
    assert names(fold(spec(), start(0, 1), events)) == []


def test_many_small_buckets():
    found = first(fold(spec(), start(0, 1), ddp(0, 1), traffic(0, all_reduce=(16, 4 * MIB))), "small_buckets")
    assert found.ranks == (0,) and "16 buckets of 256.0 KiB" in found.title and "4.0 MiB in total" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [*ddp(0), traffic(0, all_reduce=(2, 4096))],
        [*ddp(0), traffic(0, all_reduce=(16, 64 * MIB))],
        [*ddp(0), traffic(0)],
        [traffic(0, all_reduce=(16, 4 * MIB))],
        [
            saw(0, "model", name="Sequential", units=0, parameters=9),
            traffic(0, all_reduce=(16, 4 * MIB)),
        ],  # tp's own all-reduces
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


LOSS = saw(0, "model", name="CrossEntropyLoss", units=0, parameters=0)  # as older versions recorded a loss module


def test_a_loss_module_is_no_model():
    whole = saw(0, "model", name="FullyShardedDataParallel", units=1, parameters=1073536)
    assert "FullyShardedDataParallel as one unit" in first(fold(script(), start(0, 1), whole, LOSS), "one_unit").title
    small = traffic(0, all_reduce=(16, 4 * MIB))
    first(fold(script(), start(0, 1), ddp(0), LOSS, small), "small_buckets")
    first(
        fold(script(), start(0, 1), LOSS, ddp(0), small), "small_buckets"
    )  # a module for the inputs, which is called first
    same = [event for rank in (0, 1) for event in [LOSS | {"rank": rank}, *ddp(rank), *batches(rank, "a", "b")]]
    first(fold(script(), start(0, 1), same), "same_samples")


def test_several_models_of_which_one_is_a_single_unit():
    models = [
        saw(0, "model", name=name, units=units, parameters=9)
        for name, units in (("FSDPGenerator", 1), ("FSDPCritic", 4))
    ]
    assert "FSDPGenerator" in first(fold(script(), start(0, 1), models), "one_unit").title


def test_fsdp1_with_a_size_based_policy_that_wraps_nothing():
    """A real script with a loss module: what the probe records, and the finding."""
    done = run(SCRIPTS / "one_unit.py", nproc=2, device="cpu").wait(180)
    assert done.words == "finished", done.logs(0, "stderr")
    assert [(model["name"], model["units"]) for model in done.state.ranks[0].seen("model")] == [
        ("FullyShardedDataParallel", 1)
    ]
    found = next(one for one in done.findings() if one.name == "one_unit")
    assert "min_num_params" in found.fix and found.ranks == (0,)


def test_a_peak_of_activations():
    found = first(
        fold(spec(), start(0, 1), memory(0, 50 * MIB), memory(1, 200 * MIB, activations=150 * MIB)), "activations"
    )
    assert found.ranks == (1,) and "75%" in found.title and "150.0 MiB of 200.0 MiB, in step 2" in found.evidence
    assert names(fold(spec(), start(0), memory(0, 200 * MIB, activations=100 * MIB))) == []
    assert names(fold(spec(), start(0), memory(0, 20 * MIB, activations=18 * MIB))) == []  # nobody needs to save that
