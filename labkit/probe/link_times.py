"""Times collectives between ranks, and on CPUs what they compute, once for each rank:
`python -m labkit.probe.link_times STORE BACKEND SECONDS SIZE…`.

As under torchrun, RANK, LOCAL_RANK and WORLD_SIZE say which rank it is. The ranks find each other through the file
STORE. Each operation is repeated on tensors of each SIZE (bytes), in as many rounds as fit into SECONDS, so that what
else the machine does for a moment affects some repetitions only. In each round, rank 0 prints one line of JSON for each
operation and size: {round, operation, size, seconds, after_computing, computed}, or {round, operation, reason} if the
backend does not support the operation. On CPUs it also prints {round, precision, flops} for each precision: the FLOP/s
of the slowest rank, for each of several matrix products that all ranks compute at the same time, and {round, kernels}:
what `kernels` returns.

`seconds` are those of repetitions. One is a barrier, and then as many calls as take some milliseconds, because the
ranks do not leave a barrier at the same moment. Its time is that of the slowest rank, divided by the number of calls.

`after_computing` are the seconds of single calls on CPUs, before each of which every rank computes for `computed`
seconds, as in a training step. Such a call often takes some milliseconds longer, and the more often the longer they
have computed: after one of them, two ranks may share a core until the scheduler's next tick.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.probe.lifetime import PARENT, end_with_parent

_TIMEOUT = timedelta(seconds=60)
_LEAST = 0.005  # seconds of calls after one barrier
_COMPUTED = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008) * 3  # seconds that a CPU rank computes before single calls
_ALONE = 0.05  # seconds of CPU time that tell whether others use the cores
_SHORTEST = 1e-6  # seconds; less is measured if the ranks did not share the cores evenly
_LARGEST = 1 << 22  # bytes of such a call; a larger one takes so long that the delay does not matter
_MOST_CALLS = 50
_ROUNDS = 5  # at most
_REPETITIONS = (2, 10)  # of one operation and size per round, at least and at most
_REPEAT = 0.05  # seconds for which they are repeated
_PRODUCTS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # on CPUs
_SIDE = 1024  # rows and columns of their matrices
_COPIED, _LAUNCHES = 1 << 26, 1000  # bytes of a copy; operations in a row

# torch 2.13 renamed both
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffers(NamedTuple):
    """The tensors of a rank: two whole ones of the same size, and its chunk, one of as many as there are ranks."""

    whole: torch.Tensor
    other: torch.Tensor
    chunk: torch.Tensor


def _round_trip(whole: torch.Tensor) -> None:
    """Ranks 0 and 1 exchange a message in turn, as do 2 and 3, and so on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1
    if partner < ranks:
        first, second = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
        first(whole, partner)
        second(whole, partner)


# A round trip is two messages, one after the other.
OPERATIONS: dict[str, Callable[[Buffers], Any]] = {
    "all_reduce": lambda own: dist.all_reduce(own.whole),
    "all_gather": lambda own: _all_gather(own.whole, own.chunk),
    "reduce_scatter": lambda own: _reduce_scatter(own.chunk, own.whole),
    "broadcast": lambda own: dist.broadcast(own.whole, 0),
    "all_to_all": lambda own: dist.all_to_all_single(own.other, own.whole),
    "send": lambda own: _round_trip(own.whole),
}
_MESSAGES = {"send": 2}  # messages in a row per call


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, call: Callable[[], Any], calls: int) -> float:
        """Seconds of one call on this rank, of several that begin on all ranks at about the same time."""
        dist.barrier()
        self._finish()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self._finish()
        return (time.perf_counter() - began) / calls

    def after_computing(self, call: Callable[[], Any]) -> list[float]:
        """Seconds of each of several calls on this CPU rank, which computes before each."""
        dist.barrier()
        found = []
        for seconds in _COMPUTED:
            began = time.perf_counter()
            compute(seconds)
            call()
            found.append(max(_SHORTEST, time.perf_counter() - began - ranks_per_core() * seconds))
        return found

    def once(self, call: Callable[[], Any]) -> float:
        """Seconds of a computation that begins on all ranks at about the same time."""
        dist.barrier()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest of all ranks, for each value."""
        most = torch.tensor(seconds, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def ranks_per_core() -> float:
    """The ranks that share a core, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, dist.get_world_size() / cores)


