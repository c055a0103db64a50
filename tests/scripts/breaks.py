"""Ranks that fail, leave, stop or disagree in the way that the first argument names: what the diagnosis must tell
apart."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = 12
LAST = 5  # the step at which the case happens
SECONDS = 600


def same_error(rank: int) -> None:
    """Every rank meets the same mistake."""
    print(undefined_name)  # noqa: F821


def error_on_some(rank: int) -> None:
    """Ranks 0 and 1 meet the same mistake, rank 2 waits for them."""
    if rank < 2:
        {}["label"]


def returns_early(rank: int) -> None:
    """Rank 1 leaves without an error, as a `return` in `main` does."""
    if rank == 1:
        sys.exit()


def exits_at_once(rank: int) -> None:
    """Rank 1 leaves with an exit code, past Python's own exit."""
    if rank == 1:
        os._exit(3)


def crashes(rank: int) -> None:
    """Rank 1 reads from address 0."""
    if rank == 1:
        ctypes.string_at(0)


def exits_in_c(rank: int) -> None:
    """A C library ends the process of rank 1."""
    if rank == 1:
        ctypes.CDLL(None)._exit(7)


def is_killed(rank: int) -> None:
    """Rank 1 is killed while it is busy."""
    if rank == 1:
        spin(3)
        os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(rank: int) -> None:
    """Rank 1 is stopped, as by Ctrl-Z or a debugger."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_gil(rank: int) -> None:
    """Rank 1 is inside a C call that does not release the GIL."""
    if rank == 1:
        ctypes.PyDLL(None).sleep(SECONDS)


def one_stops_and_one_holds_the_gil(rank: int) -> None:
    """Of four ranks, rank 1 is stopped and rank 2 is inside a C call."""
    if rank == 1:
        is_stopped(rank)
    if rank == 2:
        holds_the_gil(1)


def crossed_groups(rank: int) -> None:
    """Two groups of the same ranks, which the ranks use in opposite order."""
    first, second = GROUPS if rank == 0 else GROUPS[::-1]
    dist.all_reduce(torch.ones(4), group=first)
    dist.all_reduce(torch.ones(8), group=second)


def uses_all_memory(rank: int) -> None:
    """Rank 1 takes memory until the kernel of its control group ends it."""
    held = []
    while rank == 1:
        held.append(bytearray(os.urandom(1 << 20) * 8))


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def pipeline(rank: int, happens) -> None:
    """Stages that send to the next one and back, without any collective."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(1, STEPS + 1):
        if step == LAST:
            happens(rank)
        if rank > 0:
            dist.recv(torch.ones(4), rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send(torch.ones(4), rank + 1)
            dist.recv(torch.ones(4), rank + 1)
        if rank > 0:
            dist.send(torch.ones(4), rank - 1)
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def data_parallel(rank: int, happens) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        if step == LAST:
            happens(rank)
        model(torch.ones(8, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def diverges(rank: int) -> None:
    """Gradients stay finite, and the loss leaves the range of a float on all ranks at once."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e12)
    for _ in range(STEPS):
        loss = -(model(torch.ones(8, 4)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = {
    function.__name__: function
    for function in (
        *(
            same_error,
            error_on_some,
            returns_early,
            exits_at_once,
            crashes,
            exits_in_c,
            is_killed,
            is_stopped,
            holds_the_gil,
        ),
        *(one_stops_and_one_holds_the_gil, crossed_groups, uses_all_memory, diverges),
    )
}

if __name__ == "__main__":
    case, train = CASES[sys.argv[1]], pipeline if "pipeline" in sys.argv else data_parallel
    dist.init_process_group("gloo")
    GROUPS = [dist.new_group(), dist.new_group()]
    if case is diverges:
        diverges(dist.get_rank())
    else:
        train(dist.get_rank(), case)
    dist.destroy_process_group()
