"""The random state of the ranks, which a checkpoint contains."""

import torch
import torch.distributed as dist

DISTRIBUTED = False  # the ranks form a process group
JOIN = False  # allow unequal numbers of batches per rank


def random_state() -> torch.Tensor:
    """The random state of this rank: that of the CPU, then that of its GPU."""
    state = torch.get_rng_state()
    if torch.cuda.is_available():
        state = torch.cat([state, torch.cuda.get_rng_state()])
    return state


def set_random_state(state: torch.Tensor) -> None:
    """The counterpart of `random_state`."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if torch.cuda.is_available() and len(state) > size:
        torch.cuda.set_rng_state(state[size:])


def random_states() -> list[torch.Tensor]:
    """The random state of every rank; every rank must call this."""
    own = random_state()
    if DISTRIBUTED and not JOIN:  # with JOIN, other ranks may have no batches left
        if torch.cuda.is_available():
            own = own.cuda()  # NCCL sends from GPU memory
        states = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(states, own)
        return [state.cpu() for state in states]
    else:
        return [own]
