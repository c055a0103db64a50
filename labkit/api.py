"""The Python API besides `run` (labkit.runs.handle): predicting, comparing strategies, and displaying runs.

The front end (notebook or terminal) is imported by the call that displays something.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from labkit.common.arguments import check_flag, check_type
from labkit.figures.prediction import Prediction
from labkit.plan.spec import Spec
from labkit.prediction.links import communication
from labkit.prediction.predict import predict as plan_of
from labkit.record.follow import Follower
from labkit.runs.comparing import Comparing, plan
from labkit.runs.handle import Run
from labkit.runs.notebook import cell, in_notebook
from labkit.runs.settling import named, with_ranks


def compare(strategies: Sequence[str] | str, *, cold: bool = False, **fields: Any) -> Comparing:
    """Starts running the strategies one after another and returns at once; `show` displays the comparison.

    See `labkit.runs.comparing.plan` for the arguments, and `run` for `cold`. Raises `SpecError`.
    """
    check_flag("cold", cold)
    return Comparing(*plan(strategies, **fields), cold=cold, show=show).start()


def predict(what: str | Spec, *, links: str | None = None, **fields: Any) -> Prediction:
    """The memory and traffic of every rank, predicted without running anything, and without a GPU.

    `what` is a strategy's name, the path of a script (it ends in `.py`) or a `Spec`, `fields` are the Spec's other
    fields, as for `run`; any number of ranks is possible. The script, generated or your own, is traced in a separate
    process, which takes some seconds, or is found in the cache. A run that is started later with the same Spec has the
    prediction in its charts. `links` adds the time of the collectives without overlap: `here` if `labkit doctor
    --calibrate` has measured them, or a named machine, such as `a100x8`. Raises `SpecError`, `TraceFailed` for a script
    of your own that cannot be traced, `ValueError` for an unknown machine, `LookupError` for links that are not known.
    """
    spec = with_ranks(named(what, **fields))
    model = None if links is None else communication(links, "nccl" if spec.device == "cuda" else "gloo")
    return Prediction(plan_of(spec), model)


def show(run: str | os.PathLike[str] | Run | Comparing = "last") -> Run | Comparing:
    """Displays a run live and returns it: a `Run`, its name, the start or end of its name, its path, or `last`; or a
    comparison.

    In a notebook it returns at once. In a headless notebook (nbclient, a batch run) it waits until the run is over and
    leaves static figures. Outside a notebook it displays the run in the terminal until the run is over. Raises
    `LookupError` if there is no such run.
    """
    if isinstance(run, (str, os.PathLike)):
        run = Run.attach(run)
    if not isinstance(run, Run):
        return _show_comparison(
            check_type("run", run, Comparing, "a Run, a run's name or path, or what compare() returned")
        )
    if in_notebook():
        from labkit.frontends.panel import show_in_notebook

        show_in_notebook(run)
    else:
        from labkit.frontends.console import Console
        from labkit.frontends.terminal import watch

        watch(Follower(run.folder), run.folder, Console())
    return run


def _show_comparison(comparing: Comparing) -> Comparing:
    if in_notebook():
        from labkit.frontends.panel import show_comparison_in_notebook

        comparing.shown_in = cell()
        show_comparison_in_notebook(comparing)
    else:
        from labkit.frontends.console import Console
        from labkit.frontends.terminal import watch_comparison

        watch_comparison(comparing, Console())
    return comparing
