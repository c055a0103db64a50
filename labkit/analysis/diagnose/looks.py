"""Runs that end without an error and train something else than their author thinks: found by comparing what the looks
of the ranks say about the same step (`probe/looks.py`)."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.analysis.diagnose.finding import Finding
from labkit.common.units import counted, listed, ranks_in_words
from labkit.record.events import Batch, DividedData, Epoch, Evaluation, GatheredOnce, Input, Loaded, Loader
from labkit.record.ranks import PEER_GONE
from labkit.record.state import per_revision

if TYPE_CHECKING:
    from labkit.record.events import Between, Look, TrackedModel, TrackedTensor
    from labkit.record.ranks import RankState
    from labkit.record.state import RunState

_APART = 1e-6  # difference of replicas, as a share of their absolute values, that rounding does not explain
_UNLIKE_FACTORS = 1e-2  # relative difference of factors for gradients
# and of weights of elements: texts of random lengths differ by less, now on one rank, now on another
_UNLIKE_WEIGHTS = 0.2
_NO_RATE = 1e-6  # of the largest learning rate, which changes no parameter
_TAIL = 0.1  # share of the steps that a schedule does not end before
_LOOKS = 3  # looks that must agree
_DRAWN = 5  # and for random numbers
_MOST = 0.9  # share of looks, or of tensors, that counts as all of them
_ALL_GRADIENTS = 1.8  # bytes per parameter: gradients in 16 bits, up to padding
_FP32 = 4  # bytes per parameter
_MORE = 64  # bytes that are all-reduced beside gradients: a loss, a few counts
_SHOWN = 4
_DEFAULT = "0"  # the id of the default group
_REPEATING = ("DistributedSampler", "BatchSamplerShard")
_EMBEDDING = re.compile(r"emb|wte|tok|vocab|shared", re.IGNORECASE)  # in the name of a table
_SHARING = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


def separate_ranks(state: RunState) -> Iterator[Finding]:
    """Several ranks that train without knowing of each other."""
    alone = _alone(state)
    if not alone:
        return
    unset = ", ".join(sorted({name for rank in alone for look in rank.looks for name in look.unset}))
    groups = "groups of one rank" if any(look.group for rank in alone for look in rank.looks) else "no process group"
    if unset:
        seen = f"the script reads {unset}, which torchrun does not set"
        cause = f"the script takes its rank and their number from {unset}, so every rank is number 0 of 1 and "
    else:
        seen, cause = "nothing is sent", "every rank acts as number 0 of 1, and "
    yield Finding(
        name="separate_ranks",
        title=f"{ranks_in_words(_numbers(alone))} train separately: the script made {groups}",
        evidence=f"{state.world_size} ranks were started with WORLD_SIZE={state.world_size}; {groups} in any step; "
        f"{seen}",
        cause=f"{cause}trains all of the data for itself",
        fix="read RANK, LOCAL_RANK and WORLD_SIZE, which torchrun sets, and call "
        "torch.distributed.init_process_group() before the model is wrapped",
        ranks=_numbers(alone),
    )


def _alone(state: RunState) -> list[RankState]:
    """The ranks, if they train equal models without a group of several ranks."""
    ranks = _training(state)
    alone = len(ranks) > 1 and all(look.group < 2 for rank in ranks for look in rank.looks)
    return ranks if alone and _alike(ranks) and not _apart(ranks, 0, _names(ranks[0], "parameter")) else []


def nothing_sent(state: RunState) -> Iterator[Finding]:
    """A wrapper, or a process group, through which nothing is sent."""
    ranks = _training(state)
    if len(ranks) < 2 or not all(look.silent for rank in ranks for look in _in_steps(rank)[-1:]):
        return
    model = next((model for model in _models(ranks[0]) if model.ranks or model.sharded), None)
    if model is None and (not _alike(ranks) or _apart(ranks, 0, _names(ranks[0], "parameter"))):
        return  # nothing says that the ranks train the same model
    step = _in_steps(ranks[0])[-1].step
    title = f"{f'a model in {model.name}' if model else 'a process group'}, but nothing is sent in any step"
    evidence = f"no collective and no message in steps 2 to {step} on {ranks_in_words(_numbers(ranks))}"
    if _alike(ranks) and (parted := parted_names(ranks, step)):
        title += ": the replicas differ"
        evidence += f"; {_parameters(parted)} differ between the ranks after step {step}"
    if model is not None and not model.called:
        cause = (
            f"the forward goes around {model.name}: the script calls the model inside, and the gradients of such a "
            "forward are not all-reduced"
        )
        fix = (
            f"call the {model.name} itself, such as model(x), instead of model.module or its methods, and compute the "
            "loss from its output"
        )
    else:
        cause = (
            "the gradients were computed without a synchronisation, such as in no_sync() or by torch.autograd.grad, "
            "which DDP does not follow, or no line sends them"
        )
        fix = (
            "leave no_sync() for the last micro-batch of each step, compute gradients by loss.backward(), or wrap the "
            "model in DistributedDataParallel"
        )
    yield Finding("nothing_sent", title, evidence, cause, fix, ranks=_numbers(ranks))


def replicas_differ(state: RunState) -> Iterator[Finding]:
    """Replicas of one model that were equal and are not any more, or that never were."""
    if _alone(state) or any(nothing_sent(state)) or surplus_calls(state):
        return
    for ranks in _never_equal(state):
        yield _unequal_from_the_start(ranks)
        return
    for ranks, ddp in _replicas(state):
        parameters, buffers = (_names(ranks[0], role) for role in ("parameter", "buffer"))
        parameters = parameters | _names(ranks[0], "frozen")
        averaging = _averaged(ranks, parameters) if ddp is None else None
        if averaging and averaging[1]:
            yield _averaged_in_part(ranks, *averaging)
        elif averaging and (source := _source(ranks, parameters)) is not None:
            yield _replaced(ranks, source, averaging[0])
        elif not averaging and (found := _parting(ranks, parameters)):
            first, before, parted = found
            if ddp is None and (steps := _averaged_copy(ranks, parameters)):
                yield _drifted(ranks, first, before, parted, *_unused_average(steps))
            elif told := _drift(ranks, ddp, first, parted):
                yield _drifted(ranks, first, before, parted, *told)
        elif (
            not (ddp and ddp.buffers)
            and not (averaging and _averaged(ranks, buffers))
            and (found := _parting(ranks, buffers))
        ):
            yield _drifted(ranks, *found, *_own_buffers(ddp))
    yield from _beside_shards(state)


def _beside_shards(state: RunState) -> Iterator[Finding]:
    """Tensors of a sharded model that are not sharded, and that each rank changes in its own way."""
    ranks = _training(state)
    models = [model for rank in ranks for model in _models(rank)]
    operations = {name for rank in ranks if rank.traffic for name in rank.traffic.ops}
    fsdp = all(model.sharded and model.name.startswith("FSDP") for model in models)
    if state.asked or len(ranks) < 2 or not fsdp or operations & {"send", "all_to_all"}:
        return
    if not _alike(ranks) or not _separate(ranks, known=True):
        return
    whole = set.intersection(*(set(look.whole) for rank in ranks for look in rank.looks))
    parameters, buffers = (_names(ranks[0], role) & whole for role in ("parameter", "buffer"))
    if not _averaged(ranks, parameters) and (found := _parting(ranks, parameters)):
        everything = parameters == _names(ranks[0], "parameter")
        yield _drifted(ranks, *found, *(_MESH_OF_ONE if everything else _LEFT_OUT))
    elif not _averaged(ranks, buffers) and (found := _parting(ranks, buffers)):
        yield _drifted(ranks, *found, *_own_buffers(None))


# What differs beside shards, the cause and the fix.
_MESH_OF_ONE = (
    "the replicas",
    "fully_shard got a mesh of one rank, so gradients are averaged over that rank only",
    "pass fully_shard the mesh of the ranks that divide the samples, of which a mesh of two dimensions names first "
    "those that replicate",
)
_LEFT_OUT = (
    "some parameters",
    "fully_shard does not manage them (ignored_params), and nothing else averages their gradients",
    "leave them to fully_shard, or all-reduce their gradients before step()",
)


@dataclass(frozen=True)
class Surplus:
    """Ranks that called a collective which the other ranks of the group did not call: the `group` in words, the number
    of `calls` by rank, and between which steps the additional call was made, in words (`when`)."""

    group: str
    calls: dict[int, int]
    before: str
    when: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that called more."""
        return tuple(rank for rank, calls in self.calls.items() if calls > min(self.calls.values()))

    @property
    def in_words(self) -> str:
        """How many collectives each rank had called, and when they were equally many."""
        each = ", ".join(f"{calls} on rank {rank}" for rank, calls in self.calls.items())
        return f"collectives of {self.group} called: {each}{self.before}"

    @property
    def cause(self) -> str:
        """Why the run goes wrong."""
        return (
            f"{ranks_in_words(self.ranks)} called a collective {self.when} that the others did not call; calls are "
            "matched only by their order, so every later one was matched with the next one of the other ranks, without "
            "an error as long as both have the same operation and size"
        )

    fix = (
        "make that call on every rank or on none: look for an `if rank ==`, a caught exception or a value of one rank "
        "around it"
    )


