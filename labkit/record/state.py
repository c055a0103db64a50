"""RunState: the fold of a run's events, and what it says: progress, words, failure. Live charts, terminal, replay,
summary and tests all read the same state.

The state knows no clock. The present of a run is its newest recorded time (`now`), which the supervisor's samples move
forward, several times per second, while the ranks write nothing. A value derived from a state therefore depends on its
events alone, and is valid for as long as `revision` does not change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from labkit.common.units import ranks_in_words
from labkit.plan.spec import Spec
from labkit.record.failures import exit_code, failure_of
from labkit.record.fold import Fold
from labkit.record.sources import inferred, inferred_note
from labkit.record.types.reported import Hosts
from labkit.record.types.summary import Failure

OVER = ("finished", "failed", "stopped", "lost")
_TRAINS = ("training", "evaluating")  # any other activity of a rank is a preparation, in words

_Derived = TypeVar("_Derived")
_Arguments = ParamSpec("_Arguments")


def per_revision(
    compute: Callable[Concatenate[RunState, _Arguments], _Derived],
) -> Callable[Concatenate[RunState, _Arguments], _Derived]:
    """Computes `compute(state, …)` once per revision of the state and set of arguments, which must be hashable.

    All views share the returned object, so none of them may change it. It is stored in the state and lives as long.
    """

    @functools.wraps(compute)
    def known(state: RunState, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Derived:
        revision, key = state.revision, (compute, args, tuple(kwargs.items()))
        found = state.derived.get(key)
        if found is None or found[0] != revision:
            found = state.derived[key] = revision, compute(state, *args, **kwargs)
        return found[1]

    return known


def elapsed(start: float | None, end: float | None) -> float | None:
    """Seconds between two times of a run; None if one is unknown, or if they are reversed (older versions had no steady
    clock).
    """
    return end - start if start and end and end >= start else None


class RunState(Fold):
    """The state of a run, folded from its events with `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.derived: dict[Any, tuple[int, Any]] = {}  # cache of `per_revision`: revision and value

    # ---- the Spec, and the progress

    @property
    def asked(self) -> Spec | None:
        """The Spec of a run of a strategy; None for any other script, and for a Spec of a newer version."""
        return self._asked

    @property
    def world_size(self) -> int:
        """The number of ranks (processes), as requested or as observed; it changes when nodes join or leave."""
        if met := self.met:
            return len(met[-1]["hosts"])
        return self._asked.processes if self._asked else self.spec.get("nproc") or max(len(self.ranks), 1)

    @property
    def met(self) -> list[Hosts]:
        """When the ranks of several nodes met, in order, each time with the host of every rank."""
        return sorted((event for event in self.nodes if event["kind"] == "hosts"), key=lambda event: event["t"])

    @property
    def expected(self) -> int:
        """The number of ranks whose events are in this folder: all, or those of one node."""
        return self.status.get("ranks_here") or self.world_size

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run; None if only the script knows it."""
        return self._asked.total_steps if self._asked else None

    @property
    def step(self) -> int:
        """The number of steps that all ranks of this folder have finished in the newest attempt."""
        world = self.world_size
        ranks = [rank for number, rank in self.ranks.items() if number < world]  # others have left
        done = [int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0 for rank in ranks]
        return min(done) if len(done) == self.expected else 0

    @property
    def note(self) -> str:
        """Remarks: how the run differs from the strategy's title (such as emulation), how a script's samples are
        counted, and why the run started cold. Empty if there are none.
        """
        note = self._asked.strategy_row.note(self._asked.device) if self._asked else inferred_note(self.ranks)
        because = self.status.get("cold_because")
        return " ".join(part for part in (note, f"The run started cold: {because}." if because else "") if part)

    @property
    def over(self) -> bool:
        """Whether the run has ended, in any state."""
        return self.status.get("state") in OVER

    @property
    def words(self) -> str:
        """The state in words: ready, starting ranks, building an extension, training, …, finished, failed (…), lost
        (…)."""
        state: str = self.status.get("state", "ready")
        if state == "failed":
            return f"failed ({self._failure_words})"
        if state == "lost":
            return f"lost ({self.status.get('message')})"
        if self.queue is not None and self.queue["state"] not in ("RUNNING", "COMPLETING") and not self.over:
            reason = f": {self.queue['reason']}" if self.queue.get("reason") else ""
            return f"job {self.queue['job']} of Slurm is {self.queue['state'].lower()}{reason}"
        if state == "starting" and (waiting := self.status.get("waiting")):
            return waiting
        if state != "running":
            return {"starting": "starting ranks"}.get(state, state)
        activities = {rank.activity for rank in self.ranks.values()}
        if len(self.ranks) < self.expected or activities <= {None}:
            return "starting ranks"
        preparing = sorted(one for one in activities if one is not None and one not in _TRAINS)
        if preparing:
            return preparing[0]
        return "evaluating" if activities == {"evaluating"} else "training"

    @property
    def _failure_words(self) -> str:
        failure = self.failure
        if failure is None:
            return self.status.get("message") or "the ranks reported no reason"
        says = failure["type"] + (f": {failure['message']}" if failure["message"] else "")
        left = f"{ranks_in_words(failure['left'])} ended early with exit code 0; " if failure["left"] else ""
        return f"{left}{ranks_in_words(failure['alike'], self.world_size)}: {says}"

    @property
    def seconds(self) -> float | None:
        """Seconds from the request to the end of the run; None before the end, or if the recorded clock ran
        backwards."""
        return elapsed(self.status.get("started"), self.status.get("ended"))

    @property
    def now(self) -> float | None:
        """The time of the newest sample of the supervisor, in Unix seconds; None if there is none."""
        return float(self.system.t[-1]) if len(self.system.t) else None

    @property
    def replicas(self) -> float:
        """The number of ranks that train on the same samples: 1 under data parallelism, the world size under tensor
        parallelism.
        """
        return max(1.0, self.world_size / self._asked.data_ranks) if self._asked else 1.0

    def sample_weights(self) -> dict[int, float]:
        """By rank, the weight of its samples, so that each sample counts once (see sources.py)."""
        if self._asked is not None:
            return dict.fromkeys(self.ranks, 1 / self.replicas)
        readers, later_stages = inferred(self.ranks)
        alike = {rank: len(ranks) for ranks in readers for rank in ranks}
        return {rank: 0.0 if rank in later_stages else 1 / alike.get(rank, 1) for rank in self.ranks}

    def loss_at(self, index: int = -1) -> float | None:
        """The mean of the ranks' losses at a step index (each for its own part of the batch); None if no rank has
        one."""
        losses = []
        for rank in self.ranks.values():
            if -len(rank.steps) <= index < len(rank.steps) and not math.isnan(rank.steps.loss[index]):
                losses.append(rank.steps.loss[index])
        return sum(losses) / len(losses) if losses else None

    def metric(self, name: str) -> Any:
        """The newest value of a metric that the script logged; None if it logged none."""
        return self._newest_metrics.get(name)

    # ---- what went wrong

    @property
    def failure(self) -> Failure | None:
        """The first failure, see `failures.failure_of`; None if no rank failed."""
        return _failure(self)

    def exit_code(self, rank: int) -> int | None:
        """A rank's exit code, from its own last event or from torchrun's report; None if it was terminated with its
        group."""
        return exit_code(self.ranks, self.status, rank)


@per_revision
def _failure(state: RunState) -> Failure | None:
    return failure_of(state.ranks, state.status, state.over)
