"""Runs that fail or hang: who was first, what it was, and who waits for whom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.diagnose.finding import Finding, place, ranks_in_words, size

if TYPE_CHECKING:
    from labkit.state import RankState, RunState

_MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory|MemoryError|ALLOC_FAILED", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate (?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_MISMATCH = re.compile(r"collective mismatch|data size doesn't match|preamble\.length|Detected mismatch between collectives", re.IGNORECASE)
_ALONE = re.compile(
    r"connection (?:was likely )?(?:closed|reset|refused)|broken pipe|timed out|timeout|remote process exited|peer closed|SIGABRT|SIGTERM",
    re.IGNORECASE,
)
_ALIKE = ("all_reduce", "reduce", "broadcast")  # operations to which every rank brings the same shape
_IDLE = 0.05  # share of the time that a rank may compute and still be said to wait


@dataclass(frozen=True)
class _Sign:
    """An error that says by its own words what it is."""

    name: str
    words: str
    title: str
    cause: str
    way_out: str


_SIGNS = (
    _Sign(
        "unused_parameters",
        r"Expected to have finished reduction in the prior iteration",
        "parameters that no gradient comes for",
        "DDP counts on a gradient of every parameter; some took no part in the loss, so a bucket was never complete",
        "use every parameter in forward, or give DDP find_unused_parameters=True (it costs a look at the graph each step)",
    ),
    _Sign(
        "shuffle_beside_sampler",
        r"sampler option is mutually exclusive with shuffle",
        "DataLoader was given a sampler and shuffle",
        "the sampler decides the order, so shuffle has nothing to say",
        "leave shuffle out, and shuffle in the sampler: DistributedSampler(dataset, shuffle=True)",
    ),
    _Sign(
        "port_taken",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the port for the rendezvous is taken",
        "another job, or one that was not ended, listens on the port that this one was told to use",
        "use torchrun --standalone, which takes a free port, or give another --master-port; labkit runs lists what is still under way",
    ),
    _Sign(
        "shared_memory",
        r"(?:out of|insufficient) shared memory|creating shared memory|(?:shared memory|</torch_|shm).*No space left on device",
        "shared memory is too small",
        "NCCL and the workers of a DataLoader pass data through /dev/shm, and containers often have 64 MB of it",
        "start the container with --shm-size=1g (or --ipc=host), or use fewer workers",
    ),
    _Sign(
        "no_nccl",
        r"(?:Distributed package doesn't have NCCL|NCCL is not available|No backend type associated with device type cuda)",
        "this torch has no NCCL",
        "NCCL is for NVIDIA GPUs on Linux: there is none on Windows and macOS, and none in a CPU build",
        "use the backend gloo (the lab's scripts do where there is no GPU), or Linux with a CUDA build of torch",
    ),
    _Sign(
        "old_driver",
        r"driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is too old for this torch",
        "torch was built for a newer CUDA than the driver knows",
        "update the driver, or install a torch for the CUDA that nvidia-smi shows; labkit doctor says both",
    ),
    _Sign(
        "no_kernel",
        r"no kernel image is available",
        "this torch has no code for this GPU",
        "the wheel was built for other architectures than the GPU's",
        "install a torch that names the GPU's capability in torch.cuda.get_arch_list(); labkit doctor compares them",
    ),
    _Sign(
        "forked_cuda",
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was used before the process was forked",
        "a child process cannot take over its parent's CUDA",
        "start workers with the method spawn, and touch no GPU before (labkit's kernel never does)",
    ),
    _Sign(
        "no_such_gpu",
        r"invalid device ordinal",
        "a rank asked for a GPU that there is not",
        "there are more ranks on this machine than GPUs, or CUDA_VISIBLE_DEVICES hides some",
        "start as many ranks as there are GPUs; cuda.set_device(LOCAL_RANK) picks one each",
    ),
    _Sign(
        "nccl",
        r"NCCL (?:error|Error)|ncclUnhandledCudaError|ncclSystemError|unhandled (?:system|cuda) error|ncclInternalError",
        "NCCL has failed",
        "a link between GPUs, a driver or a network interface did not do what NCCL asked; its own log says which",
        "run again with NCCL_DEBUG=INFO and read its first WARN; NCCL_SOCKET_IFNAME chooses the interface between machines",
    ),
)


def told_by_an_error(state: RunState) -> Iterator[Finding]:
    """Errors whose words name the cause."""
    failure = state.failure
    for sign in _SIGNS:
        said = next(((rank, text) for rank, text in _texts(state) if re.search(sign.words, text)), None)
        if said is None or (sign.name == "nccl" and (_MEMORY.search(said[1]) or _ALONE.search(said[1]))):
            continue  # NCCL also tells of memory that is short, and of peers that have gone
        rank, text = said
        first, last = text.strip().splitlines()[0], text.rpartition("Last error:")[2] if "Last error:" in text else ""
        ranks = (rank,) if rank is not None else () if failure is None else (failure["rank"],)
        yield Finding(sign.name, "wrong", sign.title, _short(f"{first} {last}"), sign.cause, sign.way_out, ranks)
        return


def _texts(state: RunState) -> Iterator[tuple[int | None, str]]:
    """What errors said, with their rank: the first failure's words, then those of the others, then torchrun's."""
    failure = state.failure
    if failure is not None:
        yield failure["rank"], f"{failure['type']}: {failure['message']}"
    for rank in state.ranks.values():
        if rank.error:
            yield rank.rank, f"{rank.error.get('type')}: {rank.error.get('message')}"
    for number, failed in (state.status.get("failures") or {}).items():
        yield int(number), str(failed.get("message", ""))
    yield None, str(state.status.get("message") or "")


def out_of_memory(state: RunState) -> Iterator[Finding]:
    """Memory that was not there, what held the rest of it at that moment, and what would have fitted."""
    failure = state.failure
    if failure is None or not _MEMORY.search(f"{failure['type']}: {failure['message']}"):
        return
    rank = state.ranks.get(failure["rank"])
    asked = _asked(failure["message"])
    held = {owner: count for owner, count in (((rank and rank.error) or {}).get("owners") or {}).items() if count}
    breakdown = ", ".join(f"{owner} {size(count)}" for owner, count in sorted(held.items(), key=lambda item: -item[1]))
    evidence = _short(failure["message"] or failure["type"]) + (f"; held then: {breakdown}" if breakdown else "")
    where = place(failure["traceback"])
    yield Finding(
        name="out_of_memory",
        kind="wrong",
        title=f"rank {failure['rank']} ran out of memory" + (f" at {where}" if where else ""),
        evidence=evidence,
        cause=f"{size(asked)} more were asked for than there was room for" if asked else "more was asked for than there was room for",
        way_out=_what_fits(state, rank, asked or 0, held),
        ranks=(failure["rank"], *failure["collateral"]),
    )


def _asked(message: str) -> float | None:
    found = _ASKED.search(message)
    return float(found["number"]) * _UNITS[found["unit"].lower()] if found else None


def _what_fits(state: RunState, rank: RankState | None, asked: float, held: Mapping[str, int]) -> str:
    """By the breakdown: activations grow with the batch, the rest does not; a shard is the rest by the number of ranks."""
    usual = "a smaller batch, accumulate=2 for the same step in parts, checkpoint_activations=true, or fsdp2 over more ranks"
    limit = _limit(state, rank)
    whole = limit or float(1 << 40)
    if asked > whole:
        return f"no setting would have fitted: one tensor of {size(asked)} is more than the device has; look at the line that asks"
    batch = state.asked.batch_per_rank if state.asked is not None else None
    fixed = sum(count for owner, count in held.items() if owner != "activations")
    sampled = rank.memory_step if rank is not None else None
    activations = sampled["at_peak"].get("activations", 0) if sampled else held.get("activations", 0)
    if limit is None or not batch or not activations:
        return usual
    if fixed > 0.95 * limit:
        return f"parameters, gradients and optimizer state take {size(fixed)} of {size(limit)}: under fsdp2 n ranks keep an n-th each"
    fits = int(batch * (0.95 * limit - fixed) / (activations + asked))
    return f"by this breakdown a batch of {fits} per rank would have fitted; or {usual}" if 0 < fits < batch else usual


def _limit(state: RunState, rank: RankState | None) -> float | None:
    number = (rank.device if rank is not None else "").removeprefix("cuda:")
    return float(state.system.gpu_memory_total.get(int(number)) or 0) or None if number.isdigit() else None


# ---- ranks that do not meet


def uneven_inputs(state: RunState) -> Iterator[Finding]:
    """Loaders of different lengths, in a run that did not come to its end."""
    lengths = {rank.rank: rank.seen("loader")[0]["batches"] for rank in state.ranks.values() if rank.seen("loader")}
    if len(set(lengths.values())) < 2 or None in lengths.values() or not _stuck(state) or (state.spec.get("options") or {}).get("join"):
        return
    least = min(lengths.values())
    short = tuple(rank for rank, length in sorted(lengths.items()) if length == least)
    yield Finding(
        name="uneven_inputs",
        kind="wrong",
        title=f"{ranks_in_words(short)} had {least} batches, and others up to {max(lengths.values())}",
        evidence="batches of an epoch, by rank: " + ", ".join(f"{rank}: {length}" for rank, length in sorted(lengths.items())),
        cause="every step has a collective; who has no batch left does not come to it, and the others wait or meet another one",
        way_out="give each rank as many samples (DistributedSampler fills up), or train inside model.join() (option join=true of ddp)",
        ranks=short,
    )


def evaluation_on_one_rank(state: RunState) -> Iterator[Finding]:
    """A rank that evaluates while others do not, and is stuck in it."""
    if not _stuck(state) or next(uneven_inputs(state), None):
        return
    waiting = _waiting(state)
    held = set(waiting) if state.failure is None else set(state.ranks)
    alone = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "evaluating" and rank.exit_code != 0 and rank.rank in held)
    others = tuple(rank.rank for rank in state.ranks.values() if rank.activity == "training")
    if not alone or not others or len(alone) >= len(others) + 1:
        return
    stood = state.ranks[alone[0]].error or waiting.get(alone[0]) or {}
    where = place(stood.get("traceback") or stood.get("stack"))
    gone = [rank for rank in others if state.ranks[rank].exit_code == 0]
    yield Finding(
        name="evaluation_on_one_rank",
        kind="wrong",
        title=f"{ranks_in_words(alone)} evaluated, and {ranks_in_words(others)} did not",
        evidence=(f"it stood at {where}; " if where else "")
        + (f"{ranks_in_words(gone)} had left" if gone else f"{ranks_in_words(others)} went on training"),
        cause="an evaluation with a sharded model, or with a sum over ranks, is a collective: every rank must come to it",
        way_out="let every rank evaluate a share of the test set, and print on rank 0 alone",
        ranks=alone + others,
    )


def mismatch(state: RunState) -> Iterator[Finding]:
    """A collective that the ranks did not agree on: it failed, or all of them are held in it by shapes that are unlike."""
    failed, waiting = state.failure is not None, _waiting(state)
    if not failed and not waiting:
        return
    said = next(((rank, text) for rank, text in _texts(state) if _MISMATCH.search(text)), None)
    stood = {rank.rank: rank.error or waiting.get(rank.rank) or {} for rank in state.ranks.values()}
    apart = _apart({number: _ops(event) for number, event in stood.items()}, unlike=failed)
    if said is None and apart is None:
        return
    places = (place(event.get("traceback") or event.get("stack")) for event in stood.values())
    where = next(filter(None, places), "")
    yield Finding(
        name="mismatch",
        kind="wrong",
        title="the ranks did not agree on a collective" + (f" at {where}" if where else ""),
        evidence="; ".join(filter(None, (apart, _short(said[1]) if said else ""))),
        cause="collectives meet by their order alone: op, shape and type must be the same on every rank",
        way_out="look for what depends on the rank there: a shape, an `if rank ==`, a last batch; TORCH_DISTRIBUTED_DEBUG=DETAIL helps",
        ranks=tuple(sorted(state.ranks)),
    )


def hang(state: RunState) -> Iterator[Finding]:
    """No progress: which rank waits in which collective, which never came, and where it is instead."""
    waiting, failure = _waiting(state), state.failure
    if not waiting or (failure is not None and failure["traceback"] and not _unmet(failure)):
        return
    pending = {number: op for number, event in waiting.items() if (op := _first_pending(event))}
    seconds = max(event["t"] - event["since"] for event in waiting.values())
    if not pending:
        title = f"{ranks_in_words(waiting)} made no progress for {seconds:.0f} s"
        absent: tuple[int, ...] = tuple(rank for rank in range(state.world_size) if rank not in waiting)
    else:
        first, absent = _awaited(pending)
        inside = [number for number, one in pending.items() if _same(one, first)]
        title = f"{ranks_in_words(inside)} waited for {seconds:.0f} s in {_op(first)}"
        title += f"; {ranks_in_words(absent)} never came" if absent else ", where all of its ranks are" if first["ranks"] else ""
    told = [f"rank {number}: {_where(event, pending.get(number))}" for number, event in sorted(waiting.items())]
    told += [f"rank {number}: {_last_seen(state, number)}" for number in absent if number not in waiting]
    yield Finding(
        name="hang",
        kind="wrong",
        title=title,
        evidence="; ".join(told),
        cause="a collective ends when every rank of its group has come to it; one that takes another way leaves the others waiting"
        if pending
        else "no collective is under way: it waits for data, a file, a lock, a message of another stage, or for ranks that have not begun",
        way_out="Stop ends it; look at the line of the rank that is elsewhere: an `if rank ==`, fewer batches, an error that was caught"
        if pending
        else "Stop ends it; look at the line where it stands",
        ranks=(*absent, *(number for number in waiting if number not in absent)),
    )


def _awaited(pending: Mapping[int, Mapping[str, Any]]) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """The collective that holds up the others, and its ranks that are not in it: one is best that waits for a rank that is in none."""
    absent = {
        number: tuple(rank for rank in op["ranks"] if rank not in pending or not _same(pending[rank], op)) for number, op in pending.items()
    }
    inside = {number: sum(_same(op, other) for other in pending.values()) for number, op in pending.items()}
    best = min(pending, key=lambda number: (all(rank in pending for rank in absent[number]), -inside[number]))
    return pending[best], absent[best]


def first_failure(state: RunState) -> Iterator[Finding]:
    """The rank that failed first, and those that only fell with it."""
    failure = state.failure
    if failure is None:
        return
    rank, collateral = failure["rank"], failure["collateral"]
    says = f"{failure['type']}: {failure['message']}" if failure["message"] else failure["type"]
    fell = f"; {ranks_in_words(collateral)} fell with it" if collateral else ""
    killed = failure["type"] == "SIGKILL"
    where = place(failure["traceback"])
    yield Finding(
        name="first_failure",
        kind="wrong",
        title=f"rank {rank} failed first{fell}",
        evidence=_short(says) + (f" (at {where})" if where else ""),
        cause="it was killed from outside: by a person, a scheduler, or the kernel where memory ran short (dmesg says so)"
        if killed
        else "the exception, or the exit, of this rank; the others lost their peer and failed for that",
        way_out=f"read the end of rank {rank}'s stderr; what the other ranks say follows from it",
        ranks=(rank, *collateral),
    )


def _stuck(state: RunState) -> bool:
    """Whether ranks did not meet: one waits, or has failed with words that say so."""
    failure = state.failure
    return _unmet(failure) if failure is not None else bool(_waiting(state))


def _unmet(failure: Mapping[str, Any]) -> bool:
    """Whether an error tells of other ranks only: gone, too late, or in another collective."""
    said = f"{failure['type']}: {failure['message']}"
    return bool(_ALONE.search(said) or _MISMATCH.search(said))


def _waiting(state: RunState) -> dict[int, Mapping[str, Any]]:
    """By rank where each stands that waits: not those that have gone on since, have ended well, or only compute for long."""
    if state.status.get("state") == "finished":
        return {}
    held = {rank.rank: rank.waiting for rank in state.ranks.values() if rank.waiting and rank.exit_code != 0 and not _went_on(rank)}
    return {number: event for number, event in held.items() if _waits(event)}


def _went_on(rank: RankState) -> bool:
    since = rank.waiting.get("step")
    return isinstance(since, int) and len(rank.steps) > rank.first_step and rank.steps.step[-1] > since


def _waits(event: Mapping[str, Any]) -> bool:
    computed = event.get("computed")
    return _first_pending(event) is not None or (computed is not None and computed < _IDLE)


def _ops(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The collectives that an event tells of, with all that is read of them; without those that have no group or number."""
    ops = [op for op in event.get("ops") or () if isinstance(op, Mapping) and isinstance(op.get("seq"), int) and op.get("group")]
    plain = {"op": "collective", "over": True}
    return [plain | dict(op) | {"ranks": tuple(op.get("ranks") or ()), "sizes": op.get("sizes") or []} for op in ops]