def extra_collective(state: RunState) -> Iterator[Finding]:
    """A collective that some ranks of a group called and the others did not, which was matched with a later one. A run
    that hangs has this as the cause of the hang."""
    surplus = surplus_calls(state)
    if surplus and (state.failure is not None or not hangs(state)):
        yield Finding(
            name="extra_collective",
            title=f"{ranks_in_words(surplus.ranks)} called a collective of {surplus.group} {surplus.when} that the "
            "other ranks did not call",
            evidence=surplus.in_words,
            cause=surplus.cause,
            fix=surplus.fix,
            ranks=tuple(surplus.calls),
        )


@per_revision
def surplus_calls(state: RunState) -> Surplus | None:
    """Ranks that called more collectives of a group than the others; None if their numbers are equal or not known, or
    if messages may be counted among them.

    Numbers may also differ for a while because a thread calls collectives, such as that of a checkpoint. So a
    difference counts if the replicas part with it, or if it lasts until the run hangs, ranks lose each other, or all of
    them end.
    """
    ranks = [rank for _, rank in sorted(state.ranks.items()) if rank.looks]
    if any(rank.traffic and "send" in rank.traffic.ops for rank in ranks):
        return None
    done = [rank.steps_done for rank in ranks]
    if not ranks or max(done) - min(done) > (state.status.state != "finished"):
        return None  # a step has another number on each rank, such as after steps that only one of them makes
    for group in dict.fromkeys(group for rank in ranks for look in rank.looks for group in look.calls):
        members = [rank for rank in ranks if any(group in look.calls for look in rank.looks)]
        if len(members) > 1 and (found := _surplus(state, members, group)):
            return found
    return None


def _surplus(state: RunState, ranks: Sequence[RankState], group: str) -> Surplus | None:
    counts = [
        {look.step: look.calls[group] for look in rank.looks if group in look.calls and not look.end} for rank in ranks
    ]
    steps = sorted(set.intersection(*map(set, counts)))
    equal = [step for step in steps if len({calls[step] for calls in counts}) == 1]
    ends = {rank.rank: look for rank in ranks for look in rank.looks if look.end and group in look.calls}
    failure = state.failure
    lost = failure is not None and (failure.left or PEER_GONE.search(f"{failure.type}: {failure.message}"))
    until_the_end = len({look.calls[group] for look in ends.values()}) > 1 if state.over and failure is None else lost
    parting = [found[0].step for members, _ in _replicas(state) if (found := _parting(members, _names(members[0])))]
    parted = next((step for step in parting if step in steps and step not in equal), None)
    known = max((step for step in equal if parted is None or step < parted), default=-1)
    lasts = parted is not None or until_the_end or hangs(state)
    first = next((step for step in steps if step > known), None) if lasts else None
    words = "the default group" if group == _DEFAULT else f"group #{group}"
    if first is not None:
        last = max((step for step in equal if step < first), default=None)
        calls = {rank.rank: calls_of_rank[first] for rank, calls_of_rank in zip(ranks, counts)}
        before = f" after step {first}" + ("" if last is None else f", equally many after step {last}")
        return Surplus(words, calls, before, _between(last, first))
    for rank, look in ends.items() if lost else ():
        for other, its in ends.items():
            if look.step < its.step and look.calls[group] > its.calls[group]:
                last = max(equal, default=None)
                calls = dict(sorted({rank: look.calls[group], other: its.calls[group]}.items()))
                before = f" when they ended, rank {rank} in step {look.step + 1}"
                return Surplus(words, calls, before, _between(last, look.step + 1))
    return None


def hangs(state: RunState) -> bool:
    """Whether a rank has waited for long and not gone on since."""
    return state.status.state != "finished" and any(
        rank.waiting is not None and rank.exit_code != 0 and rank.steps_done <= (rank.waiting.step or 0)
        for rank in state.ranks.values()
    )


def _between(last: int | None, first: int) -> str:
    """When something happened that had not after step `last`, and had after step `first`."""
    if not first:
        return "before the first step"
    if last is None:
        return f"before the end of step {first}"
    return f"in step {first}" if first <= last + 1 else f"in a step between {last + 1} and {first}"


def _since(last: int, first: int) -> str:
    """Since when something is so that was not after step `last`, and was after step `first`."""
    return f"from step {first} on" if first <= last + 1 else f"since a step between {last + 1} and {first}"


def tied_apart(state: RunState) -> Iterator[Finding]:
    """Copies of one tensor, such as the table of embeddings and the head, on two stages of a pipeline or in a model."""
    ranks = _training(state)
    yield from _untied(ranks)
    if not any(rank.traffic and "send" in rank.traffic.ops for rank in ranks):
        return
    for number, rank in enumerate(ranks):
        for other in ranks[number + 1 :]:
            copies = [(a, b) for a in _matrices(rank) for b in _matrices(other) if _same(rank, a, other, b)]
            if len(copies) != 1:
                continue  # none, or layers that were made with the same seed
            (mine, yours) = copies[0]
            steps = {look.step for look in _in_steps(rank)} & {look.step for look in _in_steps(other)}
            parted = [step for step in sorted(steps) if not _same(rank, mine, other, yours, step)]
            if len(parted) < _LOOKS or len(parted) < _MOST * len([step for step in steps if step >= parted[0]]):
                continue
            names = (
                f"{_called(rank, [mine])[0]} on rank {rank.rank} and {_called(other, [yours])[0]} on rank {other.rank}"
            )
            yield Finding(
                name="tied_apart",
                title=f"{names} were equal at the start, and differ from step {parted[0]} on",
                evidence=f"shape {_tensors(rank)[mine].shape}; equal sums before the first step, different ones after "
                f"{counted(len(parted), 'observed step')}",
                cause="each stage updates its copy of the tied weight with its own part of the gradient",
                fix="all-reduce the sum of both gradients between the two stages before step(), or untie the weights",
                ranks=(rank.rank, other.rank),
            )


def _untied(ranks: list[RankState]) -> Iterator[Finding]:
    """An embedding and one other matrix of the same model that were equal, and are updated separately."""
    for rank in ranks[:1]:
        tensors, matrices = _tensors(rank), _matrices(rank)
        pairs = [
            (mine, other)
            for mine, other in itertools.combinations(matrices, 2)
            if tensors[mine].model == tensors[other].model and _same(rank, mine, rank, other)
        ]
        if len(pairs) != 1 or not any(_EMBEDDING.search(name) for name in _called(rank, pairs[0])):
            continue  # none, or layers that are copies of each other
        steps = [look.step for look in _in_steps(rank)]
        parted = [step for step in steps if not _same(rank, pairs[0][0], rank, pairs[0][1], step)]
        if len(parted) < max(_LOOKS, len(steps)):
            continue
        names = " and ".join(_called(rank, pairs[0]))
        yield Finding(
            name="tied_apart",
            title=f"{names} were equal at the start, and differ from step {parted[0]} on",
            evidence=f"shape {tensors[pairs[0][0]].shape}; equal sums before the first step, different ones after "
            f"{counted(len(parted), 'observed step')}",
            cause="they are two parameters: a tie is lost by deepcopy of a part, by to_empty() of a model on the meta "
            "device, or by a new Parameter for one of them",
            fix="tie them again when the model is complete, and before it is wrapped: head.weight = embedding.weight",
            ranks=_numbers(ranks),
        )


def _matrices(rank: RankState) -> list[int]:
    return [n for n in sorted(_names(rank, "parameter")) if len(_tensors(rank)[n].shape) == 2]


def _same(rank: RankState, mine: int, other: RankState, yours: int, step: int = 0) -> bool:
    a, b = _look_at(rank, step), _look_at(other, step)
    if a is None or b is None or _tensors(rank)[mine].shape != _tensors(other)[yours].shape:
        return False
    return a.sums[mine] == b.sums[yours] and a.sums[mine][1] > 0


def _replicas(state: RunState) -> Iterator[tuple[list[RankState], TrackedModel | None]]:
    """Ranks that hold replicas: those of each DDP model, or all ranks with equal models that are not sharded."""
    ranks = _training(state)
    seen = set()
    for rank in ranks:
        for model in _models(rank):
            if model.ranks and tuple(model.ranks) not in seen:
                seen.add(tuple(model.ranks))
                members = [member for member in ranks if member.rank in model.ranks]
                if len(members) == len(model.ranks) > 1 and _alike(members):
                    yield members, model
    own = state.asked is None and not seen and not any(model.sharded for rank in ranks for model in _models(rank))
    if own and len(ranks) > 1 and _alike(ranks) and _separate(ranks) and not _apart(ranks, 0, _names(ranks[0])):
        yield ranks, None


