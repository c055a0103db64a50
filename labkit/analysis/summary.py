"""The figures of a run in one record: `run --json`, `summary.json`, the table below a notebook's
panel."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from labkit.analysis.diagnose import findings
from labkit.analysis.guess import outcomes as guess_outcomes
from labkit.analysis.ledger import ledger
from labkit.analysis.metrics import efficiency, gil_wait, phase_seconds, replica_figures, step_seconds, step_seconds_p95
from labkit.analysis.prediction import outcomes
from labkit.analysis.profiled import overlap
from labkit.common.units import counted
from labkit.record.documents import (
    SUMMARY,
    Communication,
    Durations,
    NodesFigures,
    RankFigures,
    Summary,
    Unreadable,
    UnreadableRun,
)
from labkit.record.events import Hosts
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.ranks import RankState
from labkit.record.state import RunState, elapsed, per_revision
from labkit.record.writer import OWNERS


@per_revision
def summarise(state: RunState, run: str = "") -> Summary:
    """The figures of the run `run` so far: bytes, seconds, samples per second. Unknown values are None.

    Steps that count, and what is a median, are defined in `metrics`. All views share the record, so none may change it.
    """
    first = [rank.steps.t[0] for rank in state.ranks.values() if len(rank.steps)]
    speed = efficiency(state)
    devices = sorted({rank.device.split(":")[0] for rank in state.ranks.values()})
    return Summary(
        v=SUMMARY,
        run=run,
        state=state.status.state,
        strategy=state.spec.strategy,
        workload=state.spec.workload,
        script=state.spec.script,
        world_size=state.world_size,
        device=devices[0] if devices else state.spec.device,
        steps=state.step,
        seconds=Durations(
            total=_rounded(state.seconds),
            to_first_step=None if state.imported else _rounded(elapsed(state.status.started, max(first, default=None))),
        ),
        samples_per_second=_rounded(speed.samples_per_second),
        tokens_per_second=_rounded(speed.tokens_per_second),
        flops_per_device=_rounded(speed.flops_per_device),
        mfu=_rounded(speed.mfu, 6),
        mfu_missing=speed.mfu_missing,
        loss=_rounded(state.loss_at(), 6),
        accuracy=state.metric("accuracy"),
        start=state.status.start,
        restarts=state.status.restarts,
        nodes=node_changes(state),
        failure=state.failure,
        broken_lines=state.broken,
        ranks=[_rank(state, number) for number in state.listed_ranks],
        note=state.note,
        replicas=replica_figures(state),
        gil_wait=_rounded(gil_wait(state)),
        ledger=[entry.recorded() for entry in ledger(state)],
        findings=[finding.recorded() for finding in findings(state)],
        prediction=[outcome.recorded() for outcome in outcomes(state)],
        guess=[outcome.recorded() for outcome in guess_outcomes(state)] if state.guess else [],
    )


def _rank(state: RunState, number: int) -> RankFigures:
    rank = state.ranks.get(number) or RankState(number)
    return RankFigures(
        rank=number,
        exit_code=state.exit_code(number),
        peak_memory_bytes=rank.peak_memory,
        memory_bytes={owner: rank.owners[owner] for owner in OWNERS if owner in rank.owners},
        step_seconds_median=_rounded(step_seconds(state, number), 6),
        step_seconds_p95=_rounded(step_seconds_p95(state, number), 6),
        phase_seconds={phase: _rounded(seconds, 6) for phase, seconds in phase_seconds(state, number).items()},
        comm_bytes_per_step=rank.bytes_per_step,
        communication=_communication(rank),
    )


def _communication(rank: RankState) -> Communication | None:
    """Of the newest profiled step: seconds of communication, exposed seconds, and the share that was overlapped by
    compute."""
    if rank.timeline is None or rank.timeline.calls_only:
        return None
    under_way, exposed = overlap(rank.timeline)
    return Communication(
        step=rank.timeline.step,
        seconds=_rounded(under_way, 6),
        open_seconds=_rounded(exposed, 6),
        hidden=_rounded(1 - min(1.0, exposed / under_way) if under_way else None),
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def recorded_summary(folder: RunFolder, progress: Callable[[float], None] = lambda share: None) -> Summary:
    """The figures as written at the end of the run; of a run that is under way, the current ones. `progress` is that of
    `Follower`."""
    try:
        if recorded := folder.read_summary():
            return recorded
    except Unreadable:
        pass  # recompute an invalid or older summary from the events
    follower = Follower(folder, progress)
    follower.poll()
    return summarise(follower.state, folder.name)


def summary_or_reason(
    folder: RunFolder, progress: Callable[[float], None] = lambda share: None
) -> Summary | UnreadableRun:
    """The figures of a run, or the reason its folder cannot be read."""
    try:
        folder.require_readable()
        return recorded_summary(folder, progress)
    except Unreadable as error:
        return UnreadableRun(folder.name, error.reason)


# ---- nodes that meet and leave


@per_revision
def node_changes(state: RunState) -> list[NodesFigures]:
    """The changes in order, each once, although every node reports it in its own folder; empty with one node."""
    found: list[NodesFigures] = []
    for event in sorted(state.nodes, key=lambda event: event.t):
        seconds = elapsed(state.status.started, event.t)
        change = NodesFigures(
            seconds=None if seconds is None else round(seconds, 3),
            what="met" if isinstance(event, Hosts) else "cut off",
            hosts=list(dict.fromkeys(event.hosts.values())),
            ranks=len(event.hosts),
        )
        if not found or replace(change, seconds=None) != replace(found[-1], seconds=None):
            found.append(change)
    return found


def nodes_in_words(state: RunState) -> str:
    """`2 nodes met (5.8 s), b cut off (9.0 s), 1 node met (14.2 s)`; empty if nothing changed after they met."""
    changes = node_changes(state)
    said = [
        (counted(len(event.hosts), "node") if event.what == "met" else ", ".join(event.hosts))
        + f" {event.what}"
        + ("" if event.seconds is None else f" ({event.seconds:.1f} s)")
        for event in changes
    ]
    return ", ".join(said) if len(said) > 1 else ""
