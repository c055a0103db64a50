"""Exercises of labs 10 and 12: checkpoints, restarts, and finding out why a run fails."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from labkit.analysis.theory.failures import first_order_cost, first_order_interval
from labkit.course.exercises import Exercise, Wrong, number_of, require_function
from labkit.course.exercises.own import a_run, finished, require_run, source
from labkit.record.events import Epoch, Save

EXERCISES: dict[str, Exercise] = {}

# ---- lab 10: how often to save, an atomic save, and a group that recovers from a killed rank


MAX_TWICE = 10  # steps that may be computed twice after a restart
_CASES = ((30, 86_400), (5, 3_600), (2, 1_000_000))  # seconds to save, mean seconds between failures
_NEAR = 0.03  # relative difference between Young's formula and higher-order ones if saving is short


def _interval(answer: Any) -> str:
    require_function(answer, "of two times")
    for save, fails in _CASES:
        case = f"with {save} s per save and a failure every {fails:,} s"
        given = number_of(f"{case}, the function", "of seconds", answer, save, fails)
        if given <= 0:
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
    saved, expected = _read(path), before if dies else "new"
    if saved != expected:
        words = {None: "nothing", "old": "the previous checkpoint", "new": "the new checkpoint"}
        raise Wrong(
            f"{case}, {path.name} must contain {words[expected]} at the end, "
            f"got {words.get(saved, 'an incomplete checkpoint')}"
        )


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _comeback(answer: Any) -> str:
    run = finished(answer)
    state = run.state
    require_run(run, ranks=2)
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


EXERCISES |= {
    "failover.interval": Exercise(
        "How often to save",
        _interval,
        "The derivative of C/T + T/2M is −C/T² + 1/2M, which is 0 at **T = √(2·C·M)** (Young 1974): `(2 *"
        " seconds_to_save * seconds_between_failures) ** 0.5`. With ten times as many failures it is √10 ≈ 3.2 times"
        " shorter.",
    ),
    "failover.whole": Exercise(
        "An atomic save",
        _whole,
        '`unfinished = path.with_name("unfinished"); write(unfinished); unfinished.replace(path)`. Restoring a backup'
        " copy in an `except` clause is not enough: it does not run after SIGKILL.",
    ),
    "failover.comeback": Exercise(
        "Recover from a killed rank",
        _comeback,
        '`job = run("ddp", **HERE, workload="mlp", steps=400, save_every=10, max_restarts=1)`, then wait for two'
        " checkpoints in `job.folder.checkpoints`, `os.kill(job.state.ranks[1].pid, signal.SIGKILL)`, and answer with"
        " `job.wait()`. `save_every` limits the number of steps that are computed twice.",
    ),
}


# ---- lab 12: names with a prefix, the rank at a different line, and a script with four mistakes


_STRAY = 2, 131  # the rank that called a different collective, and the line of the call
_STATES = (  # as saved, and as the model itself names them
    ({"module.0.weight": 1, "module.0.bias": 2}, {"0.weight": 1, "0.bias": 2}),
    ({"module.submodule.weight": 1, "module.head.bias": 2}, {"submodule.weight": 1, "head.bias": 2}),
    ({"submodule.weight": 1, "head.bias": 2}, {"submodule.weight": 1, "head.bias": 2}),
    ({"module.module.weight": 1}, {"module.weight": 1}),
)


def _prefix(answer: Any) -> str:
    require_function(answer, "of a state dict")
    for saved, wanted in _STATES:
        given = answer(dict(saved))
        if not isinstance(given, dict):
            raise Wrong(f"the function must return a dict of names and tensors, got {type(given).__name__}")
        if list(given) != list(wanted):
            names = ", ".join(map(str, given))
            raise Wrong(f"for {', '.join(saved)} your function returns {names}; the model has {', '.join(wanted)}")
        if given != wanted:
            raise Wrong("the names are right, but the values have changed; each tensor must keep its name")
    return "the function removes one prefix at the beginning of a name and does not change names without it"


def _stray(answer: Any) -> str:
    if not (
        isinstance(answer, (tuple, list)) and len(answer) == 2 and all(isinstance(number, int) for number in answer)
    ):
        raise Wrong(f"the answer must be a pair of numbers, (rank, line), got {answer!r}")
    rank, line = answer
    if rank not in range(4):
        raise Wrong(f"the rank must be in 0 … 3, got {rank}")
    if rank != _STRAY[0]:
        raise Wrong(
            f"rank {rank} is at the same line as two other ranks; for which rank is number 118 a different collective?"
        )
    if line != _STRAY[1]:
        raise Wrong(f"rank {rank} is right, but it is not at line {line}. Which line of the script would you open?")
    return (
        "number 118 is an all-reduce on three ranks and a barrier on rank 2; which condition sends only rank 2 into"
        " `save`?"
    )


def _mend(answer: Any) -> str:
    run = a_run(answer)
    text = source(run)
    wrong = [finding for finding in run.findings() if finding.kind == "wrong"]
    if wrong:
        raise Wrong(f"still: {wrong[0].title} ({wrong[0].evidence})")
    state = run.state
    if state.status.state != "finished":
        raise Wrong(f"the run {run.words} and did not finish")
    if state.world_size != 2 or "DistributedDataParallel" not in text:
        raise Wrong("the fixed script must still use DDP on two ranks")
    rank = state.ranks[0]
    if len({epoch.set for epoch in rank.seen(Epoch)}) < 2:
        raise Wrong("the run must train for two epochs with different orders of samples")
    if "correct" not in run.logs(0):
        raise Wrong("rank 0 no longer prints the accuracy; fix the evaluation instead of removing it")
    if not any(rank_state.seen(Save) for rank_state in state.ranks.values()):
        raise Wrong("the script no longer saves the model; one rank must save it")
    return (
        "different samples on each rank, a new order in each epoch, an evaluation on all ranks, and one file from one"
        " rank"
    )


EXERCISES |= {
    "troubleshooting.prefix": Exercise(
        "Names without the wrapper",
        _prefix,
        '`{name.removeprefix("module."): value for name, value in state.items()}`. `replace` would also change'
        " `submodule.weight`.",
    ),
    "troubleshooting.stray": Exercise(
        "Which rank is at a different line",
        _stray,
        "**(2, 131)**: rank 2 is in a barrier in `save` while the others are in an all-reduce; neither can complete.",
    ),
    "troubleshooting.mend": Exercise(
        "Fix a broken script",
        _mend,
        "1. `sampler = DistributedSampler(dataset)` and `DataLoader(dataset, 32, sampler=sampler)` without `shuffle`; "
        "2. `sampler.set_epoch(epoch)` first in each epoch; 3. evaluate on every rank, and only print inside "
        "`if dist.get_rank() == 0:`; 4. save inside the same `if`.",
    ),
}
