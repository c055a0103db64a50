"""Exercises of labs 10, 12 and 23: checkpoints, restarts, why a run fails, and recovery without a restart."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.analysis.theory.failures import first_order_cost, first_order_interval
from labkit.common.units import size
from labkit.course.answers import Wrong, a_run, finished, number_of, numbers_of, require_function, require_run, source
from labkit.course.build import criteria
from labkit.course.build.criteria import SLACK, check_class, check_function, records_of, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise
from labkit.record.events import Epoch, Save
from labkit.record.writer import sent

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


# ---- lab 23: what recovery costs, the outer step of DiLoCo, and recovery within a step from a rank that is killed


# ---- samples that are lost


_LOSSES = ((8, 32, 3000, 1000, 20), (64, 16, 100, 50, 40), (4, 128, 1000, 10, 600))


def _samples(answer: Any) -> str:
    require_function(answer, "lost(replicas, samples, interval, restart, heal)")
    for case in _LOSSES:
        replicas, samples, interval, restart, heal = case
        call = f"lost{case}"
        given = numbers_of(call, ("samples lost with a restart", "with recovery"), answer, *case)
        wanted = replicas * samples * (interval / 2 + restart), samples * heal
        if not math.isclose(given[0], wanted[0], rel_tol=1e-6):
            words = "which replicas compute the steps since the checkpoint again, and which of them wait for a restart?"
            if math.isclose(given[0], replicas * samples * (interval + restart), rel_tol=1e-6):
                words = "a failure comes in the middle of an interval on average"
            raise Wrong(f"{call} returned {given[0]:,g} samples for a restart: {words}")
        if not math.isclose(given[1], wanted[1], rel_tol=1e-6):
            raise Wrong(f"{call} returned {given[1]:,g} samples for recovery: whose samples are missing meanwhile?")
    return "a restart costs every replica, recovery costs one: the ratio grows with the number of replicas"


# ---- the outer step of DiLoCo


_REPLICAS = 3
_MORE = 4  # rounds after a failure


def _ring(record: Record, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of all parameters among `ranks` ranks."""
    return sent("all_reduce", record.figures["parameters"], ranks)


def _diloco(answer: Any) -> str:
    check_class(answer, "of outer optimizers", ["model", "every", "rate", "momentum"])
    records = criteria.ended(records_of("without_restart", "outer_step", answer, _REPLICAS))
    every = records[0].figures["every"]
    for record in records:
        for step in record.steps():
            wanted, got = 0.0 if (step + 1) % every else _ring(record, _REPLICAS), record.sent(step)
            if got > wanted * (1 + SLACK):
                when = f"a step after which replicas {'do not meet' if not wanted else 'meet'}"
                raise Wrong(
                    f"bytes sent: in step {step}, {when}, rank {record.rank} sends {size(got)}, expected at most"
                    f" {size(wanted)}; every = {every}, and it calls {criteria.calls_in_words(record, step)}"
                )
    criteria.results(records)
    for step in range(every - 1, len(records[0].expected), every):
        _equal(records, step, [record.figures["digests"][step] for record in records], "parameters")
    total = sum(records[0].sent(step) for step in range(every))
    return (
        f"the replicas are equal bit by bit after every {every} steps, and a rank sends {size(total)} in these:"
        f" 1/{every} of what DDP sends"
    )


def _equal(records: Sequence[Record], step: int, digests: Sequence[str], what: str) -> None:
    for record, digest in zip(records, digests):
        if digest != digests[0]:
            raise Wrong(
                f"replicas: after step {step}, the {what} of rank {record.rank} are not those of rank"
                f" {records[0].rank}, bit by bit"
            )


# ---- recovery within a step