def _never_equal(state: RunState) -> Iterator[list[RankState]]:
    """Ranks whose replicas differ at every look: of one DDP, or with gradients that the script all-reduces, of
    different samples."""
    ranks = _training(state)
    by_ddp = [members for members, model in _replicas(state) if model is not None]
    by_hand = [ranks] if not by_ddp and state.asked is None and _all_reduces_gradients(ranks, separate=True) else []
    for members in (*by_ddp, *by_hand):
        numbers = _names(members[0], "parameter")
        apart = [len(_apart(members, step, numbers)) for step in (0, *_common_steps(members))]
        if min(apart) >= _MOST * len(numbers):
            yield members


def synchronised(state: RunState) -> list[list[RankState]]:
    """The ranks that average their gradients: those of each DDP group, or all of them if a script all-reduces the
    gradients of equal replicas by itself."""
    ranks = _training(state)
    if groups := _ddp_groups(ranks):
        return groups
    if len(ranks) < state.world_size or not _all_reduces_gradients(ranks):
        return []
    if any(_apart(ranks, step, _names(ranks[0], "parameter")) for step in (0, *_common_steps(ranks))):
        return []  # they are no replicas
    sent = [rank.traffic.ops["all_reduce"].bytes - _FP32 * _elements(rank) for rank in ranks if rank.traffic]
    return [ranks] if all(0 <= more <= _MORE for more in sent) else []


def _ddp_groups(ranks: Sequence[RankState]) -> list[list[RankState]]:
    groups = sorted({tuple(model.ranks) for rank in ranks for model in _models(rank) if model.ranks})
    return [[rank for rank in ranks if rank.rank in group] for group in groups]


def _all_reduces_gradients(ranks: Sequence[RankState], separate: bool = False) -> bool:
    """Whether ranks with equal models send nothing but all-reduces of as many bytes as their gradients have; if
    `separate`, from different samples."""
    if len(ranks) < 2 or not _alike(ranks) or (separate and not _separate(ranks, known=True)):
        return False
    traffic = [rank.traffic for rank in ranks if rank.traffic]
    sizes = [sent.ops["all_reduce"].bytes if set(sent.ops) == {"all_reduce"} else 0 for sent in traffic]
    sharded = any(model.sharded for rank in ranks for model in _models(rank))
    return len(sizes) == len(ranks) and not sharded and min(sizes) >= _ALL_GRADIENTS * _elements(ranks[0])


def _own_buffers(ddp: TrackedModel | None) -> tuple[str, str, str]:
    return (
        "only buffers",
        ("DDP was made with broadcast_buffers=False" if ddp else "the script synchronises parameters, and not buffers")
        + ", so each rank computes its own, such as the running mean of BatchNorm",
        "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs, or leave out broadcast_buffers=False"
        if ddp
        else "average model.buffers() as well, at least before an evaluation and before they are saved; where each "
        "rank is meant to keep its own, as in FedBN, nothing needs to change",
    )


def _unequal_from_the_start(ranks: list[RankState]) -> Finding:
    if any(model.ranks for model in _models(ranks[0])):
        cause = (
            "the weights were loaded or changed on some of the ranks after DistributedDataParallel(model), which sends "
            "those of its first rank only when it is made (and not at all with init_sync=False)"
        )
        fix = "load the weights before DistributedDataParallel(model), or on every rank"
    else:
        cause = (
            "each rank started with other weights, from its own seed or because only some of the ranks loaded a "
            "checkpoint; averaged gradients keep the difference"
        )
        fix = (
            "send the weights of rank 0 before the first step: for tensor in model.state_dict().values(): "
            "dist.broadcast(tensor, 0); or load the checkpoint on every rank"
        )
    names = _parameters(_called(ranks[0], sorted(_names(ranks[0], "parameter"))))
    return Finding(
        name="replicas_differ",
        title=f"the replicas on {ranks_in_words(_numbers(ranks))} differ from the start",
        evidence=f"sums of {names} differ before the first step, and after each of "
        f"{counted(len(_in_steps(ranks[0])), 'observed step')}",
        cause=cause,
        fix=fix,
        ranks=_numbers(ranks),
    )


def _drift(
    ranks: list[RankState], ddp: TrackedModel | None, first: Look, parted: list[int]
) -> tuple[str, str, str] | None:
    """What differs, the cause and the fix, by what parted first; None if the events do not say that the ranks should be
    replicas."""
    start, end = ranks[0].looks[0], _in_steps(ranks[0])[-1]
    of_models = {_tensors(ranks[0])[n].model for n in parted}
    updated = [n for n in _names(ranks[0]) - _names(ranks[0], "buffer") if start.sums[n] != end.sums[n]]
    everything = len(parted) >= _MOST * sum(_tensors(ranks[0])[n].model in of_models for n in updated)
    models = _models(ranks[0])
    unlike = _unlike_settings(ranks, first.step)
    if unlike:
        name, step, values = unlike
        told = _by_rank(ranks, [f"{value:g}" for value in values])
        return (
            "the replicas",
            f"the optimizers' {_in_words(name)} differs first: {told}, in the optimizers after step {step}",
            "let all ranks decide alike: all-reduce the number that a scheduler such as ReduceLROnPlateau judges, or "
            "broadcast the learning rate from rank 0",
        )
    if orders := _unlike_orders(ranks):
        return (
            "some parameters" if not everything else "the replicas",
            f"the optimizers hold the parameters in different orders: {orders}; an optimizer that divides them by "
            "position, such as ZeroRedundancyOptimizer, then updates some on several ranks and some on none",
            "give the optimizer the parameters in one order on every rank, such as list(model.parameters()), and not "
            "those of a set or of a sort that depends on the rank",
        )
    if ddp and any(look.unsynchronised for look in _in_steps(ranks[0])):
        return (
            "the replicas" if everything else "some parameters",
            "the last backward before step() belongs to a forward in DDP's no_sync(), so its gradients are those of "
            "each rank's own samples",
            "leave no_sync() for the last micro-batch before step(), its forward included: check the condition that "
            "decides which one it is",
        )
    factors = _factors(ranks, first.step) if everything else None
    if factors and max(factors) > 1 + _UNLIKE_FACTORS:
        told = _by_rank(ranks, [f"{factor:.4g}" for factor in factors])
        return (
            "the replicas",
            f"the ranks multiply their equal gradients by different numbers, in proportion {told}: they are clipped by "
            "another limit or norm, or divided by another number, on each rank",
            "scale and clip gradients alike on all ranks: look for what depends on the rank before step()",
        )
    if factors and max(factors) < 1 + _APART:
        return (
            "the replicas",
            "the optimizers used equal gradients and made different updates: their states differ, such as after a"
            " checkpoint was loaded on one rank only, or parameters are changed after step()",
            "load the optimizer's state on every rank, and compare the ranks' lines after step()",
        )
    if ddp and not everything:
        return (
            "some parameters",
            "DDP all-reduces the parameters that required a gradient when it was made: these are in none of its"
            " buckets, because they were unfrozen or added later, or are ignored",
            "set requires_grad and add modules before DistributedDataParallel(model), or wrap the model again then",
        )
    if ddp and not all(models[number].called for number in of_models if number < len(models)):
        return (
            "the replicas" if len(parted) >= _MOST * len(updated) else "the replicas of one model",
            "the forward goes around DDP: the script calls the model inside, whose gradients are not all-reduced",
            "call the DistributedDataParallel itself instead of model.module or its methods",
        )
    if ddp:
        return (
            "the replicas",
            "what DDP all-reduces is not all that the ranks' optimizers use: gradients or parameters are changed after "
            "backward in different ways",
            "compare the ranks' lines between backward() and step()",
        )
    return _drift_by_hand(ranks, everything)


def _factors(ranks: Sequence[RankState], step: int) -> list[float] | None:
    """The gradients that the ranks' optimizers used in a step, as multiples of the smallest ones; None if they are not
    multiples of each other, or not known."""
    used = [look.used for look in _looks_at(ranks, step) if look.used]
    if len(used) < len(ranks) or not all(size > 0 and math.isfinite(size) for _, size in used):
        return None
    signed, sizes = ([pair[which] for pair in used] for which in (0, 1))
    least = min(sizes)
    shares = [value / size for value, size in zip(signed, sizes)]
    return [size / least for size in sizes] if max(shares) - min(shares) < _APART else None


def _drift_by_hand(ranks: list[RankState], everything: bool) -> tuple[str, str, str] | None:
    """The same for a script that synchronises by itself."""
    traffic = [rank.traffic for rank in ranks if rank.traffic]
    operations = {name for sent in traffic for name in sent.ops}
    if len(traffic) < len(ranks) or operations & {"send", "all_to_all"}:
        return None
    shared = min(sum(op.bytes for name, op in sent.ops.items() if name in _SHARING) for sent in traffic)
    if everything and shared >= _ALL_GRADIENTS * _elements(ranks[0]) and not _between_steps(ranks):
        return (
            "the replicas",
            f"{shared:,.0f} bytes are all-reduced per step, as many as the gradients have, but the optimizer does not"
            " use the result: it is a copy, such as of flatten, cat or .to(), or it is not there yet, as with"
            " async_op=True and no wait()",
            "copy the result back into parameter.grad (copy_) before step(), or all-reduce parameter.grad itself, and"
            " call wait() of each asynchronous one",
        )
    if not everything and shared:
        return (
            "some parameters",
            "the script synchronises the other parameters, whose replicas are equal, and not these",
            "synchronise the gradients of all parameters that the optimizer updates",
        )
    return None


