"""Exercises of lab 02: the bytes of DP's exchanges, DP against DDP, and the same training by both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.plan.spec import Spec
from labkit.runs.handle import Run

_DEVICES, _SAMPLES, _PIXELS, _CLASSES, _PARAMETERS = 4, 64, 28 * 28, 10, 669_706
_NUMBERS = (_SAMPLES * _PIXELS, _PARAMETERS, _SAMPLES * _CLASSES, _SAMPLES * _CLASSES, _PARAMETERS)  # to or from one other device
_CIRCLED = "①②③④⑤"
_SIDES = {"a": "dp", "b": "dp", "c": "ddp", "d": "dp", "e": "ddp", "f": "both", "g": "dp"}
_HINTS = {
    "a": "which of them has replicas that live on from step to step?",
    "b": "count the processes",
    "c": "after the fifth exchange of DP, who has the sum?",
    "d": "look at the chart of what passes a device’s wire",
    "e": "can a thread reach another machine?",
    "f": "what is scattered, and what does a sampler divide?",
    "g": "who calls optimizer.step(), and with which gradients?",
}
_STEPS = 10  # that are compared: with each one more, AdamW lets differences grow
_CLOSE = 1e-3  # relative difference of losses that is no other training: sums in another order


def _exchanges(answer: Any) -> str:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or len(answer) != len(_NUMBERS):
        raise Wrong(f"the answer is a list of five numbers of bytes, ① to ⑤, and this is {answer!r}")
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in answer):
        raise Wrong(f"each of the five is a number of bytes, and this is {answer!r}")
    for mark, given, each in zip(_CIRCLED, answer, _NUMBERS):
        right = 4 * (_DEVICES - 1) * each
        if given == right:
            continue
        if given == right // 4:
            raise Wrong(f"{mark}: that counts numbers, and each has four bytes")
        if given == 4 * each:
            raise Wrong(f"{mark}: that is for one of the other devices, and there are several")
        if given == 4 * _DEVICES * each:
            raise Wrong(f"{mark}: device 0 has its own part already; nothing is sent to itself")
        raise Wrong(f"{mark}: {given:,} bytes is not it; multiply other devices × numbers for each × bytes of a number")
    return "inputs and outputs grow with the batch; the model and its gradients with the number of devices, whatever the batch"


def _sides(answer: Any) -> str:
    if not isinstance(answer, Mapping) or set(answer) != set(_SIDES):
        raise Wrong(f"the answer is a dict with the letters {', '.join(_SIDES)} as keys, and this is {answer!r}")
    odd = [letter for letter in _SIDES if answer[letter] not in ("dp", "ddp", "both")]
    if odd:
        raise Wrong(f"{', '.join(odd)}: write 'dp', 'ddp' or 'both'")
    wrong = [letter for letter, side in _SIDES.items() if answer[letter] != side]
    if wrong:
        raise Wrong(f"{len(_SIDES) - len(wrong)} of {len(_SIDES)} are right; look again at {wrong[0]}: {_HINTS[wrong[0]]}")
    return "that is the whole comparison: one interpreter and one busy device against equal ranks"


def _same(answer: Any) -> str:
    if isinstance(answer, Run) or not isinstance(answer, Sequence) or not all(isinstance(run, Run) for run in answer):
        raise Wrong("give both runs in a list: [a run of dp, a run of ddp]")
    by_name = {}
    for run in answer:
        if not run.state.over:
            raise Wrong(f"{run.name} has not ended yet; wait for it with .wait()")
        if run.state.status["state"] != "finished":
            raise Wrong(f"{run.name} {run.words}; look into its logs")
        by_name[(run.state.spec or {}).get("strategy")] = run
    if set(by_name) != {"dp", "ddp"} or len(answer) != 2:
        raise Wrong(f"one run of dp and one of ddp were asked for, and these are {', '.join(map(str, by_name))}")
    for name, run in by_name.items():
        spec = Spec.from_json(run.state.spec)
        if spec.global_batch != 96:
            raise Wrong(f"{name}: a step of all devices takes {spec.global_batch} samples, and not 96: {spec.batch_sentence}")
        if run.state.step < _STEPS:
            raise Wrong(f"{name}: {run.state.step} steps are too few; ten were asked for")
    for step in range(_STEPS):
        first, second = (by_name[name].state.loss_at(step) for name in ("dp", "ddp"))
        if first is None or second is None or abs(first - second) > _CLOSE * abs(first):
            raise Wrong(f"their losses differ at step {step + 1}: {first} and {second}; is all else alike, seed, model and devices?")
    return f"the same losses in the first {_STEPS} steps: DP and DDP differ in how they get there, not in what they train"


EXERCISES = {
    "exchanges": Exercise(
        "The five exchanges in bytes",
        _exchanges,
        f"`{[4 * (_DEVICES - 1) * each for each in _NUMBERS]}`: three other devices, four bytes a number; 64 × 784 pixels, 669,706 "
        "parameters, 64 × 10 outputs, their gradients, and the gradients of all parameters.",
    ),
    "sides": Exercise(
        "DP or DDP?",
        _sides,
        f"`{_SIDES}`. c: only device 0 has the sum under DP. e: a thread stays in its process, and so on its machine. "
        "g: DP's other replicas are thrown away before the optimizer steps.",
    ),
    "same": Exercise(
        "The same training twice",
        _same,
        '`[run(name, **place(2), batch_size=48, steps=10).wait() for name in ("dp", "ddp")]`: 48 for each of two devices are 96. '
        'Or `batch_size=96, scaling="strong"`.',
    ),
}