def _recovery(answer: Any) -> str:
    check_function(answer, ["model", "optimizer", "backward", "manager", "step"])
    records = criteria.ended(records_of("without_restart", "recovery", answer, _REPLICAS))
    figures = records[0].figures
    victim, kill, back = figures["victim"], figures["kill"], figures["back"]
    when = f"rank {victim} is killed in step {kill} and returns before step {back}"
    for record in records:
        if "unagreed" in record.figures:
            raise Wrong(
                f"update: in step {record.figures['unagreed']}, rank {record.rank} calls optimizer.step() without a"
                " vote of the quorum: another rank may have failed where this one succeeded (manager.commit)"
            )
        for step, calls in record.figures["backwards"].items():
            if calls != 1:
                raise Wrong(
                    f"computation: rank {record.rank} calls backward {calls} times in step {step} ({when}); its"
                    " gradients are still right when a peer fails, if you keep them"
                )
    steps = len(records[0].expected)
    if figures["updates"] != steps:
        raise Wrong(f"update: the quorum has agreed to {figures['updates']} updates, expected {steps}, one per step")
    if figures["rounds"] > 2 * steps + _MORE:
        raise Wrong(
            f"lighthouse: it was asked in {figures['rounds']} rounds, expected at most {2 * steps + _MORE}: a quorum"
            " and a vote per step, and again when a replica has failed"
        )
    try:
        criteria.results(records)
    except Wrong as wrong:
        raise Wrong(f"{wrong} ({when}){_hint_of_state(records, back)}") from None
    for step in range(steps):
        for record, moved, low, high, why in _traffic(records, step):
            bound = criteria.crossed(moved, low, high, size)
            if bound:
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(moved)}, expected {bound} ({why});"
                    f" {when}, and it calls {criteria.calls_in_words(record, step)}"
                )
        there = [record for record in records if str(step) in record.figures["digests"]]
        for what in there[0].figures["digests"][str(step)]:
            try:
                _equal(there, step, [record.figures["digests"][str(step)][what] for record in there], what)
            except Wrong as wrong:
                raise Wrong(f"{wrong} ({when}){_hint_of_state(records, back)}") from None
    return (
        f"{when}; the others went on in step {kill} with the mean of two, nobody computed anything twice, and rank"
        f" {victim} came back with all {size(figures['state'])} of the state, bit by bit"
    )


def _traffic(records: Sequence[Record], step: int) -> Iterator[tuple[Record, float, float, float, str]]:
    """For each rank that is there in a step: what it sends, the bounds of it, and what the larger one consists of."""
    figures = records[0].figures
    victim, kill, back = figures["victim"], figures["kill"], figures["back"]
    for record in records:
        if record.rank == victim and step < back:
            continue
        left = _REPLICAS - (kill <= step < back)
        low, why = _ring(record, left), f"an all-reduce of the gradients among {left}"
        high = low
        if step == kill:
            high, why = low + _ring(record, _REPLICAS), f"{why}, and an attempt among {_REPLICAS}"
        if step == back:
            high, why = low + figures["state"], f"{why}, and the state of a replica"
        yield record, record.sent(step), low, high, why


def _hint_of_state(records: Sequence[Record], back: int) -> str:
    """What of the state the rank that is back does not have, after its first step."""
    digests = [record.figures["digests"].get(str(back)) for record in records]
    known = [digest for digest in digests if digest is not None]
    differ = [what for what in ("buffers", "optimizer state") if len({digest[what] for digest in known}) > 1]
    if not differ or len(known) < len(records):
        return ""
    return f"; after step {back}, the returning rank lacks the {' and the '.join(differ)} of its peers"


EXERCISES |= {
    "without_restart.samples": Exercise(
        "What a failure costs",
        _samples,
        "`return replicas * samples * (interval / 2 + restart), samples * heal`: with a restart, all replicas compute"
        " half an interval again and wait; with recovery, one replica is missing for `heal` steps.",
    ),
    "without_restart.diloco": Exercise(
        "The outer step of DiLoCo", _diloco, solution("without_restart", "DiLoCo"), runs="code"
    ),
    "without_restart.recovery": Exercise(
        "Recovery within a step",
        _recovery,
        solution("without_restart", "recover", "heal"),
        given="replica.py",
        runs="code",
    ),
}
