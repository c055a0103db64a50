"""What checks ask of every run of a learner's own script: that it is one, has ended well, and what its script says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.course.exercises import Wrong
from labkit.record.files import read_below
from labkit.runs.handle import Run

_SCRIPT = 4 << 20  # bytes


def a_run(answer: Any) -> Run:
    """The answer, where it is a run that is over; `Wrong` for anything else."""
    if not isinstance(answer, Run):
        raise Wrong(f"give the run itself, what run(…) gave back, and not {type(answer).__name__}")
    if not answer.state.over:
        found = next((found for found in answer.findings() if found.kind == "wrong"), None)
        if found is not None:
            raise Wrong(f"the run has not ended: {found.title} ({found.evidence}); end it with .stop()")
        raise Wrong("the run has not ended yet; wait for it with .wait()")
    return answer


def finished(answer: Any) -> Run:
    """The answer, where it is a run that came to its end; `Wrong` with its state in words for another."""
    run = a_run(answer)
    if run.state.status["state"] != "finished":
        raise Wrong(f"the run {run.words}; look into the logs of its ranks")
    return run


def source(run: Run) -> str:
    """The script of one's own that was run, as it stands now; `Wrong` where the lab wrote the script, or it cannot be read."""
    script = run.state.spec.get("script")
    if not script:
        raise Wrong(f"this ran {run.state.spec.get('strategy')} as the lab writes it; hand in a run of the script that you have mended")
    path = (Path(run.folder.read_json(run.folder.plan).get("cwd", "")) / script).resolve()  # it may well be a link
    try:
        return read_below(path.parent, path, _SCRIPT).decode()
    except (OSError, UnicodeDecodeError):
        raise Wrong(f"the script {script} cannot be read any more; run it again from where it stands") from None
