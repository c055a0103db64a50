"""Exercises of lab 20: what a fix can gain by a profile, and a slow training script with five faults.

The script is judged by what its ranks do: operators, elements, bytes, calls and synchronizations. These figures are the
same on a busy machine, unlike the time of a step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.common.units import size
from labkit.course.build import criteria
from labkit.course.build.criteria import written_script
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Wrong, explained, number_of, require_function, require_number
from labkit.record.writer import sent

# ---- what a fix can gain


_CASES = ((100.0, 30.0, 0.0), (218.0, 143.9, 0.0), (50.0, 20.0, 5.0), (80.0, 80.0, 40.0))  # ms


def _gain(answer: Any) -> str:
    require_function(answer, "gain(step, part, left)")
    for case in _CASES:
        step, part, left = case
        call = f"gain{case}"
        given = number_of(call, "for a factor", answer, *case)
        if math.isclose(given, (part - left) / step, rel_tol=1e-6):
            raise Wrong(f"{call} returned {given:.3g}, the fraction of a step that is saved; answer with the factor")
        if not math.isclose(given, step / (step - part + left), rel_tol=1e-6):
            raise Wrong(f"{call} returned {given:.3g}; how long is a step in which the part takes {left:g} ms?")
    return "what remains decides: without a part that takes 30 % of a step, training is 1.43 times as fast at most"


_LAUNCHES, _COMMUNICATION, _IDLE = 0.66, 0.06, 0.77  # of a step, in the profile that the lab shows


def _launches(answer: Any) -> str:
    require_number(answer, "for a factor")
    mistakes = (
        (1 / (1 - _COMMUNICATION), "that is without all communication, which is not the largest part"),
        (1 / (1 - _IDLE), "that is without all idle time; for launches the GPU waits for less of it"),
        (100 * _LAUNCHES, "that is a percentage; answer with the factor by which a step becomes faster"),
    )
    if not math.isclose(answer, 1 / (1 - _LAUNCHES), rel_tol=0.03):
        otherwise = "use gain(): which part of the 218 ms is the largest with one cause, and what remains without it?"
        raise Wrong(explained(answer, mistakes, otherwise, 0.02))
    return "34 % of the step remain: 2.9 times as fast at most; faster links would gain a factor of 1.05"


# ---- a slow script


_RANKS = 2
_CLASS = "Training"  # of the script, used by the judge


@dataclass(frozen=True)
class _Fault:
    """A fault: what it is called, in words with the figure `{got}` of the worst rank and step, and the largest figure
    without it. `figure(record, step)` measures it, `words` writes it."""

    said: str
    figure: Callable[[Record, int], float]
    most: Callable[[Record], float]
    words: Callable[[float], str] = "{:,.0f}".format

    def left(self, records: list[Record]) -> str:
        """The fault in words, if it is there in any step but the first, in which libraries prepare."""
        worst = max(records, key=self._worst)
        got, most = self._worst(worst), self.most(worst)
        return f"{self.said.format(got=self.words(got))}, expected at most {self.words(most)}" if got > most else ""

    def _worst(self, record: Record) -> float:
        return max(self.figure(record, step) for step in record.steps()[1:])


def _once(record: Record) -> float:
    """Bytes that a rank sends when all gradients are reduced once: 2 (n − 1) / n of them."""
    return sent("all_reduce", record.figures["gradients"], _RANKS)


def _loading(record: Record, step: int) -> float:
    return record.operators.get(f"{step} data", 0) / record.figures["micro_batches"]


def _elements(record: Record, step: int) -> float:
    return record.elements.get(f"{step} step", 0) / record.figures["scores"]


def _calls(record: Record, step: int) -> float:
    """Calls for each time that all gradients are sent, however often that is."""
    calls = sum(1 for event in record.of_step(step) if event.sent)
    return calls * _once(record) / max(record.sent(step), 1)


_FAULTS = (
    _Fault(
        "data: torch runs {got} operators to load one micro-batch",
        _loading,
        lambda record: 64,
    ),
    _Fault(
        "attention: outside of matrix products a step computes {got} times as many elements as attention has scores",
        _elements,
        lambda record: 6.0,
        "{:.1f}".format,
    ),
    _Fault(
        "traffic: a rank sends {got} per step",
        lambda record, step: record.sent(step),
        lambda record: (1 + criteria.SLACK) * _once(record),
        size,
    ),
    _Fault(
        "collectives: {got} calls send the gradients once",
        _calls,
        lambda record: 8,
    ),
    _Fault(
        "synchronization: `load` and `step` hand {got} values of tensors to Python",
        lambda record, step: sum(record.syncs.get(f"{step} {phase}", 0) for phase in ("data", "step")),
        lambda record: 0,
    ),
)


def _faults(answer: Any) -> str:
    written = written_script(answer, _CLASS, "fast_training.py")
    records = criteria.ended(criteria.records_of("profiles.trial", "train", written, _RANKS), finished_api=True)
    criteria.results(records)
    criteria.sent_between(records, _once, lambda record: math.inf, "")
    left = list(filter(None, (fault.left(records) for fault in _FAULTS)))
    if left:
        raise Wrong(f"it trains the same; {len(left)} of {len(_FAULTS)} faults are left: {'; '.join(left)}")
    record = records[0]
    return (
        f"it trains the same, and all {len(_FAULTS)} faults are gone: a micro-batch takes {_loading(record, 1):.0f}"
        f" operators to load, and {criteria.sent_in_words(record, 1)}, without a synchronization"
    )


def _changes() -> str:
    """What the reference solution changes in the script that is given (markdown)."""
    before, after = (
        Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
        for name in ("slow_training.py", "solution.py")
    )
    lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
    return "```diff\n" + "\n".join(lines) + "\n```"


EXERCISES = {
    "profiles.gain": Exercise(
        "What a fix can gain",
        _gain,
        "`return step / (step - part + left)`: the time that remains decides (Amdahl's law).",
    ),
    "profiles.launches": Exercise(
        "The profile of a GPU",
        _launches,
        "The GPU waits 66 % of a step for launches; without it 34 % remain: 1 / 0.34 = **2.9**. Without communication"
        " that is exposed (5 %), a step would become 1.05 times as fast.",
    ),
    "profiles.faults": Exercise("Five faults", _faults, _changes(), given="slow_training.py", runs="script"),
}