def _between_steps(ranks: Sequence[RankState]) -> bool:
    """Whether in every profiled step with collectives they began before backward, as where parameters are averaged
    after step(): replicas are equal then when a forward uses them, and not when the step ends."""
    begun = []
    for rank in ranks:
        for profiled in rank.timelines.values():
            backward = [start for name, start, _ in profiled.phases if name == "backward"]
            if backward and profiled.comm:
                begun.append(max(call.start for call in profiled.comm) < min(backward))
    return bool(begun) and all(begun)


def _steps_in_words(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:_SHOWN])) + (" and others" if len(steps) > _SHOWN else "")


def _unused_average(steps: Sequence[int]) -> tuple[str, str, str]:
    return (
        "the replicas",
        f"as many bytes as the parameters have are sent after steps {_steps_in_words(steps)}, but no parameter "
        "changes: what is averaged is a copy, such as of parameters_to_vector or state_dict",
        "write the average back: vector_to_parameters(average, model.parameters()), load_state_dict, or copy_ under "
        "no_grad",
    )


def _replaced(ranks: list[RankState], source: int, steps: Sequence[int]) -> Finding:
    others = [rank.rank for rank in ranks if rank.rank != source]
    return Finding(
        name="replicas_differ",
        title=f"what {ranks_in_words(others)} trained is replaced by the parameters of rank {source}",
        evidence=f"replicas that had parted are equal after the communication of steps {_steps_in_words(steps)}, and "
        f"those of rank {source} did not change by it",
        cause=f"the script sends the parameters of rank {source} to the others, such as by broadcast, instead of an "
        "average, so the steps of the others have no effect",
        fix="average them: all_reduce(parameter.data), then divide by the number of ranks; or average gradients in "
        "every step, as DistributedDataParallel does",
        ranks=_numbers(ranks),
    )


def _averaged_in_part(ranks: list[RankState], steps: Sequence[int], never: Sequence[int]) -> Finding:
    return Finding(
        name="replicas_differ",
        title=f"some parameters on {ranks_in_words(_numbers(ranks))} are averaged from time to time, and"
        " others part for good",
        evidence=f"after the communication of steps {_steps_in_words(steps)}, sums of "
        f"{_parameters(_called(ranks[0], never))} differ, and those of the other parameters, which had parted, are "
        "equal",
        cause="the script averages the other parameters from time to time, and not these",
        fix="average everything that the optimizer updates, for instance in a loop over model.parameters()",
        ranks=_numbers(ranks),
    )


def _drifted(
    ranks: list[RankState], first: Look, before: Look, parted: list[int], what: str, cause: str, fix: str
) -> Finding:
    return Finding(
        name="replicas_differ",
        title=f"{what} on {ranks_in_words(_numbers(ranks))} differ {_since(before.step, first.step)}",
        evidence=f"sums of {_parameters(_called(ranks[0], parted))} differ after step {first.step}, and were equal "
        f"after step {before.step}" + ("" if before.step else " (at the start)"),
        cause=cause,
        fix=fix,
        ranks=_numbers(ranks),
    )


def no_effect(state: RunState) -> Iterator[Finding]:
    """Steps that change no parameter, although there are gradients."""
    if not (ranks := _training(state)):
        return
    for rank in ranks:
        looks = [look for look in _in_steps(rank) if look.gradients or look.gone]
        trained = sorted(_names(rank, "parameter"))
        same = all(look.sums[n] == looks[0].sums[n] for look in looks for n in trained)
        if len(looks) < _LOOKS or not trained or not same or not _all_finite(looks, trained):
            return
    first, last = ranks[0].looks[0], ranks[0].looks[-1]
    trained = sorted(_names(ranks[0], "parameter"))
    from_start = len(first.sums) == len(last.sums) and all(first.sums[n] == last.sums[n] for n in trained)
    cause, fix = _why_no_effect(ranks[0])
    yield Finding(
        name="no_effect",
        title=f"no parameter of the model changed in {last.step} steps"
        if from_start
        else f"no parameter of the model changed after step {_in_steps(ranks[0])[0].step}",
        evidence=f"{_parameters(_called(ranks[0], trained))} get gradients and have the same values after "
        f"{counted(len(_in_steps(ranks[0])), 'observed step')}{' as before' if from_start else ''}, on "
        f"{ranks_in_words(_numbers(ranks), state.world_size)}",
        cause=cause,
        fix=fix,
        ranks=_numbers(ranks),
    )


_GATHERED = (
    "the optimizer holds the parameters from before fully_shard, or those that a forward before it had gathered: it "
    "updates tensors that the model does not use any more",
    "create the optimizer after fully_shard(model), and before the first forward",
)
_LAYER_REPLACED = (
    "a layer was replaced when the optimizer had been made, which updates the old one",
    "make the optimizer when the model is complete",
)
_NOT_HELD = (
    "the optimizer was made before they were added, such as by LoRA, or without them; gradients that nothing uses are "
    "computed, and sent if the model is wrapped",
    "if they are to be trained, make the optimizer when the model is complete; if not, requires_grad_(False) before "
    "the model is wrapped",
)


def _why_no_effect(rank: RankState) -> tuple[str, str]:
    """The cause and the fix of steps without effect."""
    used = [look for look in _in_steps(rank) if look.gone or look.used]
    rates = [value for look in rank.looks for name, value in look.settings.items() if name.split()[0] == "lr"]
    if len(used) >= _LOOKS and all(look.gone for look in used):
        return (
            "the gradients of backward were reset before step(), which found none",
            "call optimizer.zero_grad() before backward or after step(), and not between them",
        )
    if len(used) >= _LOOKS and not any(look.used[1] for look in used if look.used):
        return (
            "backward computes gradients of zero: the loss depends on the parameters only through a factor of zero, or "
            "not at all, such as on the result of dist.all_gather, which passes no gradient",
            "gather with torch.distributed.nn.functional.all_gather, or put this rank's own features, which have a "
            "gradient, in their place; and look for detach(), masks of zeros and saturated activations",
        )
    if rates and not any(rates):
        return (
            "the learning rate is 0",
            "set the learning rate, or check the schedule (scheduler.step(), and the number of its warm-up steps)",
        )
    if any(model.sharded for model in _models(rank)):
        return _GATHERED
    return (
        "the optimizer holds other tensors than the model: copies, or the parameters from before they were moved, "
        "wrapped or replaced; or the updates are smaller than the precision of the parameters",
        "create the optimizer from model.parameters() when the model is complete, or keep parameters in float32",
    )


def schedule_over(state: RunState) -> Iterator[Finding]:
    """A learning rate that has become 0, or next to it, long before the training ends."""
    ranks = _training(state)
    tails = [_without_rate(rank) for rank in ranks]
    known = [tail for tail in tails if tail is not None]
    if not known or len(known) < len(ranks):
        return
    before, first, last = known[0]
    highest = max(map(_rate, _in_steps(ranks[0])))
    yield Finding(
        name="schedule_over",
        title=f"the learning rate is {_rate(first):.2g} from step {first.step} on",
        evidence=f"{highest:.3g} at most, {_rate(before):.3g} in step {before.step}, and at most {_rate(first):.2g} in "
        f"steps {first.step} to {last.step}, on {ranks_in_words(_numbers(ranks), state.world_size)}",
        cause="the schedule ends before the training: it is shorter, or advances several times per step, as the "
        "scheduler that accelerate prepares does once per rank, or in every step although it counts epochs",
        fix="make the schedule as long as the optimizer steps of the run, times the ranks for a scheduler from "
        "accelerate's prepare(); call step() of one that counts epochs once per epoch",
        ranks=_numbers(ranks),
    )


def _rate(look: Look) -> float:
    """The largest learning rate of the optimizers."""
    return max((value for name, value in look.settings.items() if name.split()[0] == "lr"), default=0.0)


def _without_rate(rank: RankState) -> tuple[Look, Look, Look] | None:
    """The last look with a learning rate, the first one without, and the last one of the run; None if there is a rate,
    or has been until shortly before."""
    looks = [look for look in rank.looks if look.step and len(look.sums) == len(_tensors(rank))]
    highest = max(map(_rate, looks), default=0.0)
    used = max((number for number, look in enumerate(looks) if _rate(look) > _NO_RATE * highest), default=-1)
    if used < 0 or used + 2 >= len(looks):
        return None
    before, first, last = looks[used], looks[used + 1], looks[-1]
    steps = last.step - first.step
    nothing = last.rates - first.rates <= _NO_RATE * highest * steps
    return (before, first, last) if nothing and steps >= max(_LOOKS, _TAIL * last.step) else None


