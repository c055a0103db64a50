"""CNN on digits by DDP, fp32: torchrun --standalone --nproc-per-node=2 train.py

Splits The batch: every rank holds the whole model and trains on samples of its own.
Sends  Gradients: one all-reduce per bucket, while backward still runs.
"""

import os
from datetime import datetime
from itertools import count, islice

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.monitor import Event, log_event
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

SEED = 0  # of the initial weights and of the order of the samples
EPOCHS = 6
MAX_STEPS = 12  # stop after so many steps; None: at the end of the last epoch
BATCH_PER_RANK = 128  # × 2 = 256 in all; 512 samples: 2 steps an epoch
LEARNING_RATE = 1e-3
SPEAKER = os.environ.get("RANK", "0") == "0"  # the one process that prints and logs
SAMPLES = 512  # training images: 1,437 real ones, then variants of them
BUCKET_MB = 25  # gradients are sent in buckets of this size, while backward still runs


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
    """Joins the process group: NCCL between GPUs, gloo between CPU processes."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def share() -> tuple[int, int]:
    """How many shares the samples are taken in, and which of them is this rank's."""
    return dist.get_world_size(), dist.get_rank()


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of this rank, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, *share(), seed=SEED)
    how = {"pin_memory": torch.cuda.is_available()}  # copied without waiting, then
    batches = BatchSampler(sampler, BATCH_PER_RANK, drop_last=False)  # not one by one
    loader = DataLoader(dataset, None, sampler=batches, **how)
    return sampler, loader


def parallelize(model: nn.Module, device: torch.device) -> nn.Module:
    """A replica on every rank; backward averages the gradients over the ranks."""
    model = model.to(device)
    model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
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
    """Mean loss and accuracy over the test set, of which each rank takes a share."""
    model.eval()
    sums = torch.zeros(3, device=device)
    shares, mine = share()
    rounds = len(dataset) // (shares * BATCH_PER_RANK) + 1  # as many for every rank
    for indices in torch.arange(len(dataset))[mine::shares].tensor_split(rounds):
        inputs, targets = (part.to(device) for part in dataset[indices])
        logits, targets = model(inputs).flatten(0, -2), targets.flatten()
        sums[0] += cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(-1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    dist.barrier()  # nobody leaves while another still sends
    return (sums[:2] / sums[2]).tolist()


def cleanup() -> None:
    """Leaves the process group."""
    dist.destroy_process_group()


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
