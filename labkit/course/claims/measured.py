"""Claims about speed and memory: ratios between alternating runs. CPU ranks cannot decide a claim about GPUs: their
figures are shown, and the verdict says that it cannot be decided."""

from __future__ import annotations

import math
from collections.abc import Mapping

from labkit.analysis.metrics import median
from labkit.common.units import size
from labkit.course.claims.trials import JOBS, Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, PARTLY, Ruling

_STATES = ("parameters", "gradients", "optimizer")


def ddp_over_dp(trials: Trials) -> Ruling:
    """DDP versus DP, two devices each."""
    return _between(trials, "ddp", "dp", 1.2, 1.5)


def two_devices(trials: Trials) -> Ruling:
    """DDP on two devices versus one device, batch size 128 per device."""
    return _between(trials, "ddp", "single", 1.8, 1.9)


def small_speedup(trials: Trials) -> Ruling:
    """DDP on two devices versus one, with the CNN; 1.29 to two digits, give or take the noise of such a run."""
    return _between(trials, "ddp", "single", 1.29 * (1 - _TOLERANCE), 1.29 * (1 + _TOLERANCE))


def ddp_overhead(trials: Trials) -> Ruling:
    """DDP on two devices versus one, the same samples per device: 5 to 10 % more time per step."""
    return _between(trials, "ddp", "single", 2 / 1.1, 2 / 1.05)


def dp_for_small(trials: Trials) -> Ruling:
    """DP versus DDP with the smallest model."""
    return _between(trials, "dp of an mlp", "ddp of an mlp", 1.0, math.inf)


def fsdp_for_small(trials: Trials) -> Ruling:
    """FSDP versus DDP with the CNN: 10 to 20 % more time is 1/1.2 to 1/1.1 of the speed."""
    return _between(trials, "fsdp2", "ddp", 1 / 1.2, 1 / 1.1)


def _between(trials: Trials, job: str, other: str, low: float, high: float) -> Ruling:
    """Whether the ratio of the two jobs' speeds is in the claimed range, in all pairs of runs, in some, or in none."""
    ratios = trials.ratios(job, other)
    if not ratios:
        return _without(trials, (job, other))
    figures = {f"{job} / {other}": ratios}
    words = f"{_named(job)} processes {_times(ratios)} as many samples per second as {_named(other)}{_spread(ratios)}"
    if trials.device == "cpu":
        notes = "".join(f" {note}" for note in (JOBS[name].strategy_row.note("cpu") for name in (job, other)) if note)
        return Ruling(OPEN, f"CPU ranks: {words}.{notes} The claim is about GPUs; deciding it needs two.", figures)
    return Ruling(_verdict([low <= ratio <= high for ratio in ratios]), f"GPUs: {words}.", figures)


def _verdict(right: list[bool]) -> str:
    return HOLDS if all(right) else PARTLY if any(right) else FAILS


def _times(ratios: tuple[float, ...]) -> str:
    return f"{median(ratios):.2f} times"


def _spread(ratios: tuple[float, ...]) -> str:
    if len(ratios) == 1:
        return " (one pair of runs)"
    return f" (median of {len(ratios)} pairs of runs, from {min(ratios):.2f} to {max(ratios):.2f})"


def _named(job: str) -> str:
    spec = JOBS[job]
    return f"{spec.strategy_row.title} on {spec.nproc} ({spec.workload})"


def _without(trials: Trials, jobs: tuple[str, ...]) -> Ruling:
    return Ruling(OPEN, f"Not measured: {trials.why(jobs)}.")


_DDP = {"ddp": 1.9, "ddp on 4": 3.5, "ddp on 8": 6.0}  # claimed speed-ups by job
_FSDP = {"fsdp2": 1.8, "fsdp2 on 4": 3.7, "fsdp2 on 8": 7.5}
_TOLERANCE = 0.05  # relative difference from a claimed figure


def ddp_scaling(trials: Trials) -> Ruling:
    """DDP on 2, 4 and 8 devices versus one."""
    return _scaling(trials, _DDP)


def fsdp_scaling(trials: Trials) -> Ruling:
    """FSDP2 on 2, 4 and 8 devices versus one."""
    return _scaling(trials, _FSDP)


def _scaling(trials: Trials, claimed_of: Mapping[str, float]) -> Ruling:
    figures = {f"{job} / single": trials.ratios(job, "single") for job in claimed_of}
    parts = []
    for (job, claimed), ratios in zip(claimed_of.items(), figures.values()):
        found = f"{_times(ratios)} one device{_spread(ratios)}" if ratios else f"not measured, {trials.why([job])}"
        parts.append(f"{found}, claimed {claimed:g}")
    words = "; ".join(f"on {JOBS[job].nproc}: {part}" for job, part in zip(claimed_of, parts))
    if trials.device == "cpu" or not all(figures.values()):
        kind = "CPU ranks" if trials.device == "cpu" else "GPUs"
        return Ruling(OPEN, f"{kind}: {words}. The claim is about eight GPUs.", figures)
    pairs = zip(figures.values(), claimed_of.values())
    right = [abs(median(ratios) / claimed - 1) <= _TOLERANCE for ratios, claimed in pairs]
    return Ruling(_verdict(right), f"GPUs: {words}.", figures)


def fsdp_memory(trials: Trials) -> Ruling:
    """By owner, FSDP2 versus DDP on two devices. Tensors have the same size on CPU ranks as on GPUs, so CPU ranks
    decide it."""
    whole, sharded = trials.owners("ddp"), trials.owners("fsdp2")
    if not whole or not sharded:
        return _without(trials, ("ddp", "fsdp2"))
    fractions = {owner: sharded.get(owner, 0) / whole[owner] for owner in (*_STATES, "activations") if whole.get(owner)}
    total = sum(map(sharded.get, fractions)) / sum(map(whole.get, fractions))
    halved = [_is_half(fractions[owner]) for owner in _STATES if owner in fractions]
    verdict = HOLDS if all(halved) and _is_half(total) else PARTLY if any(halved) else FAILS
    cells = (
        f"{owner} {size(whole[owner])} → {size(sharded[owner])} (× {factor:.2f})" for owner, factor in fractions.items()
    )
    kind = "GPUs" if trials.device == "cuda" else "CPU ranks"
    words = f"{kind}, cnn, batch size 128, one rank of two, DDP → FSDP2: {', '.join(cells)}; total × {total:.2f}. "
    why = "Sharded memory is halved; activations depend on the samples of a rank and do not change."
    return Ruling(
        verdict, words + why, {owner: (factor,) for owner, factor in fractions.items()} | {"together": (total,)}
    )


def _is_half(fraction: float) -> bool:
    return 0.45 <= fraction <= 0.55


def pinned_memory(trials: Trials) -> Ruling:
    """With both settings versus without, on one GPU. CPU ranks copy nothing to a device, so there is nothing to
    measure."""
    ratios = trials.ratios("pinned", "pageable")
    if not ratios:
        ruling = _without(trials, ("pinned", "pageable"))
        return Ruling(
            OPEN,
            f"{ruling.evidence} Both settings speed up the copy from host memory to a GPU; CPU ranks copy nothing.",
        )
    speed = f"{_times(ratios)} as many samples per second with both settings as with neither{_spread(ratios)}"
    words = f"One GPU, cnn, whole batches loaded at once: {speed}."
    return Ruling(_verdict([1.15 <= ratio <= 1.2 for ratio in ratios]), words, {"with / without": ratios})
