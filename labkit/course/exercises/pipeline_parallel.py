"""Exercises of lab 07: the order of a stage under 1F1B, and a run with a small bubble."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished
from labkit.course.pictures.pipeline import SCHEDULES, least
from labkit.course.pictures.pipeline import order as by_rule

_CASES = ((1, 2, 3), (0, 2, 4), (0, 4, 8), (1, 4, 8), (2, 4, 8), (3, 4, 8), (0, 4, 2))  # stage, stages, micro-batches
_MAX_BUBBLE = 0.12  # fraction of the step


def _order(answer: Any) -> str:
    require_function(answer, "order(stage, stages, micro_batches)")
    for stage, stages, micro_batches in _CASES:
        call = f"order({stage}, {stages}, {micro_batches})"
        given = result_of(call, answer, stage, stages, micro_batches)
        if not isinstance(given, (list, tuple)) or not all(isinstance(row, str) for row in given):
            raise Wrong(f"{call} must return a list of strings such as 'F0' and 'B0', got {given!r:.80}")
        wanted = [f"{kind}{number}" for kind, _, number in by_rule("1F1B", stage, stages, micro_batches)]
        if list(given) != wanted:
            raise Wrong(f"{call}: {_first_wrong(list(given), wanted, stage, stages)}")
    return f"right for all {len(_CASES)} cases, including one with fewer micro-batches than stages"


def _first_wrong(given: list[str], wanted: list[str], stage: int, stages: int) -> str:
    """The first wrong entry and why it is wrong, without the right one."""
    for index, (row, right) in enumerate(zip(given, wanted)):
        if row == right:
            continue
        entry = f"entry {index + 1} is {row!r}"
        if row not in wanted:
            return f"{entry}, and there is no such pass; a micro-batch has F and B, and numbers start at 0"
        if row in given[:index]:
            return f"{entry}, which was already done"
        if row[0] == "B" and f"F{row[1:]}" not in given[:index]:
            return f"{entry}, a backward before its forward"
        if row[0] == right[0]:
            return f"{entry}, but the micro-batches must be processed in the order of their numbers"
        if row[0] == "F":
            later = stages - 1 - stage
            return (
                f"{entry}, so the stage stores more micro-batches than necessary; "
                f"{later} stages follow this one, how many forwards do they need first?"
            )
        return (
            f"{entry}, but its gradient cannot have arrived from the next stage yet: the rank can do another forward "
            "in the meantime"
        )
    if len(given) < len(wanted):
        return f"the list must have {len(wanted)} passes, got {len(given)}"
    return f"{given[len(wanted)]!r} comes after all {len(wanted)} passes are done"


def _bubble(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.spec
    if spec.strategy != "pp":
        raise Wrong(f"the strategy of this run must be pp, got {spec.strategy or 'a script'}")
    ranks, options = run.state.world_size, spec.options
    if ranks != 2:
        raise Wrong(f"the world size must be 2, got {ranks}")
    schedule, micro_batches = options["schedule"], options["micro_batches"]
    formula = SCHEDULES[schedule].formula
    bubble = formula(ranks, micro_batches)
    described = f"{schedule} with {micro_batches} micro-batches on 2 ranks has a bubble of {bubble:.0%} by formula"
    if bubble > _MAX_BUBBLE:
        raise Wrong(f"{described}, and the limit is {_MAX_BUBBLE:.0%}; what in the formula can you change?")
    size = spec.batch_size // micro_batches
    divisors = [m for m in range(max(ranks, least(schedule, ranks)), micro_batches) if micro_batches % m == 0]
    if any(formula(ranks, fewer) <= _MAX_BUBBLE for fewer in divisors):
        raise Wrong(f"{described}, but its micro-batches of {size} are smaller than necessary: use fewer of them")
    return f"{described}, with micro-batches of {size} samples"


EXERCISES = {
    "order": Exercise(
        "The order of a stage under 1F1B",
        _order,
        "`stages − 1 − stage` forwards first (at most the number of micro-batches), then one forward and one backward"
        " alternately, then the remaining backwards. The last stage starts with F0, B0; the first stage starts with one"
        " forward for each later stage.",
    ),
    "bubble": Exercise(
        "A bubble of at most 12 %",
        _bubble,
        "1/(m+1) ≤ 0.12 gives m ≥ 8 for GPipe and 1F1B: 8 micro-batches of 2 samples. Interleaved1F1B has 1/(2m+1), so"
        " 4 are enough; InterleavedZeroBubble has 1/(6m+1), so 2 are enough. ZBVZeroBubble and DualPipeV"
        " have it with at least 4.",
    ),
}
