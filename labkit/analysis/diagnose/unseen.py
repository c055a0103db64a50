"""Training that the probe could not record: without these findings, such a run would have no figures and no
explanation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.analysis.diagnose.finding import Finding
from labkit.common.units import counted, ranks_in_words
from labkit.record.events import Gradients, StartedProcess, Thread

if TYPE_CHECKING:
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState

_PATIENCE = 30.0  # seconds that a rank which started processes has to start training itself
_SHOWN = 3


def trains_elsewhere(state: RunState) -> Iterator[Finding]:
    """Ranks without a step whose script started other processes, or computed gradients but never updated parameters,
    unless an error ended it before that."""
    idle: dict[bool, list[RankState]] = {}
    for rank in state.ranks.values():
        if len(rank.steps):
            continue
        over = state.over or rank.ended is not None
        if started := rank.seen(StartedProcess):
            if over or (state.now or rank.started or 0.0) - started[0].t > _PATIENCE:
                yield _processes(rank, started)
        elif over and state.failure is None and (seen := rank.seen(Gradients)):
            idle.setdefault(seen[-1].scaler_steps > 0, []).append(rank)
    for skipped, ranks in idle.items():
        yield _gradients(ranks, skipped)


def trains_beside(state: RunState) -> Iterator[Finding]:
    """Threads that train at the same time as the thread whose steps are recorded."""
    for rank in state.ranks.values():
        names = [thread.name for thread in rank.seen(Thread)]
        if names:
            yield Finding(
                name="trains_beside",
                kind="unseen",
                title=(
                    f"{counted(len(names), 'training thread')} of rank {rank.rank} "
                    f"{'is' if len(names) == 1 else 'are'} not recorded"
                ),
                evidence=f"backward was also called in {_listed(names)}",
                cause=(
                    "the probe follows one thread per rank: the first that calls backward, then the next one when "
                    "that thread has ended"
                ),
                fix="run each training loop in a separate process, started with torchrun, to record the steps of each",
                ranks=(rank.rank,),
            )


def _processes(rank: RankState, started: list[StartedProcess]) -> Finding:
    targets = [f"{process.target} ({process.how})" for process in started]
    return Finding(
        name="trains_elsewhere",
        kind="unseen",
        title=(
            f"rank {rank.rank} recorded no training step: its script started {counted(len(started), 'process', 'es')}"
        ),
        evidence=f"processes started: {_listed(targets)}; optimizer steps in the rank itself: 0",
        cause="the probe records the processes that torchrun starts, not those that a script starts itself",
        fix=(
            "let torchrun start the workers: run the script with --nproc N, and replace "
            "torch.multiprocessing.spawn(train, nprocs=N) with train(int(os.environ['LOCAL_RANK']))"
        ),
        ranks=(rank.rank,),
    )


def _gradients(ranks: list[RankState], skipped: bool) -> Finding:
    """Ranks that computed gradients; `skipped`: for each of them a GradScaler was asked to step."""
    seen = [rank.seen(Gradients)[-1] for rank in ranks]
    numbers = [rank.rank for rank in ranks]
    scaler = f"; calls of GradScaler.step: {max(gradients.scaler_steps for gradients in seen)}" if skipped else ""
    return Finding(
        name="trains_elsewhere",
        kind="wrong" if skipped else "unseen",
        title=(
            f"{ranks_in_words(numbers)}: the GradScaler skipped every step"
            if skipped
            else f"{ranks_in_words(numbers)} recorded no training step: gradients were computed, but no parameter "
            "changed"
        ),
        evidence=f"calls of backward: {max(gradients.backwards for gradients in seen)}{scaler}; optimizer steps: 0; "
        "parameter updates after backward: 0",
        cause=(
            "the scaled gradients were infinite or NaN in every step: the loss is not finite, or the scale stays so "
            "large that float16 overflows"
            if skipped
            else "a step is optimizer.step() or a parameter update after backward; the script did neither"
        ),
        fix=(
            "print loss and scaler.get_scale(): if the loss is finite, use a smaller init_scale or the default "
            "backoff_factor of GradScaler, or bfloat16 without a scaler"
            if skipped
            else "call optimizer.step() after backward; if the script updates tensors in another way, use a "
            "torch.optim.Optimizer instead"
        ),
        ranks=tuple(numbers),
    )


def _listed(words: list[str]) -> str:
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
