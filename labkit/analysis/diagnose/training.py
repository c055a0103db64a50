"""Runs that train, but not what was intended (samples, losses, checkpoints), or where the probe cannot record it:
without these findings, such a run would have no figures and no explanation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy

from labkit.analysis.diagnose.finding import DDP, Finding, one_of
from labkit.analysis.diagnose.looks import separate_ranks, synchronised
from labkit.analysis.metrics import median
from labkit.common.units import counted, listed, ranks_in_words
from labkit.record.events import Batch, Epoch, Gradients, Input, Loader, NotFinite, Save, StartedProcess, Thread

if TYPE_CHECKING:
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState


_APART = 1e-4  # relative difference of losses that rounding does not explain
_EXPLODED = 100.0  # times the usual loss
_BEFORE = 200  # losses before the first non-finite one, which define the usual loss
_SHOWN = 4


def same_samples(state: RunState) -> Iterator[Finding]:
    """Ranks that get the same batches although each should get a different one."""
    by_step: dict[int, dict[int, str]] = defaultdict(dict)
    for rank in state.ranks.values():
        for batch in rank.seen(Batch):
            by_step[batch.step][rank.rank] = batch.digest
    whole = {step: digests for step, digests in by_step.items() if len(digests) == state.world_size}
    groups = [] if state.asked else [[rank.rank for rank in ranks] for ranks in synchronised(state)]
    if any(len(ranks) < state.world_size for ranks in groups):
        yield from _same_in_a_group(state, groups, whole)
        return
    expected = state.world_size if groups else _expected_batches(state)
    if expected < 2 or not whole or not all(len(set(digests.values())) < expected for digests in whole.values()):
        return
    step, digests = min(whole.items())
    twins: dict[str, list[int]] = defaultdict(list)
    for number, digest in sorted(digests.items()):
        twins[digest].append(number)
    alike = max(twins.values(), key=len)
    streams = any(loader.streams for rank in state.ranks.values() for loader in rank.seen(Loader)[:1])
    yield Finding(
        name="same_samples",
        title=f"{ranks_in_words(alike)} train on the same samples",
        evidence=f"their batches were identical in all {counted(len(whole), 'recorded step')}, from step {step} on; "
        f"{counted(len(set(digests.values())), 'different batch', 'es')} per step, expected {expected}",
        cause=(
            "each rank iterates over its own copy of an IterableDataset from the beginning"
            if streams
            else "without a DistributedSampler every rank draws from the whole data set, and with the same seed in the "
            "same order"
        ),
        fix=(
            "let each rank skip the samples of the others: itertools.islice(samples, rank, None, ranks)"
            if streams
            else "pass sampler=DistributedSampler(dataset) to the DataLoader, and remove shuffle=True from it"
        ),
        ranks=tuple(alike),
    )


def _same_in_a_group(state: RunState, groups: list[list[int]], batches: dict[int, dict[int, str]]) -> Iterator[Finding]:
    """The same where only some of the ranks average their gradients: these must get different batches, or else other
    inputs of their models in a script without a DataLoader."""
    by_step = batches or _inputs(state)
    for ranks in groups:
        alike = [step for step, digests in by_step.items() if len({digests[rank] for rank in ranks}) == 1]
        elsewhere = [step for step in alike if len(set(by_step[step].values())) > 1]
        if len(ranks) < 2 or not elsewhere or len(alike) < len(by_step):
            continue
        yield Finding(
            name="same_samples",
            title=f"{ranks_in_words(ranks)} average their gradients, and train on the same samples",
            evidence=f"their samples were identical in all {counted(len(alike), 'recorded step')}, from step "
            f"{min(alike)} on, and differ from those of other ranks, with which they average nothing",
            cause="DDP got the process group of ranks that share their samples, such as those of tensor parallelism, "
            "and not of those that hold the same part of the model",
            fix="pass DDP the group over which the samples are divided: process_group=mesh['dp'].get_group()",
            ranks=tuple(ranks),
        )
        return


def _inputs(state: RunState) -> dict[int, dict[int, str]]:
    """By step and rank the digests of the models' inputs, in the steps in which all ranks have one."""
    by_step: dict[int, dict[int, str]] = defaultdict(dict)
    for rank in state.ranks.values():
        for given in rank.seen(Input):
            if given.digest:
                by_step[given.step][rank.rank] = given.digest
    return {step: digests for step, digests in by_step.items() if len(digests) == state.world_size}


def _expected_batches(state: RunState) -> int:
    """Different batches that a step should have: by the Spec, or for any other script one per rank if all use DDP."""
    if state.asked is not None:
        return min(state.asked.data_ranks, state.world_size)
    wrapped = [model.name == DDP for rank in state.ranks.values() for model in rank.models[:1]]
    return state.world_size if wrapped and all(wrapped) else 1


