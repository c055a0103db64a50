"""DeepSpeed: its engine holds model and optimizer, and shards what its ZeRO stage says over the ranks."""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from labkit.training.strategies.base import (
    BATCH_PER_RANK,
    CHECKPOINT_ACTIVATIONS,
    CLIP_NORM,
    COMPILE,
    LEARNING_RATE,
    PRECISION,
    SPEAKER,
    transform,
)
from labkit.training.strategies.ddp import cleanup, evaluate, setup, share

__all__ = ["cleanup", "evaluate", "setup", "share"]

STAGE = 1  # of ZeRO: 1 shards optimizer state, 2 gradients too, 3 parameters too


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """DeepSpeed's engine around the model and its optimizer."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH_PER_RANK,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP_NORM,  # its default is a norm of 1, not 0
    }
    if PRECISION == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if PRECISION == "fp16":
        config["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if SPEAKER:
        print("loading DeepSpeed: its first run may compile an operator for minutes")
    import deepspeed  # looks at once for what it shall run on

    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The engine's, around AdamW over this rank's share."""
    return model.optimizer


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch, in 32 bits whatever the engine computes in."""
    logits = model(inputs).float()
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step of the engine, which scales, sends and clips as it was told."""
    loss = loss_of(model, inputs, targets)
    model.backward(loss)
    model.step()
    return loss.detach()
