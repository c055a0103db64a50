"""Exercises of lab 08: the coordinates of a rank on a mesh, and a mesh for two machines."""

from __future__ import annotations

from itertools import product
from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished

_MESHES = ((2, 2, 2), (2, 1, 4), (1, 3, 2), (4, 2, 8))


def _place(answer: Any) -> str:
    require_function(answer, "place_of(rank, pp, dp, tp)")
    for sizes in _MESHES:
        for rank, wanted in enumerate(product(*map(range, sizes))):
            call = f"place_of({', '.join(map(str, (rank, *sizes)))})"
            given = result_of(call, answer, rank, *sizes)
            if not isinstance(given, (tuple, list)) or len(given) != 3:
                raise Wrong(f"{call} must return three numbers, (pp, dp, tp), got {given!r:.80}")
            if tuple(given) != wanted:
                raise Wrong(f"{call} returned {tuple(given)}: {_hint(tuple(given), wanted, sizes)}")
    return f"the coordinates of every rank are right on {len(_MESHES)} meshes"


def _hint(given: tuple, wanted: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    for axis, coordinate, right, size in zip(("pp", "dp", "tp"), given, wanted, sizes):
        if not isinstance(coordinate, int) or not 0 <= coordinate < size:
            return f"the coordinate on {axis} must be in 0 … {size - 1}"
        if coordinate != right:
            return f"{axis} is wrong; how many neighbouring ranks have the same coordinate on {axis}?"
    return "check all three coordinates"


def _machines(answer: Any) -> str:
    run = finished(answer)
    spec, options = run.state.spec, run.state.spec.options
    if run.state.world_size != 4:
        raise Wrong(f"the world size must be 4, got {run.state.world_size}")
    strategy = f"the strategy of this run is {spec.strategy or 'a script'}"
    stages, split = options.get("pp_size", 1), options.get("tp_size", 1)
    if stages == 1:
        raise Wrong(f"{strategy}: which axis sends only activations, and does this strategy have it?")
    if stages != 2:
        raise Wrong(f"{strategy} with {stages} pipeline stages: some boundaries between stages are within a machine")
    if split != 1:
        raise Wrong(
            f"{strategy} with tp_size={split}: the two ranks of a machine split layers and have the same samples"
        )
    return "the pipeline is the outermost axis: each machine is one stage and averages its gradients internally"


EXERCISES = {
    "place": Exercise(
        "The coordinates of a rank on the mesh",
        _place,
        "`return rank // (dp * tp), rank // tp % dp, rank % tp`: the last axis changes with every rank, the first one"
        " least often.",
    ),
    "machines": Exercise(
        "Only activations between the machines",
        _machines,
        '`run("pp_ddp", nproc=4, steps=5, samples=200).wait()`: ranks 0 and 1 have the first stage, 2 and 3 the second.'
        " `pp_fsdp2_tp` with `tp_size=1` is right too.",
    ),
}
