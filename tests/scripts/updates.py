"""Runs on each rank: the scripts of several cases, one after another, in each way in which torch updates parameters.

`updates.py FOLDER` reads `FOLDER/cases.json`, and writes `FOLDER/rankN.json`: the losses of each case and way, and the
error. On GPUs, torch updates all parameters of a group at once by default (`foreach`); here, CPUs are added to the
devices on which it does.
"""

import importlib.util
import json
import math
import os
import sys
import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

# A transformer with few tensors: in torch 2.13, the first update of DTensors takes a time that grows with the square of
# their number (of 233, half a minute). A pipeline of any schedule has at most one stage per block.
SMALL = {"WIDTH": 32, "CONTEXT": 16, "LAYERS": 2, "EXPERTS": 4}
BLOCKS = SMALL["LAYERS"] + 2
RANK = os.environ["RANK"]


def updating(way: str) -> AbstractContextManager:
    """A context in which every AdamW updates its parameters in one way."""
    if way == "foreach":
        devices = [*_get_foreach_kernels_supported_devices(), "cpu"]
        return patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: devices)
    if way == "fused":
        return patch("torch.optim.AdamW.__init__", partialmethod(torch.optim.AdamW.__init__, fused=True))
    return nullcontext()


def train(script: Path, losses: list) -> None:
    """Runs a script, and adds the losses of its steps; a second time, for one more step, if it saves checkpoints."""
    program = loaded(script, losses)
    program.main()
    if hasattr(program, "SAVE_EVERY"):
        resumed = loaded(script, losses)
        resumed.MAX_STEPS += 1
        resumed.main()


def loaded(script: Path, losses: list) -> ModuleType:
    """The module of a script, with a small transformer, without evaluation."""
    spec = importlib.util.spec_from_file_location("script", script)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    for name, value in SMALL.items():
        if hasattr(program, name):
            setattr(program, name, value)
    if hasattr(program, "LAYERS") and hasattr(program, "STAGES"):
        program.STAGES = tuple(range(0, BLOCKS + 1, BLOCKS // (len(program.STAGES) - 1)))
    if hasattr(program, "SCALER"):
        program.SCALER = type(program.SCALER)("cpu")
    train_step = program.train_step

    def step(*args):
        loss = train_step(*args)
        losses.append(math.nan if loss is None else loss.item())  # of a rank without the last stage
        return loss

    program.train_step = step
    program.evaluate = lambda *args: (0.0, 0.0)
    return program


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = RANK  # DeepSpeed reads it
    torch.set_num_threads(1)
    folder, found = Path(sys.argv[1]), {}
    dist.init_process_group("gloo")
    dist.init_process_group = dist.destroy_process_group = lambda *args: None  # DeepSpeed keeps the first group
    cases = json.loads((folder / "cases.json").read_text())
    for name, text in cases["scripts"].items():
        found[name] = {}
        for way in cases["ways"][name]:
            place = folder / f"{name}, {way}"
            place.mkdir(exist_ok=True)
            script = place / f"train{RANK}.py"
            script.write_text(text)
            losses, error = [], None
            try:
                with updating(way):
                    train(script, losses)
            except Exception:
                error = traceback.format_exc()
            found[name][way] = {"losses": losses, "error": error}
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))
