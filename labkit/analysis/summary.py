"""The figures of a run in one dict of plain values: `run --json`, `summary.json`, the table below a notebook's
panel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from labkit.analysis.diagnose import findings
from labkit.analysis.efficiency import efficiency
from labkit.analysis.guess import outcomes as guess_outcomes
from labkit.analysis.ledger import ledger
from labkit.analysis.metrics import gil_wait, phase_seconds, replica_figures, step_seconds, step_seconds_p95
from labkit.analysis.nodes import node_changes
from labkit.analysis.prediction import outcomes
from labkit.analysis.profiled import overlap
from labkit.record.columns import RankState
from labkit.record.documents import Unreadable
from labkit.record.events import OWNERS
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState, elapsed, per_revision
from labkit.record.types.summary import VERSION, Communication, RankFigures, Summary, UnreadableRun


@per_revision
def summarise(state: RunState, run: str = "") -> Summary:
    """The figures of the run `run` so far: bytes, seconds, samples per second. Unknown values are None.

    Steps that count, and what is a median, are defined in `metrics`. All views share the dict, so none may change it.
    """
    started = state.status.get("started")
    first = [rank.steps.t[0] for rank in state.ranks.values() if len(rank.steps)]
    speed = efficiency(state)
    devices = sorted({rank.device.split(":")[0] for rank in state.ranks.values()})
    figures: Summary = {
        "v": VERSION,
        "run": run,
        "state": state.status.get("state", "ready"),
        "strategy": state.spec.get("strategy"),
        "workload": state.spec.get("workload"),
        "script": state.spec.get("script"),
        "world_size": state.world_size,
        "device": devices[0] if devices else state.spec.get("device"),
        "steps": state.step,
        "seconds": {
            "total": _rounded(state.seconds),
            "to_first_step": _rounded(elapsed(started, max(first, default=None))),
        },
        "samples_per_second": _rounded(speed.samples_per_second),
        "tokens_per_second": _rounded(speed.tokens_per_second),
        "flops_per_device": _rounded(speed.flops_per_device),
        "mfu": _rounded(speed.mfu, 6),
        "mfu_missing": speed.mfu_missing,
        "loss": _rounded(state.loss_at(), 6),
        "accuracy": state.metric("accuracy"),
        "start": state.status.get("start", "cold"),
        "restarts": state.status.get("restarts", 0),
        "failure": state.failure,
        "broken_lines": state.broken,
        "ranks": [_rank(state, number) for number in range(state.world_size)],
        "note": state.note,
        "replicas": replica_figures(state),
        "gil_wait": _rounded(gil_wait(state)),
        "ledger": [entry.to_json() for entry in ledger(state)],
        "findings": [finding.to_json() for finding in findings(state)],
    }
    if nodes := node_changes(state):
        figures["nodes"] = nodes
    if state.prediction:
        figures["prediction"] = [outcome.to_json() for outcome in outcomes(state)]
    if state.guess:
        figures["guess"] = [outcome.to_json() for outcome in guess_outcomes(state)]
    return figures


def _rank(state: RunState, number: int) -> RankFigures:
    rank = state.ranks.get(number) or RankState(number)
    return {
        "rank": number,
        "exit_code": state.exit_code(number),
        "peak_memory_bytes": rank.peak_memory,
        "memory_bytes": {owner: rank.owners[owner] for owner in OWNERS if owner in rank.owners},
        "step_seconds_median": _rounded(step_seconds(state, number), 6),
        "step_seconds_p95": _rounded(step_seconds_p95(state, number), 6),
        "phase_seconds": {phase: _rounded(each, 6) for phase, each in phase_seconds(state, number).items()},
        "comm_bytes_per_step": rank.bytes_per_step,
        "communication": _communication(rank),
    }


def _communication(rank: RankState) -> Communication | None:
    """Of the newest profiled step: seconds of communication, exposed seconds, and the share that was overlapped by
    compute.
    """
    one = rank.timeline
    if one is None:
        return None
    under_way, exposed = overlap(one)
    hidden = 1 - min(1.0, exposed / under_way) if under_way else None
    return {
        "step": one["step"],
        "seconds": _rounded(under_way, 6),
        "open_seconds": _rounded(exposed, 6),
        "hidden": _rounded(hidden),
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def recorded_summary(folder: RunFolder, progress: Callable[[float], None] = lambda share: None) -> Summary:
    """The figures as written at the end of the run; of a run that is under way, the current ones. `progress` is that of
    `Follower`."""
    try:
        if recorded := RunFolder.read_json(folder.summary):
            return cast(Summary, recorded)
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
        return {"run": folder.name, "state": "unreadable", "reason": error.reason}
