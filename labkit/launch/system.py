"""System samples taken by the supervisor, five per second and fewer in a long run. They continue while ranks hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from labkit.launch.silence import Silence
from labkit.record.folder import RunFolder
from labkit.record.writer import FULL, Writer
from labkit.setup.machine import Gpu, Machine

INTERVAL = 0.2  # seconds between two samples at first
_SPREAD = 3000  # approximate number of samples of a run of any length; more if `_RAREST` limits the interval
_RAREST = 5.0  # maximum seconds between two samples


def interval(elapsed: float) -> float:
    """Seconds until the next sample, `elapsed` seconds after the first: 12 hours give 18,000 samples instead of
    216,000.
    """
    return min(max(INTERVAL, elapsed / _SPREAD), _RAREST)


class Sampler(threading.Thread):
    """Writes `system` events until `stop`, initially every `INTERVAL` seconds.

    `pids` maps ranks to pids and may grow. It runs in a separate thread, because a faulty driver can block NVML.
    """

    def __init__(self, folder: RunFolder, pids: dict[int, int]):
        super().__init__(name="system", daemon=True)
        self.disk_full = False  # whether any sample found the disk full
        self._folder = folder
        self._pids = pids
        self._over = threading.Event()

    def run(self) -> None:
        """Samples until `stop` is called."""
        writer, gpus, ranks = Writer(self._folder.system), Gpus(), Ranks(self._pids)
        silence = Silence(self._folder, self._pids, writer.write)
        cores = psutil.cpu_count() or 1
        psutil.cpu_percent()  # the first call only sets the reference point of the next
        began = time.monotonic()
        while not self._over.wait(interval(time.monotonic() - began)):
            sample = {"memory_used": _memory_used(), "gpus": gpus.sample(), "ranks": ranks.sample()}
            try:
                writer.write("system", cpu_percent=round(psutil.cpu_percent() * cores, 1), **sample)
                silence.look()
                self.disk_full |= not _has_room(self._folder.system)
            except FileNotFoundError:
                break  # the folder was deleted or moved, which stops the run
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.disk_full = True
        writer.close()

    def stop(self) -> None:
        """Stops sampling; returns when the last sample is written, or after one second if a driver does not respond."""
        self._over.set()
        if self.is_alive():
            self.join(1.0)


class Ranks:
    """CPU utilisation (percent of one core) and resident memory (bytes) of each rank's process."""

    def __init__(self, pids: dict[int, int]):
        self._pids = pids
        self._processes: dict[int, psutil.Process] = {}

    def sample(self) -> dict[str, dict[str, Any]]:
        """One entry per rank whose process exists."""
        found = {}
        for rank, pid in dict(self._pids).items():
            try:
                process = self._processes.get(rank)
                if process is None or process.pid != pid:
                    process = self._processes[rank] = psutil.Process(pid)
                with process.oneshot():
                    row = {"cpu_percent": process.cpu_percent(), "rss": process.memory_info().rss}
            except psutil.Error:
                continue
            if row["rss"]:  # else a zombie
                found[str(rank)] = row
        return found


class Gpus:
    """Memory (bytes), utilisation (percent) and power (watts) of the visible GPUs by NVML; `index` is the CUDA
    index."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        gpus = Machine.here().gpus
        if gpus:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handles = [self._ask(self._handle, gpu) for gpu in gpus]

    def sample(self) -> list[dict[str, Any]]:
        """One entry per GPU; None for values that a device does not report."""
        return [{"index": index, **self._row(handle)} for index, handle in enumerate(self._handles)]

    def _handle(self, gpu: Gpu) -> Any:
        """A MIG device has no index."""
        if gpu.index < 0:
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)

    def _row(self, handle: Any) -> dict[str, Any]:
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "memory_used": memory and memory.used,
            "memory_total": memory and memory.total,
            "utilisation": rates and rates.gpu,
            "power": milliwatts and milliwatts / 1000,
        }

    def _ask(self, question: Callable[[Any], Any], about: Any) -> Any:
        """The answer of NVML; None if there is none, or nothing to ask about."""
        try:
            return None if about is None else question(about)
        except self._nvml.NVMLError:
            return None


def _has_room(path: str | os.PathLike[str]) -> bool:
    """Whether the disk of a file has a free block for this user."""
    disk = os.statvfs(path)
    return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) > 0 or not disk.f_blocks


def _memory_used() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available
