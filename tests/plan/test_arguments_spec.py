"""Spec, and every function that takes its fields, validates them: one sentence that names the value, immediately."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from arguments_of import FLAGS, HUGE, NUMBERS, PATHS, SMALL, STARTING, TEXTS, Rude, refused

from labkit import (
    Spec,
    run,
    write_script,
)
from labkit.common.arguments import shown
from labkit.plan.spec import bounds_of
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS


def nothing_started(runs: Path) -> bool:
    return not runs.exists() or not list(runs.iterdir())


# ---- Spec, and functions that take its fields


NUMERIC = [name for name in Spec.__dataclass_fields__ if bounds_of(name)]

WRONG_FIELDS = [
    *(
        (name, value)
        for name in NUMERIC
        for value in NUMBERS
        if not (value is None and Spec.__dataclass_fields__[name].default is None)
    ),
    *(
        (name, value)
        for name in ("strategy", "workload", "data", "precision", "fault")
        for value in TEXTS
        if value is not None
    ),
    *((name, value) for name in ("scaling", "device") for value in TEXTS),
    *((name, value) for name in ("tensors", "as_module") for value in FLAGS),
    *((name, value) for name in ("script", "resume", "data_dir") for value in PATHS),
    *(("options", value) for value in ("a=1", ["a"], 5, {1: 2}, {"typo": 1}, None)),
    *(("args", value) for value in ("x", ("x",), 5, [5], {"x": 1}, None)),
    ("nprocs", 2),
    ("x" * 5000, 1),
]


def is_wrong(name: str, value: Any) -> bool:
    bounds = bounds_of(name) if name in Spec.__dataclass_fields__ else None
    return (
        bounds is None
        or isinstance(value, bool)
        or not (isinstance(value, int) and bounds.minimum <= value <= bounds.maximum)
    )


@pytest.mark.parametrize("name", STARTING)
def test_no_field_of_a_spec_accepts_invalid_values(name, runs):
    fails = []
    for field, value in WRONG_FIELDS:
        if not is_wrong(field, value):
            continue
        given = {field: value}
        try:
            refused(lambda given=given: STARTING[name](**given))
        except (AssertionError, pytest.fail.Exception) as error:
            fails.append(f"{name}({field}={shown(value)}): {str(error).splitlines()[0]}")
    assert not fails, "\n".join(fails)
    assert nothing_started(runs)


def test_refusal_of_a_field_names_it_with_bounds_and_value():
    assert (
        refused(lambda: Spec(seed=2**64), 2**64)
        == "--seed must be an integer from 0 to 9223372036854775807, got 18446744073709551616"
    )
    assert refused(lambda: Spec(nproc=HUGE)).endswith("got an integer of 16610 bits")
    assert refused(lambda: Spec(nprocs=2)).startswith(
        "Spec has no field 'nprocs' (did you mean nproc?); fields: strategy, "
    )
    assert (
        refused(lambda: run("ddp", args=("x",)))
        == "args=('x',) applies only to your own script; name it with script='train.py'"
    )
    assert refused(lambda: Spec(script="train.py", precision="bf16")).startswith(
        "precision 'bf16' applies only to a strategy"
    )


# ---- options


OPTIONS = {(strategy.name, option.name): option for strategy in STRATEGIES.values() for option in strategy.all_options}

OPTIONS |= {("ddp", option.name): option for workload in WORKLOADS.values() for option in workload.options}


@pytest.mark.parametrize("key", OPTIONS, ids=lambda key: "-".join(key))
def test_no_option_accepts_invalid_values(key):
    option = OPTIONS[key]
    for value in (
        math.nan,
        math.inf,
        "nan",
        "inf",
        "-inf",
        1e400,
        "1e400",
        -1,
        "-1",
        HUGE,
        "9" * 5000,
        1.5e300,
        None,
        [],
        {},
        b"1",
        "",
        Rude(),
    ):
        with pytest.raises(ValueError, match=f"option {option.name} must be .*, got ") as caught:
            option.parse(value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_the_bounds_of_every_number_contain_its_default():
    for option in OPTIONS.values():
        if option.bounds is not None:
            assert option.parse(option.default) == option.default
            assert math.isfinite(option.bounds.minimum) and math.isfinite(option.bounds.maximum)
    for name in NUMERIC:
        default = Spec.__dataclass_fields__[name].default
        assert default is None or bounds_of(name).check(name, default) == default


def test_clip_norm_in_a_script_is_a_number():
    assert "CLIP_NORM = 1000.0" in write_script(Spec("ddp", nproc=2, options={"clip_norm": "1e3"}))
    for value in ("nan", "inf", math.nan, math.inf):
        assert "clip_norm must be a number from 0 to 1e+12" in refused(
            lambda value=value: Spec(options={"clip_norm": value})
        )


# ---- combinations of sizes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"batch_size": 99_999_999_999}, "--batch-size must be an integer from 1 to 1000000000"),
        (
            {"batch_size": 1_000_000, "nproc": 2},
            "the 30000 samples that a rank has per epoch; use --batch-size 30000, or more --samples",
        ),
        (
            {"batch_size": 60_002, "nproc": 2, "scaling": "strong"},
            "the 30000 samples that a rank has per epoch; use --batch-size 60000",
        ),
        (
            {"samples": 10**9},
            (
                "samples of digits need 2.9 TiB on each of 2 ranks, and this machine has 8.0 GiB of memory; use"
                " --samples 1366083 or less"
            ),
        ),
        (
            {"options": {"workers": 60}},
            (
                "workers=60 on 2 ranks starts 120 processes, more than the maximum of 16 for 2 cores; use workers=8 or"
                " less"
            ),
        ),
        (
            {"options": {"accumulate": 256}},
            "accumulate=256 splits a batch of 128 samples into more micro-batches than samples",
        ),
        (
            {"nproc": 60_001},
            "60000 samples are too few for 60001 ranks; use --samples 60001 or more, or at most 60000 ranks",
        ),
        ({"nproc": 60_001, "data": "mnist"}, "60000 samples are too few for 60001 ranks; use at most 60000 ranks"),
    ],
)
def test_sizes_that_are_too_large_are_refused_with_sizes_that_fit(asked, says):
    assert says in refused(lambda: Spec("ddp", **asked).on(SMALL))


def test_the_advice_of_a_refusal_is_accepted():
    assert Spec("ddp", nproc=2, batch_size=30_000).on(SMALL).steps_per_epoch == 1
    assert Spec("ddp", samples=1_366_083).on(SMALL).train_samples == 1_366_083
    assert Spec("ddp", options={"workers": 8}).on(SMALL).options["workers"] == 8


def test_a_default_batch_is_reduced_to_the_samples():
    spec = Spec("ddp", nproc=2, samples=10)
    assert (spec.batch_per_rank, spec.global_batch, spec.steps_per_epoch) == (5, 10, 1)
    assert "BATCH_PER_RANK = 5" in write_script(spec)


@pytest.mark.parametrize(
    ("strategy", "nproc", "advice"),
    [
        ("ddp", 1, "use --nproc 2"),
        ("fsdp2", 1, "use --nproc 2"),
        ("fsdp2_tp", 2, "use --nproc 4"),
        ("single", 1, "use ddp or fsdp2 with --nproc 2"),
        ("tp", 2, "use ddp or fsdp2 with --nproc 2"),
    ],
)
def test_a_fault_advises_what_this_strategy_can_do(strategy, nproc, advice):
    assert refused(lambda: Spec(strategy, nproc=nproc, fault="slow_rank")).endswith(advice)
