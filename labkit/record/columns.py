"""The parts of a RunState: the state of one rank, and the samples taken by the supervisor."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from labkit.record.steps import Steps
from labkit.record.types.measured import Call, Operation, Span, Timeline
from labkit.record.types.observed import Model, Seen
from labkit.record.types.reported import Error, Silent, Waiting


def numbers() -> array[float]:
    """An empty column."""
    return array("d")


class ProfiledStep(TypedDict):
    """The `timeline` event of a profiled step with all fields, see `types.measured.Timeline`."""

    step: int
    t0: float
    seconds: float
    device: str
    backend: str
    left_out: int
    phases: list[Span]
    comm: list[Call]
    marks: list[Span]
    busy: list[tuple[float, float]]
    exposed: dict[str, float]


class MemoryCurve(TypedDict):
    """The memory of a profiled step: bytes by owner from each of `times` on, see `types.measured.MemoryStep`."""

    step: int
    t0: float
    seconds: float
    phases: list[Span]
    times: list[float]
    owners: dict[str, list[int]]
    peak: float
    at_peak: dict[str, float]


class StepTraffic(TypedDict):
    """The communication of one step, by operation."""

    step: int
    ops: dict[str, Operation]


@dataclass
class Losses:
    """The losses of an optimizer other than the pacemaker, and the step of the run to which each belongs."""

    step: array[float] = field(default_factory=numbers)
    loss: array[float] = field(default_factory=numbers)


@dataclass
class RankState:
    """The state of one rank. Times are unix seconds; `attempts` maps each attempt to the index of its first step.

    `began` is when the process started, `started` when torch was imported, and `startup` when each milestone of
    `startup` events was reached.

    `silent` is what the supervisor reported about a process that could not report itself; it is valid until the rank
    writes again. `left_at` is the stack of the call that ended the script without an error, such as `sys.exit()`; empty
    otherwise.

    If several optimizers train on separate losses, `optimizers` has their names by number. The steps of the run are
    those of the `pacemaker`, and so is the loss in `steps`; `losses` has the losses of the others.
    """

    rank: int
    pid: int | None = None
    host: str | None = None
    device: str = "cpu"
    device_name: str = ""
    attempt: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    began: float | None = None
    started: float | None = None
    startup: dict[str, float] = field(default_factory=dict)
    ended: float | None = None
    exit_code: int | None = None
    left_at: str = ""
    activity: str | None = None
    activity_since: float | None = None
    error: Error | None = None
    owners: dict[str, int] = field(default_factory=dict)
    traffic: StepTraffic | None = None
    timelines: dict[int, ProfiledStep] = field(default_factory=dict)
    memory_step: MemoryCurve | None = None
    waiting: Waiting | None = None
    silent: Silent | None = None
    not_finite: int | None = None
    saw: list[Seen] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    losses: dict[int, Losses] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    pacemaker: int | None = None

    @property
    def timeline(self) -> ProfiledStep | None:
        """The `timeline` event of the newest profiled step; None if there is none."""
        return self.timelines[max(self.timelines)] if self.timelines else None

    def seen(self, what: str) -> list[Any]:
        """The observations of kind `what`, in order; `types/observed.py` has a type for each."""
        return [one for one in self.saw if one["what"] == what]

    @property
    def models(self) -> list[Model]:
        """The models that train, in the order of their first call; loss modules, which older versions recorded, are
        left out.
        """
        return [one for one in self.seen("model") if one.get("parameters")]

    @property
    def pacemaker_name(self) -> str | None:
        """The name of the optimizer that sets the pace; None if there is only one."""
        return None if self.pacemaker is None else self.optimizers.get(self.pacemaker)

    @property
    def first_step(self) -> int:
        """The index of the first step of the newest attempt, recorded or not."""
        return self.attempts.get(self.attempt, 0)

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that the rank sent in the newest measured step; 0 without a process group, None if unknown."""
        return None if self.traffic is None else float(sum(op["sent"] for op in self.traffic["ops"].values()))

    @property
    def peak_memory(self) -> int | None:
        """The largest peak of any step, in bytes; None if unknown."""
        return self.steps.peak


@dataclass
class System:
    """Samples taken by the supervisor: times `t`, and columns by device index or rank."""

    t: array[float] = field(default_factory=numbers)
    cpu_percent: array[float] = field(default_factory=numbers)
    memory_used: array[float] = field(default_factory=numbers)
    gpus: dict[int, dict[str, array[float]]] = field(default_factory=dict)
    gpu_memory_total: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, dict[str, array[float]]] = field(default_factory=dict)


def whole_timeline(event: Timeline) -> ProfiledStep:
    """A timeline with all fields that figures and findings read."""
    return {
        "step": event["step"],
        "t0": event["t0"],
        "seconds": event["seconds"],
        "device": event.get("device", "cpu"),
        "backend": event.get("backend", ""),
        "left_out": event.get("left_out", 0),
        "phases": event["phases"],
        "comm": [cast(Call, [*call, None, None, None, None][:7]) for call in event["comm"]],
        "marks": event["marks"],
        "busy": event["busy"],
        "exposed": event["exposed"],
    }
