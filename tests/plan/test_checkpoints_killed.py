"""A process that is killed while it writes a checkpoint leaves the newest complete one."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import model_of
from conftest import wait_until

from labkit.plan import checkpoints
from labkit.training.strategies import checkpoints as whole
from labkit.training.strategies import sharded

ROUNDS = 4


def keep_saving(folder: Path, first: int, in_thread: bool) -> None:
    """Saves a checkpoint after every step, as a script does, until it is killed."""
    torch.set_num_threads(1)  # a forked process has no threads of its own
    sharded.CHECKPOINTS = whole.CHECKPOINTS = folder
    sharded.CHECKPOINT_ASYNC = in_thread
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = model_of(1)
    for step in itertools.count(first):
        sharded.save(model, optimizer, step)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_newest_checkpoint_survives_sigkill_at_any_moment(in_thread, tmp_path):
    last = 0
    for number in range(ROUNDS):
        process = multiprocessing.get_context("fork").Process(target=keep_saving, args=(tmp_path, last + 1, in_thread))
        process.start()
        wait_until(lambda: len(steps_in(tmp_path)) > last)  # noqa: B023 called at once
        time.sleep(0.004 * number)  # another moment of the next checkpoints
        process.kill()
        process.join()
        found = steps_in(tmp_path)
        assert found == list(range(1, found[-1] + 1)), "none is lost"
        newest = checkpoints.newest(tmp_path)
        assert checkpoints.damage(checkpoints.read(newest)) is None
        last = found[-1]
