"""The whole program, on one device: what every strategy starts from, and changes a part of.

Run as it stands it trains the CNN on the digits. `labkit.plan.script` writes it out with another workload, data set and strategy: a module
of theirs that defines a function or constant of the same name replaces the one here, and every `if` that asks for settings alone is
decided. README.md beside this file says which functions those are, and what each is given and gives back.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.monitor import Event, log_event
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from labkit.training.workloads.cnn import build_model
from labkit.training.workloads.digits import load_data

SEED = 0  # of the initial weights and of the order of the samples
EPOCHS = 1
MAX_STEPS = None  # stop after so many steps; None: at the end of the last epoch
BATCH_PER_RANK = 128
LEARNING_RATE = 1e-3
FETCH = "batches"  # or samples: one by one from the data set, then put together
WORKERS = 0  # processes that fetch ahead; 0: this one does it itself
PIN_MEMORY = True  # where there is a GPU: batches in memory that it can read by itself
NON_BLOCKING = True  # go on while a batch is copied to the device
PRECISION = "fp32"  # tf32, bf16, fp16: what matrix products are computed in
ACCUMULATE = 1  # parts that the batch of a step is taken in, one after the other
CLIP_NORM = 0.0  # the largest norm that all gradients together may have; 0: any
CHECKPOINT_ACTIVATIONS = False  # compute activations again in backward, keep none
COMPILE = False  # each block through torch.compile
JOIN = False  # ranks may have unequal numbers of batches
LOSS_PARALLEL = False  # the logits stay split over the ranks
SAVE_EVERY = 0  # steps from one checkpoint to the next; 0: none is written
FAULT = None  # what goes wrong on purpose; it may spoil data, extend the model, disturb steps
SPOIL = EXTEND = DISTURB = False
RESUME = None  # the checkpoint of another run to resume from
CHECKPOINTS = Path(__file__).with_name("checkpoints")  # of this run; a restart resumes
# What a checkpoint must say of itself for this script to load it.
MANIFEST = {"format": 1, "layout": "whole", "workload": "cnn"}
SCALER = torch.amp.GradScaler()  # small gradients would vanish in 16 bits: scaled up
SPEAKER = os.environ.get("RANK", "0") == "0"  # the one process that prints and logs


def setup() -> torch.device:
    """The device that this process trains on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def share() -> tuple[int, int]:
    """How many shares the samples are taken in, and which of them is this rank's."""
    return 1, 0


def load(dataset: TensorDataset) -> tuple[DistributedSampler, DataLoader]:
    """The batches of this rank, shuffled anew in each epoch."""
    sampler = DistributedSampler(dataset, *share(), seed=SEED)
    if JOIN:  # not filled up, so that some ranks have a sample less than others
        shares, mine = share()
        sampler.total_size = len(dataset)
        sampler.num_samples = len(range(mine, len(dataset), shares))
    how = {"pin_memory": torch.cuda.is_available()}  # copied without waiting, then
    if not PIN_MEMORY:
        how = {}
    if WORKERS:
        how |= {"num_workers": WORKERS, "persistent_workers": True}
    if FETCH == "samples":
        loader = DataLoader(dataset, BATCH_PER_RANK, sampler=sampler, **how)
    else:
        batches = BatchSampler(sampler, BATCH_PER_RANK, drop_last=False)  # not one by one
        loader = DataLoader(dataset, None, sampler=batches, **how)
    return sampler, loader


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
    if LOSS_PARALLEL:
        with loss_parallel():
            return cross_entropy(logits.flatten(0, -2), targets.flatten())
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def exchange(model: nn.Module, last: bool) -> AbstractContextManager:
    """Around each part of a step: whether gradients are sent is the strategy's."""
    return nullcontext()


def clip_gradients(model: nn.Module) -> None:
    """Holds the norm of all gradients together to CLIP_NORM."""
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)


def train_step(model, optimizer, inputs, targets) -> torch.Tensor:
    """One step; its loss is given back without waiting for the device."""
    optimizer.zero_grad()
    if ACCUMULATE > 1:
        losses = []
        parts = [*zip(inputs.chunk(ACCUMULATE), targets.chunk(ACCUMULATE))]
        for number, (part, wanted) in enumerate(parts, 1):
            with exchange(model, last=number == len(parts)):
                loss = loss_of(model, part, wanted) * (len(part) / len(inputs))
                if PRECISION == "fp16":
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
        if PRECISION == "fp16":
            SCALER.scale(loss).backward()
        elif LOSS_PARALLEL:
            with loss_parallel():
                loss.backward()
        else:
            loss.backward()
    if CLIP_NORM:
        if PRECISION == "fp16":
            SCALER.unscale_(optimizer)
        clip_gradients(model)
    if PRECISION == "fp16":
        SCALER.step(optimizer)  # but for a step in which a gradient overflowed
        SCALER.update()
    else:
        optimizer.step()
    return loss.detach()


def joined(model, batches: Iterable) -> Iterator:
    """The batches of this rank; then it goes along with the ranks that have more."""
    with model.join():
        yield from batches


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


def optimizer_state(optimizer) -> dict:
    """What the optimizer keeps; every rank calls this, and the one that saves uses it."""
    return optimizer.state_dict()


