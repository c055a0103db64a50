"""Answers to the exercises of lab 10. The run folder is fabricated, so that no verdict depends on the machine's
speed."""

import os
from pathlib import Path

from fabricate import FakeRun

from labkit import Run


def recovered(from_step):
    """A run that saves every 10 steps, loses a rank after step 27 and resumes from `from_step`."""
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


def restore_backup(write, path):
    """Correct except for a SIGKILL while it writes."""
    backup = path.read_bytes() if path.exists() else None
    try:
        write(path)
    except BaseException:
        path.unlink() if backup is None else path.write_bytes(backup)
        raise


RIGHT = {
    "interval": lambda save, fails: (2 * save * fails) ** 0.5,
    "whole": whole,
    "comeback": lambda: recovered(20),
}
WRONG = {
    "interval": (lambda save, fails: (save * fails) ** 0.5, "a longer interval costs"),
    "whole": (restore_backup, "was not a complete checkpoint while the new one was being written"),
    "comeback": (lambda: recovered(0), "the group started again at step 1"),
}
