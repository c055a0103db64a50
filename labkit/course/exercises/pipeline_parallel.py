"""Exercises of lab 07: the order of a stage under 1F1B, and a run with a small bubble."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished
from labkit.course.pictures.schedules import SCHEDULES
from labkit.course.pictures.schedules import order as by_rule

_CASES = ((1, 2, 3), (0, 2, 4), (0, 4, 8), (1, 4, 8), (2, 4, 8), (3, 4, 8), (0, 4, 2))  # stage, stages, micro-batches
_MOST = 0.12  # of the step may be idle


def _order(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function order(stage, stages, micro_batches), and this is {answer!r}")
    for stage, stages, parts in _CASES:
        where = f"order({stage}, {stages}, {parts})"
        try:
            given = answer(stage, stages, parts)
        except Exception as error:
            raise Wrong(f"{where} raised {type(error).__name__}: {error}") from None
        if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) for each in given):
            raise Wrong(f"{where} must give a list of words such as 'F0' and 'B0', and gave {given!r:.80}")
        wanted = [f"{kind}{number}" for kind, _, number in by_rule("1F1B", stage, stages, parts)]
        if list(given) != wanted:
            raise Wrong(f"{where}: {_first_wrong(list(given), wanted, stage, stages)}")
    return f"right for each of {len(_CASES)} stages, also where there are fewer micro-batches than stages"


def _first_wrong(given: list[str], wanted: list[str], stage: int, stages: int) -> str:
    """Where the order leaves the rule first, and why that cannot be; without what should stand there."""
    for index, (one, right) in enumerate(zip(given, wanted)):
        if one == right:
            continue
        place = f"place {index + 1} has {one!r}"
        if one not in wanted:
            return f"{place}, and there is no such pass; a micro-batch has F and B, and numbers begin at 0"
        if one in given[:index]:
            return f"{place}, which was done before"
        if one[0] == "B" and f"F{one[1:]}" not in given[:index]:
            return f"{place}, a backward whose forward was not done yet"
        if one[0] == right[0]:
            return f"{place}: micro-batches go through in the order of their numbers"
        if one[0] == "F":
            behind = stages - 1 - stage
            return (
                f"{place}: it keeps more micro-batches than it must; {behind} stages come behind this one, how many forwards do they need?"
            )
        return (
            f"{place}, and the stages behind could not have sent its gradient without waiting: the rank could still do a forward meanwhile"
        )
    if len(given) < len(wanted):
        return f"it ends after {len(given)} passes, and {len(wanted)} are due"
    return f"{given[len(wanted)]!r} comes after all {len(wanted)} passes are done"


def _bubble(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.spec
    if spec.get("strategy") != "pp":
        raise Wrong(f"this run's strategy is {spec.get('strategy') or 'a script of its own'}; a pipeline is pp")
    ranks, options = run.state.world_size, spec["options"]
    if ranks != 2:
        raise Wrong(f"the world size is {ranks}; two ranks were asked for")
    schedule, parts = options["schedule"], options["micro_batches"]
    idle = SCHEDULES[schedule].formula(ranks, parts)
    told = f"{schedule} with {parts} micro-batches on 2 ranks is idle for {idle:.0%} by formula"
    if idle > _MOST:
        raise Wrong(f"{told}, and {_MOST:.0%} is the most; what in the formula can you change?")
    size = spec["batch_size"] // parts
    fewer = [m for m in range(ranks, parts) if parts % m == 0 and SCHEDULES[schedule].formula(ranks, m) <= _MOST]
    if fewer:
        raise Wrong(f"{told}, but micro-batches of {size} are smaller than they need be: fewer of them are enough")
    return f"{told}, with micro-batches of {size} samples"


EXERCISES = {
    "order": Exercise(
        "The order of a stage under 1F1B",
        _order,
        "`stages − 1 − stage` forwards first (not more than there are micro-batches), then a forward and a backward in turns, then the "
        "backwards that are left. The last stage begins with F0, B0; the first one sends a micro-batch to each stage behind it.",
    ),
    "bubble": Exercise(
        "A bubble of at most 12 %",
        _bubble,
        "1/(m+1) ≤ 0.12 gives m ≥ 8 for GPipe and 1F1B: 8 micro-batches of 2 samples. Interleaved1F1B has 1/(2m+1), so that 4 are enough; "
        "InterleavedZeroBubble 1/(6m+1), with 2.",
    ),
}
