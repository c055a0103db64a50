"""Findings: what went wrong in a run, or made it slow, each with its evidence, cause and fix.

A rule is a function from the RunState to findings. `RULES` lists the rules from most to least severe: the explanation
of a hang or a failure comes before the failure itself, and incorrect training comes before slow training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from labkit.analysis.diagnose import errors, hang, known_errors, looks, speed, training
from labkit.analysis.diagnose.finding import Finding
from labkit.common.units import counted, ranks_in_words
from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.state import RunState

__all__ = ["NAMES", "RULES", "Finding", "findings"]

_MISSING_NAME = "MissingName"  # the type of a `probe_error` if torch lacks a name (see probe/torch_private.py)


@per_revision
def findings(state: RunState) -> tuple[Finding, ...]:
    """All findings about a run, the most severe first; of an imported run, those about the files it was made from.

    They follow from the events alone: also what a rule says about time, such as the seconds of a hang, is measured by
    recorded times. Never raises: rules that cannot read the recorded events are named in a separate finding,
    `not_judged`.
    """
    if state.imported:
        told = [
            Finding(**structs.asdict(finding) | {"ranks": tuple(finding.ranks)}) for finding in state.imported.findings
        ]
        return (*told, *not_readable(state))
    found: list[Finding] = []
    unread: list[str] = []
    for rule in RULES:
        try:
            found += rule(state)
        except Exception as error:
            unread.append(f"{rule.__name__} ({type(error).__name__}: {error})")
    return (*found, *not_judged(unread))


def not_judged(unread: Sequence[str]) -> Iterator[Finding]:
    """Rules that raised an exception on the recorded events."""
    if unread:
        yield Finding(
            name="not_judged",
            kind="unseen",
            title=f"{len(unread)} of {len(RULES)} checks could not read the recorded events",
            evidence="; ".join(unread),
            cause="an event lacks a field, or a field has the wrong type: it was edited by hand, or written by another "
            "version of labkit",
            fix="open the run with the version of labkit that recorded it, or check these points by hand; the other "
            "findings are valid",
        )


def not_watched(state: RunState) -> Iterator[Finding]:
    """Parts of the probe that stopped recording: figures derived from them are frozen or missing."""
    ranks_of: dict[tuple[str, str, str], list[int]] = {}
    for lost in state.unwatched:
        ranks_of.setdefault((lost.part, lost.type, lost.message), []).append(lost.rank)
    for (part, kind, message), ranks in ranks_of.items():
        missing = kind == _MISSING_NAME
        yield Finding(
            name="not_watched",
            kind="unseen",
            title=f"the probe {'lacks' if missing else 'stopped recording'} {part} on {ranks_in_words(ranks)}",
            evidence=message if missing else f"{kind}: {message}",
            cause=(
                "the probe relies on a name that this version of torch or Python does not have"
                if missing
                else "this part of the probe raised an exception, so it was switched off for the rest of the run"
            ),
            fix=(
                "update torch if it is old, otherwise labkit; the training and the other figures were not affected"
                if missing
                else f"read the traceback in events/rank{ranks[0]}.jsonl (kind probe_error); the training itself was "
                "not affected"
            ),
            ranks=tuple(ranks),
        )


def not_written(state: RunState) -> Iterator[Finding]:
    """Events that a rank could not write."""
    for rank, events in sorted(state.dropped.items()):
        yield Finding(
            name="not_written",
            kind="unseen",
            title=f"{events} events of rank {rank} could not be written",
            evidence="the rank recorded the number of lost events once the disk had free space again",
            cause="the disk that holds the run folder was full",
            fix="free space on that disk, or set LABKIT_RUNS to a folder on another disk; steps may be missing from "
            "every figure",
            ranks=(rank,),
        )


def not_reported(state: RunState) -> Iterator[Finding]:
    """A TrainJob whose status server did not take the progress of the run."""
    if state.unreported:
        yield Finding(
            name="not_reported",
            kind="unseen",
            title="progress and metrics did not arrive in the status of the TrainJob",
            evidence=state.unreported,
            cause="the pod has the variables of Kubeflow Trainer's status server, and the server cannot be reached or"
            " does not accept its token or certificate",
            fix="check the feature gate TrainJobStatus and the log of the Trainer controller, and that no network"
            " policy closes its port; the training was not affected",
        )


def not_readable(state: RunState) -> Iterator[Finding]:
    """Lines of the run folder that are not valid events: truncated or overwritten."""
    if state.broken:
        yield Finding(
            name="not_readable",
            kind="unseen",
            title=f"{counted(state.broken, 'line')} of the run's events could not be read",
            evidence="lines under events/ or in system.jsonl are truncated or are not valid events",
            cause="the folder was copied incompletely, edited by hand, or written by another version of labkit",
            fix="copy the run folder again if it came from another machine; everything that could be read is shown",
        )


def not_there(state: RunState) -> Iterator[Finding]:
    """Ranks without any event in a run that is over."""
    missing = tuple(rank for rank in range(state.world_size) if rank not in state.ranks)
    if state.over and len(state.ranks) < state.expected and (state.ranks or state.status.state == "finished"):
        yield Finding(
            name="not_there",
            kind="unseen",
            title=f"{ranks_in_words(missing)} recorded no events",
            evidence=f"{len(state.ranks)} of {state.world_size} ranks have events",
            cause="the rank exited before it started to train, or its file under events/ is missing",
            fix="read the stderr of that rank, or copy the run folder again if a file is missing; totals cover only "
            "the ranks with events",
            ranks=missing,
        )


def cut_short(state: RunState) -> Iterator[Finding]:
    """Ranks of a finished run whose events end before those of the other ranks."""
    if state.status.state != "finished":
        return
    last = {number: rank.steps_done for number, rank in state.ranks.items()}
    most = max(last.values(), default=0)
    short = tuple(number for number, step in sorted(last.items()) if step < most and state.ranks[number].ended is None)
    if short:
        yield Finding(
            name="cut_short",
            kind="unseen",
            title=f"the events of {ranks_in_words(short)} end early, although the run continued",
            evidence=f"last step by rank: {', '.join(f'{number}: {last[number]}' for number in short)}; other ranks: "
            f"{most}; no end event",
            cause="the file was copied incompletely, or the disk was full while it was written",
            fix="copy the run folder again if it came from another machine; the figures show what was recorded",
            ranks=short,
        )


RULES: tuple[Callable[[RunState], Iterator[Finding]], ...] = (
    errors.known_error,
    errors.out_of_memory,
    looks.extra_collective,
    errors.uneven_inputs,
    errors.evaluation_on_one_rank,
    errors.mismatch,
    errors.left_early,
    hang.cut_off,
    hang.hang,
    errors.first_failure,
    *looks.RULES,
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
    speed.uneven_experts,
    training.trains_elsewhere,
    training.trains_beside,
    not_watched,
    not_there,
    cut_short,
    not_written,
    not_reported,
    not_readable,
)

# All names of findings. A rule has the name of its finding, except that `errors.known_error` yields one name per error
# message and `training.nan_loss` distinguishes two cases.
NAMES: tuple[str, ...] = (
    *known_errors.NAMES,
    *(rule.__name__ for rule in RULES if rule is not errors.known_error),
    "loss_diverged",
    not_judged.__name__,
)
