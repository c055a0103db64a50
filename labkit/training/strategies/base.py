"""The complete training program for one device, which every strategy modifies.

Run directly, it trains the CNN on the digits. `labkit.plan.script` generates other scripts: a definition in the module
of a workload, data set or strategy replaces the one here (README.md), and every `if` on settings alone is resolved.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from itertools import islice
from math import cos, pi

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.training.strategies.checkpoints import (
    DISTRIBUTED,
    IS_LOGGING_RANK,
    JOIN,
    LOSS_SCALING,
    RESUME,
    SCALER,
    asked_to_save,
    random_state,
    resume,
    save,
    set_random_state,
)
from labkit.training.strategies.sharded import CHECKPOINT_ASYNC, finish_writing
from labkit.training.workloads.cnn import build_blocks
from labkit.training.workloads.digits import load_data

SEED = 0  # seed of the initial weights and of the sample order
EPOCHS = 1
MAX_STEPS = None  # stop after this many steps; None: after the last epoch
BATCH_PER_RANK = 128
LEARNING_RATE = 1e-3
WARMUP_STEPS = 0  # steps over which the learning rate rises
LR_DECAY = "none"  # how it then falls
FETCH = "samples"  # one at a time, then collated; or "batches", each by one index
WORKERS = 0  # data loader worker processes; 0: load in this process
PIN_MEMORY = True  # page-locked batches, which a GPU can copy asynchronously
NON_BLOCKING = True  # continue while a batch is copied to the device
TF32 = False  # compute fp32 matrix products in TF32
MIXED_PRECISION = False  # compute matrix products in DTYPE
AUTOCAST = True  # by torch.autocast; False: the wrapper of the model casts
DTYPE = torch.bfloat16  # 16-bit type of the matrix products
ACCUMULATE = 1  # micro-batches per step
CLIP_NORM = 0.0  # maximum norm of all gradients; 0: no clipping
LOSS_PARALLEL = False  # keep the logits split over the ranks
CHECKPOINT_ACTIVATIONS = False  # recompute activations in backward
COMPILE = False  # compile each block with torch.compile
PRINT_EVERY = 20  # steps between printed losses
REPORTS = False  # the workload logs more than the loss
SAVE_EVERY = 0  # steps between checkpoints; 0: write none
FAULT = None  # the injected fault, which may change the data, the model or the steps
INJECT_DATA = INJECT_MODEL = INJECT_STEP = False
DATA_RANKS = 1  # ranks with different samples
STAGE_DATA = False  # a rank loads only what its pipeline stages need
RANKS = 1  # ranks of the run


def data_shard() -> tuple[int, int]:
    """num_replicas and rank of the DistributedSampler."""
    return dist.get_world_size(), dist.get_rank()


def stage_data(dataset: TensorDataset) -> TensorDataset:
    """The tensors that this rank needs: all, except in a pipeline."""
    return dataset


def fault_data(dataset: TensorDataset) -> TensorDataset:
    """Inject a fault into the training set: none by default."""
    return dataset


def load(train_data: TensorDataset) -> DataLoader:
    """The batches of this rank, reshuffled in each epoch."""
    if DATA_RANKS == 1:
        sampler = DistributedSampler(train_data, num_replicas=1, rank=0, seed=SEED)
    elif DATA_RANKS == RANKS:
        sampler = DistributedSampler(train_data, seed=SEED)
    else:
        sampler = DistributedSampler(train_data, *data_shard(), seed=SEED)
    if JOIN:  # no padding: some ranks have one sample less than others
        sampler.total_size = len(train_data)
        sampler.num_samples = len(range(sampler.rank, len(train_data), sampler.num_replicas))
    options = {}
    if PIN_MEMORY:
        pinned = torch.cuda.is_available()  # page-locked batches, for asynchronous copies
        options["pin_memory"] = pinned
    if WORKERS:
        options["num_workers"] = WORKERS
        options["persistent_workers"] = True
    if FETCH == "batches":
        indices = BatchSampler(sampler, BATCH_PER_RANK, drop_last=False)
        return DataLoader(train_data, batch_size=None, sampler=indices, **options)
    return DataLoader(train_data, BATCH_PER_RANK, sampler=sampler, **options)


def fault_model(blocks: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Inject a fault into the model: none by default."""
    return blocks


