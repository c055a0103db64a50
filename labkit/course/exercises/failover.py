"""Exercises of lab 10: how often to save, an atomic save, and a group that recovers from a killed rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from labkit.analysis.theory.failures import first_order_cost, first_order_interval
from labkit.course.exercises import Exercise, Wrong, require_function
from labkit.course.exercises.own import finished

MAX_TWICE = 10  # steps that may be computed twice after a restart
_CASES = ((30, 86_400), (5, 3_600), (2, 1_000_000))  # seconds to save, mean seconds between failures
_NEAR = 0.03  # relative difference between Young's formula and higher-order ones if saving is short


def _interval(answer: Any) -> str:
    require_function(answer, "of two times")
    for save, fails in _CASES:
        given = answer(save, fails)
        case = f"with {save} s per save and a failure every {fails:,} s"
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given <= 0:
            raise Wrong(f"{case}, the function must return a time in seconds, got {given!r}")
        best = first_order_interval(save, fails)
        if abs(given / best - 1) > _NEAR:
            cost, less = (first_order_cost(interval, save, fails) for interval in (given, best))
            raise Wrong(
                f"{case}, the function returned {given:,.0f} s, which costs {cost:.2%} of the time; a"
                f" {'shorter' if given > best else 'longer'} interval costs {less:.2%}. Where is the derivative of the"
                " sum 0?"
            )
    return "with ten times as many failures, the best interval is √10 times shorter, and its cost √10 times higher"


class _Died(Exception):
    """The failure that the check injects into `write`."""


def _whole(answer: Any) -> str:
    require_function(answer, "of write and path")
    for before in (None, "old"):
        for dies in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                _save_once(answer, Path(folder) / "step.pt", before, dies)
    return "path contained a complete checkpoint at every moment, even while the next one was being written"


def _save_once(answer: Any, path: Path, before: str | None, dies: bool) -> None:
    """Saves once over the checkpoint `before`, with a `write` that may fail; `Wrong` if the checkpoint is
    incomplete."""
    case = f"with {'a' if before else 'no'} previous checkpoint" + (" and a write that fails half-way" if dies else "")
    written = []

    def write(to: Any) -> None:
        to = Path(to)
        written.append(to)
        to.write_text("ne", encoding="utf-8")
        if _read(path) != before:
            raise Wrong(
                f"{case}, {path.name} was not a complete checkpoint while the new one was being written; "
                "a SIGKILL at that moment would leave it incomplete"
            )
        if dies:
            raise _Died
        to.write_text("new", encoding="utf-8")

    if before:
        path.write_text(before, encoding="utf-8")
    try:
        answer(write, path)
    except _Died:
        pass
    else:
        if not written:
            raise Wrong("write was never called; call it to write the checkpoint")
        if dies:
            raise Wrong(f"{case}, the failure is swallowed; let the exception propagate")
    if written and written[-1].parent != path.parent:
        raise Wrong(
            "the temporary file was created in another folder; renaming is atomic only within one file system, "
            "so create it next to its final name"
        )
    found, expected = _read(path), before if dies else "new"
    if found != expected:
        words = {None: "nothing", "old": "the previous checkpoint", "new": "the new checkpoint"}
        raise Wrong(
            f"{case}, {path.name} must contain {words[expected]} at the end, "
            f"got {words.get(found, 'an incomplete checkpoint')}"
        )


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _comeback(answer: Any) -> str:
    run = finished(answer)
    state = run.state
    if state.world_size != 2:
        raise Wrong(f"the world size must be 2, got {state.world_size}")
    if not run.summary()["restarts"]:
        raise Wrong("this group never restarted: no rank was killed while it trained")
    firsts = {rank.first_step: rank for rank in state.ranks.values()}
    rank = firsts[max(firsts)]
    if not rank.first_step:
        raise Wrong("the rank was killed before the first step; wait for the second checkpoint first")
    last, resumed = int(rank.steps.step[rank.first_step - 1]), int(rank.steps.step[rank.first_step])
    if resumed == 1:
        raise Wrong(f"after {last} steps the group started again at step 1; was there a checkpoint to resume from?")
    if resumed - 1 < 2 * (state.spec.save_every or 1):
        raise Wrong(
            f"the group resumed from step {resumed - 1}, the first checkpoint; kill the rank after the second one"
        )
    if last - resumed + 1 > MAX_TWICE:
        raise Wrong(f"steps {resumed} to {last} were computed twice, more than {MAX_TWICE}; what limits their number?")
    return f"failed after step {last}, resumed at step {resumed}: {last - resumed + 1} steps computed twice"


EXERCISES = {
    "interval": Exercise(
        "How often to save",
        _interval,
        "The derivative of C/T + T/2M is −C/T² + 1/2M, which is 0 at **T = √(2·C·M)** (Young 1974): `(2 *"
        " seconds_to_save * seconds_between_failures) ** 0.5`. With ten times as many failures it is √10 ≈ 3.2 times"
        " shorter.",
    ),
    "whole": Exercise(
        "An atomic save",
        _whole,
        '`unfinished = path.with_name("unfinished"); write(unfinished); unfinished.replace(path)`. Restoring a backup'
        " copy in an `except` clause is not enough: it does not run after SIGKILL.",
    ),
    "comeback": Exercise(
        "Recover from a killed rank",
        _comeback,
        '`job = run("ddp", **HERE, workload="mlp", steps=400, save_every=10, max_restarts=1)`, then wait for two'
        " checkpoints in `job.folder.checkpoints`, `os.kill(job.state.ranks[1].pid, signal.SIGKILL)`, and answer with"
        " `job.wait()`. `save_every` limits the number of steps that are computed twice.",
    ),
}
