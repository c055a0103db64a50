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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.futures import Future
from torch.monitor import Event, log_event

DISTRIBUTED = False  # the ranks form a process group
JOIN = False  # allow unequal numbers of batches per rank


def random_state() -> torch.Tensor:
    """The random state of this rank: that of the CPU, then that of its GPU."""
    state = torch.get_rng_state()
    if torch.cuda.is_available():
        state = torch.cat([state, torch.cuda.get_rng_state()])
    return state


def set_random_state(state: torch.Tensor) -> None:
    """The counterpart of `random_state`."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if torch.cuda.is_available() and len(state) > size:
        torch.cuda.set_rng_state(state[size:])


def random_states() -> list[torch.Tensor]:
    """The random state of every rank; every rank must call this."""
    own = random_state()
    if DISTRIBUTED and not JOIN:  # with JOIN, other ranks may have no batches left
        if torch.cuda.is_available():
            own = own.cuda()  # NCCL sends from GPU memory
        states = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(states, own)
        return [state.cpu() for state in states]
    return [own]


SAVE_NOW = Path(__file__).with_name("save")  # a file that requests a checkpoint


def asked_to_save() -> bool:
    """Whether the file SAVE_NOW exists, as rank 0 sees it; every rank must call this."""
    if DISTRIBUTED and not JOIN:
        asked = torch.tensor(int(SAVE_NOW.exists()))
        if torch.cuda.is_available():
            asked = asked.cuda()  # NCCL sends from GPU memory
        dist.broadcast(asked, 0)
        return bool(asked)
    return SAVE_NOW.exists()


# The classes in the index of the shards; torch.load rejects every other class.
INDEX = [
    filesystem._StorageInfo,
    metadata._MEM_FORMAT_ENCODING,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
]
OPTIMIZER = "optimizer.state."  # precedes the name of a parameter, and that of its state


class ShardReader(dcp.FileSystemReader):
    """Reads shards without unpickling code; torch's own reader unpickles `.metadata`."""

    def read_metadata(self, **kwargs) -> metadata.Metadata:
        with torch.serialization.safe_globals(INDEX):
            index = torch.load(self.path / "index.pt", weights_only=True)
        files = {path.name for path in self.path.iterdir()}
        for shard in index.storage_data.values():
            if shard.relative_path not in files:
                raise ValueError(f"the index names {shard.relative_path}, which is not in {self.path}")
        return index


class WholeReader(dcp.FileSystemReader):
    """Reads the shards of this rank from the checkpoint of a whole model."""

    def read_metadata(self, **kwargs) -> metadata.Metadata:
        # Mapped memory: only what is used is read.
        state = torch.load(self.path / "state.pt", map_location="cpu", mmap=True, weights_only=True)
        self.tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
        for number, values in state["optimizer"]["state"].items():
            prefix = f"{OPTIMIZER}{state['names'][number]}."
            self.tensors |= {prefix + key: value for key, value in values.items()}
        index = {}
        for name, tensor in self.tensors.items():
            kind = metadata.TensorProperties.create_from_tensor(tensor)
            whole = metadata.ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())
            index[name] = metadata.TensorStorageMetadata(kind, tensor.size(), [whole])
        return metadata.Metadata(index, storage_data={})

    def read_data(self, plan, planner) -> Future:
        for item in plan.items:
            part = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            planner.commit_tensor(item, target.copy_(part))
        finished = Future()
        finished.set_result(None)
        return finished


def whole_from_shards(path: Path, model, optimizer) -> dict:
    """The state that a checkpoint in shards contains, as `save` writes it for a whole
    model."""
    reader, names = ShardReader(path), [name for name, _ in model.named_parameters()]
    kinds = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in kinds.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    group = {**optimizer.param_groups[0], "params": [*range(len(names))]}
    state = {"model": {}, "optimizer": {"state": {n: {} for n in group["params"]}, "param_groups": [group]}}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            state["optimizer"]["state"][names.index(parameter)][key] = tensor
        else:
            state["model"][name.removeprefix("model.")] = tensor
    return state | torch.load(path / "progress.pt", weights_only=True)


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
    if LOSS_SCALING and state.get("scaler"):
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
        if RESUME and key == "layout" and manifest.get(key) in READS:
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
