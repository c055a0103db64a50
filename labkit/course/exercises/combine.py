"""Exercises of lab 08: a rank's place on a mesh, and a mesh that suits two machines."""

from __future__ import annotations

from itertools import product
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished

_MESHES = ((2, 2, 2), (2, 1, 4), (1, 3, 2), (4, 2, 8))


def _place(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function place_of(rank, pp, dp, tp), and this is {answer!r}")
    for sizes in _MESHES:
        for rank, wanted in enumerate(product(*map(range, sizes))):
            where = f"place_of({', '.join(map(str, (rank, *sizes)))})"
            try:
                given = answer(rank, *sizes)
            except Exception as error:
                raise Wrong(f"{where} raised {type(error).__name__}: {error}") from None
            if not isinstance(given, (tuple, list)) or len(given) != 3:
                raise Wrong(f"{where} must give three numbers, (pp, dp, tp), and gave {given!r:.80}")
            if tuple(given) != wanted:
                raise Wrong(f"{where} gave {tuple(given)}: {_hint(tuple(given), wanted, sizes)}")
    return f"every rank of {len(_MESHES)} meshes has its place"


def _hint(given: tuple, wanted: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    for axis, one, right, size in zip(("pp", "dp", "tp"), given, wanted, sizes):
        if not isinstance(one, int) or not 0 <= one < size:
            return f"{axis} has {size} places, counted from 0"
        if one != right:
            return f"{axis} is wrong; how many neighbouring ranks have the same place on {axis}?"
    return "look at it again"


def _machines(answer: Any) -> str:
    run = finished(answer)
    spec, options = run.state.spec, run.state.spec.get("options") or {}
    if run.state.world_size != 4:
        raise Wrong(f"the world size is {run.state.world_size}; four ranks were asked for")
    told = f"this run's strategy is {spec.get('strategy') or 'a script of its own'}"
    stages, parts = options.get("pp_size", 1), options.get("tp_size", 1)
    if stages == 1:
        raise Wrong(f"{told}: which axis hands on nothing but activations, and is there one in this strategy?")
    if stages != 2:
        raise Wrong(f"{told} with a pipeline of {stages} ranks: it goes to the other machine and on inside of it")
    if parts != 1:
        raise Wrong(f"{told} with tp_size={parts}: the two ranks of a machine split layers, and have the same samples")
    return "the pipeline is the outermost axis: a machine has a stage, and averages its gradients by itself"


EXERCISES = {
    "place": Exercise(
        "A rank's place on the mesh",
        _place,
        "`return rank // (dp * tp), rank // tp % dp, rank % tp`: the last axis changes with every rank, the first one least often.",
    ),
    "machines": Exercise(
        "Only activations between the machines",
        _machines,
        '`run("pp_ddp", nproc=4, steps=5, samples=200).wait()`: ranks 0 and 1 have the first stage, 2 and 3 the second. '
        "`pp_fsdp2_tp` with `tp_size=1` does it too.",
    ),
}