def compute(seconds: float) -> None:
    """Uses CPU time."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def measure(operation: str, size: int, device: torch.device) -> dict[str, Any]:
    """One operation on about `size` bytes, the same number for every rank."""
    clock, ranks = Clock(device), dist.get_world_size()
    count = max(1, round(size / 4 / ranks))  # elements of a chunk
    whole = torch.zeros(count * ranks, device=device)
    own = Buffers(whole, torch.zeros_like(whole), torch.zeros(count, device=device))

    def call() -> Any:
        return OPERATIONS[operation](own)

    clock(call, 1)  # the first call may connect the ranks
    (once,) = clock.slowest([clock(call, 1)])
    calls = min(_MOST_CALLS, max(1, round(_LEAST / once)))
    least, most = _REPETITIONS
    repetitions = min(most, max(least, round(_REPEAT / (once * calls))))
    found = clock.slowest([clock(call, calls) for _ in range(repetitions)])
    late = clock.slowest(clock.after_computing(call)) if device.type == "cpu" and size <= _LARGEST else []
    messages = _MESSAGES.get(operation, 1)
    return {
        "size": whole.nbytes,
        "seconds": [seconds / messages for seconds in found],
        "after_computing": [seconds / messages for seconds in late],
        "computed": _COMPUTED if late else (),
    }


def measured(operation: str, sizes: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """What was measured on each size, or the reason why the operation is not supported."""
    try:
        for size in sizes:
            yield measure(operation, size, device)
    except (RuntimeError, NotImplementedError) as error:
        yield {"reason": str(error).partition("\n")[0]}


def products(precision: torch.dtype) -> list[float]:
    """FLOP/s of the slowest rank in each of some products of two square matrices."""
    clock, matrix = Clock(torch.device("cpu")), torch.ones(_SIDE, _SIDE, dtype=precision)
    clock.once(lambda: matrix @ matrix)  # the first one is slower
    found = clock.slowest([clock.once(lambda: matrix @ matrix) for _ in range(_REPETITIONS[0])])
    return [2 * _SIDE**3 / seconds for seconds in found]


def kernels() -> dict[str, list[float]]:
    """Of the slowest rank, several times: `copies`, bytes per second that a copy of a large tensor reads and writes,
    `launch`, the seconds of an operation on one number, and `slowdown`, by how much a computation takes longer than if
    nothing but the ranks used the cores."""
    clock, number, large = Clock(torch.device("cpu")), torch.ones(1), torch.ones(_COPIED // 4)
    target = torch.empty_like(large)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            number.add_(1)

    found = {}
    calls = {"copies": lambda: target.copy_(large), "launch": launches, "slowdown": lambda: compute(_ALONE)}
    for name, call in calls.items():
        clock.once(call)
        found[name] = clock.slowest([clock.once(call) for _ in range(_REPETITIONS[0])])
    copies = [2 * _COPIED / seconds for seconds in found["copies"]]
    slowdown = [seconds / (ranks_per_core() * _ALONE) for seconds in found["slowdown"]]
    return {"copies": copies, "launch": [seconds / _LAUNCHES for seconds in found["launch"]], "slowdown": slowdown}


def main(store: str, backend: str, seconds: float, sizes: list[int]) -> None:
    """Measures all operations as one rank of the process group."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settings: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": _TIMEOUT}
    device = torch.device("cpu")
    if backend == "nccl":
        device = settings["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", **settings)
    began = time.perf_counter()
    for number in range(1, _ROUNDS + 1):
        for operation in OPERATIONS:
            for line in measured(operation, sizes, device):
                if rank == 0:
                    print(json.dumps({"round": number, "operation": operation, **line}), flush=True)
        for name, precision in _PRODUCTS.items() if device.type == "cpu" else ():
            flops = products(precision)
            if rank == 0:
                print(json.dumps({"round": number, "precision": name, "flops": flops}), flush=True)
        reached = kernels() if device.type == "cpu" else {}
        if rank == 0 and reached:
            print(json.dumps({"round": number, "kernels": reached}), flush=True)
        (elapsed,) = Clock(device).slowest([time.perf_counter() - began])
        if elapsed * (number + 1) / number > seconds:  # another round would take too long
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    if PARENT in os.environ:
        end_with_parent(os.environ[PARENT])
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), [int(size) for size in sys.argv[4:]])
