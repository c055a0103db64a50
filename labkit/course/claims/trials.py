"""The runs behind measured claims. They alternate (A B C, C B A, …), so that a slow phase of the machine affects all of
them; ratios are computed within a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from labkit.analysis.metrics import throughput_of_median_steps
from labkit.course.claims.asked import BEHAVIOUR, ask
from labkit.plan.spec import Spec, SpecError
from labkit.runs.handle import begin
from labkit.runs.settling import settle
from labkit.setup.machine import Machine

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
            name: list(each) for name, each in (measured or {}).items()
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
        speeds = [(_speed(one, JOBS[job]), _speed(two, JOBS[other])) for one, two in rounds]
        return tuple(one / two for one, two in speeds if one and two)

    def runs(self, jobs: Iterable[str]) -> tuple[str, ...]:
        """The names of the runs of these jobs."""
        return tuple(each["run"] for name in jobs for each in self.measured.get(name, ()) if each)


def _speed(summary: dict[str, Any] | None, spec: Spec) -> float | None:
    if summary is None:
        return None
    return throughput_of_median_steps(spec.global_batch, (rank["step_seconds_median"] for rank in summary["ranks"]))
