"""Trains a few steps of several Specs and prints what torch's allocator handed out, one line of JSON for each.

Standard input has the Specs, one per line. torch is imported once, and the ranks are forked: a start by torchrun for
each would take minutes. A rank reports `peaks`, those of its steps, and `reserved`, or `error`.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.prediction.tracing.world import batch, load

STEPS = 4
LIMIT = 120  # seconds for one Spec
SETTLED = 0.25  # seconds after which NCCL's watchdog has let go of the tensors of a step


def train(spec, rank, store):
    """The steps of one rank on synthetic data; the peaks of the allocator."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec.processes))
    os.environ.update(LOCAL_WORLD_SIZE=str(spec.processes))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    script = load("train.py", write_script(spec, in_place=False))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    is_alone = not spec.strategy_row.process_group
    if not is_alone:
        address = {"init_method": f"file://{store}", "rank": rank, "world_size": spec.processes}
        dist.init_process_group("nccl", device_id=device, **address)
    data = batch(script, spec.data_row.input_shape(spec.options), spec.batch_size * (spec.nproc if is_alone else 1))
    if hasattr(script, "STAGES"):
        data = script.stage_data(data)
    model = script.parallelize(script.build_blocks(), device)
    optimizer = script.build_optimizer(model)
    model.train()
    peaks = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in data.tensors)
        script.train_step(model, optimizer, inputs, targets)
        del inputs, targets
        torch.cuda.synchronize()
        time.sleep(SETTLED)
        peaks.append(torch.cuda.max_memory_allocated())
    return {"peaks": peaks, "reserved": torch.cuda.max_memory_reserved()}


def work(spec, rank, store, answer):
    """What a forked process does."""
    os.dup2(2, 1)  # libraries print
    try:
        answer.send(train(spec, rank, store))
    except BaseException as error:
        answer.send({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)


def measured(spec):
    """What each rank of a Spec reports."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        ranks = []
        for rank in range(spec.processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(spec, rank, f"{place}/store", theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        end = time.monotonic() + LIMIT
        found = []
        for process, ours in ranks:
            try:
                answers = wait([ours], max(0.0, end - time.monotonic()))
                found.append(ours.recv() if answers else {"error": "no answer"})
            except EOFError:
                process.join()
                found.append({"error": f"exit code {process.exitcode}"})
        for process, _ in ranks:
            process.kill()
            process.join()
    return found


for line in sys.stdin:
    print(json.dumps(measured(Spec.from_json(json.loads(line)))), flush=True)
