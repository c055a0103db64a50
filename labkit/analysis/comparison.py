"""Comparing strategies: the same training with each strategy, one run after another, the figures of each run, and
whether they trained the same.

`rows` computes the figures from live or recorded runs. The module depends on no front end: terminal, panel and `--json`
show the same rows.

`badge` compares the losses, the gradients after step 1 and the final parameters of a run with those of `single`. The
probe recorded the tensors (`Spec.tensors`): every rank wrote its shards, which are assembled here. The deviation of a
tensor is ‖a − b‖₂ / ‖b‖₂ with the whole tensor b of the reference, that of a loss |a − b| over the first loss. An
element-wise comparison would be too strict: AdamW divides by the root of the mean square, so if a gradient is almost
zero, its rounding determines the direction of a whole step. For the same reason the norm of a tensor counts as at least
a thousandth of what is usual in its model: the gradient of a key bias is zero in theory, and pure rounding in practice.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias

import msgspec
import numpy
from msgspec import Meta

from labkit.analysis.changes import Difference, name_of
from labkit.analysis.guess import SPEEDUP
from labkit.analysis.metrics import efficiency, phase_shares, training_time
from labkit.analysis.summary import summarise
from labkit.common.units import size
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import decoded
from labkit.record.events import Count, Name, Recorded, parse
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState, per_revision
from labkit.training.rows import UPDATE
from labkit.training.strategies import BASELINE, STRATEGIES
from labkit.training.strategies.rules import departures


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
    return lines + ([RECORDED_NOTE] if recorded_elsewhere(found) else [])


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


# ---- whether two runs trained the same

# How far two sums of the same numbers in different orders may differ: about 300 roundings of fp32 (2⁻²⁴ each), after a
# few layers of such sums. In other precisions products are rounded (2⁻¹¹ in tf32 and fp16, 2⁻⁸ in bf16) and accumulated
# in fp32: ten roundings of theirs.
_ROUNDING = {"fp32": 300 * 2.0**-24, "tf32": 10 * 2.0**-11, "fp16": 10 * 2.0**-11, "bf16": 10 * 2.0**-8}
_GROWTH = 2.0  # growth of a small deviation per step, because a step starts from weights that already differ
# The largest deviations that rounding alone was measured to cause, for any number of steps.
_MOST = {"loss": 0.05, "parameters": 0.3}
_FLIPPED = 5e-3  # of parameters after two steps or more, see `tolerance`
_SMALL = 1e-3  # smallest norm of a tensor, relative to what is usual in its model


_Place: TypeAlias = Annotated[list[Count], Meta(max_length=64)]


class Piece(Recorded):
    """A part of a tensor that one rank wrote (see probe/tensors.py), and where it belongs: at the `offset` of a block,
    at the `start` of a flat vector, or as a partial sum. `shape` is that of the whole tensor."""

    key: Name
    name: Name
    shape: _Place
    kind: Literal["block", "partial", "flat"]
    start: Count = 0
    offset: _Place = msgspec.field(default_factory=list)


class NotRecorded(Exception):
    """The data to compare are missing, incomplete, or from a different training: one sentence."""


@dataclass(frozen=True)
class Deviation:
    """How far one of "loss", "gradients" and "parameters" is from the reference.

    `where` is the first step or tensor whose deviation exceeds its tolerance, or if there is none, the one closest to
    it; `apart` is its relative deviation, and `tolerance` the deviation that rounding explains there.
    """

    what: str
    apart: float
    tolerance: float
    where: str

    @property
    def holds(self) -> bool:
        """Whether the deviation is within its tolerance; NaN is not."""
        return self.apart <= self.tolerance


@dataclass(frozen=True)
class Badge:
    """The result: "reference", "equal", "differs as expected", "differs" or "not compared", and a sentence with figures
    and reasons."""

    verdict: str
    sentence: str
    deviations: tuple[Deviation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The badge as a dict that can be written as JSON; deviations that are not finite are None."""
        plain = [
            asdict(deviation) | {"apart": deviation.apart if math.isfinite(deviation.apart) else None}
            for deviation in self.deviations
        ]
        return {"verdict": self.verdict, "sentence": self.sentence, "deviations": plain}


REFERENCE = Badge("reference", "The run with which the others are compared.")


def badge(run: RunFolder, state: RunState, reference: RunFolder, its_state: RunState) -> Badge:
    """The badge of a finished run compared with a finished `reference`; "not compared" if data are missing or broken.

    Tensors that an engine does not expose, such as the gradients of DeepSpeed, are left out, and the sentence says so.
    """
    try:
        spec, its_spec = _asked(state), _asked(its_state)
        _refuse_unlike(spec, its_spec)
        allowed = partial(tolerance, spec=spec, reference=its_spec)
        found, hidden = [_of_losses(losses(state), losses(its_state), allowed)], []
        for what, step in (("gradients", 1), ("parameters", its_state.step)):
            mine = assembled(run, what)
            if mine:
                found.append(_of_tensors(what, mine, assembled(reference, what), allowed(what, step)))
            else:
                hidden.append(f"{spec.strategy_row.title} does not expose its {what}.")
    except (NotRecorded, ValueError) as error:
        return Badge("not compared", str(error))
    judged = _judged(spec, its_spec, tuple(found))
    return replace(judged, sentence=" ".join([judged.sentence, *hidden]))