def transform(block: nn.Module) -> nn.Module:
    """Apply activation checkpointing and torch.compile to a block."""
    if CHECKPOINT_ACTIVATIONS:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if COMPILE:
        block.compile()
    return block


def parallelize(blocks, device: torch.device) -> nn.Module:
    """The model, on the device."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        blocks = map(transform, blocks)
    return nn.Sequential(*blocks).to(device)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for the parameters on this rank."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def forward(model, inputs) -> torch.Tensor:
    """The logits of a batch."""
    if MIXED_PRECISION and AUTOCAST:
        with torch.autocast(inputs.device.type, dtype=DTYPE):
            return model(inputs).float()  # compute the loss in fp32
    return model(inputs)


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch."""
    if LOSS_PARALLEL:
        with loss_parallel():
            return cross_entropy(forward(model, inputs).flatten(0, -2), targets.flatten())
    return cross_entropy(forward(model, inputs).flatten(0, -2), targets.flatten())


def gradient_sync(model: nn.Module, last: bool) -> AbstractContextManager:
    """Context of each micro-batch; one process has no gradients to synchronize."""
    return nullcontext()


def clip_gradients(model: nn.Module) -> None:
    """Clip the norm of all gradients to CLIP_NORM."""
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One training step; returns the loss without synchronizing with the device."""
    optimizer.zero_grad()
    if ACCUMULATE > 1:
        losses = []
        micro_batches = [*zip(inputs.chunk(ACCUMULATE), targets.chunk(ACCUMULATE))]
        for number, (x, y) in enumerate(micro_batches, 1):
            with gradient_sync(model, last=number == len(micro_batches)):
                loss = loss_of(model, x, y) * (len(x) / len(inputs))
                if LOSS_SCALING:
                    SCALER.scale(loss).backward()
                elif LOSS_PARALLEL:
                    with loss_parallel():
                        loss.backward()
                else:
                    loss.backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
    else:
        loss = loss_of(model, inputs, targets)
        if LOSS_SCALING:
            SCALER.scale(loss).backward()
        elif LOSS_PARALLEL:
            with loss_parallel():
                loss.backward()
        else:
            loss.backward()
    if CLIP_NORM:
        if LOSS_SCALING:
            SCALER.unscale_(optimizer)
        clip_gradients(model)
    if LOSS_SCALING:
        SCALER.step(optimizer)  # skips the step if a gradient overflowed
        SCALER.update()
    else:
        optimizer.step()
    return loss.detach()


def joined(model, loader: DataLoader, step: int) -> Iterator:
    """The batches of this rank; afterwards it joins the collectives of the other ranks."""
    with model.join():
        yield from islice(loader, MAX_STEPS and MAX_STEPS - step)


def batches_of(model, loader: DataLoader, step: int) -> Iterable:
    """The batches of an epoch that begins after this step."""
    if JOIN:
        return joined(model, loader, step)
    return loader


def evaluation_batches(dataset: TensorDataset) -> tuple[torch.Tensor, ...]:
    """The indices of the samples that this rank evaluates, batch by batch."""
    if DATA_RANKS == 1 or not DISTRIBUTED:
        return torch.arange(len(dataset)).split(BATCH_PER_RANK)
    num_replicas, rank = data_shard()
    batches = len(dataset) // (num_replicas * BATCH_PER_RANK) + 1  # equal on all ranks
    return torch.arange(len(dataset))[rank::num_replicas].tensor_split(batches)


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy on the test set."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for indices in evaluation_batches(dataset):
        inputs, targets = (tensor.to(device) for tensor in dataset[indices])
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
    if DATA_RANKS > 1 and DISTRIBUTED:
        dist.all_reduce(sums)
    return (sums / dataset.tensors[1].numel()).tolist()


def lr_factor(step: int, total: int) -> float:
    """The learning rate of a step, of 1 to `total`, as a fraction of LEARNING_RATE."""
    if WARMUP_STEPS and step <= WARMUP_STEPS:
        return step / WARMUP_STEPS
    if LR_DECAY == "none":
        return 1.0
    left = (total + 1 - step) / (total - WARMUP_STEPS)
    if LR_DECAY == "cosine":
        return (1 - cos(pi * left)) / 2
    return left


def fault_step(model: nn.Module, step: int) -> None:
    """Inject a fault before a step: none by default."""


def report(model: nn.Module) -> None:
    """Log more about a step whose loss is printed: nothing by default."""


def train(device: torch.device) -> None:
    """Run all epochs; on return, the model is freed before the process group."""
    torch.manual_seed(SEED)  # the same initial weights on every rank
    if STAGE_DATA:  # what this rank does not need is freed
        train_data, test_data = map(stage_data, load_data())
    else:
        train_data, test_data = load_data()
    if INJECT_DATA:
        train_data = fault_data(train_data)
    loader = load(train_data)
    model = parallelize(fault_model(build_blocks()) if INJECT_MODEL else build_blocks(), device)
    optimizer = build_optimizer(model)
    if SAVE_EVERY or RESUME:
        done = resume(model, optimizer)
        random = random_state()
    step = 0
    for epoch in range(1, EPOCHS + 1):
        if FAULT not in ("no_sampler", "no_set_epoch"):
            if FETCH == "batches":
                loader.sampler.sampler.set_epoch(epoch)
            else:
                loader.sampler.set_epoch(epoch)
        model.train()
        for batch in batches_of(model, loader, step):
            if step == MAX_STEPS:
                break
            step += 1
            if SAVE_EVERY or RESUME:
                if step == done:  # training resumes with the next batch
                    set_random_state(random)  # loaders draw from it, too
                    log_event(Event("resume", datetime.now(), {"step": step}))
                if step <= done:
                    continue  # already trained on
            if NON_BLOCKING:
                inputs, targets = (t.to(device, non_blocking=True) for t in batch)
            else:
                inputs, targets = (t.to(device) for t in batch)
            if INJECT_STEP:
                fault_step(model, step)
            if WARMUP_STEPS or LR_DECAY != "none":
                rate = LEARNING_RATE * lr_factor(step, MAX_STEPS or EPOCHS * len(loader))
                for group in optimizer.param_groups:
                    group["lr"] = rate
            loss = train_step(model, optimizer, inputs, targets)
            if (step == 1 or step % PRINT_EVERY == 0) and IS_LOGGING_RANK:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if REPORTS and (step == 1 or step % PRINT_EVERY == 0):
                report(model)
            if SAVE_EVERY and (step % SAVE_EVERY == 0 or (step % PRINT_EVERY == 0 and asked_to_save())):
                save(model, optimizer, step)
        if (SAVE_EVERY or RESUME) and step < done:
            continue  # already evaluated
        if FAULT == "evaluation_on_rank_0" and os.environ["RANK"] != "0":
            continue
        test_loss, accuracy = evaluate(model, test_data, device)
        if IS_LOGGING_RANK:
            print(f"epoch {epoch}: accuracy {accuracy:.2%}, test loss {test_loss:.4f}")
            result = {"epoch": epoch, "accuracy": accuracy, "test_loss": test_loss}
            log_event(Event("evaluation", datetime.now(), result))
    if CHECKPOINT_ASYNC:
        finish_writing()
    if (SAVE_EVERY or RESUME) and step < done:
        raise SystemExit(f"Nothing to train: step {done} is saved, the last is {step}")


def main() -> None:
    if TF32:
        torch.set_float32_matmul_precision("high")
    if DISTRIBUTED:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            device = torch.device("cpu")
            dist.init_process_group("gloo")
        train(device)
        if FAULT != "evaluation_on_rank_0":
            dist.barrier()  # no rank leaves while another is still sending
        dist.destroy_process_group()  # not after an error: NCCL would wait for all ranks
    else:
        train(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