def no_update(state: RunState) -> Iterator[Finding]:
    """Parameters that get gradients, and that no optimizer holds."""
    ranks = _training(state)
    unheld: list[set[str]] = []
    for rank in ranks:
        looks = _with_gradients(rank)
        if len(looks) < _LOOKS:
            return
        always = set.intersection(*(set(look.unheld) for look in looks))
        unheld.append(set(_called(rank, [n for n in sorted(always) if looks[0].sums[n] == looks[-1].sums[n]])))
    everywhere = set.intersection(*unheld) if unheld else set()
    if everywhere and not any(no_effect(state)):
        evidence = f"gradients and the same values {_where(state, ranks)}"
        cause, fix, kind = *_NOT_HELD, "slow"
        if any(look.strangers for rank in ranks for look in _in_steps(rank)):
            evidence += "; an optimizer holds parameters of no model that trains"
            sharded = any(model.sharded for model in _models(ranks[0]))
            cause, fix, kind = *(_GATHERED if sharded else _LAYER_REPLACED), "wrong"
        yield Finding(
            name="no_update",
            title=f"{_parameters(sorted(everywhere))} get gradients, but no optimizer holds them",
            evidence=evidence,
            cause=cause,
            fix=fix,
            kind=kind,
            ranks=_numbers(ranks),
        )


def no_gradient(state: RunState) -> Iterator[Finding]:
    """Parameters in an optimizer that never get a gradient."""
    ranks = _training(state)
    idle: list[set[str]] = []
    for rank in ranks:
        looks = _with_gradients(rank)
        if len(looks) <= _LOOKS:
            return
        idle.append(set(_called(rank, sorted(set.intersection(*(set(look.idle) for look in looks))))))
    everywhere = set.intersection(*idle) if idle else set()
    if everywhere:
        step = _in_steps(ranks[0])[-1].step
        yield Finding(
            name="no_gradient",
            title=f"{_parameters(sorted(everywhere))} never got a gradient",
            evidence=f"no gradient at any of {counted(len(_in_steps(ranks[0])), 'observed step')} up to step {step}, "
            f"on {ranks_in_words(_numbers(ranks), state.world_size)}; the optimizer holds them",
            cause="the loss does not depend on them: they are not used, or what uses them is detached",
            fix="use them in the forward, without detach() or no_grad(), or set requires_grad_(False)",
            ranks=_numbers(ranks),
        )


def gradients_kept(state: RunState) -> Iterator[Finding]:
    """Gradients that no step resets, so that each step uses the sum of all before it."""
    found = _in_all_looks(state, lambda look: look.kept, first=2)
    if found:
        yield Finding(
            name="gradients_kept",
            title="each step uses the gradients of all steps before it",
            evidence=f"nothing reset the gradients between step() and the next backward, {_where(state, found)}",
            cause="backward adds to the gradients that are there, and the script does not reset them",
            fix="call optimizer.zero_grad() once per step(), before the first backward or after step()",
            ranks=_numbers(found),
        )


def stays_in_evaluation(state: RunState) -> Iterator[Finding]:
    """A model that began in training mode, and trains in evaluation mode after an evaluation."""
    ranks = _training(state)
    parted = []
    for rank in ranks:
        looks = _with_gradients(rank)
        first = next((number for number, look in enumerate(looks) if look.evaluating), 0)
        if not first or len(looks) - first < _LOOKS or not all(look.evaluating for look in looks[first:]):
            return
        parted.append((looks[first - 1].step, looks[first].step, looks[-1].step))
    if parted:
        before, since, last = parted[0]
        yield Finding(
            name="stays_in_evaluation",
            title=f"the model trains in evaluation mode {_since(before, since)}",
            evidence=f"model.training was True up to step {before}, and False in all observed steps from {since} to "
            f"{last}, on {ranks_in_words(_numbers(ranks), state.world_size)}",
            cause="eval() was called for an evaluation and train() not after it: dropout is off, and batch norm uses "
            "its running statistics instead of those of the batch",
            fix="call model.train() after each evaluation, such as at the start of every epoch",
            ranks=_numbers(ranks),
        )


def clipped_scaled(state: RunState) -> Iterator[Finding]:
    """Gradients that are clipped while a GradScaler's scale is still in them."""
    found = _in_all_looks(state, lambda look: look.scaled)
    if found:
        yield Finding(
            name="clipped_scaled",
            title="gradients are clipped before they are unscaled",
            evidence=f"the gradients were clipped between backward and GradScaler.unscale_, {_where(state, found)}",
            cause="they are still multiplied by the scale of the loss (65,536 at first), so nearly all of them exceed "
            "the limit; unscaled afterwards, they are smaller than the limit by that factor",
            fix="call scaler.unscale_(optimizer) between backward and clip_grad_norm_",
            ranks=_numbers(found),
        )


def clipped_late(state: RunState) -> Iterator[Finding]:
    """Gradients that are clipped when the optimizer has already used them."""
    found = _in_all_looks(state, lambda look: look.late, first=2)
    if found:
        yield Finding(
            name="clipped_late",
            title="gradients are clipped after the step that used them",
            evidence=f"the gradients were clipped between step() and the next backward, {_where(state, found)}",
            cause="the optimizer has used the gradients as they were before, so the limit has no effect",
            fix="call clip_grad_norm_ between backward and optimizer.step()",
            ranks=_numbers(found),
        )


def dropped_micro_batches(state: RunState) -> Iterator[Finding]:
    """Gradients of micro-batches that are reset before the optimizer uses them, unless the script collects them first,
    so that it uses others than those of the last micro-batch."""
    found = _in_all_looks(state, lambda look: look.dropped is not None, first=2)
    used = [look for rank in found for look in _in_steps(rank) if look.used]
    if found and used and all(look.clipped is not None for look in used):
        dropped, backwards = _in_steps(found[0])[-1].dropped or (0, 0)
        yield Finding(
            name="dropped_micro_batches",
            title=f"{dropped} of {backwards} micro-batches have no effect in each step",
            evidence=f"gradients were reset {counted(dropped, 'time')} between the {backwards} backward calls of a "
            f"step, {_where(state, found)}",
            cause="the gradients are reset before each backward, so the step uses those of the last micro-batch only",
            fix="call optimizer.zero_grad() once per step(), before the first backward or after step()",
            ranks=_numbers(found),
        )


def nothing_loaded(state: RunState) -> Iterator[Finding]:
    """A state dict of which no tensor has a name that the model has."""
    for rank in state.ranks.values():
        loads = rank.seen(Loaded)
        filled = {load.name for load in loads if load.used}
        for load in loads:
            if not load.tensors or load.missing is None or load.unexpected is None or load.name in filled:
                continue
            yield Finding(
                name="nothing_loaded",
                title=f"load_state_dict loaded none of {counted(load.tensors, 'tensor')} into {load.name}",
                evidence=f"rank {rank.rank}: no name is known to the model, such as {load.unexpected}; the model has "
                f"{load.missing}",
                cause="with strict=False, names that do not match are left out without an error, so the model keeps "
                "the weights that it had; a wrapper adds a prefix to every name (module. by DDP, _orig_mod. by "
                "torch.compile)",
                fix="make the names equal, such as by key.removeprefix('module.'), and leave out strict=False, or "
                "check the missing_keys that it returns",
                ranks=tuple(sorted(state.ranks)),
            )
            return


def normalised_twice(state: RunState) -> Iterator[Finding]:
    """A loss function that gets probabilities, and takes them for logits."""
    found = _in_all_looks(state, lambda look: look.twice is not None)
    if found:
        loss, function = _in_steps(found[0])[-1].twice or ("", "")
        yield Finding(
            name="normalised_twice",
            title=f"{loss} gets the result of {function}",
            evidence=f"backward goes from {loss} to {function} with nothing between, {_where(state, found)}",
            cause=f"{loss} expects other numbers: without a further operation, probabilities are taken for logits or "
            "for logarithms, so gradients are small and the loss has a wrong minimum",
            fix=f"pass the logits to {loss}, and apply {function} only where probabilities are shown (nll_loss expects "
            "log_softmax)",
            ranks=_numbers(found),
        )


def _in_all_looks(state: RunState, value: Callable[[Look], bool], first: int = 1) -> list[RankState]:
    """The ranks that train, if `value` holds in all looks from step `first` on in which they have gradients, of which
    there are some; else none."""
    ranks = _training(state)
    looks = [[look for look in _with_gradients(rank) if look.step >= first] for rank in ranks]
    return ranks if all(len(of_rank) >= _LOOKS and all(map(value, of_rank)) for of_rank in looks) else []


def _where(state: RunState, ranks: Sequence[RankState]) -> str:
    looks = _with_gradients(ranks[0])
    return (
        f"in all {len(looks)} observed steps up to step {looks[-1].step}, on "
        f"{ranks_in_words(_numbers(ranks), state.world_size)}"
    )


