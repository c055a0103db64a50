"""Run folders as a real run leaves them, written without one: for tests of what reads them."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

from labkit.record.folder import RunFolder
from labkit.record.writer import Writer

MIB = 1 << 20


class FakeRun:
    """A run whose ranks do what the test says. Times go on by `step_seconds` a step from `began`."""

    def __init__(self, root: Path, nproc: int = 2, steps: int = 200, device: str = "cpu", **spec: Any):
        self.folder = RunFolder.create(f"ddp-x{nproc}", root)
        self.nproc, self.total, self.device = nproc, steps, device
        self.step_seconds, self.began, self.done = 0.05, time.time(), 0
        self.samples = 128  # of a rank per step
        self.newest = self.began  # the time of the newest step
        asked = {
            "strategy": "ddp",
            "workload": "cnn",
            "nproc": nproc,
            "batch_size": 128,
            "steps": steps,
            "device": device,
        } | spec
        RunFolder.write_json(self.folder.spec, asked)
        self.writers = [Writer(self.folder.events_of(rank), rank) for rank in range(nproc)]
        self.system = Writer(self.folder.system)
        self.logs = [self._log(rank) for rank in range(nproc)]
        self._random = random.Random(0)

    def _log(self, rank: int) -> Path:
        folder = self.folder.logs / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        for stream in ("stdout", "stderr"):
            (folder / f"{stream}.log").touch()
        return folder

    def status(self, state: str, **more: Any) -> None:
        """Writes status.json."""
        RunFolder.write_json(self.folder.status, {"state": state, "started": self.began} | more)

    def start(self) -> None:
        """The ranks report for work."""
        self.status("running")
        for rank, writer in enumerate(self.writers):
            device = f"cuda:{rank}" if self.device == "cuda" else "cpu"
            writer.write(
                "start", pid=1000 + rank, host="here", local_rank=rank, world_size=self.nproc, device=device, attempt=0
            )
            writer.write("activity", name="training")

    def step(self, count: int = 1, live: bool = False) -> None:
        """The next steps of every rank; stamped now where the test is `live`."""
        for _ in range(count):
            self.done += 1
            self.newest = time.time() if live else self.began + 1 + self.done * self.step_seconds
            for rank, writer in enumerate(self.writers):
                writer.write("step", t=self.newest, **self.measured(rank))

    def measured(self, rank: int) -> dict[str, Any]:
        """What one rank measures at one step: a loss that falls, phases that differ a little."""
        loss = 2.3 * math.exp(-3 * self.done / max(self.total, 1)) + 0.1 * self._random.random() + 0.02 * rank
        share = {"data": 0.08, "forward": 0.27, "backward": 0.5 + 0.02 * rank, "optimizer": 0.1, "other": 0.03}
        seconds = {"step": self.step_seconds} | {phase: part * self.step_seconds for phase, part in share.items()}
        held = int((12 + rank) * MIB)
        return {
            "step": self.done,
            "loss": loss,
            "samples": self.samples,
            "seconds": seconds,
            "memory": {"allocated": held, "reserved": 2 * held, "peak": 3 * held + self._random.randrange(MIB)},
        }

    def say(self, rank: int, text: str, stream: str = "stdout") -> None:
        """Appends to a rank's log."""
        with open(self.logs[rank] / f"{stream}.log", "a", encoding="utf-8") as file:
            file.write(text)

    def end(self, state: str = "finished", **more: Any) -> None:
        """The ranks are done, and so is the run; not before its last step, whose time may be yet to come."""
        ended = max(time.time(), self.newest)
        for writer in self.writers:
            writer.write("end", t=ended, exit_code=0, steps=self.done, seconds=self.done * self.step_seconds)
        self.status(state, ended=ended, **more)

    def close(self) -> None:
        """Closes the files."""
        for writer in (*self.writers, self.system):
            writer.close()


def finished_folder(
    root: Path, strategy: str, nproc: int, step_seconds: float, state: str = "finished", **spec: Any
) -> RunFolder:
    """The folder of a run of ten steps that is over."""
    run = FakeRun(root, nproc=nproc, steps=10, strategy=strategy, scaling="strong", samples=1280, **spec)
    run.step_seconds, run.samples = step_seconds, 128 // nproc
    run.start()
    run.step(10)
    run.end(state)
    run.close()
    return run.folder
