"""Pipeline parallelism: every rank holds some of the blocks and sends their activations to the next rank, in
micro-batches."""

import os
import re
from bisect import bisect
from functools import cache

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
    CHECKPOINT_ACTIVATIONS,
    CLIP_NORM,
    COMPILE,
    DTYPE,
    LOSS_SCALING,
    MIXED_PRECISION,
    RANKS,
    evaluation_batches,
    transform,
)
from labkit.training.strategies.sharded import resume, save

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
MESH = False  # the ranks of a pipeline are one axis of a mesh, and its stages are wrapped
PP_SIZE = 2  # ranks per pipeline


@cache
def mesh() -> dist.DeviceMesh:
    """The mesh with the axis pp: strategies that combine a pipeline with others."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return dist.init_device_mesh(kind, (PP_SIZE,), mesh_dim_names=("pp",))


def wrap_stage(stage: nn.Sequential, device: torch.device) -> nn.Module:
    """Split, shard or replicate a stage over the other axes of the mesh."""
    return stage.to(device)


def stage_data(dataset: TensorDataset) -> TensorDataset:
    """Inputs for the first stage, targets for the last; other tensors are empty."""
    if MESH:
        rank, last = mesh()["pp"].get_local_rank(), PP_SIZE - 1
    elif SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):
        rank, last = dist.get_rank(), 0  # the last stage is on the first rank
    else:
        rank, last = dist.get_rank(), RANKS - 1
    inputs, targets = dataset.tensors
    empty = torch.empty(len(dataset), 0)
    needed = (inputs if rank == 0 else empty, targets if rank == last else empty)
    return TensorDataset(*needed)


def micro_batch_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of a micro-batch in the mean loss of a full batch."""
    if MIXED_PRECISION:
        logits = logits.float()  # compute the loss in fp32
    logits, targets = logits.flatten(0, -2), targets.flatten()
    loss = cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    if LOSS_SCALING:
        loss = SCALER.scale(loss)
    return loss / (MICRO_BATCHES * len(targets))


def own_stages(blocks, rank: int, ranks: int) -> dict[int, nn.Sequential]:
    """The two stages of a rank, by number; other blocks are freed at once. The stages go
    down the ranks twice, or, under schedules in the shape of a V, down and up again."""
    stages = {}
    for number, block in enumerate(blocks):
        stage = bisect(STAGES, number) - 1
        holder = min(stage, 2 * ranks - 1 - stage) if SCHEDULE in ("ZBVZeroBubble", "DualPipeV") else stage % ranks
        if holder == rank:
            stages.setdefault(stage, nn.Sequential()).add_module(str(number), block)
    return stages


def parallelize(blocks, device: torch.device) -> nn.Module:
    """Build the pipeline from the blocks of this rank; the others are freed at once."""
    if dist.get_world_size() != RANKS:
        raise SystemExit(f"STAGES is for {RANKS} ranks, got {dist.get_world_size()}")
    if MESH:
        rank, group = mesh()["pp"].get_local_rank(), mesh()["pp"].get_group()
    else:
        rank, group = dist.get_rank(), dist.group.WORLD
    if (CHECKPOINT_ACTIVATIONS or COMPILE) and not MESH:
        blocks = map(transform, blocks)
    if SCHEDULE in ("GPipe", "1F1B"):
        stage = nn.Sequential()
        for number, block in enumerate(blocks):
            if STAGES[rank] <= number < STAGES[rank + 1]:
                stage.add_module(str(number), block)
        if MESH:
            stage = wrap_stage(stage, device)
        own = PipelineStage(stage, rank, len(STAGES) - 1, device, group=group)
        model = nn.ModuleList([stage])
    else:
        model, own = nn.ModuleList(), []
        for number, stage in own_stages(blocks, rank, group.size()).items():
            if MESH:
                stage = wrap_stage(stage, device)
            model.append(stage)
            own.append(PipelineStage(stage, number, len(STAGES) - 1, device, group=group))
    if MIXED_PRECISION and not MESH:
        for stage in model:
            autocast = torch.autocast(device.type, dtype=DTYPE)
            stage.forward = autocast(stage.forward)
    if not MESH:
        model.to(device)
    options = {"loss_fn": micro_batch_loss, "scale_grads": False}
    if SCHEDULE == "GPipe":
        model.schedule = ScheduleGPipe(own, MICRO_BATCHES, **options)
    elif SCHEDULE == "1F1B":
        model.schedule = Schedule1F1B(own, MICRO_BATCHES, **options)
    elif SCHEDULE == "Interleaved1F1B":
        model.schedule = ScheduleInterleaved1F1B(own, MICRO_BATCHES, **options)
    elif SCHEDULE == "InterleavedZeroBubble":
        model.schedule = ScheduleInterleavedZeroBubble(own, MICRO_BATCHES, **options)
    elif SCHEDULE == "ZBVZeroBubble":
        model.schedule = ScheduleZBVZeroBubble(own, MICRO_BATCHES, **options)
    else:
        model.schedule = ScheduleDualPipeV(own, MICRO_BATCHES, **options)
    return model


