"""Runs an answer on CPU ranks, as an ordinary run with its own folder, and reads what the ranks recorded."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.common.arguments import shown
from labkit.course.build.record import Record
from labkit.course.build.source import source_of
from labkit.course.exercises import Wrong
from labkit.launch.job import LaunchError
from labkit.plan.spec import Spec, SpecError
from labkit.runs.handle import begin
from labkit.setup.machine import Machine

_LIMIT = 180.0  # seconds after which a run is stopped
_SCRIPT = """\
# An answer on {nproc} ranks: torchrun --standalone --nproc-per-node={nproc} train.py FOLDER
import sys

from labkit.course.build.ranks.entry import graded

# ---- the answer
{source}

# ---- runs it, and writes what each rank recorded to FOLDER
if __name__ == "__main__":
    graded("{module}", "{trial}", {answer}, sys.argv[1])
"""


def check_class(answer: Any, what: str, parameters: Sequence[str]) -> None:
    """Raises `Wrong` unless the answer is a class whose objects are created with these parameters; `what` completes
    "the answer must be a class …"."""
    if not isinstance(answer, type):
        raise Wrong(f"the answer must be a class {what}, got {shown(answer)}")
    _check_parameters(answer, parameters)


def check_function(answer: Any, parameters: Sequence[str]) -> None:
    """Raises `Wrong` unless the answer is a function that takes these parameters."""
    if not inspect.isfunction(answer):
        raise Wrong(f"the answer must be a function of ({', '.join(parameters)}), got {shown(answer)}")
    _check_parameters(answer, parameters)


def _check_parameters(answer: Any, parameters: Sequence[str]) -> None:
    try:
        inspect.signature(answer).bind(*parameters)
    except (TypeError, ValueError):
        raise Wrong(f"the answer must take ({', '.join(parameters)}), as in the starter code") from None


def script_of(module: str, trial: str, answer: Any, nproc: int) -> str:
    """The script that every rank runs. Raises `Wrong` if the source of the answer cannot be found."""
    return _SCRIPT.format(nproc=nproc, source=source_of(answer), module=module, trial=trial, answer=answer.__name__)


def records_of(module: str, trial: str, answer: Any, nproc: int) -> list[Record | None]:
    """What each rank recorded; None for a rank that wrote nothing. All processes have ended when it returns."""
    text = script_of(module, trial, answer, nproc)
    with tempfile.TemporaryDirectory(prefix="labkit-answer-") as folder:
        launch(text, nproc, Path(folder))
        return [Record.read(Path(folder), rank) for rank in range(nproc)]


def launch(text: str, nproc: int, folder: Path) -> None:
    """Runs a script on `nproc` CPU ranks with `folder` as its argument, to its end. Its text is in the run folder."""
    spec = Spec(script="answer.py", nproc=nproc, device="cpu", args=(str(folder),))
    try:
        run = begin(spec.on(Machine.here()), source=text, guesses=())
    except (SpecError, LaunchError) as error:
        raise Wrong(f"this machine cannot start the ranks of this exercise: {error}") from None
    if not run.wait(_LIMIT).state.over:
        run.stop()
