"""Exercises of lab 09: the number of workers that hide loading, a data loader to fix, and one to write, which reads
shards and resumes on another number of ranks."""

from __future__ import annotations

import re
from typing import Any

from labkit.analysis.metrics import median, phase_seconds
from labkit.course.build.criteria import check_class, solution
from labkit.course.build.input_pipeline import judge as loader
from labkit.course.exercises import Exercise, Wrong, require_function
from labkit.course.exercises.own import finished, source

BATCH = 64  # samples per rank and step in the script to fix
MIN_STEPS = 8  # for a meaningful median
MIN_SLEEP = 1e-3  # seconds per batch of the simulated slow disk
_CASES = ((0.2, 0.1), (0.25, 0.1), (0.1, 0.1), (0.1, 0.2), (2.0, 0.25))  # seconds to load and to compute


def _workers(answer: Any) -> str:
    require_function(answer, "of load and compute")
    for load, compute in _CASES:
        given = answer(load, compute)
        case = f"load {1e3 * load:.0f} ms, compute {1e3 * compute:.0f} ms: your function returns {given!r}"
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given != int(given):
            raise Wrong(f"{case}, but num_workers must be an integer")
        if given < 1:
            raise Wrong(f"{case}; without workers every step waits for its batch, however fast loading is")
        if load / given > compute:
            raise Wrong(
                f"{case}; then a batch is ready every {1e3 * load / given:.0f} ms, which is slower than training"
            )
        if given > 1 and load / (given - 1) <= compute:
            raise Wrong(f"{case}; one worker fewer is enough")
    return (
        f"right for {len(_CASES)} pairs of times: the workers load batches at least as fast as training consumes them"
    )


def _mend(answer: Any) -> str:
    run = finished(answer)
    text, steps = source(run), run.state.ranks[0].steps
    slept = [float(seconds) for seconds in re.findall(r"time\.sleep\(([\d.]+)\)", text)]
    if len(steps) < MIN_STEPS:
        raise Wrong(f"the run must have at least {MIN_STEPS} steps, got {len(steps)}")
    if run.state.world_size < 2:
        raise Wrong("the world size must be 2, got 1")
    if (samples := median(steps.samples)) != BATCH:
        raise Wrong(f"a rank must process {BATCH} samples per step as before, got {samples:.0f}")
    if not slept or max(slept) < MIN_SLEEP:
        raise Wrong("time.sleep in the data set was removed or shortened; restore it, and change the loader instead")
    waits, took = phase_seconds(run.state, 0)["data"] or 0.0, max(slept)
    title = next((finding.title for finding in run.findings() if finding.name == "input_bound"), None)
    if title or waits > took / 2:
        raise Wrong(
            f"still: {title or 'too much of a step is waiting for data'}: {1e3 * waits:.1f} ms, while a batch takes "
            f"{1e3 * took:.0f} ms to load; which processes could load the batches, and how many of them are needed?"
        )
    return f"a batch still takes {1e3 * took:.0f} ms to load, and a step waits only {1e3 * waits:.1f} ms for it"


def _loader(answer: Any) -> str:
    check_class(answer, "of loaders", ["files", "rank", "ranks", "workers", "batch", "seed"])
    return loader.judge(answer)


EXERCISES = {
    "input_pipeline.workers": Exercise(
        "How many workers hide loading",
        _workers,
        "`math.ceil(load / compute)`: this many workers load a batch every load / workers seconds, which is at most"
        " compute. It is never 0, because without workers loading and computing add up.",
    ),
    "input_pipeline.mend": Exercise(
        "A loader that keeps up",
        _mend,
        "In `load` of slow_input.py pass `num_workers=2` to the DataLoader (loading takes 50 % longer than a step,"
        ' so 2 workers hide it), preferably with `persistent_workers=True`; then `run("slow_input.py",'
        " **HERE).wait()`.",
    ),
    "input_pipeline.loader": Exercise(
        "Resume on another number of ranks",
        _loader,
        solution(__file__, "Loader", "Stream"),
        given="shard_stream.py",
        runs="code",
    ),
}
