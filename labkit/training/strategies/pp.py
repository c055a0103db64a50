"""Pipeline parallelism: every rank holds some of the blocks, and hands on what comes out of them in micro-batches."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from labkit.training.strategies.base import BATCH_PER_RANK, CHECKPOINT_ACTIVATIONS, CLIP_NORM, COMPILE, PRECISION, share, transform
from labkit.training.strategies.ddp import cleanup, setup
from labkit.training.strategies.sharded import resume, save

__all__ = ["SCALER", "SPEAKER", "cleanup", "clip_gradients", "evaluate", "parallelize", "resume", "save", "setup", "train_step"]

SCHEDULE = "1F1B"  # the order in which micro-batches go forward and backward
MICRO_BATCHES = 4  # parts of a batch that are in the pipe at the same time
STAGES = (0, 1, 5)  # where each stage begins among the blocks, and where the last ends
LOSS_RANK = 1  # the rank that has the last stage
SCALER = ShardedGradScaler()  # asks all ranks whether a gradient overflowed
SPEAKER = os.environ.get("RANK", "0") == str(LOSS_RANK)  # the one that prints and logs


def pipe() -> dist.ProcessGroup:
    """The ranks that a batch goes through, in the order of their stages."""
    return dist.group.WORLD


class Pipeline(nn.Module):
    """This rank's stages, and the schedule that runs them in step with the others."""

    def __init__(self, stages: dict[int, nn.Module], device: torch.device):
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        where = {"num_stages": len(STAGES) - 1, "device": device, "group": pipe()}
        parts = [PipelineStage(stages[n], n, **where) for n in stages]
        how = {"loss_fn": self.loss_of, "scale_grads": False}
        if SCHEDULE == "GPipe":
            self.schedule = ScheduleGPipe(parts[0], MICRO_BATCHES, **how)
        elif SCHEDULE == "1F1B":
            self.schedule = Schedule1F1B(parts[0], MICRO_BATCHES, **how)
        elif SCHEDULE == "Interleaved1F1B":
            self.schedule = ScheduleInterleaved1F1B(parts, MICRO_BATCHES, **how)
        else:
            self.schedule = ScheduleInterleavedZeroBubble(parts, MICRO_BATCHES, **how)

    def loss_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What a micro-batch adds to the mean loss of the batch."""
        if PRECISION in ("bf16", "fp16"):
            logits = logits.float()
        loss = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        if PRECISION == "fp16":
            return SCALER.scale(loss / self.counted)
        return loss / self.counted

    def feed(self, run, inputs, targets, losses=None) -> torch.Tensor | None:
        """A batch through all stages; a small one is filled up with what is not counted."""
        self.counted, missing = targets.numel(), BATCH_PER_RANK - len(inputs)
        fill = [part.new_zeros(missing, *part.shape[1:]) for part in (inputs, targets)]
        inputs, targets = torch.cat([inputs, fill[0]]), torch.cat([targets, fill[1] - 100])
        given = () if dist.get_rank(pipe()) else (inputs,)
        return run(*given, target=targets, losses=losses)


def parallelize(model: nn.Sequential, device: torch.device) -> nn.Module:
    """Some of the blocks on each rank, and the pipeline around them."""
    stages = {}
    for n in range(dist.get_rank(pipe()), len(STAGES) - 1, pipe().size()):
        blocks = model[STAGES[n] : STAGES[n + 1]]
        if CHECKPOINT_ACTIVATIONS or COMPILE:
            blocks = transform(blocks)
        if PRECISION == "bf16":
            mixed = torch.autocast(device.type, dtype=torch.bfloat16)
            blocks.forward = mixed(blocks.forward)
        if PRECISION == "fp16":
            mixed = torch.autocast(device.type, dtype=torch.float16)
            blocks.forward = mixed(blocks.forward)
        stages[n] = blocks.to(device)
    return Pipeline(stages, device)


def clip_gradients(model: nn.Module) -> None:
    """Holds the norm of all gradients, of all stages together, to CLIP_NORM."""
    norm = total([nn.utils.get_total_norm([p.grad for p in model.parameters()])])
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)


def total(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all stages' gradients, from the norms of what this rank holds."""
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=pipe())
    return squares.sqrt()


def train_step(model, optimizer, inputs, targets) -> torch.Tensor | None:
    """One step; its loss is given back without waiting for the device."""
    optimizer.zero_grad()
    losses = []
    model.feed(model.schedule.step, inputs, targets, losses)
    if PRECISION == "fp16":
        scale = SCALER.scale(torch.ones((), device=inputs.device))  # on every rank
        losses = [loss / scale for loss in losses]
    if CLIP_NORM:
        if PRECISION == "fp16":
            SCALER.unscale_(optimizer)
        clip_gradients(model)
    if PRECISION == "fp16":
        SCALER.step(optimizer)  # but for a step in which a gradient overflowed
        SCALER.update()
    else:
        optimizer.step()
    return torch.stack(losses).sum().detach() if losses else None


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy over the test set, of which each rank takes a share."""
    model.eval()
    sums = torch.zeros(3, device=device)
    shares, mine = share()
    rounds = len(dataset) // (shares * BATCH_PER_RANK) + 1  # as many for every rank
    for indices in torch.arange(len(dataset))[mine::shares].tensor_split(rounds):
        inputs, targets = (part.to(device) for part in dataset[indices])
        logits = model.feed(model.schedule.eval, inputs, targets)
        if logits is None:
            continue  # they come out at another rank
        logits, targets = logits[: len(inputs)].flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    dist.barrier()  # nobody leaves while another still sends
    return (sums[:2] / sums[2]).tolist()
