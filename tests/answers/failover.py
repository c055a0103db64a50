"""Answers to the exercises of lab 10. Its run is written without one, so that no verdict depends on how fast this machine is."""

import os
from pathlib import Path

from fabricate import FakeRun

from labkit import Run


def comes_back(from_step):
    """A run that saves every 10 steps, loses a rank after step 27 and goes on from `from_step`."""
    fake = FakeRun(Path(os.environ["LABKIT_RUNS"]), steps=60, save_every=10, max_restarts=1)
    fake.start()
    fake.step(27)
    for rank, writer in enumerate(fake.writers):
        writer.write("start", pid=2000 + rank, host="here", local_rank=rank, world_size=2, device="cpu", attempt=1)
    fake.done = from_step
    fake.step(60 - from_step)
    fake.end(restarts=1)
    fake.close()
    return Run.attach(fake.folder.path)


def whole(write, path):
    unfinished = path.with_name("unfinished")
    write(unfinished)
    unfinished.replace(path)


def put_back(write, path):
    """Right but for a SIGKILL while it writes."""
    kept = path.read_bytes() if path.exists() else None
    try:
        write(path)
    except BaseException:
        path.unlink() if kept is None else path.write_bytes(kept)
        raise


RIGHT = {
    "interval": lambda save, fails: (2 * save * fails) ** 0.5,
    "whole": whole,
    "comeback": lambda: comes_back(20),
}
WRONG = {
    "interval": (lambda save, fails: (save * fails) ** 0.5, "a longer interval costs"),
    "whole": (put_back, "no whole checkpoint while the new one was being written"),
    "comeback": (lambda: comes_back(0), "the group began again with step 1"),
}
