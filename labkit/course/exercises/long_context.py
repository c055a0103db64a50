"""Exercises of lab 16: the chunks of a rank, and the method of context parallelism that sends the fewest bytes."""

from __future__ import annotations

from typing import Any

from labkit.course.exercises import Exercise, Wrong, require_function, result_of
from labkit.course.exercises.own import finished
from labkit.training.strategies import STRATEGIES

_SIZES = (1, 2, 4, 8)


def _chunks(answer: Any) -> str:
    require_function(answer, "chunks_of(rank, ranks)")
    for ranks in _SIZES:
        for rank in range(ranks):
            call = f"chunks_of({rank}, {ranks})"
            given = result_of(call, answer, rank, ranks)
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise Wrong(f"{call} must return two numbers, got {given!r:.80}")
            if sorted(map(repr, given)) != sorted(map(repr, (rank, 2 * ranks - 1 - rank))):
                raise Wrong(
                    f"{call} returned {tuple(given)}: there are {2 * ranks} chunks; one is as far from the beginning as"
                    " the other from the end"
                )
    return f"the chunks of every rank are right for {', '.join(map(str, _SIZES))} ranks"


def _bytes(answer: Any) -> str:
    run = finished(answer)
    name, spec = run.state.spec.strategy or "a script", run.state.asked
    if spec is None or "keys_and_values" not in (STRATEGIES[name].traffic or ()):
        raise Wrong(f"this is a run of {name}: train gpt with context parallelism")
    if run.state.world_size != 4 or spec.batch_per_rank != 4 or spec.precision != "fp32":
        raise Wrong("compare like with like: four ranks, a batch of 4, and fp32")
    if spec.options["method"] != "ulysses":
        raise Wrong(
            f"method={spec.options['method']} sends keys and values to every rank: what is it that need not be?"
        )
    return "an all-to-all sends each number to one rank, so the bytes per rank shrink with the number of ranks"


EXERCISES = {
    "chunks": Exercise(
        "The chunks of a rank",
        _chunks,
        "`return rank, 2 * ranks - 1 - rank`: an early chunk with few keys, and a late one with many.",
    ),
    "bytes": Exercise(
        "The fewest bytes for attention",
        _bytes,
        '`run("cp", **HERE, **SMALL, options={"method": "ulysses"}).wait()`: from three ranks on it sends the least.',
    ),
}
