"""Checks for every run that is handed in: that it is a run, that it finished, and what its script contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.course.exercises import Wrong
from labkit.record.files import read_below
from labkit.runs.handle import Run

_MAX_SCRIPT = 4 << 20  # bytes


def a_run(answer: Any) -> Run:
    """The answer, if it is a run that has ended; `Wrong` for anything else."""
    if not isinstance(answer, Run):
        raise Wrong(f"the answer must be the run itself, the return value of run(…), got {type(answer).__name__}")
    if not answer.state.over:
        trouble = next((finding for finding in answer.findings() if finding.kind == "wrong"), None)
        if trouble is not None:
            raise Wrong(f"the run has not ended: {trouble.title} ({trouble.evidence}); stop it with .stop()")
        raise Wrong("the run has not ended yet; wait for it with .wait()")
    return answer


def finished(answer: Any) -> Run:
    """The answer, if it is a run that finished; otherwise `Wrong` with the state of the run in words."""
    run = a_run(answer)
    if run.state.status.state != "finished":
        raise Wrong(f"the run {run.words}; read the logs of its ranks")
    return run


def source(run: Run) -> str:
    """The current text of the learner's script; `Wrong` if labkit generated it, or if it cannot be read."""
    script = run.state.spec.script
    if not script:
        strategy = run.state.spec.strategy
        raise Wrong(f"this run used the generated {strategy} script; run the script that you have fixed")
    path = (Path(run.folder.read_launch().cwd) / script).resolve()  # it may be a symbolic link
    try:
        return read_below(path.parent, path, _MAX_SCRIPT).decode()
    except (OSError, UnicodeDecodeError):
        raise Wrong(f"the script {script} cannot be read; run it again from its current location") from None
