"""Several strategies side by side: the same training by each, one run after another, and what each was like.

`plan` settles all Specs before the first starts; `Comparing` runs them; `rows` are the figures, from runs that are live or recorded.
No face is known here: terminal, panel and `--json` draw the same rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from labkit.api import Run, cell, in_notebook, run, settle, show
from labkit.arguments import check_flag, check_seconds, shown
from labkit.columns import RankState
from labkit.equivalence import REFERENCE, Badge, badge, training
from labkit.events import PHASES
from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.spec import Spec, SpecError, check_fields
from labkit.state import RunState
from labkit.steps import Column, median
from labkit.strategies import STRATEGIES
from labkit.summary import summarise
from labkit.units import size

if TYPE_CHECKING:
    import plotly.graph_objects as go

BASELINE = "single"


@dataclass(frozen=True)
class Row:
    """One strategy's figures; None where there is none (yet).

    `seconds` is the time from the end of the first step, which warms up, to the last step or evaluation, and `epoch_seconds` the part of
    it that goes to as many steps as an epoch has. `speedup` is how many times more samples a second than the baseline trained on in that
    time. `memory` is the largest peak of any device, and `sent` what the rank that sends the most sends in a step, in bytes. `phases`
    are shares of a median step of the slowest rank, which sum to 1. `words` is the state in words, `note` what the run is not of what
    its title says.
    """

    strategy: str
    title: str
    workload: str = "cnn"
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
    accuracy: float | None = None
    loss: float | None = None
    speedup: float | None = None
    memory: int | None = None
    sent: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    badge: Badge | None = None
    note: str = ""

    @property
    def bound(self) -> str:
        """The phase that takes the largest part of a step, with its share; empty where none is known."""
        if not self.phases:
            return ""
        phase = max(self.phases, key=self.phases.__getitem__)
        return f"{phase} {self.phases[phase]:.0%}"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        plain = {name: value for name, value in asdict(self).items() if name != "badge"}
        return plain | {"bound": self.bound, "badge": self.badge.to_json() if self.badge else None}


# A result to set beside one's own. It was measured elsewhere, and not by labkit: a CNN with the same three convolutions, on MNIST,
# 5 epochs, batch 128 per GPU, on two GPUs, fed sample by sample.
RECORDED = (
    Row("single", "Single", devices=1, device="cuda", seconds=44.69, epoch_seconds=44.69 / 5, accuracy=0.9924, speedup=1.0),
    Row("ddp", "DDP", devices=2, device="cuda", seconds=34.69, epoch_seconds=34.69 / 5, accuracy=0.9905, speedup=44.69 / 34.69),
    Row("fsdp", "FSDP1", devices=2, device="cuda", seconds=34.63, epoch_seconds=34.63 / 5, accuracy=0.9920, speedup=44.69 / 34.63),
)
RECORDED_NOTE = (
    "Recorded elsewhere, not measured here: this CNN on MNIST, 5 epochs, batch 128 per GPU, two GPUs. Its input pipeline, "
    "which fetches sample by sample, held the speed-up down."
)


def beside(found: Sequence[Row]) -> tuple[Row, ...]:
    """The recorded result, where it is of the same model; else nothing."""
    return RECORDED if any(row.workload == "cnn" for row in found) else ()


# ---- what is to be run


def plan(strategies: Sequence[str] | str, **fields: Any) -> tuple[list[Spec], dict[str, str]]:
    """The Specs of a comparison as this machine would run them, the baseline first, and what is left out, with the reason.

    `strategies` are names, or "all": then those that cannot run are left out, where otherwise the first of them raises `SpecError`.
    `fields` are those of Spec. The global batch is the same for all (`scaling` is strong if nothing is said), and an option goes to
    the strategies that have it. The baseline is added where it can run.
    """
    everything = isinstance(strategies, str) and strategies == "all"
    names = list(STRATEGIES) if everything else _names(strategies)
    check_fields(fields)
    for name in ("strategy", "script", "args", "as_module"):
        if name in fields:
            raise SpecError(name, f"{name} does not go with a comparison, which runs strategies; name them in the first argument")
    if not names:
        raise SpecError("strategies", f"no strategy was named; name some of {', '.join(STRATEGIES)}, or all")
    specs, left_out = [], {}
    for name in dict.fromkeys((BASELINE, *names)):
        try:
            specs.append(_settled(name, names, **fields))
        except SpecError as error:
            if not everything and name in names:
                raise SpecError(error.field, f"{name} cannot be compared: {error}") from None
            left_out[name] = str(error)
    if not specs:
        raise SpecError("strategies", f"none of them can run here; the first says: {next(iter(left_out.values()))}")
    return specs, left_out


def _names(strategies: Sequence[str] | str) -> list[str]:
    """The strategies that were named, each once; a single name may stand without a list."""
    if not isinstance(strategies, (str, list, tuple, set, frozenset, Mapping)):
        raise SpecError("strategies", f"strategies must be a list of names such as ['ddp', 'fsdp2'], or 'all'; got {shown(strategies)}")
    names = [strategies] if isinstance(strategies, str) else list(strategies)
    for name in names:
        if not isinstance(name, str) or name not in STRATEGIES:
            raise SpecError("strategies", f"strategy {shown(name)} is not known; there is {', '.join(STRATEGIES)}, or all")
    return list(dict.fromkeys(names))


def _settled(name: str, names: Sequence[str], **fields: Any) -> Spec:
    row = STRATEGIES[name]
    asked = {"scaling": "strong", "tensors": True} | fields
    if row.default_nproc == 1:
        asked["nproc"] = 1
    elif asked.get("nproc") is None:
        asked["nproc"] = row.default_nproc
    given = asked.get("options", {})
    if not isinstance(given, Mapping):
        return settle(name, **asked)  # refuses them
    elsewhere = {option.name for other in names for option in STRATEGIES[other].all_options} - {option.name for option in row.all_options}
    asked["options"] = {option: value for option, value in given.items() if option not in elsewhere}
    return settle(name, **asked)


class Comparing:
    """Runs the Specs one after another, in a thread of its own; `rows` are the figures at any moment."""

    def __init__(self, specs: Sequence[Spec], left_out: Mapping[str, str] | None = None, *, cold: bool = False):
        self.specs = tuple(specs)
        self._cold = cold
        self.left_out = dict(left_out or {})
        self._runs: list[Run] = []
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._badges: dict[str, Badge] = {}
        self.shown_in: int | None = None  # the cell that showed it last
        self._thread = threading.Thread(target=self._work, daemon=True, name="labkit compare")

    def start(self) -> Comparing:
        """Begins, and returns at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the run that is under way; those that have not begun do not begin."""
        self._stopping.set()
        for one in self._runs[-1:]:
            one.stop()
        self.wait()

    def wait(self, timeout: float | None = None) -> Comparing:
        """Waits until all have run. Raises what kept a run from being started."""
        timeout = check_seconds("timeout", timeout)
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return self

    def __repr__(self) -> str:
        over = [row.over for row in self.rows]
        return f"<Comparing {', '.join(spec.strategy_row.title for spec in self.specs)}: {sum(over)} of {len(over)} over>"

    def _ipython_display_(self) -> None:
        """Shows it as the last line of a notebook's cell, unless `show` did so in the same cell."""
        if not in_notebook():
            raise NotImplementedError  # IPython takes the repr then
        if self.shown_in != cell():
            show(self)

    @property
    def over(self) -> bool:
        """Whether nothing runs any more."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def runs(self) -> list[Run]:
        """The runs that were started, in order."""
        return list(self._runs)

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for each Spec, in order."""
        started = self.runs
        known = [(one.folder, one.state) for one in started]
        waiting = [Row(spec.strategy, spec.strategy_row.title, spec.workload, devices=spec.nproc) for spec in self.specs[len(started) :]]
        if self._stopping.is_set():
            waiting = [replace(row, words="not started", over=True) for row in waiting]
        return (*rows(known, self._badges), *waiting)

    def to_json(self) -> dict[str, Any]:
        """Everything in one dict of plain values."""
        return document(self.rows, self.left_out)

    def figure(self) -> go.Figure:
        """The charts as they are now, as one plotly figure."""
        from labkit.figures.comparison import figure

        found = self.rows
        return figure(found, beside(found))

    def _work(self) -> None:
        try:
            for spec in self.specs:
                if self._stopping.is_set():
                    return
                started = run(spec, cold=self._cold)
                self._runs.append(started)
                if self._stopping.is_set():  # who stopped had not seen this one yet
                    started.stop()
                started.wait()
        except BaseException as error:  # it is raised again where somebody waits
            self._error = error


