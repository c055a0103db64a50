"""Small traces in the format of torch's profiler, whose answers are known."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm>(cutlass::Params)"
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
_numbers = count(1)


def event(category: str, name: str, start: float, lasts: float, **args: Any) -> dict[str, Any]:
    """A complete event; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": lasts, "args": args}


def step(number: int, start: float, lasts: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start, lasts)


def kernel(
    start: float, lasts: float, name: str = GEMM, launched: float | None = None, stream: int = 7, **args: Any
) -> list[dict]:
    """A kernel, with the call that launched it 5 µs before, or at `launched`."""
    number = next(_numbers)
    at = start - 5 if launched is None else launched
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 2, correlation=number),
        event("kernel", name, start, lasts, correlation=number, stream=stream, device=0, **args),
    ]


def all_reduce(start: float, lasts: float, elements: int = 0, ranks: int = 2, **settings: Any) -> list[dict]:
    """An all-reduce of float32 elements, with the arguments that torch has recorded since version 2.2."""
    args = {"Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    args |= {"Group size": ranks, "Process Group Name": "0", "Process Group Ranks": str([*range(ranks)])}
    return kernel(start, lasts, ALL_REDUCE, **(args if elements else {}), **settings)


def trace(events: Iterable[Any], rank: int = 0, world_size: int = 2, **metadata: Any) -> dict[str, Any]:
    flat = [one for entry in events for one in (entry if isinstance(entry, list) else [entry])]
    about = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
    about["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_config": []}
    return about | metadata | {"traceEvents": flat, "displayTimeUnit": "ms"}


def write(path: Path, content: Mapping[str, Any] | str | bytes) -> Path:
    text = json.dumps(content) if isinstance(content, Mapping) else content
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def steps_of(lasts: float) -> list[Any]:
    """Steps 4 and 5, and the beginning of 6; in each 100 µs of forward, `lasts` µs of backward, an all-reduce of 200 µs
    of which 50 overlap with it, and 40 µs of the optimizer."""
    events = []
    for number, begin in ((4, 0), (5, 2000)):
        end = begin + 200 + lasts
        events += [step(number, begin, 2000), kernel(begin + 100, 100), kernel(begin + 200, lasts)]
        events += [event("cpu_op", BACKWARD, begin + 150, 60), all_reduce(end - 50, 200, 1000, launched=begin + 160)]
        events += [event("user_annotation", "Optimizer.step#SGD.step", begin + 300, 30)]
        events += [kernel(end + 200, 40, "adam", launched=begin + 310)]
    return [*events, step(6, 4000, 2000), kernel(4100, 100)]


def job(folder: Path, lasts: tuple[float, float] = (500, 500)) -> Path:
    """A job of two ranks, whose backward passes last so many µs."""
    folder.mkdir()
    for rank, of_rank in enumerate(lasts):
        content = trace(steps_of(of_rank), rank=rank, baseTimeNanoseconds=1_700_000_000_000_000_000, host_name="node-7")
        write(folder / f"rank{rank}.json.gz", content)
    return folder


_COMMUNICATION = (ALL_REDUCE, "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)")
_ROCM = ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "Cijk_Ailk_Bljk_SB_MT128x64x8")
_COMPUTATION = (GEMM, "triton_poi_fused_add_0", "memcpy128", "Kernel_with_nccl_in_its_name", "ampere_sgemm_128x64_tn")
_COPIES = ("Memcpy DtoH (Device -> Pageable)", "Memset (Device)")


def hostile(seed: int) -> dict[str, Any]:
    """A trace of several streams, with kernels that overlap, contain each other or last no time, copies, and events in
    any order; for some seeds of ROCm, without a step in the middle, or without steps."""
    chosen = random.Random(seed)
    numbers = [3, 4, 5, 6] if seed % 3 else [3, 5, 6]
    streams, events, now = 1 + seed % 4, [], 0.0
    for number in numbers:
        begin, free = now, [now + 20] * streams
        for _ in range(chosen.randint(5, 40)):
            now += chosen.uniform(1, 30)
            kinds = [_COMMUNICATION, _COMPUTATION, _COPIES] if seed % 2 else [_ROCM, _COMPUTATION, _COPIES]
            name = chosen.choice(chosen.choices(kinds, (3, 5, 1))[0])
            stream = chosen.randrange(streams)
            start = max(free[stream], now + 5) + chosen.choice([0, 0, chosen.uniform(0, 50)])
            lasts = chosen.choice([0, 1, chosen.uniform(1, 20), chosen.uniform(1, 400)])
            free[stream] = start + lasts
            events += kernel(round(start, 3), round(lasts, 3), name, launched=round(now, 3), stream=stream)
        now += chosen.uniform(1, 100)
        if seed % 5:
            events.append(step(number, round(begin, 3), round(now - begin, 3)))
    if seed % 2:
        chosen.shuffle(events)
    return trace(events)
