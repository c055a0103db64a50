"""What the parts of a session share: cases with a limit, and one training run with everything that it shows."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from gpu_session.report import IMPOSSIBLE, OK, WRONG, Report
from labkit.analysis.comparison import Badge, badge
from labkit.common.text import visible_line
from labkit.common.units import milliseconds, size
from labkit.plan.spec import Spec, SpecError
from labkit.prediction.devices import DEVICES, Device
from labkit.prediction.predict import predict
from labkit.prediction.timing import modelled
from labkit.record.documents import plain
from labkit.runs.handle import Run, begin, settle
from labkit.setup.environment import CLONE
from labkit.setup.machine import Machine
from labkit.training.strategies import BASELINE, STRATEGIES
from labkit.training.workloads import WORKLOADS

CLOSE = 0.02  # share of the allocator's peak by which a predicted one may be off
_LONGEST = 120.0, 0.25  # seconds of one run, and share of its part, whichever is longer
_SHORTEST = 5.0  # seconds that a part must have left for another case
_UNPACKED = ("tensors", "checkpoints")  # folders of a run that are left out of its pack: they are large

# The training of a run: small, because most of its time is the start of its processes.
TRAINING: dict[str, Any] = {
    "batch_size": 16,
    "scaling": "strong",
    "steps": 12,
    "samples": 256,
    "precision": "fp32",
    "device": "cuda",
    "sample_every": 4,
    "hang_after": 20,
}


@dataclass(frozen=True)
class Outcome:
    """What a case has shown: a verdict, a sentence, and figures as plain values."""

    verdict: str
    says: str
    figures: Mapping[str, Any] = field(default_factory=dict)


class OutOfTime(Exception):
    """The part has reached its limit while a case was under way, which is then not known."""


Case = Callable[[], Outcome]
Cases = dict[str, "Case | str"]  # by name; a text says what this machine lacks


class Session:
    """The session as a part sees it: where results go, and how long the part may take."""

    def __init__(self, folder: Path, part: str, deadline: float):
        self.folder, self.part, self.deadline = folder, part, deadline
        self.report = Report(folder)
        self.packs = folder / "packs"
        seconds, share = _LONGEST
        self._longest = max(seconds, share * self.left)
        self.machine = Machine.here()

    @property
    def left(self) -> float:
        """Seconds that are left to the part."""
        return self.deadline - time.time()

    def execute(self, cases: Cases, chosen: Sequence[str] = ()) -> bool:
        """Executes the cases that are not known yet, or of them those whose names begin with one of `chosen`, and
        writes each to the report; returns whether all are known. A case that raises is wrong, and the next one begins.
        None begins in less time than the others took, in the median."""
        cases = {name: case for name, case in cases.items() if not chosen or name.startswith(tuple(chosen))}
        self.report.add("part", part=self.part, cases=list(cases))
        known, taken = self.report.cases(), [_SHORTEST]
        for name, case in cases.items():
            if (self.part, name) in known:
                continue
            if self.left < statistics.median(taken) and not isinstance(case, str):
                return False
            began = time.monotonic()
            try:
                outcome = Outcome(IMPOSSIBLE, case) if isinstance(case, str) else self._outcome(case)
            except OutOfTime:
                return False
            seconds = round(time.monotonic() - began, 1)
            taken.append(seconds)
            shown = {"verdict": outcome.verdict, "says": outcome.says, "seconds": seconds}
            self.report.add("case", part=self.part, case=name, **shown, figures=outcome.figures)
            print(visible_line(f"  {name}: {outcome.verdict}; {outcome.says} ({seconds:g} s)"), flush=True)
        return True

    @staticmethod
    def _outcome(case: Case) -> Outcome:
        try:
            return case()
        except OutOfTime:
            raise
        except Exception as error:  # whatever fails, the other cases are executed
            where = traceback.format_exc()[-2000:]
            return Outcome(WRONG, f"{type(error).__name__}: {error}"[:500], {"traceback": where})

    def python(self, *arguments: object, failing: Sequence[int] = ()) -> str:
        """The output of a Python program that runs alone; `RuntimeError` with its last line if it ends with an exit
        code that is neither 0 nor one of `failing`."""
        command = [sys.executable, *map(str, arguments)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=max(1.0, self.left), cwd=CLONE
            )
        except subprocess.TimeoutExpired:
            raise OutOfTime from None
        if done.returncode not in (0, *failing):
            lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
            raise RuntimeError(lines[-1])
        return done.stdout

    # ---- runs

    def run(self, spec: Spec, until: str | None = None, cold: bool = True) -> Trained:
        """Runs a Spec to its end, or until it has the finding `until`, and packs its folder. A run that takes too
        long is stopped. Raises `OutOfTime` if the part has reached its limit before."""
        handle = begin(spec, cold=cold, guesses=())
        handle.wait(max(1.0, min(self._longest, self.left)), until=until)
        findings = tuple(one.name for one in handle.findings())
        late = not handle.state.over and until not in findings
        if not handle.state.over:
            handle.stop()
        if late and self.left < 1:
            raise OutOfTime
        self.packs.mkdir(exist_ok=True)
        pack(handle.folder.path, self.packs)
        return Trained(handle, findings or tuple(one.name for one in handle.findings()), late)

    def trained_before(self, spec: Spec) -> Run | None:
        """The run of the baseline with the same training in this session; None if there is none."""
        for line in self.report.read("case"):
            run = line["figures"].get("run")
            folder = self.folder / "runs" / str(run)
            if run and line["figures"].get("baseline") == spec.workload and folder.is_dir():
                return Run.attach(folder)
        return None


@dataclass(frozen=True)
class Trained:
    """A run that is over: its findings while it was under way or at its end, and whether it had to be stopped."""

    handle: Run
    findings: tuple[str, ...]
    late: bool

    @property
    def failure(self) -> str:
        """Why it did not finish; empty if it did."""
        if self.late:
            return f"not over in time and stopped, with the findings {', '.join(self.findings) or 'none'}"
        words = self.handle.words
        return "" if words == "finished" else words

    @property
    def unwatched(self) -> list[str]:
        """The parts of the probe that failed."""
        return [f"{one.part} on rank {one.rank} ({one.type})" for one in self.handle.state.unwatched]

    def figures(self) -> dict[str, Any]:
        """Everything that the run shows, as plain values."""
        ranks = self.handle.state.ranks.values()
        return {
            "run": self.handle.name,
            "words": self.handle.words,
            "summary": self.handle.summary(),
            "reserved": [_largest(one.steps.memory["reserved"]) for one in ranks],
            "probe_errors": [plain(one) for one in self.handle.state.unwatched],
        }


def _largest(column: Any) -> float | None:
    values = numpy.asarray(column[0:])
    known = values[~numpy.isnan(values)]
    return float(known.max()) if len(known) else None


def pack(run: Path, folder: Path) -> Path:
    """Zips a recorded run, as a folder of its name, without tensors and checkpoints."""
    path, half = folder / f"{run.name}.zip", folder / f".{run.name}.part"
    with zipfile.ZipFile(half, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(run.rglob("*")):
            below = file.relative_to(run)
            if file.is_file() and not file.is_symlink() and below.parts[0] not in _UNPACKED:
                archive.write(file, Path(run.name, below))
    return half.replace(path)


# ---- strategies against one device


def possible(machine: Machine, strategy: str, workload: str | None = None, **fields: Any) -> Spec | str:
    """The Spec of a strategy on as many GPUs as it can use here, with a workload that it has (default: GPT before
    others); or why there is none."""
    row, gpus, refusal = STRATEGIES[strategy], len(machine.gpus), ""
    own = {option.name for option in row.all_options}
    ranks = sorted({gpus, 4, 2, 1} & set(range(1, gpus + 1)), reverse=True)
    for one in [workload] if workload else sorted(WORKLOADS, key="gpt".__ne__):
        for nproc in ranks if row.default_nproc != 1 else [1]:
            for options in ({}, {"tp_size": 1}):
                if set(options) <= own:
                    try:
                        asked = TRAINING | {"workload": one, "nproc": nproc, "options": options} | fields
                        return settle(strategy, **asked)
                    except SpecError as error:
                        refusal = refusal or str(error)
    return refusal


def against_one_device(session: Session, spec: Spec) -> Outcome:
    """Predicts a Spec, runs it, and compares: the losses, gradients and parameters with those of one device, memory
    with the prediction, and the time of a step with the model of this GPU."""
    spec = replace(spec, tensors=True)
    plan = predict(spec)
    trained = session.run(spec)
    figures = trained.figures() | {"method": plan.method, "reason": plan.reason}
    if trained.failure:
        return Outcome(WRONG, f"{trained.failure}; findings: {', '.join(trained.findings) or 'none'}", figures)
    wrong, says = [], []
    for text, holds in (_losses(session, spec, trained, figures), _memory(trained, figures)):
        (says if holds else wrong).append(text)
    says.append(_step(session, spec, trained, figures))
    if trained.unwatched:
        wrong.append(f"the probe failed: {', '.join(trained.unwatched)}")
    unasked = [name for name in trained.findings if name not in _EXPECTED]
    if unasked:
        says.append(f"findings: {', '.join(unasked)}")
    return Outcome(WRONG if wrong else OK, "; ".join([*wrong, *says]), figures)


_EXPECTED = ("input_bound",)  # of a training this small


def _losses(session: Session, spec: Spec, trained: Trained, figures: dict[str, Any]) -> tuple[str, bool]:
    if spec.strategy == BASELINE.name:
        figures["baseline"] = spec.workload
        return "the reference", True
    reference = session.trained_before(spec)
    if reference is None:
        return "no run of one device to compare with", False
    found: Badge = badge(trained.handle.folder, trained.handle.state, reference.folder, reference.state)
    figures["badge"] = found.to_json()
    return f"{found.verdict}: {found.sentence}", found.verdict in ("equal", "differs as expected")


def _memory(trained: Trained, figures: dict[str, Any]) -> tuple[str, bool]:
    """The predicted peak of each rank against the largest one that the allocator reports of any step."""
    errors = {}
    for one in figures["summary"].get("prediction") or ():
        peak = figures["summary"]["ranks"][one["rank"]]["peak_memory_bytes"]
        if one["peak_predicted"] and peak:
            errors[one["rank"]] = one["peak_predicted"] / peak - 1
    figures["peak_errors"] = errors
    if not errors:
        return "peak memory was not predicted", figures["method"] != "simulated"
    worst = max(errors, key=lambda rank: abs(errors[rank]))
    allocated = figures["summary"]["ranks"][worst]["peak_memory_bytes"]
    says = f"predicted peak {errors[worst]:+.1%} of {size(allocated, 1)} on rank {worst}"
    reserved = [one for one in figures["reserved"] if one]
    return f"{says}, reserved {size(max(reserved), 1)}" if reserved else says, abs(errors[worst]) <= CLOSE


def _step(session: Session, spec: Spec, trained: Trained, figures: dict[str, Any]) -> str:
    """The median step of the slowest rank, against what the table of machines says about this GPU."""
    steps = [one["step_seconds_median"] for one in figures["summary"]["ranks"] if one["step_seconds_median"]]
    if not steps:
        return "no step was timed"
    measured = figures["step_seconds"] = max(steps)
    says = f"step {milliseconds(measured)}"
    machine = _row(session.machine)
    if machine is None:
        return f"{says}; the table of machines has no {session.machine.gpus[0].name}"
    found = modelled(spec, predict(spec), machine)
    if found.time is None:
        figures["modelled"] = found.untimed
        return f"{says}, not modelled ({found.untimed})"
    figures["modelled"] = plain(found.time)
    low, high = (milliseconds(seconds or found.time.seconds) for seconds in (found.time.low, found.time.high))
    return f"{says}, modelled {low} to {high} without loading samples"


def _row(machine: Machine) -> Device | None:
    """The row of the table of machines with this machine's GPU."""
    name = machine.gpus[0].name
    return next((one for one in DEVICES.values() if one.accelerator and name.startswith(one.accelerator.driver)), None)