def tensors_of(weights: dict, optimizer_state: dict) -> dict:
    """The tensors to save, by their names in the whole model, which has no stages."""

    def renamed(state: dict) -> dict:
        tensors = {k: value for k, value in state.items() if torch.is_tensor(value)}
        return {re.sub(r"^(state\.)?\d+\.", r"\1", k): v for k, v in tensors.items()}

    return {"model": renamed(weights), "optimizer": renamed(optimizer_state)}


def clip_gradients(model: nn.Module) -> None:
    """Clip the norm of all gradients, over all stages, to CLIP_NORM."""
    norm = total_norm([nn.utils.get_total_norm([p.grad for p in model.parameters()])])
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)


def total_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of the gradients of all stages, from the norms on this rank."""
    squares = torch.stack(norms).square().sum()
    if MESH:
        dist.all_reduce(squares, group=mesh()["pp"].get_group())
    else:
        dist.all_reduce(squares)
    return squares.sqrt()


def train_step(model, optimizer, inputs, targets) -> torch.Tensor | None:
    """One training step; returns the loss without synchronizing with the device."""
    optimizer.zero_grad()
    # Micro-batches have equal sizes: fill up a small batch with ignored samples.
    missing, scale = BATCH_PER_RANK - len(inputs), BATCH_PER_RANK / len(inputs)
    inputs = torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])])
    ignored = targets.new_full((missing, *targets.shape[1:]), -100)
    targets = torch.cat([targets, ignored])
    losses = []
    args = [inputs] if inputs.numel() else []  # on the rank with the first stage
    model.schedule.step(*args, target=targets, losses=losses)
    if missing:  # the mean over its samples, without the padding
        for parameter in model.parameters():
            parameter.grad *= scale
    if LOSS_SCALING:
        scale = scale / SCALER.scale(torch.ones((), device=inputs.device))  # on every rank
    if CLIP_NORM:
        if LOSS_SCALING:
            SCALER.unscale_(optimizer)
        clip_gradients(model)
    if LOSS_SCALING:
        SCALER.step(optimizer)  # skips the step if a gradient overflowed
        SCALER.update()
    else:
        optimizer.step()
    return torch.stack(losses).sum().detach() * scale if losses else None


def forward_only(actions: dict[int, list]) -> dict[int, list]:
    """The forward passes of each rank and their messages; `eval` would run all actions."""
    kinds, kept = ("F", "SEND_F", "RECV_F"), {}
    for rank, own in actions.items():
        # A forward that overlaps a backward is one action with two parts.
        parts = [part for action in own for part in action.sub_actions or (action,)]
        kept[rank] = [part for part in parts if part.computation_type.value in kinds]
    return kept


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy on the test set; each rank evaluates its shard."""
    model.eval()
    if SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):
        actions = model.schedule.pipeline_order_with_comms
        model.schedule.pipeline_order_with_comms = forward_only(actions)
    sums = torch.zeros(3, device=device)
    for indices in evaluation_batches(dataset):
        # Fill up a small batch with copies of sample 0, whose logits are not used.
        full = nn.functional.pad(indices, (0, BATCH_PER_RANK - len(indices)))
        inputs, targets = (tensor.to(device) for tensor in dataset[full])
        args = [inputs] if inputs.numel() else []  # on the rank with the first stage
        logits = model.schedule.eval(*args, target=targets)
        if logits is not None:  # this rank has the last stage
            logits = logits[: len(indices)].flatten(0, -2)
            targets = targets[: len(indices)].flatten()
            sums[0] += cross_entropy(logits, targets, reduction="sum")
            sums[1] += (logits.argmax(-1) == targets).sum()
            sums[2] += len(targets)
    if SCHEDULE in ("ZBVZeroBubble", "DualPipeV"):
        model.schedule.pipeline_order_with_comms = actions
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()
