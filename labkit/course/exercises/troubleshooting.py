"""Exercises of lab 12: names with a prefix, the rank at a different line, and a script with four mistakes."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function
from labkit.course.exercises.own import a_run, source
from labkit.record.events import Epoch, Save

_STRAY = 2, 131  # the rank that called a different collective, and the line of the call
_STATES = (  # as saved, and as the model itself names them
    ({"module.0.weight": 1, "module.0.bias": 2}, {"0.weight": 1, "0.bias": 2}),
    ({"module.submodule.weight": 1, "module.head.bias": 2}, {"submodule.weight": 1, "head.bias": 2}),
    ({"submodule.weight": 1, "head.bias": 2}, {"submodule.weight": 1, "head.bias": 2}),
    ({"module.module.weight": 1}, {"module.weight": 1}),
)


def _prefix(answer: Any) -> str:
    require_function(answer, "of a state dict")
    for saved, wanted in _STATES:
        given = answer(dict(saved))
        if not isinstance(given, dict):
            raise Wrong(f"the function must return a dict of names and tensors, got {type(given).__name__}")
        if list(given) != list(wanted):
            names = ", ".join(map(str, given))
            raise Wrong(f"for {', '.join(saved)} your function returns {names}; the model has {', '.join(wanted)}")
        if given != wanted:
            raise Wrong("the names are right, but the values have changed; each tensor must keep its name")
    return "the function removes one prefix at the beginning of a name and does not change names without it"


def _stray(answer: Any) -> str:
    if not (
        isinstance(answer, (tuple, list)) and len(answer) == 2 and all(isinstance(number, int) for number in answer)
    ):
        raise Wrong(f"the answer must be a pair of numbers, (rank, line), got {answer!r}")
    rank, line = answer
    if rank not in range(4):
        raise Wrong(f"the rank must be in 0 … 3, got {rank}")
    if rank != _STRAY[0]:
        raise Wrong(
            f"rank {rank} is at the same line as two other ranks; for which rank is number 118 a different collective?"
        )
    if line != _STRAY[1]:
        raise Wrong(f"rank {rank} is right, but it is not at line {line}. Which line of the script would you open?")
    return (
        "number 118 is an all-reduce on three ranks and a barrier on rank 2; which condition sends only rank 2 into"
        " `save`?"
    )


def _mend(answer: Any) -> str:
    run = a_run(answer)
    text = source(run)
    wrong = [finding for finding in run.findings() if finding.kind == "wrong"]
    if wrong:
        raise Wrong(f"still: {wrong[0].title} ({wrong[0].evidence})")
    state = run.state
    if state.status.state != "finished":
        raise Wrong(f"the run {run.words} and did not finish")
    if state.world_size != 2 or "DistributedDataParallel" not in text:
        raise Wrong("the fixed script must still use DDP on two ranks")
    rank = state.ranks[0]
    if len({epoch.set for epoch in rank.seen(Epoch)}) < 2:
        raise Wrong("the run must train for two epochs with different orders of samples")
    if "correct" not in run.logs(0):
        raise Wrong("rank 0 no longer prints the accuracy; fix the evaluation instead of removing it")
    if not any(rank_state.seen(Save) for rank_state in state.ranks.values()):
        raise Wrong("the script no longer saves the model; one rank must save it")
    return (
        "different samples on each rank, a new order in each epoch, an evaluation on all ranks, and one file from one"
        " rank"
    )


EXERCISES = {
    "prefix": Exercise(
        "Names without the wrapper",
        _prefix,
        '`{name.removeprefix("module."): value for name, value in state.items()}`. `replace` would also change'
        " `submodule.weight`.",
    ),
    "stray": Exercise(
        "Which rank is at a different line",
        _stray,
        "**(2, 131)**: rank 2 is in a barrier in `save` while the others are in an all-reduce; neither can complete.",
    ),
    "mend": Exercise(
        "Fix a broken script",
        _mend,
        "1. `sampler = DistributedSampler(dataset)` and `DataLoader(dataset, 32, sampler=sampler)` without `shuffle`; "
        "2. `sampler.set_epoch(epoch)` first in each epoch; 3. evaluate on every rank, and only print inside "
        "`if dist.get_rank() == 0:`; 4. save inside the same `if`.",
    ),
}
