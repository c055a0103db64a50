"""What the checks of answers share: what is wrong with one, and what is required of numbers, functions and runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from labkit.record.files import read_below
from labkit.runs.handle import Run

_MAX_SCRIPT = 4 << 20  # bytes


class Wrong(Exception):
    """What is wrong with an answer: a hint that does not give the solution away."""


class Unanswered(Wrong):
    """A file that is the answer still is as it was given."""


def require_function(answer: Any, what: str) -> None:
    """Raises `Wrong` unless the answer is callable; `what` completes "the answer must be a function …"."""
    if not callable(answer):
        raise Wrong(f"the answer must be a function {what}, got {answer!r}")


def require_number(answer: Any, what: str) -> None:
    """Raises `Wrong` unless the answer is a number; `what` completes "the answer must be a number …"."""
    if not _is_number(answer):
        raise Wrong(f"the answer must be a number {what}, got {answer!r}")


def result_of(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a learner's function returns for some arguments; `Wrong` if it raises. `call` says it in words."""
    try:
        return function(*arguments)
    except Exception as error:
        raise Wrong(f"{call} raised {type(error).__name__}: {error}") from None


def number_of(call: str, what: str, function: Callable[..., Any], *arguments: Any) -> float:
    """As `result_of`, of a function that must return a number; `what` completes "a number …"."""
    given = result_of(call, function, *arguments)
    if not _is_number(given):
        raise Wrong(f"{call} must return a number {what}, got {given!r:.80}")
    return float(given)


def numbers_of(call: str, names: Sequence[str], function: Callable[..., Any], *arguments: Any) -> list[float]:
    """As `result_of`, of a function that must return a number for each of `names`."""
    given = result_of(call, function, *arguments)
    if not isinstance(given, (tuple, list)) or len(given) != len(names) or not all(map(_is_number, given)):
        raise Wrong(f"{call} must return {len(names)} numbers ({', '.join(names)}), got {given!r:.80}")
    return list(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def explained(number: float, mistakes: Iterable[tuple[float, str]], otherwise: str, near: float = 1e-6) -> str:
    """The words of the first of `mistakes` that leads to this number, up to a relative difference; or `otherwise`."""
    return next((words for wrong, words in mistakes if math.isclose(number, wrong, rel_tol=near)), otherwise)


# ---- a run that is handed in: that it is one, that it finished, and what its script contains


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
