"""CNN on digits by DP, fp32: torchrun --standalone --nproc-per-node=1 train.py

Splits The batch: one process has a thread and a replica of the model for each device.
Sends  At every step through device 0: inputs, parameters and outputs; their gradients
       back.
Note   Emulated on CPU: devices are threads of one process, and memory is their wire.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import datetime
from itertools import count, islice

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.monitor import Event, log_event
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

SEED = 0  # of the initial weights and of the order of the samples
EPOCHS = 6
MAX_STEPS = 6  # stop after so many steps; None: at the end of the last epoch
BATCH_PER_RANK = 128  # × 2 = 256 in all; 256 samples: 1 steps an epoch
LEARNING_RATE = 1e-3
SPEAKER = os.environ.get("RANK", "0") == "0"  # the one process that prints and logs
SAMPLES = 256  # training images: 1,437 real ones, then variants of them
RANKS = 2  # devices, each with a replica and a thread of this one process
THREADS = [ThreadPoolExecutor(1, f"replica {n:03}") for n in range(RANKS)]


def draw_digits(side: int) -> tuple[TensorDataset, TensorDataset]:
    """The digits, and variants of all but the last 360, each so many pixels wide."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = interpolate(pixels.float().view(-1, 1, 8, 8) / 16, side, mode="bilinear")
    source = torch.arange(SAMPLES) % 1437
    random = torch.Generator().manual_seed(0)
    maps = torch.eye(2, 3) + torch.randn(SAMPLES, 2, 3, generator=random) / 10
    maps[:1437] = torch.eye(2, 3)  # once as it is; then turned, stretched and shifted
    drawn = []
    for which, how in zip(source.split(1000), maps.split(1000)):  # fits the cache
        grid = affine_grid(how, (len(how), 1, side, side), align_corners=False)
        drawn.append(grid_sample(images[which], grid, align_corners=False))
    train_data = TensorDataset(torch.cat(drawn), labels[source])
    return train_data, TensorDataset(images[1437:], labels[1437:])


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images of 28×28 to train on, and the last 360 real ones to test on."""
    return draw_digits(28)


def build_model() -> nn.Sequential:
    """The model: images of (batch, 1, 28, 28) to logits of (batch, 10)."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(64, 128, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(128 * 3 * 3, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def setup() -> torch.device:
    """The device that this process trains on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of all devices together, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
    how = {"pin_memory": torch.cuda.is_available()}  # copied without waiting, then
    batches = BatchSampler(sampler, BATCH_PER_RANK * RANKS, drop_last=False)
    loader = DataLoader(dataset, None, sampler=batches, **how)
    return sampler, loader


def in_threads(run, *given) -> list:
    """What `run` gives for each replica, called in the replica's own thread."""
    calls = [thread.submit(run, *call) for thread, *call in zip(THREADS, *given)]
    return [call.result() for call in calls]


class Replicas(nn.Module):
    """`nn.DataParallel`, emulated: the devices are threads, and what is sent is copied."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        learns, mixed = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        def run(replica, share):  # each thread decides for itself what it records
            with torch.set_grad_enabled(learns), torch.autocast("cpu", enabled=mixed):
                return replica(share)

        def backward(gradient):  # replica 0 has the loss
            parts = gradient.split([len(share) for share in shares])  # 4: scattered
            in_threads(torch.autograd.backward, outputs, parts)
            for copy in copies:  # 5: gradients of parameters are reduced on replica 0
                for mine, its in zip(self.module.parameters(), copy.parameters()):
                    mine.grad += its.grad

        shares = inputs.chunk(RANKS)  # 1: scattered; a small batch has fewer shares
        copies = [deepcopy(self.module) for _ in shares[1:]]  # 2: parameters broadcast
        outputs = in_threads(run, [self.module, *copies], shares)
        logits = torch.cat([output.detach() for output in outputs])  # 3: gathered
        if learns:
            logits.requires_grad_().register_hook(backward)
        return logits


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A replica on every device; each batch is scattered, and the logits are gathered."""
    model = Replicas(model)
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what this rank holds of the model."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def loss_of(model, inputs, targets) -> torch.Tensor:
    """The mean loss of a batch."""
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step; its loss is given back without waiting for the device."""
    optimizer.zero_grad()
    loss = loss_of(model, inputs, targets)
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
            batches = zip(loader, steps)
            for batch, step in batches:
                inputs, targets = (p.to(device, non_blocking=True) for p in batch)
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
