"""From a RunState to causes: what went wrong or slowly, by which evidence, why, and the way out.

A rule is a function from the state to findings. `RULES` has them in the order of their weight: what explains a run that hangs or has
failed comes before the failure itself, what trains something else than was meant before what is only slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from labkit.analysis.diagnose import errors, hang, meeting, speed, training, unseen
from labkit.analysis.diagnose.finding import Finding
from labkit.common.units import ranks_in_words
from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.state import RunState

__all__ = ["NAMES", "RULES", "Finding", "findings"]


def findings(state: RunState) -> list[Finding]:
    """Every finding about a run, the gravest first. Never raises: a rule that cannot read what was recorded is named in one of them."""
    return list(_findings(state))


@per_revision
def _findings(state: RunState) -> tuple[Finding, ...]:
    found: list[Finding] = []
    unread: list[str] = []
    for rule in RULES:
        try:
            found += rule(state)
        except Exception as error:
            unread.append(f"{rule.__name__} ({type(error).__name__}: {error})")
    return (*found, *not_judged(unread))


def not_judged(unread: Sequence[str]) -> Iterator[Finding]:
    """Rules that failed on what was recorded."""
    if unread:
        yield Finding(
            name="not_judged",
            kind="unseen",
            title=f"{len(unread)} of {len(RULES)} checks could not read what was recorded",
            evidence="; ".join(unread),
            cause="an event lacks a field or has one of another sort: changed by hand, or written by another version",
            fix="the other findings stand; what these checks look for has to be looked for by hand",
        )


def not_watched(state: RunState) -> Iterator[Finding]:
    """What the probe stopped measuring because a part of it failed: figures that follow from it stand still or are missing."""
    for lost in state.unwatched:
        yield Finding(
            name="not_watched",
            kind="unseen",
            title=f"the probe stopped watching {lost['part']} on rank {lost['rank']}",
            evidence=f"{lost['type']}: {lost['message']}",
            cause="a part of the probe failed; it says so once and stays off",
            fix="the training itself went on; the rank's events hold the traceback, as an event of kind probe_error",
            ranks=(lost["rank"],),
        )


def not_written(state: RunState) -> Iterator[Finding]:
    """Events that ranks could not write."""
    for rank, events in sorted(state.dropped.items()):
        yield Finding(
            name="not_written",
            kind="unseen",
            title=f"{events} events of rank {rank} could not be written",
            evidence="the rank's events say so, written after there was room on the disk again",
            cause="the disk that holds the run folder was full",
            fix="steps may be missing from every figure; free space on that disk, or set LABKIT_RUNS to a folder on another disk",
            ranks=(rank,),
        )


def not_readable(state: RunState) -> Iterator[Finding]:
    """Lines of the run folder that are no events: cut short, or written over."""
    if state.broken:
        yield Finding(
            name="not_readable",
            kind="unseen",
            title=f"{state.broken} of the run's events could not be read",
            evidence="lines under events/ or in system.jsonl that are cut short, or no events",
            cause="the folder was cut short, changed by hand, or written by another version",
            fix="what could be read is shown; copy the run folder again if it came from elsewhere",
        )


def not_there(state: RunState) -> Iterator[Finding]:
    """Ranks of which a run that is over has left no event."""
    missing = tuple(rank for rank in range(state.world_size) if rank not in state.ranks)
    if state.over and missing and (state.ranks or state.status["state"] == "finished"):
        yield Finding(
            name="not_there",
            kind="unseen",
            title=f"nothing is recorded of {ranks_in_words(missing)}",
            evidence=f"{len(state.ranks)} of {state.world_size} ranks have events",
            cause="such a rank ended before it began to train, or its file under events/ is missing",
            fix="what the others recorded is shown; figures over all ranks are those of the ranks that are there",
            ranks=missing,
        )


def cut_short(state: RunState) -> Iterator[Finding]:
    """Ranks of a run that came to its end, whose events break off before those of the others."""
    if state.status.get("state") != "finished":
        return
    last = {rank.rank: int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0 for rank in state.ranks.values()}
    most = max(last.values(), default=0)
    short = tuple(number for number, step in sorted(last.items()) if step < most and state.ranks[number].ended is None)
    if short:
        yield Finding(
            name="cut_short",
            kind="unseen",
            title=f"the events of {ranks_in_words(short)} break off, and the run went on",
            evidence=f"last step by rank: {', '.join(f'{number}: {last[number]}' for number in short)}; the others: {most}; and no end",
            cause="the file was cut short, or the disk was full while it was written",
            fix="what is there is shown; copy the run folder again if it came from elsewhere",
            ranks=short,
        )


RULES: tuple[Callable[[RunState], Iterator[Finding]], ...] = (
    errors.told_by_an_error,
    errors.out_of_memory,
    meeting.uneven_inputs,
    meeting.evaluation_on_one_rank,
    meeting.mismatch,
    meeting.left_early,
    hang.hang,
    errors.first_failure,
    training.same_samples,
    training.no_set_epoch,
    training.nan_loss,
    training.loss_differs,
    training.one_file,
    speed.input_bound,
    speed.straggler,
    speed.communication_bound,
    speed.small_buckets,
    speed.synchronised,
    speed.one_unit,
    speed.activations,
    unseen.trains_elsewhere,
    unseen.trains_beside,
    not_watched,
    not_there,
    cut_short,
    not_written,
    not_readable,
)

# The names that findings can have: a rule is called as its finding; what is recognised by its error message has a name of its own, and
# `training.nan_loss` tells two cases apart.
NAMES: tuple[str, ...] = (
    *errors.NAMES,
    *(rule.__name__ for rule in RULES if rule is not errors.told_by_an_error),
    "loss_diverged",
    not_judged.__name__,
)
