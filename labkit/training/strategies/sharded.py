"""Sharded checkpoints: every rank writes its shards, and any number of ranks can load them."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.monitor import Event, log_event

from labkit.training.strategies.checkpoints import (
    CHECKPOINTS,
    IS_LOGGING_RANK,
    RESUME,
    ShardReader,
    WholeReader,
    intact,
    pickle_by_value,
    progress,
    publish,
    restore,
)

# Store optimizer state by parameter name, so that it can be loaded by any rank.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
CHECKPOINT_ASYNC = False  # write checkpoints in a thread, while training continues
WRITER = ThreadPoolExecutor(1)  # the thread that writes checkpoints
WRITING = []  # the checkpoint that it writes


def tensors_of(weights: dict, optimizer_state: dict) -> dict:
    """The tensors to save, without the optimizer's settings, which the script sets."""
    tensors = {k: value for k, value in optimizer_state.items() if torch.is_tensor(value)}
    return {"model": weights, "optimizer": tensors}


@cache
def writers() -> dist.ProcessGroup:
    """All ranks, for messages of their WRITER, which training does not wait for."""
    return dist.new_group(backend="gloo")


def save(model, optimizer, step: int) -> None:
    """Write a checkpoint: each rank its shards; rename the folder when all are done."""
    if CHECKPOINT_ASYNC:
        finish_writing()  # the checkpoint before this one
    unfinished = CHECKPOINTS / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by killed processes
    state = tensors_of(*get_state_dict(model, optimizer, options=BY_NAME))
    rest = progress(step)
    if CHECKPOINT_ASYNC:  # copies the state before it returns
        saving = dcp.async_save(state, checkpoint_id=unfinished, process_group=writers())
        WRITING.append(WRITER.submit(lambda: commit(saving.result(), rest, step)))
    else:
        commit(dcp.save(state, checkpoint_id=unfinished), rest, step)


def commit(index, rest: dict, step: int) -> None:
    """Publish a checkpoint whose shards every rank has written."""
    unfinished = CHECKPOINTS / "unfinished"
    if dist.get_rank() == 0:
        index.storage_meta = None  # it contains the folder's name, which changes
        pickle_by_value(metadata._MEM_FORMAT_ENCODING)
        torch.save(index, unfinished / "index.pt")
        torch.save(rest, unfinished / "progress.pt")
        publish(unfinished, step)
    if CHECKPOINT_ASYNC:
        dist.barrier(writers())
    else:
        dist.barrier()
    if IS_LOGGING_RANK:
        log_event(Event("checkpoint", datetime.now(), {"checkpoint": step}))


def finish_writing() -> None:
    """Wait until the checkpoint that is being written is complete."""
    while WRITING:
        WRITING.pop().result()


def resume(model, optimizer) -> int:
    """Load the newest intact checkpoint and return its step; 0 for a new run."""
    path = intact()
    if path is None:
        return 0
    weights, optimizer_state = get_state_dict(model, optimizer, options=BY_NAME)
    state = tensors_of(weights, optimizer_state)
    reader, rest = ShardReader(path), "progress.pt"
    if RESUME and (path / "state.pt").exists():  # of a strategy that does not shard the model
        reader, rest = WholeReader(path), "state.pt"
    dcp.load(state, storage_reader=reader)
    # `dcp.load` has changed the tensors in place.
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state, options=BY_NAME)
    state = torch.load(path / rest, map_location="cpu", mmap=True, weights_only=True)
    restore(state)
    if IS_LOGGING_RANK:
        print(f"resuming from {path}", flush=True)
    return state["step"]
