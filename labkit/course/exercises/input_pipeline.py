"""Exercises of lab 09: how many workers hide loading, and a loader to mend."""

from __future__ import annotations

import re
import statistics
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished, source

BATCH = 64  # samples a rank takes at a step in the script to mend
STEPS = 8  # of which a median may speak
DISK = 1e-3  # seconds that the slow disk takes at the least
_CASES = ((0.2, 0.1), (0.25, 0.1), (0.1, 0.1), (0.1, 0.2), (2.0, 0.25))  # seconds to load and to compute


def _workers(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of load and compute, and this is {answer!r}")
    for load, compute in _CASES:
        given = answer(load, compute)
        case = f"load {1e3 * load:.0f} ms, compute {1e3 * compute:.0f} ms: your function gives {given!r}"
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given != int(given):
            raise Wrong(f"{case}, and num_workers is a whole number")
        if given < 1:
            raise Wrong(f"{case}; with no worker every step waits for its batch, however fast that comes")
        if load / given > compute:
            raise Wrong(f"{case}; then a batch comes every {1e3 * load / given:.0f} ms, and training is ready for it sooner")
        if given > 1 and load / (given - 1) <= compute:
            raise Wrong(f"{case}; one worker less would do")
    return f"right for {len(_CASES)} pairs of times: together the workers bring a batch at least as often as training takes one"


def _mend(answer: Any) -> str:
    run = finished(answer)
    text, steps = source(run), run.state.ranks[0].steps
    slept = [float(found) for found in re.findall(r"time\.sleep\(([\d.]+)\)", text)]
    if len(steps) < STEPS:
        raise Wrong(f"{len(steps)} steps are too few to judge by; let it train for {STEPS} or more")
    if run.state.world_size < 2:
        raise Wrong("this ran on one rank; hand in a run on two")
    if (samples := statistics.median(steps.samples)) != BATCH:
        raise Wrong(f"a rank now takes {samples:.0f} samples at a step, and it took {BATCH}; that is another training")
    if not slept or max(slept) < DISK:
        raise Wrong("the disk became faster: time.sleep in the data set is gone or short; leave it, and change the loader")
    waits, took = statistics.median(steps.phases["data"]), max(slept)
    told = next((found.title for found in run.findings() if found.name == "input_bound"), None)
    if told or waits > took / 2:
        raise Wrong(
            f"still: {told or 'too much of a step is waiting for data'}: {1e3 * waits:.1f} ms, of {1e3 * took:.0f} ms "
            "that a batch takes to fetch; who else could fetch the batches, and how many of them does it take?"
        )
    return f"a step still needs a batch that takes {1e3 * took:.0f} ms to fetch, and waits {1e3 * waits:.1f} ms for it"


EXERCISES = {
    "workers": Exercise(
        "How many workers hide loading",
        _workers,
        "`math.ceil(load / compute)`: so many workers bring a batch every load / workers seconds, which is at most compute. It is never 0, "
        "since without workers loading and computing add up.",
    ),
    "mend": Exercise(
        "A loader that keeps up",
        _mend,
        "In `load` of slow_input.py give the DataLoader `num_workers=2` (1.5 times a step's time to load, so 2 workers hide it), best "
        'with `persistent_workers=True`; then `run("slow_input.py", **HERE).wait()`.',
    ),
}
