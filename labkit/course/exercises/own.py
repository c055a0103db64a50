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


def require_run(run: Run, strategy: str = "", ranks: int = 0, batch: int = 0, steps: int = 0) -> None:
    """Raises `Wrong` unless a run has this strategy, world size and global batch size, and at least so many steps; what
    is not given may be any."""
    state, spec = run.state, run.state.spec
    if strategy and spec.strategy != strategy:
        raise Wrong(f"the strategy of this run must be {strategy}, got {spec.strategy or 'a script'}")
    if ranks and state.world_size != ranks:
        raise Wrong(f"the world size must be {ranks}, got {state.world_size}")
    if batch and (settled := spec.to_spec()).global_batch != batch:
        raise Wrong(f"the global batch size must be {batch}, got {settled.global_batch} ({settled.batch_sentence})")
    if state.step < steps:
        raise Wrong(f"the run must have at least {steps} steps, got {state.step}")


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