def _first_pending(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((op for op in _ops(event) if not op["over"]), None)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("group", "ranks", "seq", "op"))


def _op(op: Mapping[str, Any]) -> str:
    shapes = " and ".join("×".join(map(str, shape)) or "one number" for shape in op["sizes"])
    return f"{op['op']} number {op['seq']}" + (f" ({shapes})" if shapes else "")


def _where(event: Mapping[str, Any], op: Mapping[str, Any] | None) -> str:
    at = place(event["stack"]) or event.get("phase") or "a place that is not known"
    return (f"in {_op(op)} at {at}" if op else f"in no collective, at {at}") + f", {event.get('step', 0)} steps done"


def _last_seen(state: RunState, number: int) -> str:
    rank = state.ranks.get(number)
    if rank is None:
        return "has not begun"
    if rank.exit_code is not None:
        return f"has ended with exit code {rank.exit_code}"
    done = int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0
    return f"goes on{' evaluating' if rank.activity == 'evaluating' else ''}, {done} steps done"


def _apart(ops: Mapping[int, list[dict[str, Any]]], unlike: bool) -> str | None:
    """Two ranks' different ideas of the same number in the same group, in words: of its shape, or, if `unlike`, of the operation too."""
    known: dict[tuple[str, tuple[int, ...], int], tuple[int, dict[str, Any]]] = {}
    for rank, those in sorted(ops.items()):
        for op in those:
            before, first = known.setdefault((op["group"], op["ranks"], op["seq"]), (rank, op))
            same = first["op"] == op["op"]
            if (same and op["op"] in _ALIKE and first["sizes"] != op["sizes"]) or (unlike and not same):
                return f"rank {before} was in {_op(first)}, rank {rank} in {_op(op)}"
    return None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "…"
