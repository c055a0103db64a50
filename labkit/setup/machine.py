"""The resources of this machine, found without CUDA: GPUs through NVML, the rest through psutil.

The notebook kernel must never initialize CUDA, because its forked children could not use it; so this module does not
import torch.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG device: its name, memory in bytes, compute capability and UUID."""

    index: int
    name: str
    memory: int
    capability: tuple[int, int]
    uuid: str = field(default="", compare=False)


@dataclass(frozen=True)
class Machine:
    """The resources for a run: GPUs (visible under CUDA_VISIBLE_DEVICES), CPU cores, bytes of memory, and torch's
    (major, minor) version.

    `torch` is () if it is not installed.
    """

    gpus: tuple[Gpu, ...]
    cores: int
    memory: int
    no_gpu_reason: str = "this machine has no GPU"
    torch: tuple[int, ...] = ()

    @property
    def max_cpu_ranks(self) -> int:
        """The maximum number of CPU ranks: twice the cores, but at least 8, so that every strategy can run."""
        return max(8, 2 * self.cores)

    @property
    def max_workers(self) -> int:
        """The maximum number of data loader workers, over all ranks."""
        return max(16, 4 * self.cores)

    @property
    def hardware(self) -> str:
        """CPU cores and GPUs in words, by which measurements of another machine are recognised."""
        gpus = Counter(gpu.name for gpu in self.gpus)
        return "; ".join([f"{self.cores} × {_cpu()}", *(f"{count} × {name}" for name, count in gpus.items())])

    @property
    def torch_version(self) -> str:
        """`2.13`; empty if torch is not installed."""
        return ".".join(map(str, self.torch))

    def default_nproc(self, device: str) -> int:
        """The default number of ranks: all GPUs, or two CPU ranks, the minimum for communication."""
        return len(self.gpus) if device == "cuda" else 2

    def times(self, nodes: int) -> Machine:
        """Several machines like this one, as the devices of one run."""
        return replace(self, gpus=self.gpus * nodes, cores=self.cores * nodes, memory=self.memory * nodes)

    @classmethod
    def here(cls) -> Machine:
        """This machine, detected now."""
        gpus, reason = _visible_gpus()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            gpus=gpus, cores=cores, memory=psutil.virtual_memory().total, no_gpu_reason=reason, torch=_torch_version()
        )


def _cpu() -> str:
    """The model of the CPU, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _torch_version() -> tuple[int, ...]:
    """From the package metadata, because importing torch takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _visible_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that a process on this machine can see, and the reason if there are none."""
    try:
        import pynvml
    except ImportError:
        return (), "GPUs cannot be detected, because nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), "this machine has no GPU"
    try:
        every = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            every += [device for _, gpu in every for device in _mig_devices(pynvml, gpu.index, gpu)]
    finally:
        pynvml.nvmlShutdown()
    return _visible(every)


def _gpu(pynvml, index: int) -> tuple[str, Gpu]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    text = [value.decode() if isinstance(value, bytes) else value for value in (name, uuid)]
    return text[1], Gpu(index, text[0], memory, capability, text[1])


def _mig_devices(pynvml, index: int, gpu: Gpu) -> list[tuple[str, Gpu]]:
    """The MIG devices of a GPU, by UUID; CUDA finds them only if CUDA_VISIBLE_DEVICES names one."""
    found = []
    with suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError):  # no device has this number
                device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                uuid, memory = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetMemoryInfo(device).total
                uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
                found.append((uuid, replace(gpu, index=-1, memory=memory, uuid=uuid)))
    return found


def _visible(every: list[tuple[str, Gpu]]) -> tuple[tuple[Gpu, ...], str]:
    """CUDA_VISIBLE_DEVICES as CUDA interprets it: indices or UUID prefixes, up to the first that matches no GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpu for _, gpu in every), "this machine has no GPU"
    gpus = []
    for word in (word.strip() for word in chosen.split(",")):
        match = [gpu for uuid, gpu in every if word and (str(gpu.index) == word or uuid.startswith(word))]
        if not match:
            break
        gpus.append(match[0])
    return tuple(gpus), f"CUDA_VISIBLE_DEVICES={chosen!r} selects no GPU"
