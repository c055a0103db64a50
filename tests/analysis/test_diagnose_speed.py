"""Findings about runs that are slower or larger than they need to be."""

from __future__ import annotations

import re

import diagnosed
import pytest
from diagnosed import (
    MIB,
    batches,
    ddp,
    first,
    fold,
    memory,
    names,
    saw,
    script,
    spec,
    start,
    timeline,
    traffic,
)
from generated import ONLY
from places import SCRIPTS

from labkit import run
from labkit.analysis.diagnose.finding import _ADVICE, advice
from labkit.record.events import Model
from labkit.training.strategies import STRATEGIES


def steps(rank: int, count: int = 25, **seconds) -> list[dict]:
    """Steps of a run that is long enough to judge its speed."""
    return diagnosed.steps(rank, count, **seconds)


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
        [*steps(0, 30), *steps(1, 11), *steps(1, 19, first=12, other=0.3)],  # delayed for a while
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
    """One profiled step, and 25 others whose backward takes as long."""
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
    asked = spec(strategy, nproc=STRATEGIES[strategy].default_nproc or 2, workload=ONLY.get(strategy, "mlp"))
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


def test_a_value_read_in_every_step():
    item = saw(0, "item", calls=20, steps=20)
    state = fold(spec(), start(0, 1, device="cuda:0"), item, item | {"rank": 1})
    found = first(state, "synchronised")
    assert found.ranks == (0, 1) and "20 of 20 steps" in found.evidence and "no work is queued" in found.cause
    assert names(fold(spec(), start(0, device="cuda:0"), saw(0, "item", calls=1, steps=20))) == []
    assert names(fold(spec(), start(0), item)) == [], "a CPU rank waits for nothing"


def test_a_run_of_a_moment_says_nothing_about_speed():
    quick = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.001)
    short = [*steps(0, 40, **quick), *steps(1, 40, **quick | {"other": 0.01})]
    events = [event | {"seconds": event["seconds"] | {"step": 0.014}} for event in short]
    assert names(fold(script(), start(0, 1), events, timeline(0), timeline(1))) == []


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
    assert [(model.name, model.units) for model in done.state.ranks[0].seen(Model)] == [("FullyShardedDataParallel", 1)]
    found = next(one for one in done.findings() if one.name == "one_unit")
    assert "min_num_params" in found.fix and found.ranks == (0,)


def test_a_peak_of_activations():
    found = first(
        fold(spec(), start(0, 1), memory(0, 50 * MIB), memory(1, 200 * MIB, activations=150 * MIB)), "activations"
    )
    assert found.ranks == (1,) and "75%" in found.title and "150.0 MiB of 200.0 MiB, in step 2" in found.evidence
    assert names(fold(spec(), start(0), memory(0, 200 * MIB, activations=100 * MIB))) == []
    assert names(fold(spec(), start(0), memory(0, 20 * MIB, activations=18 * MIB))) == []  # nobody needs to save that
