"""The course of a recorded run: how long it took, when each step ended, and the moments that one would like to see."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy

from labkit.analysis.diagnose import findings
from labkit.analysis.profiled import step_in_words
from labkit.common.units import size
from labkit.record.events import Step, Timeline
from labkit.record.folder import RunFolder
from labkit.record.follow import Recording
from labkit.record.reader import Block
from labkit.record.state import RunState

_PARTS = 32  # into which a run is divided to look for its first finding, and the part where it is again
_TITLE = 60  # characters of a finding's title


@dataclass(frozen=True)
class Moment:
    """A moment of a run, in seconds since it began. `kind` is start, step, memory, finding or end."""

    kind: str
    what: str
    position: float


@dataclass(frozen=True)
class Course:
    """A run from its beginning to its end. `steps` has the seconds since its beginning when all ranks had finished each
    step of the newest attempt."""

    seconds: float
    steps: numpy.ndarray
    moments: list[Moment]

    def step_at(self, position: float) -> int:
        """How many steps were finished."""
        return int(numpy.searchsorted(self.steps, position, side="right"))

    def end_of(self, step: int) -> float:
        """When a step had been finished; the beginning for 0, and the last one for later steps."""
        return float(self.steps[min(step, len(self.steps)) - 1]) if step > 0 and len(self.steps) else 0.0


def course(folder: RunFolder) -> Course:
    """The course of a run that is over. Reads all of its events."""
    recording = Recording(folder)
    due: dict[int, list[numpy.ndarray]] = {}
    profiled: dict[int, float] = {}
    last = 0.0
    for event, times in recording.to_end():
        last = max(last, float(times[-1]))
        if isinstance(event, (Step, Block)):
            due.setdefault(event.rank, []).append(times)
        elif isinstance(event, Timeline):
            profiled[event.step] = max(last, profiled.get(event.step, 0.0))
    state, began = recording.state, recording.began
    times_of = {rank: numpy.concatenate(parts) for rank, parts in due.items()}
    steps = _step_ends(state, times_of)
    seconds = max(last, (state.status.ended or began) - began)
    moments = [Moment("start", "first step", float(steps[0]))] if len(steps) else []
    moments += [Moment("step", step_in_words(state, step), position) for step, position in sorted(profiled.items())]
    moments += _peak(state, times_of)
    moments += _first_finding(folder, state, seconds)
    moments.append(Moment("end", state.status.state, seconds))
    return Course(seconds, steps, sorted(moments, key=lambda moment: moment.position))


def _step_ends(state: RunState, due: Mapping[int, numpy.ndarray]) -> numpy.ndarray:
    """When the last rank finished each step of the newest attempt; without steps that a rank lacks."""
    columns = []
    for number, rank in state.ranks.items():
        newest = len(rank.steps) - rank.first_step
        if newest and number in due:
            columns.append(due[number][-newest:])
    shortest = min(map(len, columns), default=0)
    ends: numpy.ndarray = numpy.max([column[:shortest] for column in columns], axis=0) if shortest else numpy.empty(0)
    return ends


def _peak(state: RunState, due: Mapping[int, numpy.ndarray]) -> list[Moment]:
    """The end of the step in which a rank held most, if memory was measured."""
    most, when = 0.0, 0.0
    for number, times in due.items():
        steps = state.ranks[number].steps
        peaks = numpy.nan_to_num(steps.values("peak", 0, len(steps)))
        index = int(peaks.argmax()) if len(peaks) else 0
        if index < min(len(peaks), len(times)) and peaks[index] > most:
            most, when = float(peaks[index]), float(times[index])
    return [Moment("memory", f"peak of memory, {size(most)}", when)] if most else []


def _first_finding(folder: RunFolder, state: RunState, seconds: float) -> list[Moment]:
    """When the first of the run's findings could be seen, to a thousandth of the run."""
    titles = {finding.name: finding.title for finding in findings(state)}
    if not titles:
        return []
    _, *part = _first_part(folder, titles, 0.0, seconds)
    name, _, position = _first_part(folder, titles, *part)
    return [Moment("finding", textwrap.shorten(titles[name], _TITLE, placeholder=" …"), position)]


def _first_part(folder: RunFolder, names: Mapping[str, str], first: float, last: float) -> tuple[str, float, float]:
    """The part of a stretch at whose end one of the findings can be seen for the first time."""
    recording = Recording(folder)
    for start, end in pairwise(numpy.linspace(first, last, _PARTS + 1).tolist()):
        recording.seek(end)
        for finding in findings(recording.state):
            if finding.name in names:
                return finding.name, start, end
    return next(iter(names)), first, last  # seen by what is known at the end only
