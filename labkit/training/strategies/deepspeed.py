"""DeepSpeed: the engine wraps model and optimizer, and shards their state over the ranks according to the ZeRO
stage."""

import os
import shutil
from datetime import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy

from labkit.training.strategies.base import (
    BATCH_PER_RANK,
    CHECKPOINT_ACTIVATIONS,
    CLIP_NORM,
    COMPILE,
    DTYPE,
    LEARNING_RATE,
    MIXED_PRECISION,
    transform,
)
from labkit.training.strategies.checkpoints import (
    CHECKPOINTS,
    IS_LOGGING_RANK,
    intact,
    pickle_by_value,
    progress,
    publish,
    restore,
)

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


def save(model, optimizer, step: int) -> None:
    """Write a checkpoint: each rank its part of the engine's state; then rename it."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    pickle_by_value(ZeroStageEnum)
    unfinished = CHECKPOINTS / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by killed processes
    settings = {"client_state": progress(step), "save_latest": False}
    model.save_checkpoint(unfinished.parent, unfinished.name, **settings)
    if dist.get_rank() == 0:  # the engine has waited for all ranks
        publish(unfinished, step)
    dist.barrier()
    if IS_LOGGING_RANK:
        log_event(Event("checkpoint", datetime.now(), {"checkpoint": step}))


def load_file(path: str, map_location=None) -> dict:
    """Load a file of the engine without running code, unlike its own loader."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(classes):
        return torch.load(path, map_location=map_location, weights_only=True)


def resume(model, optimizer) -> int:
    """Load the newest intact checkpoint and return its step; 0 for a new run."""
    path = intact()
    if path is None:
        return 0
    model.checkpoint_engine.load = load_file
    _, state = model.load_checkpoint(path.parent, path.name)
    restore(state)
    if IS_LOGGING_RANK:
        print(f"resuming from {path}", flush=True)
    return state["step"]
