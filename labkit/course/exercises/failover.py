"""Exercises of lab 10: how often to save, how to save whole, and a group that comes back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished

TWICE = 10  # steps that a group which comes back may compute again
_CASES = ((30, 86_400), (5, 3_600), (2, 1_000_000))  # seconds to save, and from one failure to the next
_NEAR = 0.03  # what finer formulas than Young's differ by, where saving is short


def _interval(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of two times, and this is {answer!r}")
    for save, fails in _CASES:
        given = answer(save, fails)
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given <= 0:
            raise Wrong(f"for {save} s to save and a failure every {fails:,} s it gave {given!r}; it should give a time in seconds")
        best = (2 * save * fails) ** 0.5
        if abs(given / best - 1) > _NEAR:
            cost, less = (save / each + each / (2 * fails) for each in (given, best))
            raise Wrong(
                f"for {save} s to save and a failure every {fails:,} s it gave {given:,.0f} s, which costs {cost:.2%} of the time; "
                f"a {'shorter' if given > best else 'longer'} interval costs {less:.2%}. Where is the slope of the sum 0?"
            )
    return "ten times as many failures make the best interval √10 times shorter, and what is lost at the best √10 times more"


class _Died(Exception):
    """What the writing process of the check dies of."""


def _whole(answer: Any) -> str:
    if not callable(answer):
        raise Wrong(f"the answer is a function of write and path, and this is {answer!r}")
    for before in (None, "old"):
        for dies in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                _save_once(answer, Path(folder) / "step.pt", before, dies)
    return "under the name there was a whole checkpoint at every moment, also while the next was written"


def _save_once(answer: Any, path: Path, before: str | None, dies: bool) -> None:
    """One save over what was there `before`, by a writer that may die; `Wrong` for whatever is not whole."""
    when = f"with {'an' if before else 'no'} older checkpoint there" + (" and a writer that dies half-way" if dies else "")
    written = []

    def write(to: Any) -> None:
        to = Path(to)
        written.append(to)
        to.write_text("ne", encoding="utf-8")
        if _read(path) != before:
            raise Wrong(f"{when}, {path.name} was no whole checkpoint while the new one was being written; a SIGKILL then leaves it so")
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
            raise Wrong("write was never called; it is what makes the checkpoint")
        if dies:
            raise Wrong(f"{when}, nobody hears of the failure; let the exception through")
    if written and written[-1].parent != path.parent:
        raise Wrong("the file was made in another folder; renaming is atomic within one file system only, so keep it beside its final name")
    found, expected = _read(path), before if dies else "new"
    if found != expected:
        words = {None: "nothing", "old": "the old checkpoint", "new": "the new checkpoint"}
        raise Wrong(f"{when}, there was {words.get(found, 'a broken one')} under {path.name} at the end, and not {words[expected]}")


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _comeback(answer: Any) -> str:
    run = finished(answer)
    state = run.state
    if state.world_size != 2:
        raise Wrong(f"the world size is {state.world_size}; two ranks were asked for")
    if not run.summary()["restarts"]:
        raise Wrong("this group never had to come back: no rank of it was ended while it trained")
    firsts = {rank.first_step: rank for rank in state.ranks.values()}
    kept = firsts[max(firsts)]
    if not kept.first_step:
        raise Wrong("the rank was ended before any step was done; wait for the second checkpoint first")
    last, began = int(kept.steps.step[kept.first_step - 1]), int(kept.steps.step[kept.first_step])
    if began == 1:
        raise Wrong(f"after {last} steps the group began again with step 1; what was there to go on from?")
    if began - 1 < 2 * state.spec.get("save_every", 1):
        raise Wrong(f"it went on from step {began - 1}, the first checkpoint; two were asked for before the end of a rank")
    if last - began + 1 > TWICE:
        raise Wrong(f"steps {began} to {last} were computed twice, more than {TWICE}; what decides how many those can be?")
    return f"ended after step {last}, back with step {began}: {last - began + 1} steps computed twice"


EXERCISES = {
    "interval": Exercise(
        "How often to save",
        _interval,
        "The slope of C/T + T/2M is −C/T² + 1/2M, which is 0 at **T = √(2·C·M)** (Young 1974): `(2 * seconds_to_save * "
        "seconds_between_failures) ** 0.5`. Ten times as many failures make it √10 ≈ 3.2 times shorter.",
    ),
    "whole": Exercise(
        "Whole or not at all",
        _whole,
        '`unfinished = path.with_name("unfinished"); write(unfinished); unfinished.replace(path)`. Keeping a copy and putting it back in '
        "an `except` does not do: SIGKILL leaves no time for it.",
    ),
    "comeback": Exercise(
        "Bring a group back",
        _comeback,
        '`job = run("ddp", **HERE, workload="mlp", steps=400, save_every=10, max_restarts=1)`, then wait for two checkpoints in '
        "`job.folder.checkpoints`, `os.kill(job.state.ranks[1].pid, signal.SIGKILL)`, and hand in `job.wait()`. `save_every` bounds "
        "what is computed twice.",
    ),
}
