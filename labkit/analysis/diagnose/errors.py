"""Runs that fail: errors that say by their own words what they are, memory that was not there, and who was first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.diagnose.advice import one_of
from labkit.analysis.diagnose.finding import Finding, shorter, texts
from labkit.common.units import counted, ranks_in_words, size
from labkit.record.failures import PEER_GONE
from labkit.record.stacks import place

if TYPE_CHECKING:
    from labkit.record.columns import RankState
    from labkit.record.state import RunState

_MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory|MemoryError|ALLOC_FAILED", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate (?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True)
class _Sign:
    """An error that says by its own words what it is."""

    name: str
    words: str
    title: str
    cause: str
    fix: str


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
        "disk_full",
        r"No space left on device|Disk quota exceeded|the disk that holds the run folder was full",
        "the disk was full",
        "what the run writes (events, logs, checkpoints, the script's own files) found no room; what came after that is not recorded",
        "free space on that disk (labkit clean deletes recorded runs), or set LABKIT_RUNS to a folder on another disk",
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
NAMES = tuple(sign.name for sign in _SIGNS)  # of findings that are recognised by an error message


def told_by_an_error(state: RunState) -> Iterator[Finding]:
    """Errors whose words name the cause."""
    failure = state.failure
    for sign in _SIGNS:
        said = next(((rank, text) for rank, text in texts(state) if re.search(sign.words, text)), None)
        if said is None or (sign.name == "nccl" and (_MEMORY.search(said[1]) or PEER_GONE.search(said[1]))):
            continue  # NCCL also tells of memory that is short, and of peers that have gone
        rank, text = said
        first, *more = text.strip().splitlines()
        last = "\n".join(more).rpartition("Last error:")[2] if "Last error:" in "\n".join(more) else ""
        ranks = (rank,) if rank is not None else () if failure is None else (failure["rank"],)
        yield Finding(sign.name, "wrong", sign.title, shorter(f"{first} {last}"), sign.cause, sign.fix, ranks)
        return


def out_of_memory(state: RunState) -> Iterator[Finding]:
    """Memory that was not there, what held the rest of it at that moment, and what would have fitted."""
    failure = state.failure
    if failure is not None and failure["type"] == "SIGKILL" and state.status.get("oom_kills"):
        yield _killed_for_memory(state, failure)
        return
    if failure is None or not _MEMORY.search(f"{failure['type']}: {failure['message']}"):
        return
    rank = state.ranks.get(failure["rank"])
    asked = _asked(failure["message"])
    held = {owner: count for owner, count in (((rank and rank.error) or {}).get("owners") or {}).items() if count}
    breakdown = ", ".join(f"{owner} {size(count)}" for owner, count in sorted(held.items(), key=lambda item: -item[1]))
    evidence = shorter(failure["message"] or failure["type"]) + (f"; held then: {breakdown}" if breakdown else "")
    where = place(failure["traceback"])
    yield Finding(
        name="out_of_memory",
        kind="wrong",
        title=f"{ranks_in_words(failure['alike'], state.world_size)} ran out of memory" + (f" at {where}" if where else ""),
        evidence=evidence,
        cause=f"{size(asked)} more were asked for than there was room for" if asked else "more was asked for than there was room for",
        fix=_what_fits(state, rank, asked or 0, held),
        ranks=_involved(failure),
    )


def _killed_for_memory(state: RunState, failure: Mapping[str, Any]) -> Finding:
    """A rank that the kernel killed because the memory of the host, or of its control group, ran out."""
    rank, where = failure["rank"], place(failure["traceback"])
    sampled = state.system.ranks.get(rank)
    resident = f"; its process last had {size(sampled['rss'][-1])} of resident memory" if sampled and len(sampled["rss"]) else ""
    kills = state.status["oom_kills"]
    return Finding(
        name="out_of_memory",
        kind="wrong",
        title=f"rank {rank} was killed by the kernel because memory ran out" + (f", last seen at {where}" if where else ""),
        evidence=f"SIGKILL; in this control group the kernel killed {counted(kills, 'process', 'es')} for lack of memory{resident}",
        cause="the processes of the host or container used more memory than its limit (this is host memory, not GPU memory)",
        fix=f"start the container or job with more memory; or hold less data in each rank; or {one_of(state, 'smaller batch')}",
        ranks=_involved(failure),
    )


def _involved(failure: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks that a failure concerns, the first one first."""
    first = failure["rank"]
    return (first, *(rank for rank in failure["alike"] if rank != first), *failure["collateral"])


