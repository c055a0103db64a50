"""A claim and the verdict on it, and claims about speed and memory: ratios between runs that alternate."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from labkit.analysis.metrics import median, throughput_of_median_steps
from labkit.common.text import escape
from labkit.common.units import size
from labkit.plan.spec import Spec, SpecError
from labkit.runs.handle import begin, settle
from labkit.setup.machine import Machine

if TYPE_CHECKING:
    from rich.table import Table


HOLDS, FAILS, PARTLY, OPEN = "holds", "does not hold", "partly", "cannot be decided here"
_MARKS = {HOLDS: "✓", FAILS: "✗", PARTLY: "◐", OPEN: "?"}
_HEADS = ("claim", "verdict", "evidence", "how")


@dataclass(frozen=True)
class Ruling:
    """The result of a trial: one of the four verdicts, the evidence in sentences, and the figures behind it by name,
    with one value per measurement."""

    verdict: str
    evidence: str
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


Judge = Callable[["Trials"], Ruling]


@dataclass(frozen=True)
class Claim:
    """A common claim. `how` it is tested: computed, modelled, measured, published by others, asked of torch and the
    system, documented, or argued.

    `judge` gets the measurements, and `needs` names the jobs in `JOBS` that it requires.
    """

    name: str
    says: str
    how: str
    judge: Judge
    needs: tuple[str, ...] = ()


CLAIMS: dict[str, Claim] = {}


def claim(name: str, says: str, how: str, *needs: str) -> Callable[[Judge], Judge]:
    """Adds a claim to `CLAIMS`; the decorated function judges it."""

    def add(judge: Judge) -> Judge:
        CLAIMS[name] = Claim(name, says, how, judge, needs)
        return judge

    return add


@dataclass(frozen=True)
class Verdict:
    """A claim and the ruling on it; `runs` are the names of the runs that the ruling is based on."""

    claim: Claim
    ruling: Ruling
    runs: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One of: holds, does not hold, partly, cannot be decided here."""
        return self.ruling.verdict

    @property
    def marked(self) -> str:
        """The verdict with its mark."""
        return f"{_MARKS[self.verdict]} {self.verdict}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Claim, verdict, evidence, how it was tested."""
        return self.claim.says, self.marked, self.ruling.evidence, self.claim.how

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        plain = {"name": self.claim.name, "says": self.claim.says, "how": self.claim.how, "runs": list(self.runs)}
        return plain | asdict(self.ruling)


class Verdicts(tuple[Verdict, ...]):
    """The page of claims: a table in a notebook, and text elsewhere."""

    def __repr__(self) -> str:
        return "\n".join(
            f"“{says}”\n    {marked} ({how})\n    {evidence}"
            for says, marked, evidence, how in (verdict.cells for verdict in self)
        )

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        rows = "".join(map(_row, self))
        return f'<table class="labkit-claims"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'

    def __rich__(self) -> Table:
        from rich.table import Column, Table
        from rich.text import Text

        says, verdict, evidence, how = _HEADS
        columns = (
            Column(says, ratio=3),
            Column(verdict, min_width=12),
            Column(evidence, ratio=6, overflow="fold"),
            Column(how),
        )
        table = Table(*columns, expand=True, show_lines=True)
        for row in self:
            table.add_row(*map(Text, row.cells))
        return table


def _row(verdict: Verdict) -> str:
    says, marked, evidence, how = map(escape, verdict.cells)
    left = "text-align:left;vertical-align:top"
    cells = (("", says), (";white-space:nowrap;font-weight:bold", marked), ("", evidence), ("", how))
    return "<tr>" + "".join(f'<td style="{left}{more}">{text}</td>' for more, text in cells) + "</tr>"


# ---- code that needs torch


_HOME = str(Path(__file__).resolve().parents[3])
_TIMEOUT = 120.0  # seconds; the first import of torch from a cold disk is slow


def ask(code: str) -> tuple[Any, str]:
    """Runs Python code. Returns the JSON value of its last line of output, and the error as one line; one of them is
    empty."""
    path = os.pathsep.join(part for part in (_HOME, os.environ.get("PYTHONPATH")) if part)
    command, environment = [sys.executable, "-W", "ignore", "-c", code], os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT:g} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode:
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return json.loads(lines[-1]), ""


BEHAVIOUR = "import json; from labkit.course.claims.in_torch import behaviour; print(json.dumps(behaviour()))"


# ---- the runs behind measured claims


