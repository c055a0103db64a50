"""The whole program, on one device: what every strategy starts from, and changes a part of.

Run as it stands it trains the CNN on the digits. `labkit.script` writes it out with another workload, data set, precision and
strategy: a module of theirs that defines a function or constant of the same name replaces the one here. README.md beside this file
says which functions those are, and what each is given and gives back.
"""

import os
from datetime import datetime
from itertools import count, islice

import torch
from torch import nn
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.workloads.cnn import build_model
from labkit.workloads.digits import load_data

SEED = 0  # of the initial weights and of the order of the samples
EPOCHS = 1
MAX_STEPS = None  # stop after so many steps; None: at the end of the last epoch
BATCH_PER_RANK = 128
LEARNING_RATE = 1e-3
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


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, on the device."""
    return model.to(device)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what this rank holds of the model."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step; its loss is given back without waiting for the device."""
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
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