def repeated_stream(state: RunState) -> Iterator[Finding]:
    """A stream of samples that each worker of a DataLoader reads from its beginning."""
    for rank in state.ranks.values():
        loader = next(iter(rank.seen(Loader)), None)
        if loader is None or not loader.streams or loader.workers < 2:
            continue
        digests = [batch.digest for batch in rank.seen(Batch)[: loader.workers + 1]]
        if len(digests) <= loader.workers or len(set(digests[:-1])) > 1 or digests[-1] == digests[0]:
            continue
        yield Finding(
            name="repeated_stream",
            title=f"the {loader.workers} workers of a DataLoader return the same samples",
            evidence=f"rank {rank.rank}: the first {loader.workers} batches, one of each worker, are equal, and the "
            "next one differs; the data set is an IterableDataset",
            cause="each worker iterates over its own copy of an IterableDataset from the beginning, so the rank trains "
            f"{loader.workers} times on each sample",
            fix="let each worker skip the samples of the others: itertools.islice(samples, info.id, None, "
            "info.num_workers) with info = torch.utils.data.get_worker_info(), and each rank those of other ranks",
            ranks=tuple(sorted(state.ranks)),
        )
        return


def same_random(state: RunState) -> Iterator[Finding]:
    """Random numbers that are equal on ranks with different samples."""
    ranks = _training(state)
    if len(ranks) < 2 or not _separate(ranks, known=True):
        return
    drawn = [{look.step: look.random for look in _in_steps(rank) if look.random} for rank in ranks]
    steps = set(drawn[0]).intersection(*drawn[1:])
    for name in sorted({name for steps_of_rank in drawn for random in steps_of_rank.values() for name in random}):
        pairs = [[steps_of_rank[step].get(name) for steps_of_rank in drawn] for step in sorted(steps)]
        known = [pair for pair in pairs if all(pair)]
        if len(known) < _DRAWN or len(known) < _MOST * len(steps) or any(len(set(pair)) > 1 for pair in known):
            continue
        yield Finding(
            name="same_random",
            title=f"{ranks_in_words(_numbers(ranks), state.world_size)} draw the same random numbers",
            evidence=f"the states of {name}'s generator were equal in all {len(known)} observed steps, before and "
            "after numbers were drawn for samples that differ between the ranks",
            cause="every rank has set the same seed, so noise, dropout and augmentation are the same on all ranks",
            fix="seed with the rank once the model is built, and after whatever seeds again, such as Trainer(): "
            "torch.manual_seed(seed + rank)",
            ranks=_numbers(ranks),
        )


def unlike_data(state: RunState) -> Iterator[Finding]:
    """A data set that ranks divide, and that is not the same on all of them."""
    seen = [rank.seen(DividedData) for rank in state.ranks.values()]
    for sets in zip(*seen) if len(seen) > 1 else ():
        alike = len({(part.name, part.ranks) for part in sets}) == 1 and sets[0].ranks == len(sets)
        if not alike or len({part.digest for part in sets}) == 1:
            continue
        first = sets[0]
        if first.content and len({part.content for part in sets}) == 1:
            how = "is in a different order on each"
            cause = (
                "the order of a set, of os.listdir or of glob differs between processes, so the ranks' parts overlap "
                "and leave samples out"
            )
            fix = "sort it: sorted(names)"
        else:
            how = "is not the same on all of them"
            cause = (
                "a random split, or random data, with different seeds: samples are in several parts, or in none, and "
                "those held back on one rank are trained on another one"
            )
            fix = "use the same seed on all ranks: random_split(data, lengths, torch.Generator().manual_seed(0))"
        yield Finding(
            name="unlike_data",
            title=f"the ranks divide a {first.name} that {how}",
            evidence=f"{counted(len({part.digest for part in sets}), 'different digest')} of the data on "
            f"{ranks_in_words([part.rank for part in sets])}, with {first.samples} samples on rank {first.rank}",
            cause=cause,
            fix=fix,
            ranks=tuple(part.rank for part in sets),
        )
        return


def divided_twice(state: RunState) -> Iterator[Finding]:
    """Data that a DistributedSampler and a library both divide among the ranks, so that a part is never used."""
    for rank in state.ranks.values():
        loader = next((loader for loader in rank.seen(Loader) if loader.parts > state.world_size), None)
        if loader is None:
            continue
        yield Finding(
            name="divided_twice",
            title=f"each of {state.world_size} ranks gets 1 of {loader.parts} parts of the data set",
            evidence=f"rank {rank.rank}: a DistributedSampler divides the data, and the batch sampler of accelerate "
            "divides its part again",
            cause="prepare() divides what the loader returns, so the samples in the other "
            f"{loader.parts - state.world_size} parts are used by no rank in this epoch",
            fix="pass a DataLoader with shuffle=True and without a DistributedSampler to prepare(), or do not prepare "
            "the loader",
            ranks=tuple(sorted(state.ranks)),
        )
        return


def unlike_order(state: RunState) -> Iterator[Finding]:
    """Samplers that shuffle in a different order on each rank, so that the parts of the ranks overlap."""
    seen = [[epoch for epoch in rank.seen(Epoch) if epoch.shuffle] for rank in state.ranks.values()]
    for epochs in zip(*seen) if len(seen) > 1 else ():
        alike = len({(epoch.sampler, epoch.ranks) for epoch in epochs}) == 1 and epochs[0].ranks == len(epochs)
        if not alike or len({epoch.seed + epoch.set for epoch in epochs}) == 1:
            continue
        if len({epoch.seed for epoch in epochs}) > 1:
            word, each = "seed", [epoch.seed for epoch in epochs]
            fix = (
                "use one seed on all ranks, DistributedSampler(data, seed=seed), and seed with the rank only what is "
                "drawn for its samples"
            )
        else:
            word, each = "epoch", [epoch.set for epoch in epochs]
            fix = (
                "call sampler.set_epoch(epoch) with the same number on all ranks: after a restart, broadcast the epoch "
                "of the checkpoint"
            )
        yield Finding(
            name="unlike_order",
            title=f"the DistributedSampler shuffles by a different {word} on each rank",
            evidence=", ".join(f"{word} {number} on rank {epoch.rank}" for number, epoch in zip(each, epochs)),
            cause="each rank takes its part of a shuffled order, which must be the same on all of them: now samples "
            "are in several parts, or in none",
            fix=fix,
            ranks=tuple(epoch.rank for epoch in epochs),
        )
        return


def evaluated_twice(state: RunState) -> Iterator[Finding]:
    """Samples that count more than once in an evaluation, or that are also trained on."""
    if any(unlike_data(state)):
        return  # of which this is a consequence
    gathered_once = any(rank.seen(GatheredOnce) for rank in state.ranks.values())
    seen = [rank.seen(Evaluation) for rank in state.ranks.values()]
    for number, evaluations in enumerate(zip(*seen) if seen else ()):
        if len(evaluations) < state.world_size or any(
            len(evaluation.indices) != evaluation.count for evaluation in evaluations
        ):
            continue
        samples, ranks = evaluations[0].samples, tuple(evaluation.rank for evaluation in evaluations)
        parts = {tuple(sorted(evaluation.indices)) for evaluation in evaluations}
        whole = len(parts) == 1 or all(evaluation.count == evaluation.samples for evaluation in evaluations)
        counted_once = evaluations[:1] if whole else evaluations  # every rank evaluates all of it
        count = sum(evaluation.count for evaluation in counted_once)
        often = [
            index
            for index, times in Counter(index for evaluation in counted_once for index in evaluation.indices).items()
            if times > 1
        ]
        if often and not gathered_once:
            yield Finding(
                name="evaluated_twice",
                title=f"{count} samples are evaluated of a data set of {samples}",
                evidence=f"evaluation {number + 1}: {counted(len(often), 'sample')} more than once, such as number "
                f"{min(often)}; "
                + ", ".join(f"{evaluation.count} on rank {evaluation.rank}" for evaluation in counted_once),
                cause=(
                    f"a {evaluations[0].sampler} repeats samples until all ranks have equally many"
                    if evaluations[0].sampler in _REPEATING
                    else "the parts of the ranks overlap"
                ),
                fix="count each sample once: evaluate Subset(data, range(rank, len(data), ranks)) without a "
                "DistributedSampler, or leave out the repeated ones when the results are gathered (in accelerate by "
                "gather_for_metrics instead of gather)",
                ranks=ranks,
            )
            return
        trained = sum(evaluation.trained for evaluation in counted_once)
        if 0 < trained < count:
            yield Finding(
                name="evaluated_twice",
                title=f"{trained} of {count} evaluated samples are also trained on",
                evidence=f"evaluation {number + 1}: {trained} indices are in both parts of one data set",
                cause="the parts for training and evaluation overlap: they were split with different random numbers",
                fix="split once, with one generator, and use both parts of that split",
                ranks=ranks,
            )
            return