_STEPS = 20  # including the first, which is not counted
_COPY = {"pin_memory": False, "non_blocking": False}
JOBS: Mapping[str, Spec] = {
    "single": Spec("single", steps=_STEPS),
    "dp": Spec("dp", nproc=2, steps=_STEPS),
    "ddp": Spec("ddp", nproc=2, steps=_STEPS),
    "fsdp2": Spec("fsdp2", nproc=2, steps=_STEPS),
    "dp of an mlp": Spec("dp", "mlp", nproc=2, steps=_STEPS),
    "ddp of an mlp": Spec("ddp", "mlp", nproc=2, steps=_STEPS),
    "ddp on 4": Spec("ddp", nproc=4, steps=_STEPS),
    "ddp on 8": Spec("ddp", nproc=8, steps=_STEPS),
    "fsdp2 on 4": Spec("fsdp2", nproc=4, steps=_STEPS),
    "fsdp2 on 8": Spec("fsdp2", nproc=8, steps=_STEPS),
    "pinned": Spec("single", steps=_STEPS, device="cuda"),
    "pageable": Spec("single", steps=_STEPS, device="cuda", options=_COPY),
}


class Reporter(Protocol):
    """Receives the name of each step when it starts."""

    def step(self, text: str) -> None: ...


class Trials:
    """The measurements: the summaries of each job's runs, one per round; None if a run did not finish."""

    def __init__(self, machine: Machine, measured: Mapping[str, Sequence[dict[str, Any] | None]] | None = None):
        self.machine = machine
        self.device = "cuda" if len(machine.gpus) > 1 else "cpu"  # of all runs in a comparison
        self.measured: dict[str, list[dict[str, Any] | None]] = {
            name: list(rounds) for name, rounds in (measured or {}).items()
        }
        self._failed: dict[str, str] = {}
        self._behaviour: tuple[dict[str, Any] | None, str] | None = None

    def lacks(self, jobs: Iterable[str]) -> str:
        """Why some of the jobs cannot be measured here, in a few words; empty if all can."""
        gpus, cores = len(self.machine.gpus), self.machine.cores
        most, of = (gpus, f"{gpus} GPUs") if self.device == "cuda" else (max(2, cores), f"{cores} cores")
        for spec in (JOBS[name] for name in jobs):
            if spec.device == "cuda" and not self.machine.gpus:
                return self.machine.no_gpu_reason
            if spec.nproc > most:
                return f"{spec.nproc} ranks would have to share {of}"
        return ""

    def run(self, jobs: Iterable[str], rounds: int, progress: Reporter) -> None:
        """Runs the jobs that this machine can run, `rounds` times each. An interrupt stops the current run."""
        names = [name for name in dict.fromkeys(jobs) if not self.lacks([name])]
        for turn in range(rounds):
            for name in names[:: -1 if turn % 2 else 1]:
                progress.step(f"round {turn + 1} of {rounds}: {name}")
                self.measured.setdefault(name, []).append(self._summary(name))

    def _summary(self, name: str) -> dict[str, Any] | None:
        spec = JOBS[name]
        try:
            device = spec.device if spec.device != "auto" else self.device
            done = begin(settle(replace(spec, device=device)), guesses=()).wait()
        except SpecError as error:
            self._failed[name] = str(error)
            return None
        summary = done.summary()
        if summary["state"] != "finished":
            self._failed[name] = f"the run {done.name} {done.words}"
            return None
        return summary

    def why(self, jobs: Iterable[str]) -> str:
        """Why there are no figures of some of the jobs, in a few words."""
        reasons = [self.lacks([name]) or self._failed.get(name, "") for name in jobs]
        return next(filter(None, reasons), "there was no run")

    # ---- what the claims query

    def behaviour(self) -> tuple[Any, str]:
        """The results of `in_torch.behaviour`, which runs once, and its error; one of them is empty."""
        if self._behaviour is None:
            self._behaviour = ask(BEHAVIOUR)
        return self._behaviour

    def summary(self, job: str) -> dict[str, Any] | None:
        """The figures of a finished run; None if there is none."""
        return next(filter(None, self.measured.get(job, ())), None)

    def owners(self, job: str) -> dict[str, int]:
        """Bytes by owner on the first rank; empty if no run has finished."""
        summary = self.summary(job)
        return summary["ranks"][0]["memory_bytes"] if summary else {}

    def ratios(self, job: str, other: str) -> tuple[float, ...]:
        """The ratio of the two jobs' samples per second at their median step, by round."""
        rounds = zip(self.measured.get(job, ()), self.measured.get(other, ()))
        speeds = [(_speed(first, JOBS[job]), _speed(second, JOBS[other])) for first, second in rounds]
        return tuple(first / second for first, second in speeds if first and second)

    def runs(self, jobs: Iterable[str]) -> tuple[str, ...]:
        """The names of the runs of these jobs."""
        return tuple(round_["run"] for name in jobs for round_ in self.measured.get(name, ()) if round_)


def _speed(summary: dict[str, Any] | None, spec: Spec) -> float | None:
    if summary is None:
        return None
    return throughput_of_median_steps(spec.global_batch, (rank["step_seconds_median"] for rank in summary["ranks"]))


