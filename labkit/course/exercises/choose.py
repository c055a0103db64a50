"""Exercises of lab 11: bytes per ZeRO stage, a 7B model on eight devices, and a run that has to fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labkit.common.units import size
from labkit.course.exercises import Exercise, Wrong, require_function, require_number
from labkit.course.exercises.own import finished
from labkit.course.exercises.published import pick_a_layout

_SHARDED: dict[int, Callable[[float, int], float]] = {  # bytes per device, by stage, in mixed precision
    0: lambda parameters, devices: 16 * parameters,
    1: lambda parameters, devices: (2 + 2 + 12 / devices) * parameters,
    2: lambda parameters, devices: (2 + 14 / devices) * parameters,
    3: lambda parameters, devices: 16 * parameters / devices,
}
_TRIED = ((1000, 8), (1_000_000, 4), (50, 1))


def _states(answer: Any) -> str:
    require_function(answer, "of parameters, devices and stage")
    for parameters, devices in _TRIED:
        for stage, right in _SHARDED.items():
            given = answer(parameters, devices, stage)
            if isinstance(given, bool) or not isinstance(given, (int, float)):
                raise Wrong(f"states({parameters}, {devices}, {stage}) must return a number of bytes, got {given!r}")
            if not math.isclose(given, right(parameters, devices), rel_tol=1e-6):
                raise Wrong(f"states({parameters}, {devices}, {stage}) returned {given:,.6g} bytes: {_HINTS[stage]}")
    return (
        "on one device, all stages store 16 bytes per parameter; with many devices, stage 3 stores almost nothing on"
        " each"
    )


_HINTS = {
    0: "without ZeRO every device stores all states; add up the five components",
    1: "stage 1 shards only the optimizer state",
    2: "stage 2 shards the optimizer state and one more component",
    3: "stage 3 shards everything",
}


def _seven(answer: Any) -> str:
    require_number(answer, "of GB")
    for near, words in (
        (112, "that is the total over all GPUs; ZeRO-3 divides it by their number"),
        (13.04, "that is in GiB (2³⁰ bytes); answer in GB (10⁹ bytes)"),
        (38.5, "that is ZeRO-1, which shards only the optimizer state"),
        (26.25, "that is ZeRO-2, which does not shard the parameters"),
        (1.75, "that is only the parameters in bf16; what else does training store?"),
        (3.5, "that is parameters and gradients in bf16; Adam stores more than both"),
        (10.5, "that is only the optimizer state"),
    ):
        if math.isclose(answer, near, rel_tol=0.01):
            raise Wrong(words)
    if answer > 1e9:
        raise Wrong(f"{answer:,.0f} looks like bytes; answer in GB (10⁹ bytes)")
    if not 13.9 <= answer <= 14.2:
        raise Wrong("multiply the parameters by the bytes per parameter in training, and divide by the number of GPUs")
    return (
        "16 × 7 · 10⁹ / 8 bytes. Of 24 GB that leaves about 10 GB for activations, the gathered block and memory "
        "fragmentation: it can fit"
    )


_BUDGET = 24 << 20  # bytes per rank
_MIN_BATCH = 256
_COUNTED = ("parameters", "gradients", "optimizer", "activations")


def _fits(answer: Any) -> str:
    summary = _finished(answer)
    spec = answer.state.spec.to_spec()
    if spec.workload != "cnn" or spec.nproc != 2:
        raise Wrong(f"the run must train the cnn on 2 ranks, got {spec.workload} on {spec.nproc}")
    if spec.global_batch < _MIN_BATCH:
        raise Wrong(f"the global batch size must be at least {_MIN_BATCH}, got {spec.global_batch}")
    worst = max((rank["memory_bytes"] for rank in summary["ranks"]), key=_counted)
    if not worst.get("activations"):
        raise Wrong("no step of this run was profiled, so its activations are unknown; run at least 6 steps")
    total = _counted(worst)
    if total > _BUDGET:
        most = max(_COUNTED, key=lambda owner: worst.get(owner, 0))
        used = f"a rank needs {size(total)} and has {size(_BUDGET)}"
        raise Wrong(f"{used}; most of it is {most}, {size(worst[most])}. What reduces those?")
    return f"{size(total)} per rank, of which {size(worst['activations'])} are activations"


def _counted(memory: dict[str, float]) -> float:
    """Bytes of the owners that count against the budget."""
    return sum(memory.get(owner, 0) for owner in _COUNTED)


def _finished(answer: Any) -> dict[str, Any]:
    summary = finished(answer).summary()
    if not summary["strategy"]:
        raise Wrong("this run uses a script; choose a strategy instead")
    return summary


EXERCISES: dict[str, Exercise] = {
    "states": Exercise(
        "What each ZeRO stage stores",
        _states,
        "`16*P`, `(4 + 12/n)*P`, `(2 + 14/n)*P`, `16*P/n` for stages 0 to 3: 2 + 2 bytes for parameters and gradients"
        " in 16 bits, 12 bytes for Adam.",
    ),
    "seven": Exercise(
        "7B on eight GPUs",
        _seven,
        "**14 GB**: 16 × 7 · 10⁹ = 112 GB, an eighth on each GPU. The model fits into 24 GB if activations and a"
        " gathered block stay below about 9 GB.",
    ),
    "fits": Exercise(
        "Make it fit",
        _fits,
        "The activations are too large, so sharding the states does not help. `run('ddp', nproc=2,"
        " options={'accumulate': 4}, steps=6)` splits the batch into four micro-batches; `fsdp2` with `accumulate=2`"
        " fits too.",
    ),
    "published": pick_a_layout(
        "A layout for 8B on 64 H100",
        "nanotron Llama 8B",
        64,
        "`'dp=32,pp=2,zero=1,micro_batch=1'` is the fastest of those published. DDP does not fit: 18 bytes per"
        " parameter (here with gradients in 32 bits) are more than a GPU has. ZeRO-1 with two halves of the model (PP 2"
        " or TP 2) fits, and sends little.",
    ),
}