def _asked(state: RunState) -> Spec:
    """The Spec of a run of a strategy with a known number of ranks. Raises `NotRecorded` for any other run."""
    spec = state.spec.to_spec()
    if spec.strategy is None or spec.script is not None or spec.nproc is None:
        raise NotRecorded("the run is not of a strategy, or its number of ranks is unknown")
    return spec


def tolerance(what: str, step: int, spec: Spec, reference: Spec) -> float:
    """The largest deviation of "loss", "gradients" or "parameters" that rounding explains after `step` steps.

    It doubles with each step, as measured on CPU ranks (parameters of a CNN: 3e-3 after 10 steps, from 1e-6 in the
    first gradient), up to the largest measured deviation: after hundreds of steps two correct trainings differ by as
    much, and the gradients after step 1 distinguish them from incorrect ones.

    Parameters can differ more from the second step on: where rounding flips a ReLU or the maximum of a pooling window,
    a gradient that is zero in one training is not in the other, and AdamW moves such parameters by the full learning
    rate. Between `single` with its batch in one part and in four, this made 1e-3 in 4 steps of a CNN. A wrong gradient
    of a whole tensor makes about 5e-2 per step there (estimated: the learning rate over the usual size of a weight).
    """
    rounding = max(_ROUNDING[run.precision or "fp32"] for run in (spec, reference))
    grown = rounding * _GROWTH ** min(step - 1, 60)
    if what == "parameters" and step > 1:
        grown = max(grown, _FLIPPED)
    return min(grown, max(_MOST.get(what, rounding), rounding))


def losses(state: RunState) -> dict[int, float]:
    """The loss of every step: the mean over the ranks that have one, each for its own part of the batch."""
    known: dict[int, list[float]] = {}
    for rank in state.ranks.values():
        mine = dict(zip(rank.steps.step, rank.steps.loss))  # for repeated attempts at a step, the newest
        for step, loss in mine.items():
            known.setdefault(int(step), []).extend([] if math.isnan(loss) and len(state.ranks) > 1 else [loss])
    return {step: sum(values) / len(values) if values else math.nan for step, values in sorted(known.items())}