def no_set_epoch(state: RunState) -> Iterator[Finding]:
    """A sampler that shuffles every epoch in the same order."""
    for rank in state.ranks.values():
        epochs = _training_epochs(rank)
        if len(epochs) < 2 or not epochs[0].shuffle or len({epoch.set for epoch in epochs}) > 1:
            continue
        yield Finding(
            name="no_set_epoch",
            title=f"rank {rank.rank} draws the samples in the same order in every epoch",
            evidence=f"rank {rank.rank}'s DistributedSampler started {len(epochs)} epochs with the same epoch number, "
            f"{epochs[0].set}",
            cause="the sampler shuffles by its seed and epoch number, and set_epoch was not called",
            fix="call sampler.set_epoch(epoch) at the start of each epoch",
            ranks=tuple(sorted(state.ranks)),
        )
        return


def _training_epochs(rank: RankState) -> list[Epoch]:
    """The epochs of the training sampler, which fed the first step; a validation sampler may well keep one order."""
    model = next(iter(rank.models), None)
    trains = next((number for number, event in enumerate(rank.saw) if event is model), len(rank.saw))
    before = [seen for seen in rank.saw[:trains] if isinstance(seen, Epoch)][-1:]
    after = [seen for seen in rank.saw[trains:] if isinstance(seen, Epoch)]
    return before + [epoch for epoch in after if before and epoch.sampler == before[0].sampler]


def nan_loss(state: RunState) -> Iterator[Finding]:
    """A loss that is not finite from some step on: it diverged on all ranks, or a gradient or the input of one rank was
    not finite."""
    found = {rank.rank: rank.not_finite for rank in state.ranks.values() if rank.not_finite is not None}
    if not found:
        return
    step = min(found.values())
    first = tuple(rank for rank, at in sorted(found.items()) if at == step)
    everyone = len(first) == state.world_size
    if step > 1 and _diverged(state, first, step):
        yield _divergence(state, first, step)
        return
    propagated = everyone and step > 1 and _expected_batches(state) > 1
    if propagated:
        parameters = _parameters_then(state, first, step)
        sure = f"; the parameters contain NaN before step {step}" if any(seen.nan for seen in parameters) else ""
        cause = (
            f"on all ranks at once: in step {step - 1} the gradient of at least one rank was not finite, and the"
            " all-reduce of "
        )
        cause += f"gradients propagated it to all{sure}"
    else:
        cause = (
            "the inputs, the weights or an overflow on this rank; the next gradient all-reduce propagates it to other"
            " ranks"
        )
    yield Finding(
        name="nan_loss",
        title=f"the loss is not finite from step {step} on, first on {ranks_in_words(first)}",
        evidence=f"{ranks_in_words(sorted(found))}: loss NaN or infinite"
        + (f"; the losses up to step {step - 1} were finite" if step > 1 else " in the first step"),
        cause=cause,
        fix="locate the operation with torch.autograd.set_detect_anomaly(True); then lower the learning rate, "
        f"{one_of(state, 'clip') or 'clip the gradients'}, or use bf16 instead of fp16",
        ranks=first,
    )


def _diverged(state: RunState, ranks: tuple[int, ...], step: int) -> bool:
    """Whether a loss that is not finite from `step` on, first on `ranks`, comes from finite updates that were too
    large.

    NaN in a gradient makes the next loss NaN while the losses before it look normal. A loss that diverges was many
    times larger than usual before, on every rank; or it becomes infinite on all ranks at once, or NaN although no
    parameter is.
    """
    before = [[abs(loss) for loss in _until(rank, step)[:-1] if math.isfinite(loss)] for rank in state.ranks.values()]
    if all(_exploded(sizes) for sizes in before if sizes) and any(before):
        return True
    if len(ranks) < state.world_size and state.replicas == 1:
        return False  # a single rank, because of its own samples or weights
    if any(math.isinf(_until(state.ranks[rank], step)[-1]) for rank in ranks):
        return True
    parameters = _parameters_then(state, ranks, step)
    return bool(parameters) and not any(seen.nan for seen in parameters)


def _parameters_then(state: RunState, ranks: tuple[int, ...], step: int) -> list[NotFinite]:
    """What the probe recorded about the parameters with which these ranks computed the non-finite loss of a step."""
    return [event for rank in ranks for event in state.ranks[rank].seen(NotFinite) if event.step == step]


def _exploded(sizes: list[float]) -> bool:
    return len(sizes) > 1 and sizes[-1] > _EXPLODED * max(1.0, median(sizes[:-1]))


def _until(rank: RankState, step: int) -> list[float]:
    """The last losses of the newest attempt, up to and including a step."""
    end = bisect_right(rank.steps.step, step, lo=rank.first_step)
    return [float(loss) for loss in rank.steps.loss[max(rank.first_step, end - _BEFORE) : end]]


