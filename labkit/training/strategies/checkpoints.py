"""Checkpoints of a whole model: one rank writes them, and every rank verifies and loads them.

`sharded.py` replaces `save` and `resume` where every rank writes its shards.
"""

import hashlib
import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import torch
from torch.monitor import Event, log_event

from labkit.training.strategies.asking import SAVE_NOW
from labkit.training.strategies.randomness import random_states, set_random_state
from labkit.training.strategies.resharding import whole_from_shards

LOSS_SCALING = False  # prevent underflow of fp16 gradients
RESUME = None  # the checkpoint of another run to resume from
READS = ("whole", "shards")  # the layouts of checkpoints that RESUME can have
CHECKPOINTS = Path(__file__).with_name("checkpoints")  # a restart resumes from them
# The identity that a checkpoint must have to be loaded by this script.
MANIFEST = {"format": 3, "layout": "whole", "workload": "cnn"}
SCALER = torch.amp.GradScaler()  # scales the loss, and skips steps that overflow
IS_LOGGING_RANK = os.environ.get("RANK", "0") == "0"  # only this rank prints and logs


def optimizer_state(optimizer) -> dict:
    """The state of the optimizer; every rank must call this, the saving rank uses it."""
    return optimizer.state_dict()


def progress(step: int) -> dict:
    """The state that a checkpoint contains besides model and optimizer; every rank must
    call this. The step is also the position in the data: batches are in a fixed order."""
    state = {"step": step, "random": random_states()}
    if LOSS_SCALING:
        state["scaler"] = SCALER.state_dict()
    return state


def restore(state: dict) -> None:
    """Restore the state that `progress` saved, as far as it is in the checkpoint."""
    states = state["random"]  # of more or fewer ranks, if another run has saved them
    set_random_state(states[int(os.environ.get("RANK", "0")) % len(states)])
    if LOSS_SCALING:
        if state.get("scaler"):
            SCALER.load_state_dict(state["scaler"])


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pickle_by_value(kind: type) -> None:
    """Pickle an enum as newer versions of Python do: 3.11.2 refers to `getattr`, which
    `torch.load` refuses."""
    kind.__reduce_ex__ = lambda member, protocol: (kind, (member.value,))


def publish(unfinished: Path, step: int) -> None:
    """Add a manifest to a complete checkpoint, flush it, then rename the folder."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    sums = {path.name: checksum(path) for path in unfinished.iterdir()}
    manifest = {**MANIFEST, "step": step, "world_size": world_size, "sha256": sums}
    (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2))
    final = CHECKPOINTS / f"step{step:08}"
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of that name
    for path in unfinished.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # on the disk before the name is
    unfinished.replace(final)
    SAVE_NOW.unlink(missing_ok=True)  # who asked for a checkpoint has one


def verify(path: Path) -> None:
    """Raise ValueError if the identity of a checkpoint differs or a file has changed."""
    manifest = json.loads((path / "manifest.json").read_text())
    for key, expected in MANIFEST.items():
        if RESUME:
            if key == "layout" and manifest.get(key) in READS:
                continue  # of another strategy
        if manifest.get(key) != expected:
            raise ValueError(f"{key} must be {expected!r}, got {manifest.get(key)!r}")
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
            if IS_LOGGING_RANK:
                print(reason, flush=True)
    if found:
        raise SystemExit(f"Cannot resume: {reason}")
    return None


def save(model, optimizer, step: int) -> None:
    """Write a checkpoint atomically, from one rank."""
    state = {"optimizer": optimizer_state(optimizer), **progress(step)}
    if not IS_LOGGING_RANK:
        return
    unwrapped = getattr(model, "module", model)  # the model without DDP
    state["model"] = unwrapped.state_dict()
    state["names"] = [name for name, _ in unwrapped.named_parameters()]
    unfinished = CHECKPOINTS / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir(parents=True)
    torch.save(state, unfinished / "state.pt")
    publish(unfinished, step)
    log_event(Event("checkpoint", datetime.now(), {"checkpoint": step}))


def load_either(path: Path, model, optimizer) -> dict:
    """The state in a checkpoint of a whole model, or in one of shards."""
    if (path / "index.pt").exists():
        return whole_from_shards(path, model, optimizer)
    return torch.load(path / "state.pt", map_location="cpu", weights_only=True)


def resume(model, optimizer) -> int:
    """Load the newest intact checkpoint and return its step; 0 for a new run."""
    path, unwrapped = intact(), getattr(model, "module", model)
    if path is None:
        return 0
    if RESUME:
        state = load_either(path, unwrapped, optimizer)
    else:
        # weights_only loads tensors and plain values, and rejects code in a pickle.
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    unwrapped.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    restore(state)
    if IS_LOGGING_RANK:
        print(f"resuming from {path}", flush=True)
    return state["step"]
