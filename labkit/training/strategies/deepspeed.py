"""DeepSpeed: the engine wraps model and optimizer, and shards their state over the ranks according to the ZeRO
stage."""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from labkit.training.strategies.base import (
    BATCH_PER_RANK,
    CLIP_NORM,
    DTYPE,
    LEARNING_RATE,
    MIXED_PRECISION,
)
from labkit.training.strategies.transforming import CHECKPOINT_ACTIVATIONS, COMPILE, transform

STAGE = 1  # ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Wrap the model and its optimizer in DeepSpeed's engine."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    config = {
        "train_micro_batch_size_per_gpu": BATCH_PER_RANK,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP_NORM,  # the default is 1, not 0
    }
    if MIXED_PRECISION:
        config["torch_autocast"] = {"enabled": True, "dtype": str(DTYPE)}
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed  # selects its accelerator on import

    # Inference on CPUs would use this operator; compiling it takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the engine, which wraps AdamW."""
    return model.optimizer


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch, in fp32 regardless of the engine's precision."""
    logits = model(inputs).float()
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step of the engine, which scales, synchronizes and clips the gradients."""
    loss = loss_of(model, inputs, targets)
    model.backward(loss)
    model.step()
    return loss.detach()
