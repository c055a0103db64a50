"""Comparing strategies: the same training with each strategy, one run after another, and the figures of each run.

`rows` computes the figures from live or recorded runs. The module depends on no front end: terminal, panel and `--json`
show the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from labkit.analysis.changes import Difference, name_of
from labkit.analysis.equivalence import REFERENCE, Badge, badge, training
from labkit.analysis.guess import SPEEDUP
from labkit.analysis.metrics import efficiency, phase_shares, training_time
from labkit.analysis.summary import summarise
from labkit.common.units import size
from labkit.plan.spec import SpecError
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState, per_revision
from labkit.training.strategies import BASELINE, STRATEGIES


@dataclass(frozen=True)
class Row:
    """The figures of one strategy; None if unknown.

    `seconds` is the time from the end of the first step (warm-up) to the last step or evaluation, and `epoch_seconds`
    the time per epoch at the same speed, evaluations included. `samples_per_second` is the throughput of the summary,
    which counts the time of training steps alone, and `speedup` its ratio to that of the baseline; tokens, FLOP/s and
    MFU are those of the summary, too. `memory` is the largest peak of any device, and `sent` the traffic per step of
    the rank that sends the most, in bytes. `phases` are shares of a median step of the slowest rank and sum to 1.
    `words` is the state in words, `note` how the run differs from its title, `guessed_speedup` what the learner
    predicted.
    """

    strategy: str
    title: str
    workload: str
    run: str = ""
    devices: int = 0
    device: str = ""
    words: str = "waiting"
    over: bool = False
    failed: bool = False
    steps: int = 0
    seconds: float | None = None
    epoch_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    flops_per_device: float | None = None
    mfu: float | None = None
    mfu_missing: str = ""
    accuracy: float | None = None
    loss: float | None = None
    speedup: float | None = None
    memory: float | None = None
    sent: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    badge: Badge | None = None
    note: str = ""
    guessed_speedup: float | None = None

    @property
    def bound(self) -> str:
        """The phase that takes the largest part of a step, with its share; empty if unknown."""
        if not self.phases:
            return ""
        phase = max(self.phases, key=self.phases.__getitem__)
        return f"{phase} {self.phases[phase]:.0%}"

    def to_json(self) -> dict[str, Any]:
        """The row as a dict that can be written as JSON."""
        plain = {name: value for name, value in asdict(self).items() if name != "badge"}
        return plain | {"bound": self.bound, "badge": self.badge.to_json() if self.badge else None}


# A result for comparison, measured on another machine and not by labkit: a CNN with the same three convolutions, on
# MNIST, 5 epochs, batch 128 per GPU, on two GPUs, loaded sample by sample.
RECORDED = tuple(
    Row(
        name,
        title,
        "cnn",
        devices=devices,
        device="cuda",
        seconds=seconds,
        epoch_seconds=seconds / 5,
        accuracy=accuracy,
        speedup=44.69 / seconds,
    )
    for name, title, devices, seconds, accuracy in (
        ("single", "Single", 1, 44.69, 0.9924),
        ("ddp", "DDP", 2, 34.69, 0.9905),
        ("fsdp", "FSDP1", 2, 34.63, 0.9920),
    )
)
RECORDED_NOTE = (
    "Recorded elsewhere, not measured here: this CNN on MNIST, 5 epochs, batch 128 per GPU, two GPUs. Its input "
    "pipeline loads sample by sample, which limits the speed-up."
)


def recorded_elsewhere(found: Sequence[Row]) -> tuple[Row, ...]:
    """The rows recorded on another machine, if they are of the same model; otherwise none."""
    models = {row.workload for row in RECORDED}
    return RECORDED if any(row.workload in models for row in found) else ()


# ---- the figures


def recorded(folders: Iterable[RunFolder]) -> tuple[Row, ...]:
    """The rows of recorded runs, the baseline first."""
    known = []
    for folder in folders:
        follower = Follower(folder)
        follower.poll()
        known.append((folder, follower.state))
    known.sort(key=lambda pair: pair[1].spec.strategy != BASELINE.name)
    return rows(known, {})


def alike(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Of recorded runs (oldest first), the newest run of each strategy with the same training as the newest run."""
    found: dict[str, RunFolder] = {}
    wanted = None
    for folder in reversed(folders):
        try:
            spec = folder.read_spec().to_spec()
        except SpecError:
            continue
        if spec.strategy is None or spec.nproc is None:
            continue
        wanted = wanted or training(spec)
        if training(spec) == wanted:
            found.setdefault(spec.strategy, folder)
    return [found[name] for name in STRATEGIES if name in found]