# ---- claims about speed and memory


_STATES = ("parameters", "gradients", "optimizer")


def _compared(name: str, says: str, job: str, other: str, low: float, high: float) -> None:
    """Adds the claim that the ratio of the two jobs' speeds is in this range."""
    claim(name, says, "measured", other, job)(partial(_between, job=job, other=other, low=low, high=high))


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


def _scales(name: str, says: str, claimed_of: Mapping[str, float]) -> None:
    """Adds the claim that jobs are so many times as fast as one device."""
    claim(name, says, "measured", "single", *claimed_of)(partial(_scaling, claimed_of=claimed_of))


def _scaling(trials: Trials, claimed_of: Mapping[str, float]) -> Ruling:
    figures = {f"{job} / single": trials.ratios(job, "single") for job in claimed_of}
    parts = []
    for (job, claimed), ratios in zip(claimed_of.items(), figures.values()):
        times = f"{_times(ratios)} one device{_spread(ratios)}" if ratios else f"not measured, {trials.why([job])}"
        parts.append(f"{times}, claimed {claimed:g}")
    words = "; ".join(f"on {JOBS[job].nproc}: {part}" for job, part in zip(claimed_of, parts))
    if trials.device == "cpu" or not all(figures.values()):
        kind = "CPU ranks" if trials.device == "cpu" else "GPUs"
        return Ruling(OPEN, f"{kind}: {words}. The claim is about eight GPUs.", figures)
    pairs = zip(figures.values(), claimed_of.values())
    right = [abs(median(ratios) / claimed - 1) <= _TOLERANCE for ratios, claimed in pairs]
    return Ruling(_verdict(right), f"GPUs: {words}.", figures)


_compared("two-gpus", "2 GPUs are 1.8 to 1.9 times as fast", "ddp", "single", 1.8, 1.9)
_compared("ddp-dp", "DDP is 20 to 50 % faster than DP on one machine", "ddp", "dp", 1.2, 1.5)
_compared("dp-small", "DP is better for small models", "dp of an mlp", "ddp of an mlp", 1.0, math.inf)
# 10 to 20 % more time is 1 / 1.2 to 1 / 1.1 of the speed
_compared("fsdp-small", "FSDP costs 10 to 20 % on small models", "fsdp2", "ddp", 1 / 1.2, 1 / 1.1)
_near = 1.29 * (1 - _TOLERANCE), 1.29 * (1 + _TOLERANCE)  # two digits, give or take the noise of such a run
_compared("speedup-129", "2 GPUs train a small CNN 1.29 times as fast as one", "ddp", "single", *_near)
# 5 to 10 % more time per step, with the same samples per device
_compared("ddp-overhead", "The overhead of DDP is 5 to 10 %", "ddp", "single", 2 / 1.1, 2 / 1.05)
_scales("scaling", "DDP scales by 1.9, 3.5 and 6 on 2, 4 and 8 GPUs", _DDP)
_scales("fsdp-scaling", "FSDP scales by 1.8, 3.7 and 7.5 on 2, 4 and 8 GPUs", _FSDP)


@claim("fsdp-memory", "FSDP halves memory on 2 GPUs", "measured", "ddp", "fsdp2")
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
    cells = [
        f"{owner} {size(whole[owner])} → {size(sharded[owner])} (× {factor:.2f})" for owner, factor in fractions.items()
    ]
    kind = "GPUs" if trials.device == "cuda" else "CPU ranks"
    words = f"{kind}, cnn, batch size 128, one rank of two, DDP → FSDP2: {', '.join(cells)}; total × {total:.2f}. "
    why = "Sharded memory is halved; activations depend on the samples of a rank and do not change."
    figures = {owner: (factor,) for owner, factor in fractions.items()}
    return Ruling(verdict, words + why, figures | {"together": (total,)})


def _is_half(fraction: float) -> bool:
    return 0.45 <= fraction <= 0.55


@claim("pin-memory", "pin_memory with non_blocking gains 15 to 20 %", "measured", "pinned", "pageable")
def pinned_memory(trials: Trials) -> Ruling:
    """With both settings versus without, on one GPU. CPU ranks copy nothing to a device, so there is nothing to
    measure."""
    ratios = trials.ratios("pinned", "pageable")
    if not ratios:
        why = _without(trials, ("pinned", "pageable")).evidence
        return Ruling(OPEN, f"{why} Both settings speed up the copy from host memory to a GPU; CPU ranks copy nothing.")
    speed = f"{_times(ratios)} as many samples per second with both settings as with neither{_spread(ratios)}"
    words = f"One GPU, cnn, whole batches loaded at once: {speed}."
    return Ruling(_verdict([1.15 <= ratio <= 1.2 for ratio in ratios]), words, {"with / without": ratios})