def progress(step: int) -> dict:
    """What a checkpoint holds in addition to model and optimizer."""
    state = {"step": step, "random": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda_random"] = torch.cuda.get_rng_state()
    if PRECISION == "fp16":
        state["scaler"] = SCALER.state_dict()
    return state


def restore(state: dict) -> None:
    """Sets what `progress` saved, as far as the checkpoint has it."""
    torch.set_rng_state(state["random"])
    if torch.cuda.is_available() and "cuda_random" in state:
        torch.cuda.set_rng_state(state["cuda_random"])
    if PRECISION == "fp16":
        if state.get("scaler"):
            SCALER.load_state_dict(state["scaler"])


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def publish(unfinished: Path, step: int) -> None:
    """Adds a manifest to a complete checkpoint, then gives the folder its name."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    sums = {path.name: checksum(path) for path in unfinished.iterdir()}
    manifest = {**MANIFEST, "step": step, "world_size": ranks, "sha256": sums}
    (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2))
    final = CHECKPOINTS / f"step{step:08}"
    shutil.rmtree(final, ignore_errors=True)  # a damaged one may have that name
    unfinished.replace(final)


def verify(path: Path) -> None:
    """Raises ValueError for a checkpoint of another kind, and for one that has changed."""
    manifest = json.loads((path / "manifest.json").read_text())
    for key, mine in MANIFEST.items():
        if manifest.get(key) != mine:
            raise ValueError(f"its {key} is {manifest.get(key)!r}, and not {mine!r}")
    for name, expected in manifest["sha256"].items():
        if not (path / name).is_file() or checksum(path / name) != expected:
            raise ValueError(f"{name} is missing or has changed since it was written")


def intact() -> Path | None:
    """The newest intact checkpoint of this run, else RESUME; None for a new run."""
    found = sorted(CHECKPOINTS.glob("step*"), reverse=True)
    if RESUME:
        found.append(Path(RESUME))
    for path in found:
        try:
            verify(path)
            return path
        except (OSError, ValueError, KeyError) as error:
            reason = f"{path} cannot be used: {error}"
            if SPEAKER:
                print(reason, flush=True)
    if found:
        raise SystemExit(f"Cannot resume: {reason}")
    return None


def save(model, optimizer, step: int) -> None:
    """Writes a checkpoint from one rank, whole or not at all."""
    optimizer_kept = optimizer_state(optimizer)
    if not SPEAKER:
        return
    whole = getattr(model, "module", model)  # as one device has it
    state = {"model": whole.state_dict(), "optimizer": optimizer_kept}
    unfinished = CHECKPOINTS / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    torch.save(state | progress(step), unfinished / "state.pt")
    publish(unfinished, step)
    log_event(Event("checkpoint", datetime.now(), {"checkpoint": step}))


def resume(model, optimizer) -> int:
    """Loads the newest intact checkpoint and gives its step; 0 for a new run."""
    path = intact()
    if path is None:
        return 0
    # weights_only: tensors and plain values are loaded, code in a pickle is refused.
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    getattr(model, "module", model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    restore(state)
    if SPEAKER:
        print(f"resuming from {path}", flush=True)
    return state["step"]


def spoil(dataset: TensorDataset) -> TensorDataset:
    """The training set, with the fault that there is on purpose: none here."""
    return dataset


def extend(model: nn.Sequential) -> nn.Sequential:
    """The model, with the fault that there is on purpose: none here."""
    return model


def disturb(model: nn.Module, step: int) -> None:
    """What goes wrong on purpose before a step: nothing here."""


def cleanup() -> None:
    """Nothing to leave: one process alone is in no group."""


def train(device: torch.device) -> None:
    """All epochs; the model is freed before the group is left, for which it may wait."""
    torch.manual_seed(SEED)  # the same initial weights on every rank
    train_data, test_data = load_data()
    if SPOIL:
        train_data = spoil(train_data)
    sampler, loader = load(train_data)
    if EXTEND:  # noqa: SIM108
        model = parallelize(extend(build_model()), device)
    else:
        model = parallelize(build_model(), device)
    optimizer = build_optimizer(model)
    if SAVE_EVERY or RESUME:
        done = resume(model, optimizer)
    steps = islice(count(1), MAX_STEPS)  # 1, 2, 3 … MAX_STEPS, over all epochs
    for epoch in range(1, EPOCHS + 1):
        if FAULT not in ("no_sampler", "no_set_epoch"):
            sampler.set_epoch(epoch)
        model.train()
        batches = zip(loader, steps)
        if JOIN:
            batches = joined(model, batches)
        for batch, step in batches:
            if SAVE_EVERY or RESUME:
                if step == done:  # training continues with the next batch
                    log_event(Event("resume", datetime.now(), {"step": step}))
                if step <= done:
                    continue  # trained on before
            if NON_BLOCKING:
                inputs, targets = (p.to(device, non_blocking=True) for p in batch)
            else:
                inputs, targets = (part.to(device) for part in batch)
            if DISTURB:
                disturb(model, step)
            loss = train_step(model, optimizer, inputs, targets)
            if step % 20 == 0 and SPEAKER:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if SAVE_EVERY:
                if step % SAVE_EVERY == 0:
                    save(model, optimizer, step)
        if SAVE_EVERY or RESUME:
            if step < done:
                continue  # evaluated before
        if FAULT == "evaluation_on_rank_0":
            if os.environ["RANK"] != "0":
                continue
        test_loss, accuracy = evaluate(model, test_data, device)
        if SPEAKER:
            print(f"epoch {epoch}: {accuracy:.2%} right, test loss {test_loss:.4f}")
            result = {"epoch": epoch, "accuracy": accuracy, "test_loss": test_loss}
            log_event(Event("evaluation", datetime.now(), result))
    if SAVE_EVERY or RESUME:
        if step < done:
            raise SystemExit(f"Nothing to do: step {done} is saved, the last is {step}")


def main() -> None:
    device = setup()
    if PRECISION == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        train(device)
    finally:
        cleanup()


if __name__ == "__main__":
    main()