def unequal_weights(state: RunState) -> Iterator[Finding]:
    """A mean over different numbers of elements per rank, which an average over ranks weights alike."""
    for ranks in _averaging(state):
        found = _unequal(ranks, lambda look: look.weight, _UNLIKE_WEIGHTS)
        counted_alike = any(look.elements for rank in ranks for look in rank.looks) and not _unequal(
            ranks, lambda look: look.elements, _UNLIKE_WEIGHTS
        )
        if found is None or counted_alike:  # each rank may multiply its loss by a number of its own, as mixup does
            continue
        step, weights = found
        told = _by_rank(ranks, [f"{1 / weight:.4g}" for weight in weights])
        yield Finding(
            name="unequal_weights",
            title="the loss is a mean over different numbers of elements on each rank, and the gradients are averaged",
            evidence=f"step {step}: a mean over {told}",
            cause="the average over ranks weights each rank alike, so a token or sample counts more on a rank that has "
            "fewer of them",
            fix="sum the loss, and divide by the number on all ranks: all_reduce(count), then loss * ranks / count; or "
            "give all ranks equally many",
            ranks=_numbers(ranks),
        )
        return


def unequal_micro_batches(state: RunState) -> Iterator[Finding]:
    """A mean over different numbers of labels in each micro-batch of a step, which accumulation weights alike."""
    ranks = _training(state)
    unequal = [[look for look in _in_steps(rank) if look.least and look.most and _is_unequal(look)] for rank in ranks]
    known = [sum(look.least is not None for look in _in_steps(rank)) for rank in ranks]
    if not ranks or not all(len(looks) >= _LOOKS and 2 * len(looks) > of for looks, of in zip(unequal, known)):
        return
    look = unequal[0][-1]
    (least, many), (most, few) = look.least or (0, 0), look.most or (0, 0)
    yield Finding(
        name="unequal_micro_batches",
        title="the loss is a mean over different numbers of labels in each micro-batch, and the gradients are added",
        evidence=f"rank {ranks[0].rank}, step {look.step}: means over {few:g} to {many:g} labels; one counts "
        f"{most / least:.3g} times as much in the first as in the second, in {len(unequal[0])} of {known[0]} observed "
        "steps",
        cause="accumulation adds one mean per micro-batch, so a token counts more in a micro-batch that has fewer of "
        "them: that is not the gradient of the whole batch",
        fix="sum the loss (reduction='sum'), and divide by the number of labels in all micro-batches of the step, on "
        "all ranks",
        ranks=_numbers(ranks),
    )


def _is_unequal(look: Look) -> bool:
    (least, _), (most, _) = look.least or (0, 0), look.most or (0, 0)
    return 0 < least < (1 - _UNLIKE_WEIGHTS) * most and math.isfinite(most)


def experts_replaced(state: RunState) -> Iterator[Finding]:
    """Experts of expert parallelism that DDP replaced by those of its first rank."""
    for ranks, ddp in _replicas(state):
        sends = all(rank.traffic and "all_to_all" in rank.traffic.ops for rank in ranks)
        wrapped = [rank.wrapped[0] for rank in ranks if rank.wrapped]
        if ddp is None or not sends or len(wrapped) < len(ranks) or len({tuple(model.names) for model in wrapped}) > 1:
            continue
        tensors = {tensor.name: number for number, tensor in enumerate(_tensors(ranks[0]))}
        values = {
            tensors[name]: set(sums)
            for name, *sums in zip(wrapped[0].names, *(model.sums for model in wrapped))
            if name in tensors
        }
        alike = [number for number in _matrices(ranks[0]) if len(values.get(number, ())) == 1]
        own = [number for number, sums in values.items() if len(sums) > 1]
        named = [number for number in own if "expert" in _tensors(ranks[0])[number].name.lower()]
        own = named or (own if alike else [])  # each rank may draw all parameters, to let DDP replace them
        if not own or _apart(ranks, 0, set(own)):
            continue
        unlike = f", unlike {_parameters(_called(ranks[0], alike))}" if alike else ""
        yield Finding(
            name="experts_replaced",
            title=f"DDP replaced {_parameters(_called(ranks[0], own))} of the other ranks by those of rank "
            f"{ranks[0].rank}",
            evidence=f"they differed between {ranks_in_words(_numbers(ranks))} before "
            f"DistributedDataParallel(model){unlike}, and are equal since; the ranks exchange samples by all-to-all in "
            "each step",
            cause="each rank has experts of its own, but DDP takes all parameters for replicas: it sends those of its "
            "first rank, and averages the gradients of different experts",
            fix="wrap only the other modules, or name the experts before DDP is made: "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names); average the gradients "
            "of an expert only over ranks that hold the same one",
            ranks=_numbers(ranks),
        )


def clipped_first(state: RunState) -> Iterator[Finding]:
    """Gradients that each rank clips by the norm of its own ones, before they are averaged by hand."""
    for ranks in synchronised(state):
        found = _unequal(ranks, _clip_factor, _UNLIKE_FACTORS)
        if found is None or any(model.ranks for model in _models(ranks[0])):
            continue
        step, factors = found
        told = _by_rank(ranks, [f"{factor:.4g}" for factor in factors])
        yield Finding(
            name="clipped_first",
            title="each rank clips its own gradients, before they are averaged",
            evidence=f"step {step}: clip_grad_norm_ multiplied gradients by {told}; after the step the replicas are "
            "equal",
            cause="the norm of one rank's gradients is larger and noisier than that of their average, so the ranks are "
            "scaled by different factors, and the limit means something else than on one device",
            fix="all-reduce the gradients first, and call clip_grad_norm_ after that",
            ranks=_numbers(ranks),
        )
        return


def _clip_factor(look: Look) -> float | None:
    """By what `clip_grad_norm_` multiplied the gradients of a rank."""
    norm, limit = look.norm or (0.0, 0.0)
    return min(1.0, limit / norm) if norm > 0 else None


def local_norm(state: RunState) -> Iterator[Finding]:
    """Gradients that were clipped by a different factor on each rank of one model."""
    for ranks in _averaging(state):
        found = _unequal(ranks, lambda look: look.clipped, _UNLIKE_FACTORS)
        if found is None or not any(model.sharded for model in _models(ranks[0])):
            continue  # replicas part if that happens to them, which is told
        step, factors = found
        told = _by_rank(ranks, [f"{factor:.4g}" for factor in factors])
        yield Finding(
            name="local_norm",
            title="gradients are clipped by a norm that differs between the ranks of one model",
            evidence=f"step {step}: between backward and step(), all gradients were multiplied by {told}",
            cause="each rank computed the norm of the gradients that it holds, which are a part of the model's, and "
            "not of all of them",
            fix="use torch.nn.utils.clip_grad_norm_(model.parameters(), limit) on the DTensors (FSDP2), "
            "model.clip_grad_norm_(limit) (FSDP1), or all-reduce the sum of the squared norms",
            ranks=_numbers(ranks),
        )
        return


# ---- what looks say


def _training(state: RunState) -> list[RankState]:
    """The ranks that train, of which it is known what they train."""
    return [rank for rank in state.ranks.values() if len(_in_steps(rank)) >= 2 and _names(rank, "parameter")]


def _numbers(ranks: Sequence[RankState]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)


def _in_steps(rank: RankState) -> list[Look]:
    """The looks at the ends of steps, whose sums are those of the tracked tensors."""
    count = len(rank.tracked.tensors) if rank.tracked else 0
    return [look for look in rank.looks if look.step and not look.end and len(look.sums) == count]


def _with_gradients(rank: RankState) -> list[Look]:
    return [look for look in _in_steps(rank) if look.gradients]


def _models(rank: RankState) -> list[TrackedModel]:
    return rank.tracked.models if rank.tracked else []


def _tensors(rank: RankState) -> list[TrackedTensor]:
    return rank.tracked.tensors if rank.tracked else []


def _names(rank: RankState, role: str = "") -> set[int]:
    """The indices of the tracked tensors with a role; of all without one."""
    return {number for number, tensor in enumerate(_tensors(rank)) if tensor.role == role or not role}


def _by_rank(ranks: Sequence[RankState], texts: Sequence[str]) -> str:
    """`0.5 on rank 0, 0.7 on rank 1`"""
    return ", ".join(f"{text} on rank {rank.rank}" for text, rank in zip(texts, ranks))


def _called(rank: RankState, numbers: Sequence[int]) -> list[str]:
    tensors = _tensors(rank)
    return [tensors[number].name for number in numbers if number < len(tensors)]


def _parameters(names: Sequence[str]) -> str:
    return listed(names, _SHOWN)


def _elements(rank: RankState) -> int:
    return sum(math.prod(_tensors(rank)[number].shape) for number in _names(rank, "parameter"))


def _alike(ranks: Sequence[RankState]) -> bool:
    """Whether ranks track tensors of the same names and shapes."""
    return len({tuple((tensor.name, tuple(tensor.shape)) for tensor in _tensors(rank)) for rank in ranks}) == 1


