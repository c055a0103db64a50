"""Claims about sizes: whether the states of a model fit, by 16 bytes per parameter; and what the formulas for speed and
traffic say. Modelled figures are labelled."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.analysis.theory import theory
from labkit.analysis.theory.states import RECIPES
from labkit.common.units import size
from labkit.course.claims.trials import Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, PARTLY, Ruling
from labkit.plan.spec import Spec
from labkit.prediction.devices import DEVICES
from labkit.prediction.scale.advice import advice
from labkit.prediction.scale.asked import training

_PER_PARAMETER = sum(RECIPES["mixed"].values())  # bytes; the same in 32 bits
_MACHINE = "a100x8"


def _states(parameters: float) -> float:
    return _PER_PARAMETER * parameters


def _gb(count: float) -> str:
    return f"{count / 1e9:,.0f} GB"


def sixty_five_billion(trials: Trials) -> Ruling:
    """The states of 65B parameters, and the memory of eight GPUs with 80 GB each."""
    states, there = _states(65e9), 8 * 80e9
    return Ruling(
        HOLDS if states <= there else FAILS,
        f"By formula: the states of Adam take 16 bytes per parameter, {_gb(states)} in total, and eight GPUs have"
        f" {_gb(there)}. It needs offloading, states in fewer bits, or an adapter (LoRA) that leaves the model frozen.",
        {"states, GB": (states / 1e9,), "memory, GB": (there / 1e9,)},
    )


def seven_billion(trials: Trials) -> Ruling:
    """What each of one and two ranks stores of 7B parameters."""
    one, two = _states(7e9), _states(7e9) / 2
    claimed = 28e9, 14e9
    return Ruling(
        HOLDS if (one, two) == claimed else FAILS,
        f"By formula: 28 GB are the parameters alone, in 32 bits. With gradients and the state of Adam it is"
        f" {_gb(one)}, and {_gb(two)} on each of two ranks, without activations.",
        {"one rank, GB": (one / 1e9,), "each of two, GB": (two / 1e9,)},
    )


def billions_on_one(trials: Trials) -> Ruling:
    """The states of 1B and 10B parameters, and the memory of one GPU."""
    small, large, memory = _states(1e9), _states(10e9), 80e9
    fits = [states <= memory for states in (small, large)]
    return Ruling(
        PARTLY if any(fits) and not all(fits) else FAILS if all(fits) else HOLDS,
        f"By formula: the states of 1B parameters take {_gb(small)}, which fits on a GPU with 24 GB if the activations"
        f" do; those of 10B take {_gb(large)}, more than any GPU with 80 GB.",
        {"1B, GB": (small / 1e9,), "10B, GB": (large / 1e9,)},
    )


def two_gigabytes(trials: Trials) -> Ruling:
    """The states of 120K parameters, and the measured peak of the CNN with 405,898."""
    summary = trials.summary("single")
    if summary is None:
        return Ruling(OPEN, f"Not measured: {trials.why(['single'])}.")
    peak, states = summary["ranks"][0]["peak_memory_bytes"], _states(120_000)
    return Ruling(
        HOLDS if peak >= 1e9 else FAILS,
        f"By formula, the states of 120,000 parameters take {size(states)}. Measured: the CNN with 405,898 parameters"
        f" and 128 samples has a peak of {size(peak)} in tensors. nvidia-smi also counts the CUDA context and the cache"
        " of the allocator, which a small model does not fill.",
        {"peak, bytes": (float(peak),), "states, bytes": (states,)},
    )


def one_overhead(trials: Trials) -> Ruling:
    """How the traffic of a rank grows with the ranks: an overhead measured on two does not hold for eight."""
    sent = {n: sum(flow.theory or 0 for flow in theory(Spec("ddp", nproc=n))) / n for n in (2, 4, 8)}
    words = ", ".join(f"{count / sent[2]:.2f} on {n}" for n, count in sent.items())
    return Ruling(
        PARTLY,
        "By formula: for a given n it is the definition of the overhead, so it cannot be wrong. As a prediction it"
        f" is: a rank of DDP sends 2 (n − 1) / n of its gradients, relative to 2 ranks {words}; latency grows with n,"
        " and links between machines are slower than within. Measure the overhead at the n that you want to know"
        " about.",
        {f"sent on {n}": (count / sent[2],) for n, count in sent.items()},
    )


# ---- modelled: evidence that does not decide a claim


def fsdp_from_8(trials: Trials) -> Ruling:
    """DDP and FSDP on 8 devices, for models that fit under both."""
    figures, words = modelled_speeds((8,))
    return Ruling(
        OPEN,
        f"Modelled, not run, {words}. Differences of a few percent are smaller than the error of the model; deciding"
        " the claim needs that many GPUs. The first question is another one: whether the states fit under DDP.",
        figures,
    )


def modelled_speeds(devices: Iterable[int]) -> tuple[dict[str, tuple[float, ...]], str]:
    """The speed of FSDP relative to DDP by the model of `labkit advise`, where both fit: by name, and in words."""
    figures: dict[str, tuple[float, ...]] = {}
    for count in devices:
        for parameters in ("350M", "1.3B"):
            found = advice(training(parameters, machine=_MACHINE, devices=count))
            ddp, fsdp = found.of_kind("DDP"), found.of_kind("FSDP")
            if ddp and fsdp:
                figures[f"{parameters} on {count}"] = (ddp.seconds / fsdp.seconds,)
    ratios = ", ".join(f"{name} × {ratio:.2f}" for name, (ratio,) in figures.items())
    return figures, f"speed of FSDP relative to DDP ({DEVICES[_MACHINE].title}, `labkit advise`, bf16): {ratios}"