def assembled(run: RunFolder, what: str) -> dict[str, numpy.ndarray]:
    """The whole "gradients" or "parameters" of a run by name, in float64; empty if the ranks recorded none.

    Raises `NotRecorded` if a file, a shard or an element is missing.
    """
    spec = run.read_spec().to_spec()
    wanted = [run.tensors / f"rank{rank}-{what}.npz" for rank in range(spec.processes)]
    files = [path for path in wanted if os.path.lexists(path)]
    if len(files) != spec.processes:
        raise NotRecorded(f"only {len(files)} of {spec.processes} ranks of {run.name} recorded their {what}")
    whole: dict[str, numpy.ndarray] = {}
    held: dict[str, numpy.ndarray] = {}
    most = sum(path.lstat().st_size for path in files)  # most elements: there are no more than bytes
    for path in files:
        try:
            with run.open(path) as file:
                _refuse_packed(file)
                with numpy.load(file) as arrays:
                    for piece in _index(arrays):
                        _put(piece, arrays[piece.key], whole, held, most)
        except (OSError, EOFError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise NotRecorded(f"{what} cannot be read from {path.name} of {run.name}: {error}") from None
    holes = [name for name, there in held.items() if not there.all()]
    if holes:
        raise NotRecorded(f"the ranks of {run.name} did not record all of the {what} of {holes[0]}")
    return whole


def _refuse_packed(file: BinaryIO) -> None:
    """Refuses compressed files, which could unpack to any size; the probe writes none."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in zipfile.ZipFile(file).infolist()):
        raise ValueError("it is compressed")
    file.seek(0)


def _index(arrays: Mapping[str, numpy.ndarray]) -> list[Piece]:
    """The index of the arrays in a file. Raises `ValueError` if it does not have the format that the probe writes."""
    index: list[Piece] = decoded(parse(arrays["index"].tobytes()), list[Piece])
    return index


def _put(
    piece: Piece, array: numpy.ndarray, whole: dict[str, numpy.ndarray], held: dict[str, numpy.ndarray], most: int
) -> None:
    """Copies one rank's shard into its whole tensor. Partial sums are added; where copies of two ranks disagree, it is
    NaN."""
    name, shape = piece.name, tuple(piece.shape)
    if name not in whole and math.prod(shape) + sum(tensor.size for tensor in whole.values()) > most:
        raise ValueError(f"{name} would have more elements than the files have bytes")
    target = whole.setdefault(name, numpy.zeros(shape))
    there = held.setdefault(name, numpy.zeros(shape, dtype=bool))
    if piece.kind == "flat":
        place: Any = slice(piece.start, piece.start + array.size)
        target, there, array = target.reshape(-1), there.reshape(-1), array.reshape(-1)
    else:
        place = tuple(slice(begin, begin + size) for begin, size in zip(piece.offset, array.shape))
    if piece.kind == "partial":
        target[place] += array
    else:
        parted = numpy.linalg.norm(target[place] - array)
        agree = not there[place].any() or parted <= _SMALL * numpy.linalg.norm(array)
        target[place] = array if agree else math.nan
    there[place] = True


def training(spec: Spec) -> dict[str, Any]:
    """The settings that make two runs the same training, by name; how the work is split is not part of them."""
    own = {option.name: spec.options[option.name] for option in spec.workload_row.options}
    plain = {
        name: getattr(spec, name)
        for name in ("workload", "data", "seed", "train_samples", "global_batch", "total_steps")
    }
    update = {option.name: spec.options.get(option.name, option.default) for option in UPDATE}
    return plain | own | update


def _refuse_unlike(spec: Spec, reference: Spec) -> None:
    wanted = training(reference)
    for name, value in training(spec).items():
        if value != wanted.get(name):
            what = name.replace("_", " ")
            raise NotRecorded(f"{what} is {value}, but {wanted.get(name)} in the reference run")


def _of_losses(
    found: Mapping[int, float], wanted: Mapping[int, float], allowed: Callable[[str, int], float]
) -> Deviation:
    if not wanted or found.keys() != wanted.keys():
        raise NotRecorded(f"it has losses of {len(found)} steps, but the reference run has {len(wanted)}")
    first = wanted[min(wanted)]
    apart = {step: (_relative(found[step] - wanted[step], first), allowed("loss", step)) for step in wanted}
    return _deviation("loss", {f"step {step}": pair for step, pair in apart.items()})


def _of_tensors(
    what: str, found: Mapping[str, numpy.ndarray], wanted: Mapping[str, numpy.ndarray], allowed: float
) -> Deviation:
    if found.keys() != wanted.keys():
        other = sorted(found.keys() ^ wanted.keys())[0]
        raise NotRecorded(f"only one of the two runs has {what} of {other}")
    usual = math.sqrt(
        sum(float(numpy.square(tensor).sum()) for tensor in wanted.values())
        / sum(tensor.size for tensor in wanted.values())
    )
    apart = {}
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise NotRecorded(f"{name} has shape {found[name].shape}, but {tensor.shape} in the reference run")
        size = max(float(numpy.linalg.norm(tensor)), _SMALL * usual * math.sqrt(tensor.size))
        apart[name] = (_relative(float(numpy.linalg.norm(found[name] - tensor)), size), allowed)
    return _deviation(what, apart)


def _deviation(what: str, apart: Mapping[str, tuple[float, float]]) -> Deviation:
    """The first deviation that exceeds its tolerance, or else the one closest to it."""
    out = (where for where, (value, allowed) in apart.items() if not value <= allowed)
    where = next(out, None) or max(apart, key=lambda where: apart[where][0] / apart[where][1])
    found, allowed = apart[where]
    return Deviation(what, float(found), float(allowed), where)


def _judged(spec: Spec, reference: Spec, found: tuple[Deviation, ...]) -> Badge:
    figures = ", ".join(
        f"{deviation.what} {_short(deviation.apart)} of {_short(deviation.tolerance)}" for deviation in found
    )
    precision = spec.precision or "fp32"
    missed = [deviation for deviation in found if not deviation.holds]
    if not missed:
        return Badge("equal", f"Equal up to {precision} rounding. Deviation and tolerance: {figures}.", found)
    first = next((deviation for deviation in missed if deviation.what == "gradients"), missed[0])
    where = first.where if first.what == "loss" else f"{first.what} of {first.where}"
    reasons = departures(spec)
    if reasons:
        return Badge(
            "differs as expected", f"{'; '.join(reasons)}. First at {where}. Deviation and tolerance: {figures}.", found
        )
    return Badge("differs", f"Not the same training, first at {where}. Deviation and tolerance: {figures}.", found)


def _relative(apart: float, size: float) -> float:
    apart, size = abs(float(apart)), abs(float(size))
    return apart / size if size else (0.0 if apart == 0 else math.inf)


def _short(value: float) -> str:
    return f"{value:.0e}" if math.isfinite(value) else "nan"
