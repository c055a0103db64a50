"""Claims about speed and memory: ratios of runs that took turns. A claim about GPUs is not decided by CPU ranks: their figures are
shown, and the verdict is left open."""

from __future__ import annotations

import math
import statistics

from labkit.common.units import size
from labkit.course.claims.trials import JOBS, Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, PARTLY, Ruling

_STATES = ("parameters", "gradients", "optimizer")


def ddp_over_dp(trials: Trials) -> Ruling:
    """DDP against DP, two devices each."""
    return _between(trials, "ddp", "dp", 1.2, 1.5)


def two_devices(trials: Trials) -> Ruling:
    """DDP on two devices against one device, batch 128 each."""
    return _between(trials, "ddp", "single", 1.8, 1.9)


def dp_for_small(trials: Trials) -> Ruling:
    """DP against DDP with the cheapest model that there is."""
    return _between(trials, "dp of an mlp", "ddp of an mlp", 1.0, math.inf)


def fsdp_for_small(trials: Trials) -> Ruling:
    """FSDP against DDP with the CNN: 10 to 20 % more time is 1/1.2 to 1/1.1 of the speed."""
    return _between(trials, "fsdp2", "ddp", 1 / 1.2, 1 / 1.1)


def _between(trials: Trials, job: str, other: str, low: float, high: float) -> Ruling:
    """Whether one job's speed, as a multiple of the other's, lies where the claim has it: in every pair of runs, in some, or in none."""
    ratios = trials.ratios(job, other)
    if not ratios:
        return _without(trials, (job, other))
    figures = {f"{job} / {other}": ratios}
    words = f"{_named(job)} trains on {_times(ratios)} as many samples a second as {_named(other)}{_spread(ratios)}"
    if trials.device == "cpu":
        notes = "".join(f" {note}" for note in (JOBS[name].strategy_row.note("cpu") for name in (job, other)) if note)
        return Ruling(OPEN, f"CPU ranks: {words}.{notes} The claim is about GPUs, and two of them would have to say.", figures)
    return Ruling(_verdict([low <= ratio <= high for ratio in ratios]), f"GPUs: {words}.", figures)


def _verdict(right: list[bool]) -> str:
    return HOLDS if all(right) else PARTLY if any(right) else FAILS


def _times(ratios: tuple[float, ...]) -> str:
    return f"{statistics.median(ratios):.2f} times"


def _spread(ratios: tuple[float, ...]) -> str:
    if len(ratios) == 1:
        return " (one pair of runs)"
    return f" (median of {len(ratios)} pairs of runs, from {min(ratios):.2f} to {max(ratios):.2f})"


def _named(job: str) -> str:
    spec = JOBS[job]
    return f"{spec.strategy_row.title} on {spec.nproc} ({spec.workload})"


def _without(trials: Trials, jobs: tuple[str, ...]) -> Ruling:
    return Ruling(OPEN, f"Not measured: {trials.why(jobs)}.")


_SAID = {"ddp": 1.9, "ddp on 4": 3.5, "ddp on 8": 6.0}
_NEAR = 0.05  # of a figure that is said: what is nearer counts as it


def ddp_scaling(trials: Trials) -> Ruling:
    """DDP on 2, 4 and 8 devices against one."""
    figures = {f"{job} / single": trials.ratios(job, "single") for job in _SAID}
    parts = []
    for (job, said), ratios in zip(_SAID.items(), figures.values()):
        found = f"{_times(ratios)} one{_spread(ratios)}" if ratios else f"not measured, {trials.why([job])}"
        parts.append(f"{found}, where {said:g} is said")
    words = "; ".join(f"on {JOBS[job].nproc}: {part}" for job, part in zip(_SAID, parts))
    if trials.device == "cpu" or not all(figures.values()):
        kind = "CPU ranks" if trials.device == "cpu" else "GPUs"
        return Ruling(OPEN, f"{kind}: {words}. The claim is about eight GPUs.", figures)
    right = [abs(statistics.median(ratios) / said - 1) <= _NEAR for ratios, said in zip(figures.values(), _SAID.values())]
    return Ruling(_verdict(right), f"GPUs: {words}.", figures)


def fsdp_memory(trials: Trials) -> Ruling:
    """By owner, FSDP2 against DDP on two devices. Bytes of tensors are the same on CPU ranks as on GPUs, so these decide it too."""
    whole, sharded = trials.owners("ddp"), trials.owners("fsdp2")
    if not whole or not sharded:
        return _without(trials, ("ddp", "fsdp2"))
    shares = {owner: sharded.get(owner, 0) / whole[owner] for owner in (*_STATES, "activations") if whole.get(owner)}
    total = sum(map(sharded.get, shares)) / sum(map(whole.get, shares))
    halved = [_is_half(shares[owner]) for owner in _STATES if owner in shares]
    verdict = HOLDS if all(halved) and _is_half(total) else PARTLY if any(halved) else FAILS
    each = ", ".join(f"{owner} {size(whole[owner])} → {size(sharded[owner])} (× {share:.2f})" for owner, share in shares.items())
    kind = "GPUs" if trials.device == "cuda" else "CPU ranks"
    told = f"{kind}, cnn, batch 128, one rank of two, DDP → FSDP2: {each}; together × {total:.2f}. "
    why = "What is sharded halves; activations belong to a rank's own samples and stay as they are."
    return Ruling(verdict, told + why, {owner: (share,) for owner, share in shares.items()} | {"together": (total,)})


def _is_half(share: float) -> bool:
    return 0.45 <= share <= 0.55


def pinned_memory(trials: Trials) -> Ruling:
    """With both switches against without, on one GPU; on CPU ranks nothing is copied to a device, so there is nothing to run."""
    ratios = trials.ratios("pinned", "pageable")
    if not ratios:
        ruling = _without(trials, ("pinned", "pageable"))
        return Ruling(OPEN, f"{ruling.evidence} Both speed up the copy from memory to a GPU, and CPU ranks copy nothing.")
    told = f"{_times(ratios)} as many samples a second with both as with neither{_spread(ratios)}"
    words = f"One GPU, cnn, batches taken whole: {told}."
    return Ruling(_verdict([1.15 <= ratio <= 1.2 for ratio in ratios]), words, {"with / without": ratios})
