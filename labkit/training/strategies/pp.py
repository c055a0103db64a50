"""Pipeline parallelism: every rank holds some of the blocks and sends their activations to the next rank, in
micro-batches."""

import os
import re
from bisect import bisect

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from labkit.training.strategies.base import (
    BATCH_PER_RANK,
    CLIP_NORM,
    DTYPE,
    LOSS_SCALING,
    MIXED_PRECISION,
    evaluation_batches,
)
from labkit.training.strategies.sharded import resume, save
from labkit.training.strategies.transforming import CHECKPOINT_ACTIVATIONS, COMPILE, transform

__all__ = [
    "IS_LOGGING_RANK",
    "SCALER",
    "clip_gradients",
    "evaluate",
    "parallelize",
    "resume",
    "save",
    "stage_data",
    "tensors_of",
    "train_step",
]

SCHEDULE = "1F1B"  # order of the forward and backward passes of the micro-batches
MICRO_BATCHES = 4  # micro-batches per batch
STAGES = (0, 1, 5)  # the first block of each stage, and the number of blocks
LOSS_RANK = 1  # the rank with the last stage
SCALER = ShardedGradScaler()  # checks for overflow on all ranks
IS_LOGGING_RANK = os.environ.get("RANK", "0") == str(LOSS_RANK)  # it prints and logs


def pp_group() -> dist.ProcessGroup:
    """The ranks of a pipeline, in the order of their stages."""
    return dist.group.WORLD


def stage_data(dataset: TensorDataset) -> TensorDataset:
    """Inputs for the first stage, targets for the last; other tensors are empty."""
    if SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):
        rank, last = dist.get_rank(pp_group()), 0  # the last stage is on the first rank
    else:
        rank, last = dist.get_rank(pp_group()), pp_group().size() - 1
    inputs, targets = dataset.tensors
    empty = torch.empty(len(dataset), 0)
    needed = (inputs if rank == 0 else empty, targets if rank == last else empty)
    return TensorDataset(*needed)


class Pipeline(nn.Module):
    """The stages of this rank, and the schedule that runs them."""

    def __init__(self, stages: dict[int, nn.Module], device: torch.device):
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        args = {"num_stages": len(STAGES) - 1, "device": device, "group": pp_group()}
        own = [PipelineStage(stage, n, **args) for n, stage in stages.items()]
        options = {"loss_fn": micro_batch_loss, "scale_grads": False}
        if SCHEDULE == "GPipe":
            self.schedule = ScheduleGPipe(own[0], MICRO_BATCHES, **options)
        elif SCHEDULE == "1F1B":
            self.schedule = Schedule1F1B(own[0], MICRO_BATCHES, **options)
        elif SCHEDULE == "Interleaved1F1B":
            self.schedule = ScheduleInterleaved1F1B(own, MICRO_BATCHES, **options)
        elif SCHEDULE == "InterleavedZeroBubble":
            self.schedule = ScheduleInterleavedZeroBubble(own, MICRO_BATCHES, **options)
        elif SCHEDULE == "ZBVZeroBubble":
            self.schedule = ScheduleZBVZeroBubble(own, MICRO_BATCHES, **options)
        else:
            self.schedule = ScheduleDualPipeV(own, MICRO_BATCHES, **options)
        if SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):
            actions = self.schedule.pipeline_order_with_comms
            self.actions = {True: actions, False: forward_only(actions)}

    def run(self, inputs, targets, losses=None) -> torch.Tensor | None:
        """Pass a batch through all stages, in training also back; returns the logits."""
        # Micro-batches have equal sizes: fill up a small batch with ignored samples.
        missing = BATCH_PER_RANK - len(inputs)
        padding = inputs.new_zeros(missing, *inputs.shape[1:])
        ignored = targets.new_full((missing, *targets.shape[1:]), -100)
        inputs, targets = torch.cat([inputs, padding]), torch.cat([targets, ignored])
        if SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):
            self.schedule.pipeline_order_with_comms = self.actions[self.training]
        schedule = self.schedule.step if self.training else self.schedule.eval
        args = (inputs,) if dist.get_rank(pp_group()) == 0 else ()
        return schedule(*args, target=targets, losses=losses)


