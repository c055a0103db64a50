"""Every strategy with its workloads and options takes its steps on GPUs, and no part of the probe is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import warm_run

from labkit.plan.spec import Spec, SpecError
from labkit.runs.handle import Run
from labkit.training.strategies import STRATEGIES

STEPS = 4
ASKED = {"samples": 256, "batch_size": 16, "steps": STEPS, "device": "cuda"}
WORKLOADS = ("mlp", "cnn", "gpt", "moe")
# values that differ from the default, of options that are neither a choice nor a flag
NUMBERS = {
    "bucket_mb": (1,),
    "micro_batches": (8,),
    "min_parameters": (1,),
    "sync_every": (2,),
    "outer_learning_rate": (0.5,),
    "tp_size": (4,),
    "pp_size": (4,),
    "replicas": (2,),
}
NEEDS = {"HYBRID_SHARD": {"replicas": 2}}  # further options of a choice
TOGETHER = {
    "accumulate": 2,
    "clip_norm": 1.0,
    "warmup_steps": 2,
    "lr_decay": "cosine",
    "checkpoint_activations": True,
    "fetch": "batches",
    "workers": 1,
}


def check(run: Run, steps: int, first: int = 1) -> Run:
    """The ranks have taken their steps on GPUs, with memory by owner, and every part of the probe has worked."""
    state = run.state
    assert state.status.state == "finished", run.logs(0, "stderr")[-3000:]
    assert not state.unwatched and not state.dropped and not state.broken
    for rank in state.ranks.values():
        assert list(rank.steps.step) == list(range(first, first + steps))
        assert rank.device.startswith("cuda") and rank.exit_code == 0
        assert rank.steps.peak > 0 and all(rank.steps.seconds[at] > 0 for at in range(steps))
        offloads = state.spec.options.get("cpu_offload", False)
        assert rank.owners and (rank.owners["parameters"] == 0) == offloads
    return run


def ranks_of(strategy: str, options: dict[str, Any]) -> int:
    """How many ranks it needs, on eight GPUs at most."""
    if strategy == "single":
        return 1
    least = STRATEGIES[strategy].default_nproc or 2
    return max(least, 4) if options.get("replicas", 1) > 1 else 8 if options.get("pp_size", 2) > 2 else least


def spec(strategy: str, workload: str | None, options: dict[str, Any], **more: Any) -> Spec | None:
    """The Spec; None where the strategy refuses the combination."""
    fields = ASKED | {"workload": workload, "options": options, "nproc": ranks_of(strategy, options)} | more
    try:
        return Spec(strategy, **fields)
    except SpecError:
        return None


def variants(strategy: str) -> Iterator[Spec]:
    """Each workload that the strategy can train, and each value of its own options with the smallest of them."""
    yield from filter(None, (spec(strategy, workload, {}) for workload in WORKLOADS))
    for option in STRATEGIES[strategy].options:
        flags = (not option.default,) if isinstance(option.default, bool) else ()
        for value in option.choices or flags or NUMBERS[option.name]:
            if value == option.default:
                continue
            options = {option.name: value} | NEEDS.get(str(value), {})
            yield next(filter(None, (spec(strategy, workload, options) for workload in WORKLOADS)))


def name_of(wanted: Spec) -> str:
    """For pytest: strategy, workload, and options that are not the default."""
    own = {option.name: option.default for option in STRATEGIES[wanted.strategy].options}
    chosen = [f"{name}={value}" for name, value in wanted.options.items() if name in own and value != own[name]]
    return "-".join([wanted.strategy, wanted.workload, *chosen])


VARIANTS = [wanted for strategy in STRATEGIES for wanted in variants(strategy)]


@pytest.mark.parametrize("wanted", VARIANTS, ids=name_of)
def test_variant(wanted, on_machine):
    if wanted.nproc > 2:
        on_machine("h100x8")
    run = check(warm_run(wanted), STEPS)
    has_fp16 = spec(wanted.strategy, wanted.workload, dict(wanted.options), precision="fp16") is not None
    assert run.state.spec.precision == ("fp16" if wanted.nproc <= 2 and has_fp16 else "fp32")  # on a T4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_together_and_a_checkpoint_that_resumes(strategy, on_machine):
    allowed = {option.name for option in STRATEGIES[strategy].all_options}
    options = {name: value for name, value in TOGETHER.items() if name in allowed}
    on_machine("h100x8")
    more = {"precision": "bf16", "save_every": 2}
    workload = "moe" if strategy == "ep" else "gpt"
    if not spec(strategy, workload, options, **more):
        more["save_every"] = None
    first = check(warm_run(spec(strategy, workload, options, **more)), STEPS)
    assert first.state.spec.precision == "bf16"
    if more["save_every"]:
        wanted = spec(strategy, workload, options, **more | {"steps": STEPS + 2, "resume": first.name})
        check(warm_run(wanted), 2, first=STEPS + 1)
