"""Exercises of lab 12: names with a prefix, the rank that is somewhere else, and a script with four mistakes."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import a_run, source

_STRAY = 2, 131  # the rank that is in another collective, and the line where
_STATES = (  # as saved, and as the model itself names them
    ({"module.0.weight": 1, "module.0.bias": 2}, {"0.weight": 1, "0.bias": 2}),
    ({"module.submodule.weight": 1, "module.head.bias": 2}, {"submodule.weight": 1, "head.bias": 2}),
    ({"submodule.weight": 1, "head.bias": 2}, {"submodule.weight": 1, "head.bias": 2}),
    ({"module.module.weight": 1}, {"module.weight": 1}),
)


def _prefix(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of a state dict, and this is {answer!r}")
    for saved, wanted in _STATES:
        given = answer(dict(saved))
        if not isinstance(given, dict):
            raise Wrong(f"a state dict was given and {type(given).__name__} came back; give a dict of names and tensors")
        if list(given) != list(wanted):
            raise Wrong(f"of {', '.join(saved)} your function makes {', '.join(map(str, given))}; the model has {', '.join(wanted)}")
        if given != wanted:
            raise Wrong("the names are right, and the values have changed; each tensor belongs to its own name")
    return "one prefix goes, at the beginning of a name only, and names without it stay as they are"


def _stray(answer: Any) -> str:
    if not (isinstance(answer, (tuple, list)) and len(answer) == 2 and all(isinstance(each, int) for each in answer)):
        raise Wrong(f"the answer is a pair of numbers, (rank, line), and this is {answer!r}")
    rank, line = answer
    if rank not in range(4):
        raise Wrong(f"there is no rank {rank} here; ranks count from 0 to 3")
    if rank != _STRAY[0]:
        raise Wrong(f"rank {rank} is where two others are too; who is in number 118 of another kind?")
    if line != _STRAY[1]:
        raise Wrong(f"rank {rank} it is; at line {line} it does not stand. Which line would you open?")
    return "all have number 118 before them, and three call it an all-reduce; what decides there that rank 2 goes to `save`?"


def _mend(answer: Any) -> str:
    run = a_run(answer)
    text = source(run)
    wrong = [found for found in run.findings() if found.kind == "wrong"]
    if wrong:
        raise Wrong(f"still: {wrong[0].title} ({wrong[0].evidence})")
    state = run.state
    if state.status["state"] != "finished":
        raise Wrong(f"the run {run.words} and did not come to its end")
    if state.world_size != 2 or "DistributedDataParallel" not in text:
        raise Wrong("the patient is DDP on two ranks; it should be that when it is well, too")
    rank = state.ranks[0]
    if len({epoch["set"] for epoch in rank.seen("epoch")}) < 2:
        raise Wrong("two epochs with two orders of samples were asked for, and this run has not had them")
    if "right" not in run.logs(0):
        raise Wrong("rank 0 prints no share of right answers any more; the evaluation should be mended, not left out")
    if not any(each.seen("save") for each in state.ranks.values()):
        raise Wrong("nothing is saved any more; one rank should do it")
    return "own samples for each rank, a new order in each epoch, an evaluation to which all come, and one file from one rank"


EXERCISES = {
    "prefix": Exercise(
        "Names without the wrapper",
        _prefix,
        '`{name.removeprefix("module."): value for name, value in state.items()}`. `replace` would also change `submodule.weight`.',
    ),
    "stray": Exercise(
        "Who is somewhere else",
        _stray,
        "**(2, 131)**: rank 2 is in a barrier in `save` where the others are in an all-reduce; the two can never end.",
    ),
    "mend": Exercise(
        "A patient of your own",
        _mend,
        "1. `sampler = DistributedSampler(dataset)` and `DataLoader(dataset, 32, sampler=sampler)` without `shuffle`; "
        "2. `sampler.set_epoch(epoch)` first in each epoch; 3. evaluate on every rank, and only print under `if dist.get_rank() == 0:`; "
        "4. save under that same `if`.",
    ),
}
