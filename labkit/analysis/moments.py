"""The course of a recorded run: how long it took, when each step ended, and the moments that one would like to see."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy

from labkit.analysis.diagnose import findings
from labkit.common.units import size
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording
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
    follower, recording = Follower(folder), Recording(folder)
    follower.poll()
    state, began = follower.state, recording.began
    ends = _step_ends(state) - began
    last_step = float(ends[-1]) if len(ends) else 0.0
    ended = max([state.status.ended or state.now or began, *(rank.ended or began for rank in state.ranks.values())])
    seconds = max(ended - began, last_step)
    moments = [Moment("start", "first step", float(ends[0]))] if len(ends) else []
    for number in sorted({step for rank in state.ranks.values() for step in rank.timelines}):
        times = [rank.timelines[number].t for rank in state.ranks.values() if number in rank.timelines]
        moments.append(Moment("step", f"profiled step {number:,}", max(times) - began))
    moments += _peak(state, began)
    moments += _first_finding(folder, state, seconds)
    moments.append(Moment("end", state.status.state, seconds))
    placed = [moment for moment in moments if 0.0 <= moment.position <= seconds]
    return Course(seconds, ends, sorted(placed, key=lambda moment: moment.position))


def _step_ends(state: RunState) -> numpy.ndarray:
    """When the last rank finished each step of the newest attempt, in Unix seconds; without steps that a rank lacks."""
    columns = [rank.steps.values("t", rank.first_step, len(rank.steps)) for rank in state.ranks.values()]
    columns = [column for column in columns if len(column)]
    shortest = min(map(len, columns), default=0)
    if not shortest:
        return numpy.empty(0)
    last = numpy.max([column[:shortest] for column in columns], axis=0)
    ends: numpy.ndarray = numpy.maximum.accumulate(last)
    return ends


def _peak(state: RunState, began: float) -> list[Moment]:
    """The step in which a rank held most, if memory was measured."""
    most, when = 0.0, 0.0
    for rank in state.ranks.values():
        peaks = rank.steps.values("peak", 0, len(rank.steps))
        if len(peaks) and not numpy.isnan(peaks).all():
            index = int(numpy.nanargmax(peaks))
            if peaks[index] > most:
                most, when = float(peaks[index]), float(rank.steps.values("t", index, index + 1)[0])
    return [Moment("memory", f"peak of memory, {size(most)}", when - began)] if most else []


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
