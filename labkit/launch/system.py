"""Samples from outside the ranks, five a second and fewer in a long run: they continue while the ranks hang, and cost them nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from labkit.launch.silence import Silence
from labkit.record.appender import FULL
from labkit.record.events import Writer
from labkit.record.folder import RunFolder
from labkit.setup.machine import Machine

INTERVAL = 0.2  # seconds between two samples at first
_SPREAD = 3000  # samples that a run of any length is divided into; more only where `_RAREST` demands it
_RAREST = 5.0  # seconds between two samples at most


def interval(elapsed: float) -> float:
    """Seconds until the next sample, `elapsed` seconds after the first: 12 hours take 18,000 samples instead of 216,000."""
    return min(max(INTERVAL, elapsed / _SPREAD), _RAREST)


class Sampler(threading.Thread):
    """Writes `system` events until `stop`, at first every `INTERVAL` seconds.

    `pids` maps ranks to their processes and may grow meanwhile. In a thread of its own, because a sick driver can keep NVML waiting.
    """

    def __init__(self, folder: RunFolder, pids: dict[int, int]):
        super().__init__(name="system", daemon=True)
        self.disk_full = False  # whether it ever was, as far as the samples tell
        self._folder = folder
        self._pids = pids
        self._over = threading.Event()

    def run(self) -> None:
        """Samples until told to stop."""
        writer, gpus, ranks = Writer(self._folder.system), Gpus(), Ranks(self._pids)
        silence = Silence(self._folder, self._pids, writer.write)
        cores = psutil.cpu_count() or 1
        psutil.cpu_percent()  # the first call only sets the mark that the next one counts from
        began = time.monotonic()
        while not self._over.wait(interval(time.monotonic() - began)):
            sample = {"memory_used": _memory_used(), "gpus": gpus.sample(), "ranks": ranks.sample()}
            try:
                writer.write("system", cpu_percent=round(psutil.cpu_percent() * cores, 1), **sample)
                silence.look()
                self.disk_full |= not _has_room(self._folder.system)
            except FileNotFoundError:
                break  # the folder was deleted or moved, which ends the run
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.disk_full = True
        writer.close()

    def stop(self) -> None:
        """Ends the sampling; returns when the last sample is written, or after a second where a driver does not answer."""
        self._over.set()
        self.join(1.0)


class Ranks:
    """CPU share (percent of one core) and resident bytes of each rank's own process."""

    def __init__(self, pids: dict[int, int]):
        self._pids = pids
        self._processes: dict[int, psutil.Process] = {}

    def sample(self) -> dict[str, dict[str, Any]]:
        """By rank; a rank that is gone is left out."""
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
            if row["rss"]:  # else it has ended and is only not reaped yet
                found[str(rank)] = row
        return found


class Gpus:
    """Memory (bytes), utilisation (percent) and power (watts) of the visible GPUs by NVML; `index` counts as CUDA does."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        gpus = Machine.here().gpus
        if gpus:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus]

    def sample(self) -> list[dict[str, Any]]:
        """One row for each GPU; what a device does not tell is None."""
        return [{"index": index, **self._row(handle)} for index, handle in enumerate(self._handles)]

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

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None


def _has_room(path: str | os.PathLike[str]) -> bool:
    """Whether the disk of a file has a free block for this user."""
    disk = os.statvfs(path)
    return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) > 0 or not disk.f_blocks


def _memory_used() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available
