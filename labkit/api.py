"""The Python API besides `run` (labkit.runs.handle): advice, published runs, predicting, comparing strategies,
explaining files, and displaying runs.

The front end (notebook or terminal) is imported by the call that displays something.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from labkit.analysis.foreign.opening import explain as pages_of
from labkit.analysis.guess import FIGURES
from labkit.common.arguments import check_flag, check_path, check_type
from labkit.figures.advice import Advised, Comparison, Estimated
from labkit.figures.atlas import Atlas
from labkit.figures.tables import Explained, Prediction
from labkit.plan.spec import Spec
from labkit.prediction.devices import HERE, device
from labkit.prediction.predict import predict as plan_of
from labkit.prediction.scale.advice import advice, laid, training
from labkit.prediction.scale.atlas import check as check_rows
from labkit.prediction.scale.atlas import select
from labkit.prediction.scale.step import estimate
from labkit.prediction.timing import modelled, timed
from labkit.record.follow import Follower
from labkit.runs import gathering
from labkit.runs.comparing import Comparing, plan
from labkit.runs.handle import Run, named, with_ranks
from labkit.runs.notebook import cell, in_notebook


@overload
def advise(params: Any = None, *, layout: None = None, check: None = None, **asked: Any) -> Advised: ...
@overload
def advise(params: Any = None, *, layout: str | Mapping[str, Any], check: None = None, **asked: Any) -> Estimated: ...
@overload
def advise(*, check: str | os.PathLike[str]) -> Comparison: ...
def advise(
    params: Any = None, *, layout: Any = None, check: Any = None, **asked: Any
) -> Advised | Estimated | Comparison:
    """Whether a transformer fits on some devices, with which strategies, and how fast they are; nothing is run, and all
    figures are modelled.

    The model is `params`, such as `7B`; or `config`, the path of a Hugging Face style config.json; or `workload` with
    its `options`. `machine` is a name of the table, such as `h100x8` (default), or the path of a small JSON file,
    `devices` their number (default: one node), `memory` that of one in bytes or such as `24GB`, `batch` the samples per
    step, globally, or such as `4M tokens`, `sequence` in tokens, `precision` one that the device has (default: bf16, or
    fp16), `attention` `fused` (default) or `eager`.

    With `layout`, a text such as `dp=8,tp=4,pp=2,zero=1,micro_batch=2` or a dict, it is one layout: time, tokens/s, MFU
    and memory with their 80 % ranges, the parts of a step, and the nearest published runs. With `check`, the path of a
    CSV file of published runs, it is how well the estimates agree with them. Raises `ValueError` or `TypeError` for a
    value that is not possible, `SpecError` for one of `options`, `OSError` if the file of `check` cannot be read.
    """
    if check is not None:
        if params is not None or layout is not None or asked:
            raise ValueError("check compares a file with its own figures, and takes no other argument")
        return Comparison(check_rows(Path(check_path("check", check))))
    if layout is not None:
        return Estimated(estimate(*laid(layout, params=params, **asked)))
    return Advised(advice(training(params, **asked)))


def atlas(
    *, model: Any = None, gpus: Any = None, gpu_type: Any = None, layout: Any = None, source: Any = None
) -> Atlas:
    """Published runs on real GPUs that ship with the lab, failures included, each with what is modelled for it.

    Without arguments all of them, otherwise those with a `model`, a `gpu_type` or a `source` whose name contains a text
    (`8B`, `H100`, `Playbook`), with a number of `gpus` or a list of them, and with some degrees of a `layout`, such as
    `tp=8,pp=1` (also dp, cp, zero, micro_batch). Raises `LookupError` with the values that exist if there are none,
    `ValueError` or `TypeError` for a value that is not possible.
    """
    return Atlas(select(model=model, gpus=gpus, gpu_type=gpu_type, layout=layout, source=source))


def compare(strategies: Sequence[str] | str, *, cold: bool = False, **fields: Any) -> Comparing:
    """Starts running the strategies one after another and returns at once; `show` displays the comparison.

    See `labkit.runs.comparing.plan` for the arguments, and `run` for `cold`. Raises `SpecError`.
    """
    check_flag("cold", cold)
    return Comparing(*plan(strategies, **fields), cold=cold, show=show).start()


def explain(*paths: str | os.PathLike[str], keep: str | None = None) -> Explained:
    """What files of a job say that ran anywhere: traces of torch's profiler, dumps of its flight recorder or debug
    server, snapshots of CUDA memory, reports of NCCL's RAS, and logs of torchrun, Slurm or Kubernetes.

    A folder stands for the files in it, and in its folders, that can be explained. Nothing in a file is executed.
    With a name in `keep`, what they say becomes a run of this name, which is shown, compared and exported as any other.
    Raises `ForeignError` (a `ValueError`) with one sentence for a file that cannot be read, `TypeError` for a value
    that is no path.
    """
    if not paths:
        raise ValueError("explain needs the path of a file or folder, such as explain('traces/')")
    name = None if keep is None else gathering.check_name(keep)
    pages = pages_of([Path(check_path("path", path)) for path in paths])
    return Explained(pages, "" if name is None else gathering.keep_files(pages, name).name)


def predict(what: str | Spec, *, machine: str | None = None, **fields: Any) -> Prediction:
    """The memory and traffic of every rank, predicted without running anything, and without a GPU.

    `what` is a strategy's name, the path of a script (it ends in `.py`) or a `Spec`, `fields` are the Spec's other
    fields, as for `run`; any number of ranks is possible. The script, generated or your own, is traced in a separate
    process, which takes some seconds, or is found in the cache. A run that is started later with the same Spec has the
    prediction in its charts. `machine` adds times: with `here`, a few steps of a generated script are measured without
    communication, and the time of a step follows with what `labkit doctor --calibrate` has measured; with a named
    machine, such as `a100x8`, it is modelled from the traced kernels and the machine's published figures.
    Raises `SpecError`, `TraceFailed` for a script of your own that cannot be traced and for a step that cannot be
    measured, `ValueError` for an unknown machine, `LookupError` for a time that is not known on this machine.
    """
    if isinstance(what, str) and what in FIGURES:
        raise ValueError(f"{what} is a figure, which a learner guesses: use guess({what!r}, 40)")
    asked = named(what, **fields)
    if machine is not None and device(machine).name != HERE:
        spec = with_ranks(replace(asked, device="cuda") if asked.device == "auto" else asked)
        return Prediction(modelled(spec, plan_of(spec), device(machine)))
    spec = with_ranks(asked)
    plan = plan_of(spec)
    return Prediction(plan if machine is None else timed(spec, plan))


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
        from labkit.frontends.panel.view import show_in_notebook

        show_in_notebook(run)
    else:
        from labkit.frontends.console import Console
        from labkit.frontends.terminal import watch

        watch(Follower(run.folder), run.folder, Console())
    return run


def _show_comparison(comparing: Comparing) -> Comparing:
    if in_notebook():
        from labkit.frontends.panel.compare import show_comparison_in_notebook

        comparing.shown_in = cell()
        show_comparison_in_notebook(comparing)
    else:
        from labkit.frontends.console import Console
        from labkit.frontends.terminal import watch_comparison

        watch_comparison(comparing, Console())
    return comparing