def newest(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Of recorded runs (oldest first), the runs of the newest comparison (only those record tensors); empty for
    none."""
    found = alike([folder for folder in folders if folder.read_spec().tensors])
    return found if len(found) > 1 else []


def rows(known: Sequence[tuple[RunFolder, RunState]], badges: dict[str, Badge]) -> tuple[Row, ...]:
    """The rows of live or finished runs; `badges` caches computed badges by the name of the run."""
    found = [_row(state, folder.name) for folder, state in known]
    base = next((number for number, row in enumerate(found) if row.strategy == BASELINE.name), None)
    if base is None:
        return tuple(found)
    folder, state = known[base]
    speed = found[base].samples_per_second
    for number, row in enumerate(found):
        if row.over and row.run not in badges and found[base].over:
            badges[row.run] = REFERENCE if number == base else badge(*known[number], folder, state)
        own = row.samples_per_second
        speedup = own / speed if own and speed and _same(known[number][1], state) else None
        found[number] = replace(row, speedup=speedup, badge=badges.get(row.run))
    return tuple(found)


def _same(state: RunState, other: RunState) -> bool:
    """Whether two runs are the same training, so that their speeds can be compared."""
    return state.asked is not None and other.asked is not None and training(state.asked) == training(other.asked)


@per_revision
def _row(state: RunState, run: str) -> Row:
    """The figures of the run `run` on its own: without speed-up and badge, which need the baseline."""
    summary, spec = summarise(state, run), state.asked
    guessed = state.guess.get(SPEEDUP.name)
    accuracy = summary.accuracy  # any value that the script logged under this name
    peaks = [rank.peak_memory_bytes for rank in summary.ranks if rank.peak_memory_bytes is not None]
    sent = [rank.comm_bytes_per_step for rank in summary.ranks if rank.comm_bytes_per_step is not None]
    row = Row(
        strategy=str(state.spec.strategy),
        title=spec.strategy_row.title if spec else name_of(state, run),
        workload=str(state.spec.workload),
        run=run,
        devices=state.spec.nproc or state.world_size,
        device=summary.device or "",
        words=state.words,
        over=state.over,
        failed=state.status.state == "failed",
        steps=state.step,
        accuracy=accuracy if isinstance(accuracy, (int, float)) else None,
        loss=summary.loss,
        memory=max(peaks, default=None),
        sent=max(sent, default=None),
        phases=phase_shares(state),
        note=state.note,
        guessed_speedup=guessed if isinstance(guessed, (int, float)) else None,
        **asdict(efficiency(state)),
    )
    seconds, steps = training_time(state)
    if spec is None or not steps or seconds <= 0:
        return row
    return replace(row, seconds=seconds, epoch_seconds=seconds / steps * spec.steps_per_epoch)


def document(found: Sequence[Row], left_out: Mapping[str, str], changed: Difference | None = None) -> dict[str, Any]:
    """The object that `compare --json` prints; what `changed` between two runs, if that is known."""
    elsewhere = {"note": RECORDED_NOTE, "rows": [_measured(row) for row in recorded_elsewhere(found)]}
    said = {"rows": [row.to_json() for row in found], "left_out": dict(left_out), "recorded_elsewhere": elsewhere}
    return said | ({"changes": changed.to_json()} if changed else {})


def _measured(row: Row) -> dict[str, Any]:
    return {
        name: getattr(row, name)
        for name in ("strategy", "devices", "device", "seconds", "epoch_seconds", "accuracy", "speedup")
    }


# ---- as text, for all front ends

HEADS = (
    "strategy",
    "devices",
    "time (s)",
    "epoch (s)",
    "accuracy",
    "speed-up",
    "samples/s",
    "TFLOP/s (MFU)",
    "peak memory",
    "sent per step",
    "same training",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts, one for each of HEADS; an en dash if a figure is unknown."""
    return (
        row.title,
        f"{row.devices} {row.device.upper() if row.device == 'cpu' else 'GPU' if row.device else ''}".strip(),
        _number(row.seconds, ".2f"),
        _number(row.epoch_seconds, ".2f"),
        _number(row.accuracy, ".2%"),
        _number(row.speedup, ".2f", "×"),
        _number(row.samples_per_second, ",.0f") + _further(row.tokens_per_second, ",.0f", " tokens/s"),
        _number(row.flops_per_device and row.flops_per_device / 1e12, ".3g") + _further(row.mfu, ".1%"),
        _bytes(row.memory),
        _bytes(row.sent),
        row.badge.verdict if row.badge else ("–" if row.over else row.words),
    )


def sentences(found: Sequence[Row], left_out: Mapping[str, str]) -> list[str]:
    """The sentences below the table: the learner's predictions, badges, notes, the longest phase, why FLOP/s or MFU are
    not known, and strategies that were left out."""
    lines = [f"{row.title}: {row.words}." for row in found if row.failed]
    lines += [said for row in found if (said := guess_sentence(row))]
    lines += [f"{row.title}: {row.badge.sentence}" for row in found if row.badge and row.badge is not REFERENCE]
    lines += [f"{row.title}: {row.note}" for row in found if row.note]
    lines += [f"{row.title}: {row.bound} of each step, the longest phase." for row in found if row.bound and row.over]
    lines += dict.fromkeys(f"{row.mfu_missing}." for row in found if row.over and row.mfu_missing)
    lines += [f"{STRATEGIES[name].title} is left out: {reason}." for name, reason in left_out.items()]
    return lines + [RECORDED_NOTE] * bool(recorded_elsewhere(found))


def guess_sentence(row: Row) -> str:
    """`DDP: you predicted a speed-up of 1.8 ×; it was 1.4 × (+29 %).` Empty for a row without a prediction, and until
    the speed-up is known."""
    if row.guessed_speedup is None or not row.over or row.speedup is None:
        return ""
    error = SPEEDUP.error(row.guessed_speedup, row.speedup)
    said = f"{row.title}: you predicted a speed-up of {SPEEDUP.in_words(row.guessed_speedup)}"
    off = "" if error is None else f" ({SPEEDUP.error_in_words(error)})"
    return f"{said}; it was {SPEEDUP.in_words(row.speedup)}{off}."


def _number(value: float | None, how: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{how}}{unit}"


def _further(value: float | None, how: str, unit: str = "") -> str:
    return "" if value is None else f" ({value:{how}}{unit})"


def _bytes(value: float | None) -> str:
    return "–" if value is None else size(value)
