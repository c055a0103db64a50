"""Exercises of lab 06: cutting a pair of matrices, and logits that stay in parts."""

from __future__ import annotations

from typing import Any

from labkit.common.units import size
from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished

_CASES = ((2, 3, 4, 5), (2, 4, 6, 3), (3, 5, 9, 4), (4, 2, 8, 6))  # ranks, width of x, inner width, width of y


def _parts(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function parts(a, b, rank, ranks), and this is {answer!r}")
    import torch

    for ranks, come, inner, go in _CASES:
        draw = torch.Generator().manual_seed(ranks)
        x, a, b = (torch.randint(-3, 4, shape, generator=draw).double() for shape in ((7, come), (come, inner), (inner, go)))
        total = torch.zeros(7, go, dtype=torch.double)
        for rank in range(ranks):
            where = f"rank {rank} of {ranks}, with a of {come}×{inner} and b of {inner}×{go}"
            mine = _called(answer, (a.clone(), b.clone(), rank, ranks), where)
            _shaped(mine, (come, inner // ranks), (inner // ranks, go), where)
            total += torch.relu(x @ mine[0].double()) @ mine[1].double()
        if not torch.allclose(total, torch.relu(x @ a) @ b):
            raise Wrong(
                f"on {ranks} ranks every part has the right shape, and their sum is not relu(x @ a) @ b: "
                "a rank's columns of a and its rows of b must have the same numbers, and each must belong to one rank"
            )
    return "the sum of the ranks' addends is the whole product, on 2, 3 and 4 ranks"


def _called(answer: Any, given: tuple, where: str) -> tuple:
    try:
        mine = answer(*given)
    except Exception as error:
        raise Wrong(f"for {where}, parts(a, b, rank, ranks) raised {type(error).__name__}: {error}") from None
    if not isinstance(mine, (tuple, list)) or len(mine) != 2 or not all(hasattr(part, "shape") for part in mine):
        raise Wrong(f"for {where}, it must give two tensors, a part of a and a part of b, and gave {type(mine).__name__}")
    return tuple(mine)


def _shaped(mine: tuple, a: tuple[int, int], b: tuple[int, int], where: str) -> None:
    for name, part, wanted in zip("ab", mine, (a, b)):
        if tuple(part.shape) != wanted:
            raise Wrong(
                f"for {where}, the part of {name} is {'×'.join(map(str, part.shape))}; x has all its columns on every rank, "
                f"and relu must see finished numbers: in which direction can {name} be cut then?"
            )


def _logits(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.spec
    if spec.get("strategy") != "tp" or spec.get("workload") != "gpt":
        raise Wrong(f"this run trains {spec.get('workload') or 'a script of its own'} with {spec.get('strategy')}; take tp and gpt")
    if run.state.world_size != 2:
        raise Wrong(f"the world size is {run.state.world_size}; two ranks were asked for")
    entries = run.ledger()
    if not entries:
        raise Wrong("no step of this run was looked at closely; give it 5 steps at least")
    gathered = sum(entry.measured for entry in entries if entry.op == "all_gather")
    if gathered and not spec["options"].get("loss_parallel"):
        raise Wrong(f"a step of it still gathers {size(gathered)}; look for an option that has to do with the loss")
    return "each rank computes its part of the loss from its part of the logits: three numbers for a place travel, and not 256"


EXERCISES = {
    "parts": Exercise(
        "Cut a pair of matrices",
        _parts,
        "`return a.chunk(ranks, dim=1)[rank], b.chunk(ranks, dim=0)[rank]`: columns of the first, the same rows of the second. "
        "relu stands between them and sees finished numbers, so one all-reduce at the end is enough.",
    ),
    "logits": Exercise(
        "Logits that nobody gathers",
        _logits,
        '`run("tp", workload="gpt", nproc=2, steps=5, samples=200, options={"loss_parallel": True}).wait()`: the softmax needs of all '
        "logits their maximum, the sum of their exponentials and the one of the target, which are three small all-reduces.",
    ),
}
