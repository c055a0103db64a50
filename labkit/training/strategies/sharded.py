"""Checkpoints in shards: every rank writes what it holds, and any number of ranks can load it."""

import shutil
from datetime import datetime

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.monitor import Event, log_event

from labkit.training.strategies.base import CHECKPOINTS, SPEAKER, intact, progress, publish, restore

# Each parameter's state under its name: it is found again by whoever holds it then.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
# What the index of the shards consists of; torch.load refuses every other class in it.
INDEX = [
    filesystem._StorageInfo,
    metadata._MEM_FORMAT_ENCODING,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
]


class ShardReader(dcp.FileSystemReader):
    """Reads shards without unpickling code: torch's own reader trusts `.metadata`."""

    def read_metadata(self, **how) -> metadata.Metadata:
        with torch.serialization.safe_globals(INDEX):
            index = torch.load(self.path / "index.pt", weights_only=True)
        files = {shard.relative_path for shard in index.storage_data.values()}
        if outside := files - {path.name for path in self.path.iterdir()}:
            raise ValueError(f"the index names {outside}, which are not in {self.path}")
        return index


def tensors_of(weights: dict, optimizer_kept: dict) -> dict:
    """What is saved; of a tensor in shards, this rank's. Settings are the script's."""
    kept = {key: value for key, value in optimizer_kept.items() if torch.is_tensor(value)}
    return {"model": weights, "optimizer": kept}


def save(model, optimizer, step: int) -> None:
    """Writes a checkpoint, each rank its shards; it gets its name when all are done."""
    unfinished = CHECKPOINTS / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of processes that were killed
    state = tensors_of(*get_state_dict(model, optimizer, options=BY_NAME))
    index = dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        index.storage_meta = None  # it names the folder, which is renamed
        torch.save(index, unfinished / "index.pt")
        torch.save(progress(step), unfinished / "progress.pt")
        publish(unfinished, step)
    dist.barrier()
    if SPEAKER:
        log_event(Event("checkpoint", datetime.now(), {"checkpoint": step}))


def resume(model, optimizer) -> int:
    """Loads the newest intact checkpoint and gives its step; 0 for a new run."""
    path = intact()
    if path is None:
        return 0
    weights, optimizer_kept = get_state_dict(model, optimizer, options=BY_NAME)
    state = tensors_of(weights, optimizer_kept)
    dcp.load(state, storage_reader=ShardReader(path))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=optimizer_kept | state["optimizer"],
        options=BY_NAME,
    )
    state = torch.load(path / "progress.pt", weights_only=True)
    restore(state)
    if SPEAKER:
        print(f"resuming from {path}", flush=True)
    return state["step"]