def compare(strategies: Sequence[str] | str, *, cold: bool = False, **fields: Any) -> Comparing:
    """Starts to run strategies side by side and returns at once; `show` shows it. See `plan` for the arguments, and `run` for `cold`.

    Raises `SpecError`.
    """
    check_flag("cold", cold)
    return Comparing(*plan(strategies, **fields), cold=cold).start()


# ---- the figures


def recorded(folders: Iterable[RunFolder]) -> tuple[Row, ...]:
    """The rows of recorded runs, the baseline first."""
    known = []
    for folder in folders:
        follower = Follower(folder)
        follower.poll()
        known.append((folder, follower.state))
    known.sort(key=lambda pair: pair[1].spec.get("strategy") != BASELINE)
    return rows(known, {})


def alike(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Of recorded runs (the oldest first) the newest of each strategy that trained the same as the newest of all."""
    found: dict[str, RunFolder] = {}
    wanted = None
    for folder in reversed(folders):
        try:
            spec = Spec.from_json(RunFolder.read_json(folder.spec))
        except SpecError:
            continue
        if spec.strategy is None or spec.nproc is None:
            continue
        wanted = wanted or training(spec)
        if training(spec) == wanted:
            found.setdefault(spec.strategy, folder)
    return [found[name] for name in STRATEGIES if name in found]


def newest(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Of recorded runs (the oldest first) those of the newest comparison, whose runs alone record tensors; empty for none."""
    found = alike([folder for folder in folders if RunFolder.read_json(folder.spec).get("tensors")])
    return found if len(found) > 1 else []


def rows(known: Sequence[tuple[RunFolder, RunState]], badges: dict[str, Badge]) -> tuple[Row, ...]:
    """The rows of runs, live or over; `badges` keeps those that were worked out, by the run's name."""
    found = [_row(folder, state) for folder, state in known]
    base = next((number for number, row in enumerate(found) if row.strategy == BASELINE), None)
    if base is None:
        return tuple(found)
    folder, state = known[base]
    speed = found[base].samples_per_second
    for number, row in enumerate(found):
        if row.over and row.run not in badges and found[base].over:
            badges[row.run] = REFERENCE if number == base else badge(*known[number], folder, state)
        known_both = speed and row.samples_per_second and _same(known[number][1], state)
        speedup = row.samples_per_second / speed if known_both else None
        found[number] = replace(row, speedup=speedup, badge=badges.get(row.run))
    return tuple(found)


def _same(state: RunState, other: RunState) -> bool:
    """Whether two runs train the same, so that their speeds can be compared."""
    return state.asked is not None and other.asked is not None and training(state.asked) == training(other.asked)


def _row(folder: RunFolder, state: RunState) -> Row:
    summary, spec = summarise(state, folder.name), state.asked
    accuracy = summary["accuracy"]  # whatever the script logged by that name
    peaks = [rank["peak_memory_bytes"] for rank in summary["ranks"] if rank["peak_memory_bytes"] is not None]
    sent = [rank["comm_bytes_per_step"] for rank in summary["ranks"] if rank["comm_bytes_per_step"] is not None]
    row = Row(
        strategy=str(state.spec.get("strategy")),
        title=spec.strategy_row.title if spec else folder.name,
        workload=str(state.spec.get("workload")),
        run=folder.name,
        devices=state.spec.get("nproc") or state.world_size,
        device=summary["device"] or "",
        words=state.words,
        over=state.over,
        failed=state.status.get("state") == "failed",
        steps=state.step,
        accuracy=accuracy if isinstance(accuracy, (int, float)) else None,
        loss=summary["loss"],
        memory=max(peaks, default=None),
        sent=max(sent, default=None),
        phases=_shares(state),
        note=state.note,
    )
    seconds, steps = _training(state)
    if spec is None or not steps or seconds <= 0:
        return row
    per_second = steps * spec.global_batch / seconds
    return replace(row, seconds=seconds, samples_per_second=per_second, epoch_seconds=seconds / steps * spec.steps_per_epoch)


def _training(state: RunState) -> tuple[float, int]:
    """Seconds from the end of the first step to the last step or evaluation, and the steps in between."""
    ranks = [rank.steps for rank in state.ranks.values() if len(rank.steps) > rank.first_step + 1]
    if not ranks or len(ranks) < state.world_size:
        return 0.0, 0
    firsts = [rank.first_step for rank in state.ranks.values()]
    begin = max(steps.t[first] for steps, first in zip(ranks, firsts))
    end = max([steps.t[-1] for steps in ranks] + [metric["t"] for metric in state.metrics if metric["t"]])
    return end - begin, min(len(steps) - first for steps, first in zip(ranks, firsts)) - 1


def _shares(state: RunState) -> dict[str, float]:
    """What part of a median step each phase is, on the rank whose steps take the longest."""

    def typical(rank: RankState, column: Column) -> float:
        value = median(column, rank.first_step + 1)
        return 0.0 if math.isnan(value) else value

    slowest = max(state.ranks.values(), key=lambda rank: typical(rank, rank.steps.seconds), default=None)
    if slowest is None:
        return {}
    medians = {phase: typical(slowest, slowest.steps.phases[phase]) for phase in PHASES}
    total = sum(medians.values())
    return {phase: value / total for phase, value in medians.items()} if total else {}


def document(found: Sequence[Row], left_out: Mapping[str, str]) -> dict[str, Any]:
    """What `compare --json` prints."""
    elsewhere = {"note": RECORDED_NOTE, "rows": [_measured(row) for row in beside(found)]}
    return {"rows": [row.to_json() for row in found], "left_out": dict(left_out), "recorded_elsewhere": elsewhere}


def _measured(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("strategy", "devices", "device", "seconds", "epoch_seconds", "accuracy", "speedup")}


# ---- in words, for all faces

HEADS = ("mode", "devices", "time (s)", "epoch (s)", "accuracy", "speed-up", "peak memory", "sent a step", "same training")


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts, one for each of HEADS; an en dash where there is no figure."""
    return (
        row.title,
        f"{row.devices} {row.device.upper() if row.device == 'cpu' else 'GPU' if row.device else ''}".strip(),
        _number(row.seconds, ".2f"),
        _number(row.epoch_seconds, ".2f"),
        _number(row.accuracy, ".2%"),
        _number(row.speedup, ".2f", "×"),
        _bytes(row.memory),
        _bytes(row.sent),
        row.badge.verdict if row.badge else ("–" if row.over else row.words),
    )


def sentences(found: Sequence[Row], left_out: Mapping[str, str]) -> list[str]:
    """What stands below the table: badges, notes, what bounds a step, what was left out."""
    said = [f"{row.title}: {row.words}." for row in found if row.failed]
    said += [f"{row.title}: {row.badge.sentence}" for row in found if row.badge and row.badge is not REFERENCE]
    said += [f"{row.title}: {row.note}" for row in found if row.note]
    said += [f"{row.title}: {row.bound} of a step, more than any other phase." for row in found if row.bound and row.over]
    said += [f"{STRATEGIES[name].title} is left out: {reason}." for name, reason in left_out.items()]
    return said + [RECORDED_NOTE] * bool(beside(found))


def _number(value: float | None, how: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{how}}{unit}"


def _bytes(value: float | None) -> str:
    return "–" if value is None else size(value)
