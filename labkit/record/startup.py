"""The start of a run: the milestones that each rank has reached before its first step, and after how many seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labkit.record.ranks import RankState
from labkit.record.state import RunState, elapsed, per_revision

# In the order in which a script usually reaches them. Those in `writer.STARTUP` are missing if a script never reaches
# them, and in runs of versions that did not record them.
MILESTONES = {
    "agent": "torchrun started",
    "process": "process started",
    "torch": "torch imported",
    "group": "group formed",
    "data": "data ready",
    "batch": "first batch",
    "step": "first step",
}


@per_revision
def milestones(state: RunState) -> Mapping[int, Mapping[str, float]]:
    """By rank (including ranks that have not started), the seconds from the request of the run to each reached
    milestone.
    """
    agent = state.status.agent_began
    return {
        number: _reached(state, state.ranks.get(number) or RankState(number), agent)
        for number in range(state.world_size)
    }


def _reached(state: RunState, rank: RankState, agent: float | None) -> dict[str, float]:
    first = rank.steps.t[rank.first_step] if len(rank.steps) > rank.first_step else None
    times = {"agent": agent, "process": rank.began, "torch": rank.started, **rank.startup, "step": first}
    found = {name: elapsed(state.status.started, times.get(name)) for name in MILESTONES}
    return {name: float(seconds) for name, seconds in found.items() if seconds is not None}


def is_starting(state: RunState) -> bool:
    """Whether a rank of a requested run has not finished its first step, even if the run has ended."""
    return (
        state.status.state != "ready"
        and not state.imported
        and any("step" not in reached for reached in milestones(state).values())
    )


def newest(state: RunState) -> str | None:
    """The milestone that was reached last, on any rank; None before the first."""
    of_ranks = milestones(state).values()
    names = [name for name in MILESTONES if any(name in reached for reached in of_ranks)]
    return max(names, key=lambda name: max(_seconds(of_ranks, name)), default=None)


def in_words(state: RunState) -> str:
    """How far a run has started: `torch imported on 1 of 2 ranks (3.1 s)`; empty before the first milestone, and once
    all ranks train."""
    name = newest(state) if is_starting(state) else None
    if name is None:
        return ""
    seconds = _seconds(milestones(state).values(), name)
    ranks = f" on {len(seconds)} of {state.world_size} ranks" if state.world_size > 1 and name != "agent" else ""
    return f"{MILESTONES[name]}{ranks} ({max(seconds):.1f} s)"


def _seconds(of_ranks: Iterable[Mapping[str, float]], name: str) -> list[float]:
    return [reached[name] for reached in of_ranks if name in reached]


def table(state: RunState) -> list[tuple[str, ...]]:
    """Rows of texts, a header and one per rank: the seconds of every milestone, `…` for one not reached yet.

    A skipped milestone, before others that were reached, is shown as `–`: the script may never reach it.
    """
    found = milestones(state)
    shown = [
        name
        for name in MILESTONES
        if name == "step" or any(name in reached for reached in found.values()) or not state.over
    ]
    rows = [("rank", *(MILESTONES[name] for name in shown))]
    return rows + [(str(number), *_cells(reached, shown, state.over)) for number, reached in found.items()]


def _cells(reached: Mapping[str, float], shown: list[str], over: bool) -> list[str]:
    last = max((index for index, name in enumerate(shown) if name in reached), default=-1)
    return [
        f"{reached[name]:.1f} s" if name in reached else "–" if over or index < last else "…"
        for index, name in enumerate(shown)
    ]
