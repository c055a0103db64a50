"""Exercises of lab 02: the bytes of DP's transfers, DP versus DDP, and the same training with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.runs.handle import Run

_DEVICES, _SAMPLES, _PIXELS, _CLASSES, _PARAMETERS = 4, 64, 28 * 28, 10, 669_706
_NUMBERS = (
    _SAMPLES * _PIXELS,
    _PARAMETERS,
    _SAMPLES * _CLASSES,
    _SAMPLES * _CLASSES,
    _PARAMETERS,
)  # to or from one replica
_CIRCLED = "①②③④⑤"
_SIDES = {"a": "dp", "b": "dp", "c": "ddp", "d": "dp", "e": "ddp", "f": "both", "g": "dp"}
_HINTS = {
    "a": "which of them keeps its replicas from step to step?",
    "b": "count the processes",
    "c": "which devices have the sum after the fifth transfer of DP?",
    "d": "look at the third transfer of DP, and at what a rank of DDP sends",
    "e": "can a thread run on another machine?",
    "f": "what is scattered, and what does a sampler divide?",
    "g": "which devices call optimizer.step(), and with which gradients?",
}
_STEPS = 10  # steps to compare: with AdamW, rounding differences grow from step to step
_CLOSE = 1e-3  # relative difference of losses due to rounding (a different order of summation)


def _exchanges(answer: Any) -> str:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or len(answer) != len(_NUMBERS):
        raise Wrong(f"the answer must be a list of five numbers of bytes, ① to ⑤, got {answer!r}")
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in answer):
        raise Wrong(f"each of the five must be a number of bytes, got {answer!r}")
    for mark, given, number in zip(_CIRCLED, answer, _NUMBERS):
        right = 4 * (_DEVICES - 1) * number
        if given == right:
            continue
        if given == right // 4:
            raise Wrong(f"{mark}: that is the count of numbers, and each has four bytes")
        if given == 4 * number:
            raise Wrong(f"{mark}: that is for one of the other devices, and there are several")
        if given == 4 * _DEVICES * number:
            raise Wrong(f"{mark}: device 0 does not send its own data to itself")
        raise Wrong(f"{mark}: {given:,} bytes is wrong; multiply other devices × numbers per device × bytes per number")
    return (
        "inputs and outputs grow with the batch; the model and its gradients do not, but every device needs a copy of"
        " the model"
    )


def _sides(answer: Any) -> str:
    if not isinstance(answer, Mapping) or set(answer) != set(_SIDES):
        raise Wrong(f"the answer must be a dict with the keys {', '.join(_SIDES)}, got {answer!r}")
    odd = [letter for letter in _SIDES if answer[letter] not in ("dp", "ddp", "both")]
    if odd:
        raise Wrong(f"{', '.join(odd)}: the value must be 'dp', 'ddp' or 'both'")
    wrong = [letter for letter, side in _SIDES.items() if answer[letter] != side]
    if wrong:
        raise Wrong(
            f"{len(_SIDES) - len(wrong)} of {len(_SIDES)} are right; check {wrong[0]} again: {_HINTS[wrong[0]]}"
        )
    return "in short: DP has one interpreter and one overloaded device, DDP has equal ranks"


def _same(answer: Any) -> str:
    if isinstance(answer, Run) or not isinstance(answer, Sequence) or not all(isinstance(run, Run) for run in answer):
        raise Wrong("the answer must be a list of two runs: [a run of dp, a run of ddp]")
    by_name = {}
    for run in answer:
        if not run.state.over:
            raise Wrong(f"{run.name} has not ended yet; wait for it with .wait()")
        if run.state.status.state != "finished":
            raise Wrong(f"{run.name} {run.words}; read its logs")
        by_name[run.state.spec.strategy] = run
    if set(by_name) != {"dp", "ddp"} or len(answer) != 2:
        raise Wrong(f"the runs must be one of dp and one of ddp, got {', '.join(map(str, by_name))}")
    for name, run in by_name.items():
        spec = run.state.spec.to_spec()
        if spec.global_batch != 96:
            raise Wrong(f"{name}: the global batch size must be 96, got {spec.global_batch} ({spec.batch_sentence})")
        if run.state.step < _STEPS:
            raise Wrong(f"{name}: the run must have at least {_STEPS} steps, got {run.state.step}")
    for step in range(_STEPS):
        first, second = (by_name[name].state.loss_at(step) for name in ("dp", "ddp"))
        if first is None or second is None or abs(first - second) > _CLOSE * abs(first):
            raise Wrong(
                f"the losses differ at step {step + 1}: {first} and {second}; do both runs have the same seed, model"
                " and devices?"
            )
    return f"the losses of the first {_STEPS} steps are the same: DP and DDP are two implementations of one computation"


EXERCISES = {
    "exchanges": Exercise(
        "The five transfers in bytes",
        _exchanges,
        f"`{[4 * (_DEVICES - 1) * count for count in _NUMBERS]}`: three other devices, four bytes per number; 64 × 784"
        " pixels, 669,706 parameters, 64 × 10 outputs, their gradients, and the gradients of all parameters.",
    ),
    "sides": Exercise(
        "DP or DDP?",
        _sides,
        f"`{_SIDES}`. c: under DP only device 0 has the sum. e: a thread belongs to a process, which runs on one"
        " machine. g: the other replicas of DP are discarded before the optimizer step.",
    ),
    "same": Exercise(
        "The same training with both",
        _same,
        '`[run(name, **place(2), batch_size=48, steps=10).wait() for name in ("dp", "ddp")]`: 48 samples on each of two'
        ' devices are 96. `batch_size=96, scaling="strong"` is right too.',
    ),
}
