"""The resources of this machine, found without CUDA, and the address by which other nodes reach it."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import platform
import re
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import psutil

# ---- addresses


class NoAddress(ValueError):
    """A host cannot be used as the meeting place of nodes; the message is one sentence with the fix."""


def own_address(host: str) -> str:
    """The address of this machine towards `host`, which may be this machine; nothing is sent. Raises `NoAddress`."""
    host = host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NoAddress(
            f"{host} cannot be reached from this machine ({why}); give an address of node 0 that all nodes reach"
        ) from None
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback and not is_loopback(host):
        raise NoAddress(
            f"{host} is {own} on this machine, which no other machine reaches (see /etc/hosts); give an address of"
            " node 0 that all nodes reach"
        )
    return own


def interface_of(address: str) -> str:
    """The name of the interface that has an address of this machine; empty if none has."""
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(known.address == address for known in addresses)
        ),
        "",
    )


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the resources of this machine, found without CUDA


NO_GPU = "this machine has no GPU"
_CUDA = re.compile(r"^cuda\b[^=]*= *'([\d.]+)'", re.MULTILINE)  # in torch/version.py, which has None for a CPU build
_NODES = Path("/dev/nvidia[0-9]*")  # one for each GPU that the loaded driver has
_PCI = Path("/sys/bus/pci/devices")


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
    (major, minor) version and the version of CUDA for which it was built.

    `torch` is () if it is not installed, and `cuda` empty for a CPU build.
    """

    gpus: tuple[Gpu, ...]
    cores: int
    memory: int
    no_gpu_reason: str = NO_GPU
    torch: tuple[int, ...] = ()
    cuda: str = ""

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

    @property
    def unused_cuda(self) -> str:
        """Why a CUDA build of torch trains on CPU ranks; empty for a CPU build, and if there are GPUs."""
        if self.gpus or not self.cuda:
            return ""
        return f"torch is a build for CUDA {self.cuda}, but {self.no_gpu_reason}: CPU ranks over gloo are used"

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
            gpus=gpus,
            cores=cores,
            memory=psutil.virtual_memory().total,
            no_gpu_reason=reason,
            torch=_torch_version(),
            cuda=_cuda_of_torch(),
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


def _cuda_of_torch() -> str:
    """From the file in which torch has it, because importing torch takes seconds."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return ""
    try:
        text = Path(torch_spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    version = _CUDA.search(text)
    return version[1] if version else ""


def _visible_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that a process on this machine can see, and the reason if there are none."""
    try:
        import pynvml
    except ImportError:
        return (), "GPUs cannot be detected, because nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), _without_driver(error, absent=error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    try:
        if too_old := _old_driver(pynvml, _cuda_of_torch()):
            return (), too_old
        every = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            every += [device for _, gpu in every for device in _mig_devices(pynvml, gpu.index, gpu)]
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer ({error})"
    finally:
        pynvml.nvmlShutdown()
    return _visible(every)


def _without_driver(error: Exception, absent: bool) -> str:
    """Why NVML does not start; `absent` if its library, a part of the driver, is not there."""
    if next(_NODES.parent.glob(_NODES.name), None):
        what = "without the library NVML" if absent else f"and NVML does not answer ({error})"
        return f"there are GPUs here, {what}; in a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    if any(_is_nvidia(path) for path in _PCI.glob("*/vendor")):
        return f"this machine has an NVIDIA GPU, but no driver for it is loaded ({error})"
    return NO_GPU


def _is_nvidia(vendor: Path) -> bool:
    try:
        is_display = vendor.with_name("class").read_text(encoding="ascii").startswith("0x03")
        return is_display and vendor.read_text(encoding="ascii").strip() == "0x10de"
    except OSError:
        return False


def _old_driver(pynvml, cuda: str) -> str:
    """Why a torch that is built for this version of CUDA cannot use the driver; empty if it can, or is a CPU build. A
    driver supports all minor versions of its major one."""
    if not cuda:
        return ""
    supported = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12020 for CUDA 12.2
    major, minor = supported // 1000, supported % 1000 // 10
    if major >= int(cuda.partition(".")[0]):
        return ""
    return f"the driver of its GPUs supports only CUDA {major}.{minor} (update it, or install a torch for CUDA {major})"


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
    """CUDA_VISIBLE_DEVICES as CUDA interprets it: indices or beginnings of UUIDs, up to the first that does not select
    exactly one GPU; and none at all if one is repeated."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpu for _, gpu in every), NO_GPU
    gpus: list[Gpu] = []
    for word in (word.strip() for word in chosen.split(",")):
        match = [gpu for uuid, gpu in every if _selects(word, uuid, gpu.index)]
        if len(match) != 1:
            break
        if any(gpu.uuid == match[0].uuid and gpu.index == match[0].index for gpu in gpus):
            return (), f"CUDA_VISIBLE_DEVICES={chosen!r} selects a GPU twice, for which CUDA reports none"
        gpus += match
    return tuple(gpus), f"CUDA_VISIBLE_DEVICES={chosen!r} selects no GPU"


def _selects(word: str, uuid: str, index: int) -> bool:
    return bool(word) and (uuid.startswith(word) or (index >= 0 and word == str(index)))