def _separate(ranks: Sequence[RankState], known: bool = False) -> bool:
    """Whether the ranks' models get different samples; if `known`, nothing else than that is known."""
    inputs: list[dict[int, str | None]] = [{seen.step: seen.digest for seen in rank.seen(Input)} for rank in ranks]
    batches: list[dict[int, str | None]] = [{seen.step: seen.digest for seen in rank.seen(Batch)} for rank in ranks]
    steps: set[int] = set()
    for digests in (inputs, batches):
        of_kind = set(digests[0]).intersection(*digests[1:])
        different = [len({of_rank[step] for of_rank in digests}) for step in of_kind]
        if different and min(different) == len(ranks):
            return True
        steps |= of_kind
    return not steps and not known


def _look_at(rank: RankState, step: int) -> Look | None:
    count = len(_tensors(rank))
    return next((look for look in rank.looks if look.step == step and not look.end and len(look.sums) == count), None)


def _looks_at(ranks: Sequence[RankState], step: int) -> list[Look]:
    """The looks of all ranks after a step; empty if one of them has none."""
    looks = [look for rank in ranks if (look := _look_at(rank, step)) is not None]
    return looks if len(looks) == len(ranks) else []


def _common_steps(ranks: Sequence[RankState]) -> list[int]:
    """The steps at whose end all ranks looked."""
    return sorted(set.intersection(*({look.step for look in _in_steps(rank)} for rank in ranks)))


def _apart(ranks: Sequence[RankState], step: int, numbers: set[int]) -> list[int]:
    """Which of these tensors differ between ranks after a step; all if that is not known."""
    looks = _looks_at(ranks, step)
    return _different(looks, numbers) if looks else sorted(numbers)


def parted_names(ranks: Sequence[RankState], step: int) -> list[str]:
    """The parameters that differ between ranks after a step."""
    return _called(ranks[0], _apart(ranks, step, _names(ranks[0], "parameter")))


def _averaged(ranks: Sequence[RankState], numbers: set[int]) -> tuple[list[int], list[int]] | None:
    """The steps after which replicas that had parted came together again, at least some of their tensors; and the
    tensors that never did. None if that is not known to happen."""
    ever: set[int] = set()
    apart_after = {}
    for step, found in _moments(ranks):
        apart = set(_different(found, numbers))
        if ever - apart:
            apart_after[step] = apart
        ever |= apart
    return (list(apart_after), sorted(set.intersection(*apart_after.values()))) if len(apart_after) >= _LOOKS else None


def _moments(ranks: Sequence[RankState]) -> list[tuple[int, list[Look | Between]]]:
    """What the ranks recorded of the same steps, in their order: the ends of steps, and the begin of the next ones."""
    looks = [{look.step: look for look in _in_steps(rank)} for rank in ranks]
    between = [_betweens(rank) for rank in ranks]
    steps = [(step, False) for step in set(looks[0]).intersection(*looks[1:])]
    steps += [(step, True) for step in set(between[0]).intersection(*between[1:])]
    return [(step, [of_rank[step] for of_rank in (between if later else looks)]) for step, later in sorted(steps)]


def _betweens(rank: RankState) -> dict[int, Between]:
    return {look.step: look for look in rank.between if len(look.sums) == len(_tensors(rank))}


def _around(ranks: Sequence[RankState]) -> Iterator[tuple[int, list[Look], list[Between]]]:
    """The steps of which it is known what the ranks had when they ended, and what when the next one began."""
    looks = [{look.step: look for look in _in_steps(rank)} for rank in ranks]
    between = [_betweens(rank) for rank in ranks]
    for step in sorted(set(looks[0]).intersection(*looks[1:], *between)):
        yield step, [of_rank[step] for of_rank in looks], [of_rank[step] for of_rank in between]


def _source(ranks: Sequence[RankState], numbers: set[int]) -> int | None:
    """The rank whose parameters replace those of all others, wherever replicas come together; None if there is none."""
    kept: set[int] | None = None
    seen = 0
    for _, before, after in _around(ranks):
        if _different(before, numbers) and not _different(after, numbers):
            unchanged = {
                rank.rank for rank, old, new in zip(ranks, before, after) if not _different([old, new], numbers)
            }
            kept = unchanged if kept is None else kept & unchanged
            seen += 1
    return min(kept) if kept and seen >= _LOOKS else None


def _averaged_copy(ranks: Sequence[RankState], numbers: set[int]) -> list[int]:
    """The steps after which as many bytes were sent as the parameters have, and no parameter changed."""
    least = _ALL_GRADIENTS * _elements(ranks[0])
    found = [
        step
        for step, before, after in _around(ranks)
        if all(old.sums == new.sums and new.bytes >= least for old, new in zip(before, after))
        and _different(after, numbers)
    ]
    return found if len(found) >= _LOOKS else []


def _different(looks: Sequence[Look | Between], numbers: set[int]) -> list[int]:
    found = []
    for number in sorted(numbers):
        sums = [look.sums[number] for look in looks]
        if not all(math.isfinite(value) for pair in sums for value in pair):
            continue
        scale = max(size for _, size in sums)
        if max(value for value, _ in sums) - min(value for value, _ in sums) > _APART * scale:
            found.append(number)
    return found


def _parting(ranks: Sequence[RankState], numbers: set[int]) -> tuple[Look, Look, list[int]] | None:
    """The first look at which tensors differ for good, the one before, and which differ at the end; None if none does,
    or if they have come together again, as with periodic averaging."""
    steps = sorted(set.intersection(*({look.step for look in rank.looks if not look.end} for rank in ranks)))
    before: Look | None = None
    first: Look | None = None
    parted: list[int] = []
    for step in steps:
        looks = _looks_at(ranks, step)
        if not looks:
            continue
        parted = _different(looks, numbers)
        if parted and before is None:
            return None  # they were never equal
        if not parted and first is not None:
            return None
        if parted:
            first = first or looks[0]
        else:
            before = looks[0]
    return (first, before, parted) if first is not None and before is not None else None


def _unlike_settings(ranks: Sequence[RankState], until: int) -> tuple[str, int, list[float]] | None:
    """The first hyperparameter that differs between ranks, up to a step; or the sum of the learning rates until then,
    if they differed in between."""
    for step in sorted(look.step for look in ranks[0].looks if look.step <= until and not look.end):
        looks = _looks_at(ranks, step)
        for name in looks[0].settings if looks else ():
            values = [look.settings.get(name, looks[0].settings[name]) for look in looks]
            if max(values) - min(values) > 1e-9 * max(map(abs, values)):
                return name, step, values
        rates = [look.rates for look in looks]
        if rates and max(rates) - min(rates) > 1e-9 * max(rates):
            return "lr summed over the steps", step, rates
    return None


def _unlike_orders(ranks: Sequence[RankState]) -> str:
    """Where the orders of the parameters in the ranks' optimizers differ first, in words; empty if they do not."""
    held = [next((look.order for look in _in_steps(rank) if look.order), []) for rank in ranks]
    length = max(map(len, held))
    orders = [order or list(range(length)) for order in held]
    if len({len(order) for order in orders}) > 1:
        return ""
    for position, numbers in enumerate(zip(*orders)):
        if len(set(numbers)) > 1:
            names = [_called(rank, [number])[0] for rank, number in zip(ranks, numbers)]
            return f"number {position + 1} is {_by_rank(ranks, names)}"
    return ""


def _in_words(name: str) -> str:
    return name.replace("lr", "learning rate", 1) if name.split()[0] == "lr" else name


def _averaging(state: RunState) -> Iterator[list[RankState]]:
    """Ranks that average the gradients of one model: those of a DDP group, or of a sharded model."""
    ranks = _training(state)
    groups = _ddp_groups(ranks)
    yield from (members for members in groups if len(members) > 1)
    if not groups and len(ranks) > 1 and all(any(model.sharded for model in _models(rank)) for rank in ranks):
        yield ranks


def _unequal(
    ranks: Sequence[RankState], value: Callable[[Look], float | None], by: float
) -> tuple[int, list[float]] | None:
    """A step and the values of the ranks in it, if they differ by a share `by` of the largest in most looks."""
    found, unequal = 0, []
    for step in _common_steps(ranks):
        values = [number for look in _looks_at(ranks, step) if (number := value(look)) is not None and number > 0]
        if len(values) < len(ranks) or not all(map(math.isfinite, values)):
            continue
        found += 1
        if max(values) - min(values) > by * max(values):
            unequal.append((step, values))
    return unequal[-1] if found >= _LOOKS and 2 * len(unequal) > found else None


def _all_finite(looks: Sequence[Look], numbers: Sequence[int]) -> bool:
    return all(math.isfinite(value) for look in looks for number in numbers for value in look.sums[number])


RULES = (
    separate_ranks,
    nothing_sent,
    replicas_differ,
    tied_apart,
    experts_replaced,
    no_effect,
    schedule_over,
    no_update,
    no_gradient,
    gradients_kept,
    stays_in_evaluation,
    clipped_scaled,
    clipped_late,
    dropped_micro_batches,
    nothing_loaded,
    normalised_twice,
    repeated_stream,
    same_random,
    unlike_data,
    divided_twice,
    unlike_order,
    evaluated_twice,
    unequal_weights,
    unequal_micro_batches,
    clipped_first,
    local_norm,
)
