"""The steps of a training that its log tells: number, loss and time, as trainers print them.

| who prints | a line |
| --- | --- |
| Megatron-LM | `iteration 100/ 5000 … elapsed time per iteration (ms): 250.3 … lm loss: 2.345E+00 … loss scale: 1.0` |
| torchtitan | `step: 10  loss:  7.1234  memory: 30.1GiB(38%)  tps: 3,112` |
| nanoGPT | `iter 100: loss 2.3100, time 120.30ms, mfu 10.1%` |
| DeepSpeed | `steps: 100 loss: 2.31 iter time (s): 0.25` |
| torch's ImageNet example | `Epoch: [1][ 10/500]  Time  0.310 ( 0.5)  Loss 6.9e+00 (7.0e+00)` |
| many scripts | `step 100, loss 2.31`, `Step 100/1000 - train_loss=2.31` |

Numbers of an evaluation are left out. A step whose line has no time gets one from the times of its own and the previous
line, which counts everything between them, evaluations and checkpoints included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from labkit.record import events

_MOST_DIGITS = 12
_STEP = re.compile(
    r"(?<![\w.-])(?:global[ _]?|train(?:ing)?[ _]?|optimizer[ _]?)?(?:steps?|iter(?:ation)?s?)"
    rf"['\"]?(?: *[:=#\[(] *| +)(?P<step>\d[\d,]{{0,{_MOST_DIGITS}}})(?![\w.%])"
)
_OF_EPOCH = re.compile(r"epoch:? *\[(?P<epoch>\d{1,6})\] *\[ *(?P<step>\d{1,9}) */ *(?P<of>\d{1,9})\]")
_LOSS = re.compile(  # begins with a fixed text, for which a line is searched fast
    r"loss['\"]?(?: *[:=] *| +)"
    r"(?P<loss>[-+]?(?:\d{1,12}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf(?:inity)?))(?![\w%])"
)
_WHICH = re.compile(r"(?<![a-z])(?:(?:train(?:ing)?|lm|total|mean|avg|average|global_avg)[ _/-]?)?$")  # loss it is
_EVALUATED = re.compile(r"(?<![a-z])(?:val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)[ _/:-]{0,3}$")
_LONGEST_WORD = 16  # characters of what these two match, and of what stands before
_NUMBER = r"(?P<{}>\d{{1,9}}(?:\.\d{{0,9}})?(?:e[-+]?\d{{1,2}})?)"
_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
_UNIT = "|".join(_UNITS)
_TIMES = (
    re.compile(
        r"(?:elapsed )?(?:time (?:per|/) ?(?:iter(?:ation)?|step)|(?:iter(?:ation)?|step|batch)[ _]?time)"
        rf"(?: *\((?P<before>{_UNIT})\))? *[:=]? *{_NUMBER.format('value')} ?(?P<after>{_UNIT})?(?!\w)"
    ),
    re.compile(rf"(?<!\w)time:? *{_NUMBER.format('value')} ?(?P<after>ms)(?!\w)"),  # not of all steps
    re.compile(rf"(?<!\w){_NUMBER.format('value')} ?(?P<after>{_UNIT}) ?/ ?(?:it|iter|step)(?!\w)"),
)
_OF_A_METER = re.compile(rf"\btime +{_NUMBER.format('value')} *\(")  # of torch's ImageNet example
_PER_SECOND = re.compile(rf"(?<!\w){_NUMBER.format('value')} ?(?:it|iters?|steps?)/s(?:ec)?(?!\w)")


class Logged(NamedTuple):
    """What a line says of a step: its loss and its seconds, and when the line was written (seconds since 1970)."""

    loss: float | None
    seconds: float | None
    time: float | None


def step_in(text: str) -> tuple[int, float | None, float | None] | None:
    """The number, the loss and the seconds of the step that a line is about; None if it is about none."""
    text = text.lower()  # the patterns are in lower case: ignoring case takes three times as long
    loss = _loss(text)
    numbered = _OF_EPOCH.search(text)
    if numbered:
        step = int(numbered["epoch"]) * int(numbered["of"]) + int(numbered["step"])
    elif found := _STEP.search(text):
        step = int(found["step"].replace(",", ""))
    else:
        return None
    seconds = _seconds(text, of_a_meter=bool(numbered))
    return None if loss is None and seconds is None else (step, loss, seconds)


def _loss(text: str) -> float | None:
    for match in _LOSS.finditer(text):
        which = _WHICH.search(text, max(0, match.start() - _LONGEST_WORD), match.start())
        if which and not _EVALUATED.search(text, max(0, which.start() - _LONGEST_WORD), which.start()):
            return float(match["loss"])
    return None


def _seconds(text: str, of_a_meter: bool) -> float | None:
    for pattern in _TIMES:
        if found := pattern.search(text):
            unit = found["after"] or found.groupdict().get("before")
            return float(found["value"]) * _UNITS[unit] if unit else None
    if of_a_meter and (found := _OF_A_METER.search(text)):
        return float(found["value"])
    if (found := _PER_SECOND.search(text)) and float(found["value"]) > 0:
        return 1 / float(found["value"])
    return None


def timed(steps: Mapping[int, Logged]) -> dict[int, Logged]:
    """The steps in order, with seconds from the times of two lines where the line has none."""
    ordered: dict[int, Logged] = {}
    before: tuple[int, float] | None = None
    for step, logged in sorted(steps.items()):
        seconds = logged.seconds
        if seconds is None and before is not None and logged.time is not None and logged.time > before[1]:
            seconds = (logged.time - before[1]) / (step - before[0])
        ordered[step] = logged._replace(seconds=seconds)
        if logged.time is not None:
            before = step, logged.time
    return ordered


def step_events(rank: int, steps: Mapping[int, Logged]) -> Iterator[events.Step]:
    """The steps of a rank as events of a run; steps whose line was not written are not there."""
    for step, logged in timed(steps).items():
        yield events.Step(
            t=logged.time or 0.0,
            rank=rank,
            step=step,
            loss=logged.loss,
            seconds=events.StepSeconds(step=logged.seconds),
        )


def finite(number: float | None) -> float | None:
    """The number; None for NaN and infinity, which JSON does not have."""
    return number if number is not None and math.isfinite(number) else None


def first_not_finite(steps: Mapping[int, Logged]) -> tuple[int, float] | None:
    """The first step whose loss is NaN or infinite, and that loss."""
    known = ((step, logged.loss) for step, logged in sorted(steps.items()) if logged.loss is not None)
    return next(((step, loss) for step, loss in known if not math.isfinite(loss)), None)
