"""A checkpoint on request: before a time limit, for example."""

from pathlib import Path

import torch
import torch.distributed as dist

from labkit.training.strategies.randomness import DISTRIBUTED, JOIN

SAVE_NOW = Path(__file__).with_name("save")  # a file that requests a checkpoint


def asked_to_save() -> bool:
    """Whether the file SAVE_NOW exists, as rank 0 sees it; every rank must call this."""
    if DISTRIBUTED and not JOIN:
        asked = torch.tensor(int(SAVE_NOW.exists()))
        if torch.cuda.is_available():
            asked = asked.cuda()  # NCCL sends from GPU memory
        dist.broadcast(asked, 0)
        return bool(asked)
    else:
        return SAVE_NOW.exists()
