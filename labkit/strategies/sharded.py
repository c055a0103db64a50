"""Checkpoints of what is sharded: every rank writes what it holds, and can be given another share of it when it goes on."""

import shutil
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.monitor import Event, log_event

from labkit.strategies.base import CHECKPOINTS, PRECISION, RESUME, SCALER, SPEAKER

# Each parameter's state under its name: it is found again by whoever holds it then.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoint_of(model, optimizer, step: int) -> dict:
    """Everything that a checkpoint holds; of a tensor in shards, this rank's."""
    weights, optimizer_kept = get_state_dict(model, optimizer, options=BY_NAME)
    rest = {"step": step, "random": torch.get_rng_state()}
    if torch.cuda.is_available():
        rest["cuda_random"] = torch.cuda.get_rng_state()
    if PRECISION == "fp16":
        rest["scaler"] = SCALER.state_dict()
    return {"model": weights, "optimizer": optimizer_kept, "rest": rest}


def save(model, optimizer, step: int) -> None:
    """Writes a checkpoint, each rank its part; it has its name when all are done."""
    unfinished = CHECKPOINTS / "unfinished"
    dcp.save(checkpoint_of(model, optimizer, step), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        # One of that name is there where it could not be used.
        shutil.rmtree(CHECKPOINTS / f"step{step:08}", ignore_errors=True)
        unfinished.replace(CHECKPOINTS / f"step{step:08}")
    dist.barrier()
    if SPEAKER:
        log_event(Event("checkpoint", datetime.now(), {"checkpoint": step}))


def resume(model, optimizer) -> int:
    """Goes on from the newest checkpoint that can be used; its step, or 0."""
    found = sorted(CHECKPOINTS.glob("step*"), reverse=True)
    if RESUME:
        found += sorted(Path(RESUME).glob("step*"), reverse=True)
    for path in found:
        state = checkpoint_of(model, optimizer, 0)
        try:
            dcp.load(state, checkpoint_id=path)
            weights, optimizer_kept = state["model"], state["optimizer"]
            set_state_dict(
                model,
                optimizer,
                model_state_dict=weights,
                optim_state_dict=optimizer_kept,
                options=BY_NAME,
            )
            torch.set_rng_state(state["rest"]["random"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state["rest"]["cuda_random"])
            if PRECISION == "fp16":
                SCALER.load_state_dict(state["rest"]["scaler"])
        except (Exception, dcp.CheckpointException) as error:
            if SPEAKER:
                print(f"{path} cannot be used: {type(error).__name__}", flush=True)
            continue
        if SPEAKER:
            print(f"going on from {path}", flush=True)
        log_event(Event("resume", datetime.now(), {"step": state["rest"]["step"]}))
        return state["rest"]["step"]
    if found:
        raise SystemExit("there are checkpoints, and none of them can be used")
    return 0