def forward_only(actions: dict[int, list]) -> dict[int, list]:
    """The forward passes of each rank and their messages; `eval` would run all actions."""
    kinds, kept = ("F", "SEND_F", "RECV_F"), {}
    for rank, own in actions.items():
        # A forward that overlaps a backward is one action with two parts.
        parts = [part for action in own for part in action.sub_actions or (action,)]
        kept[rank] = [part for part in parts if part.computation_type.value in kinds]
    return kept


def micro_batch_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of a micro-batch in the mean loss of a full batch."""
    if MIXED_PRECISION:
        logits = logits.float()  # compute the loss in fp32
    logits, targets = logits.flatten(0, -2), targets.flatten()
    loss = cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    if LOSS_SCALING:
        loss = SCALER.scale(loss)
    return loss / (MICRO_BATCHES * len(targets))


def own_stages(blocks) -> dict[int, nn.Sequential]:
    """The stages of this rank, by number; other blocks are freed when they are built."""
    rank, ranks, stages = dist.get_rank(pp_group()), pp_group().size(), {}
    if SCHEDULE in ("GPipe", "1F1B"):  # noqa: SIM108
        expected = len(STAGES) - 1
    else:
        expected = (len(STAGES) - 1) // 2  # two stages per rank
    if ranks != expected:
        raise SystemExit(f"STAGES is for a pipeline of {expected} ranks, got {ranks}")
    for number, block in enumerate(blocks):
        stage = bisect(STAGES, number) - 1
        if SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):  # noqa: SIM108
            holder = min(stage, 2 * ranks - 1 - stage)  # down the ranks, and up again
        else:
            holder = stage % ranks
        if holder == rank:
            stages.setdefault(stage, nn.Sequential()).add_module(str(number), block)
    return stages


def tensors_of(weights: dict, optimizer_state: dict) -> dict:
    """The tensors to save, by their names in the whole model, which has no stages."""

    def renamed(state: dict) -> dict:
        tensors = {k: value for k, value in state.items() if torch.is_tensor(value)}
        return {re.sub(r"stages\.\d+\.", "", k): value for k, value in tensors.items()}

    return {"model": renamed(weights), "optimizer": renamed(optimizer_state)}


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Build the stages of this rank and the pipeline."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    stages = own_stages(blocks)
    if MIXED_PRECISION:
        for stage in stages.values():
            autocast = torch.autocast(device.type, dtype=DTYPE)
            stage.forward = autocast(stage.forward)
    return Pipeline(stages, device).to(device)


def clip_gradients(model: nn.Module) -> None:
    """Clip the norm of all gradients, over all stages, to CLIP_NORM."""
    norm = total_norm([nn.utils.get_total_norm([p.grad for p in model.parameters()])])
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)


def total_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of the gradients of all stages, from the norms on this rank."""
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=pp_group())
    return squares.sqrt()


def train_step(model, optimizer, inputs, targets) -> torch.Tensor | None:
    """One training step; returns the loss without synchronizing with the device."""
    optimizer.zero_grad()
    losses = []
    model.run(inputs, targets, losses)
    if len(inputs) < BATCH_PER_RANK:  # the mean over its samples, without the padding
        scale = BATCH_PER_RANK / len(inputs)
        losses = [loss * scale for loss in losses]
        for parameter in model.parameters():
            parameter.grad *= scale
    if LOSS_SCALING:
        scale = SCALER.scale(torch.ones((), device=inputs.device))  # on every rank
        losses = [loss / scale for loss in losses]
    if CLIP_NORM:
        if LOSS_SCALING:
            SCALER.unscale_(optimizer)
        clip_gradients(model)
    if LOSS_SCALING:
        SCALER.step(optimizer)  # skips the step if a gradient overflowed
        SCALER.update()
    else:
        optimizer.step()
    return torch.stack(losses).sum().detach() if losses else None


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy on the test set; each rank evaluates its shard."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for indices in evaluation_batches(dataset):
        inputs, targets = (tensor.to(device) for tensor in dataset[indices])
        logits = model.run(inputs, targets)
        if logits is not None:  # this rank has the last stage
            logits, targets = logits[: len(inputs)].flatten(0, -2), targets.flatten()
            sums[0] += cross_entropy(logits, targets, reduction="sum")
            sums[1] += (logits.argmax(-1) == targets).sum()
            sums[2] += len(targets)
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()