def _divergence(state: RunState, ranks: tuple[int, ...], step: int) -> Finding:
    losses = _until(state.ranks[ranks[0]], step)
    shown = ", ".join(f"{loss:.4g}" for loss in losses[-_SHOWN:])
    first = step - len(losses[-_SHOWN:]) + 1
    parameters = _parameters_then(state, ranks, step)
    whole = "; no parameter contained NaN then" if parameters and not any(seen.nan for seen in parameters) else ""
    return Finding(
        name="loss_diverged",
        title=f"the loss diverged: {losses[-1]:g} from step {step} on, on {ranks_in_words(ranks, state.world_size)}",
        evidence=f"losses of rank {ranks[0]} in steps {first} to {step}: {shown}{whole}",
        cause="each update made the loss larger until it overflowed: the updates are too large for this loss, or the "
        "loss has no minimum; no single rank is the cause",
        fix="lower the learning rate, or increase it gradually over the first steps (warm-up); "
        f"{one_of(state, 'clip') or 'clip the gradients'}; check the sign of the loss",
        ranks=ranks,
    )


def loss_differs(state: RunState) -> Iterator[Finding]:
    """Ranks that split layers and must have the same loss, but do not."""
    if state.asked is None or state.asked.strategy_row.one_loss(state.asked) < 2:
        return
    together = state.asked.strategy_row.one_loss(state.asked)
    for first in range(0, state.world_size, together):
        ranks = [state.ranks[number] for number in range(first, first + together) if number in state.ranks]
        by_rank = [_losses(rank) for rank in ranks]
        for step in sorted(set(by_rank[0]).intersection(*by_rank[1:])) if by_rank else ():
            losses = [known[step] for known in by_rank]
            if max(losses) - min(losses) > _APART * max(abs(max(losses)), 1e-9):
                numbers = tuple(rank.rank for rank in ranks)
                yield Finding(
                    name="loss_differs",
                    title=(
                        f"{ranks_in_words(numbers)} have different losses from step {step} on, but must have the same"
                    ),
                    evidence=f"step {step}: " + ", ".join(f"{loss:.6f}" for loss in losses),
                    cause="ranks that split layers must train on the same samples and start from the same weights",
                    fix="set the same seed on every rank before the model is built, and feed the same batch to all "
                    "ranks that split one layer",
                    ranks=numbers,
                )
                return


def _losses(rank: RankState) -> dict[int, float]:
    """The losses of the newest attempt, by step; steps without a loss are left out."""
    steps, losses = rank.steps.step[rank.first_step :].astype(int), rank.steps.loss[rank.first_step :]
    known = ~numpy.isnan(losses)
    return dict(zip(steps[known].tolist(), losses[known].tolist()))


def one_file(state: RunState) -> Iterator[Finding]:
    """Several ranks that wrote the same file in one step."""
    writers: dict[tuple[str | None, str, int], set[int]] = defaultdict(set)
    for rank in state.ranks.values():
        for save in rank.seen(Save):
            writers[rank.host, save.path, save.step].add(rank.rank)
    several = {key: ranks for key, ranks in writers.items() if len(ranks) > 1}
    if not several or next(separate_ranks(state), None):  # each of them is rank 0
        return
    (_, path, step), ranks = min(several.items(), key=lambda item: item[0][2])
    yield Finding(
        name="one_file",
        title=f"{ranks_in_words(sorted(ranks))} wrote the same file after step {step}",
        evidence=f"{path}, after step {step}"
        + (f", and {counted(len(several) - 1, 'more time')}" if len(several) > 1 else ""),
        cause=(
            "nothing coordinates the writes: the file contains what the last rank wrote, or a mixture of several ranks"
        ),
        fix="save on rank 0 only while the others wait at a barrier, or save one shard per rank with "
        "torch.distributed.checkpoint",
        ranks=tuple(sorted(ranks)),
    )


# ---- training that the probe could not record

_PATIENCE = 30.0  # seconds that a rank which started processes has to start training itself
_LISTED = 3


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
                title=f"{counted(len(names), 'training thread')} of rank {rank.rank} "
                f"{'is' if len(names) == 1 else 'are'} not recorded",
                evidence=f"backward was also called in {listed(names, _LISTED)}",
                cause="the probe follows one thread per rank: the first that calls backward, then the next one when "
                "that thread has ended",
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
        evidence=f"processes started: {listed(targets, _LISTED)}; optimizer steps in the rank itself: 0",
        cause="the probe records the processes that torchrun starts, not those that a script starts itself",
        fix="let torchrun start the workers: run the script with --nproc N, and replace "
        "torch.multiprocessing.spawn(train, nprocs=N) with train(int(os.environ['LOCAL_RANK']))",
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
