"""The whole program, on one device: what every strategy starts from, and changes a part of.

Run as it stands it trains the CNN on the digits. `labkit.script` writes it out with another workload, data set and strategy: a module
of theirs that defines a function or constant of the same name replaces the one here, and every `if` that asks for settings alone is
decided. README.md beside this file says which functions those are, and what each is given and gives back.
"""

import os
from datetime import datetime
from functools import partial
from itertools import count, islice

import torch
from torch import nn
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.workloads.cnn import build_model
from labkit.workloads.digits import load_data

SEED = 0  # of the initial weights and of the order of the samples
EPOCHS = 1
MAX_STEPS = None  # stop after so many steps; None: at the end of the last epoch
BATCH_PER_RANK = 128
LEARNING_RATE = 1e-3
PRECISION = "fp32"  # tf32, bf16, fp16: what matrix products are computed in
ACCUMULATE = 1  # parts that the batch of a step is taken in, one after the other
CLIP_NORM = 0.0  # the largest norm that all gradients together may have; 0: any
CHECKPOINT_ACTIVATIONS = False  # compute activations again in backward, keep none
COMPILE = False  # each block through torch.compile
SCALER = torch.amp.GradScaler()  # small gradients would vanish in 16 bits: scaled up
SPEAKER = os.environ.get("RANK", "0") == "0"  # the one process that prints and logs


def setup() -> torch.device:
    """The device that this process trains on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of this rank, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
    batches = BatchSampler(sampler, BATCH_PER_RANK, drop_last=False)  # not one by one
    pin = torch.cuda.is_available()
    return sampler, DataLoader(dataset, None, sampler=batches, pin_memory=pin)


def transform(model: nn.Sequential) -> nn.Sequential:
    """The model, each of its blocks as the settings ask for."""
    for block in model:
        if CHECKPOINT_ACTIVATIONS:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if COMPILE:
            block.compile()
    return model


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, on the device."""
    if CHECKPOINT_ACTIVATIONS or COMPILE:
        model = transform(model)
    return model.to(device)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what this rank holds of the model."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch."""
    if PRECISION == "bf16":
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            logits = model(inputs).float()  # the loss is computed in 32 bits
    elif PRECISION == "fp16":
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            logits = model(inputs).float()  # the loss is computed in 32 bits
    else:
        logits = model(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step; its loss is given back without waiting for the device."""
    optimizer.zero_grad()
    if ACCUMULATE > 1:
        losses = []
        for part, wanted in zip(inputs.chunk(ACCUMULATE), targets.chunk(ACCUMULATE)):
            loss = loss_of(model, part, wanted) * (len(part) / len(inputs))
            if PRECISION == "fp16":
                SCALER.scale(loss).backward()
            else:
                loss.backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
    else:
        loss = loss_of(model, inputs, targets)
        if PRECISION == "fp16":
            SCALER.scale(loss).backward()
        else:
            loss.backward()
    if CLIP_NORM:
        if PRECISION == "fp16":
            SCALER.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    if PRECISION == "fp16":
        SCALER.step(optimizer)  # but for a step in which a gradient overflowed
        SCALER.update()
    else:
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, dataset: TensorDataset, device: torch.device) -> list[float]:
    """Mean loss and accuracy over the test set."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for indices in torch.arange(len(dataset)).split(BATCH_PER_RANK):
        inputs, targets = (part.to(device) for part in dataset[indices])
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
    return (sums / dataset.tensors[1].numel()).tolist()


def cleanup() -> None:
    """Nothing to leave: one process alone is in no group."""


def main() -> None:
    device = setup()
    if PRECISION == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        torch.manual_seed(SEED)  # the same initial weights on every rank
        train_data, test_data = load_data()
        sampler, loader = load(train_data)
        model = parallelize(build_model(), device)
        optimizer = build_optimizer(model)
        steps = islice(count(1), MAX_STEPS)  # 1, 2, 3 … MAX_STEPS, over all epochs
        for epoch in range(1, EPOCHS + 1):
            sampler.set_epoch(epoch)
            model.train()
            for batch, step in zip(loader, steps):
                inputs, targets = (part.to(device, non_blocking=True) for part in batch)
                loss = train_step(model, optimizer, inputs, targets)
                if step % 20 == 0 and SPEAKER:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
            test_loss, accuracy = evaluate(model, test_data, device)
            if SPEAKER:
                print(f"epoch {epoch}: {accuracy:.2%} right, test loss {test_loss:.4f}")
                result = {"epoch": epoch, "accuracy": accuracy, "test_loss": test_loss}
                log_event(Event("evaluation", datetime.now(), result))
    finally:
        cleanup()


if __name__ == "__main__":
    main()
