"""Ranks that wait for ever, as the first argument names: what the findings about a hang must tell apart."""

import sys
import time

import torch
import torch.distributed as dist


def ring(rank: int, ranks: int) -> None:
    """Everyone sends to the next rank, and nobody receives."""
    key = torch.ones(64)
    dist.send(key, (rank + 1) % ranks)
    dist.recv(key, (rank - 1) % ranks)


def pairs(rank: int, ranks: int) -> None:
    """The ranks reduce tensors of equal bytes and different dtypes, which gloo pairs, and hang later, one after the
    other."""
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 0 else torch.float32))
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(3)
        dist.recv(torch.ones(4), 0)
    dist.barrier()


def elsewhere(rank: int, ranks: int) -> None:
    """Rank 1 sleeps outside of all collectives."""
    if rank == 1:
        time.sleep(600)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {function.__name__: function for function in (ring, pairs, elsewhere)}[sys.argv[1]](
        dist.get_rank(), dist.get_world_size()
    )