def _asked(message: str) -> float | None:
    found = _ASKED.search(message)
    return float(found["number"]) * _UNITS[found["unit"].lower()] if found else None


def _what_fits(state: RunState, rank: RankState | None, asked: float, held: Mapping[str, int]) -> str:
    """By the breakdown: activations grow with the batch, the rest does not; a shard is the rest by the number of ranks."""
    usual = one_of(state, "smaller batch", "accumulate for memory", "checkpoint activations", "shard")
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
        sharded = "sharded over n ranks (fsdp2), each holds an n-th of them"
        return f"parameters, gradients and optimizer state take {size(fixed)} of {size(limit)}: {sharded}"
    fits = int(batch * (0.95 * limit - fixed) / (activations + asked))
    return f"by this breakdown a batch of {fits} per rank would have fitted; or {usual}" if 0 < fits < batch else usual


def _limit(state: RunState, rank: RankState | None) -> float | None:
    number = (rank.device if rank is not None else "").removeprefix("cuda:")
    return float(state.system.gpu_memory_total.get(int(number)) or 0) or None if number.isdigit() else None


def first_failure(state: RunState) -> Iterator[Finding]:
    """The rank that failed first, or those that failed in the same way, and the ranks that were terminated with them."""
    failure = state.failure
    if failure is None:
        return
    says = f"{failure['type']}: {failure['message']}" if failure["message"] else failure["type"]
    where = _where(failure)
    several = len(failure["alike"]) > 1
    those = ranks_in_words(failure["alike"], state.world_size)
    if several:
        how = "in the same way"
    elif failure["left"]:
        how = f"because {ranks_in_words(failure['left'])} had already ended"
    else:
        how = "first" if state.world_size > 1 and not _lost_a_peer(state, failure) else ""
    title = " ".join(filter(None, (those, "failed", how))) + f": {shorter(says, 120)}{where}"
    if failure["collateral"]:
        verb = "was" if len(failure["collateral"]) == 1 else "were"
        title += f"; {ranks_in_words(failure['collateral'])} {verb} terminated because {those if not several else 'they'} failed"
    yield Finding(
        name="first_failure",
        kind="wrong",
        title=title,
        evidence=shorter(says) + where,
        cause=_cause(state, failure),
        fix=f"read the end of the stderr of rank {failure['rank']}"
        + ("; the messages of the other ranks follow from it" if failure["collateral"] else ""),
        ranks=_involved(failure),
    )


def _where(failure: Mapping[str, Any]) -> str:
    """` (train.py:12 in step)`; for a process that was killed, where it was a moment before; empty if the message has the line."""
    line = place(failure["traceback"])
    if not line or f"{line.partition(':')[0]}, line" in failure["message"]:
        return ""
    return f" (last seen at {line})" if failure["last_seen"] else f" ({line})"


def _lost_a_peer(state: RunState, failure: Mapping[str, Any]) -> bool:
    """Whether the first failure that is known so far only says that another rank is gone; torchrun reports that one at the end."""
    return not state.over and bool(PEER_GONE.search(f"{failure['type']}: {failure['message']}"))


def _cause(state: RunState, failure: Mapping[str, Any]) -> str:
    if failure["left"]:
        return "the process of a rank that has ended is gone, and its connections are closed"
    if _lost_a_peer(state, failure):
        return "another rank is gone; which one, and why, is known when torchrun has ended the run"
    if failure["type"] == "SIGKILL" and state.status.get("oom_kills"):
        return "the kernel killed the process because memory ran out"
    if failure["type"] == "SIGKILL":
        unknown = ", or by the kernel because memory ran out (dmesg shows that)" if state.status.get("oom_kills") is None else ""
        return f"the process was killed from outside: by a person or a scheduler{unknown}"
    if str(failure["type"]).startswith("SIG"):
        return "code outside Python, such as a C extension or a driver, crashed the process"
    several = len(failure["alike"]) > 1
    what = "the same mistake on every one of these ranks" if several else "the exception, or the exit, of this rank"
    return what + ("; the other ranks were terminated because they lost a peer" if failure["collateral"] else "")
