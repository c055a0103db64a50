"""Findings of CUDA's and NCCL's own messages: a communicator that fails, memory that runs out, and a collective that a
rank does not call; and which processes initialise CUDA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import warm_run

from labkit.analysis.diagnose import findings

HEAD = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # NCCL's watchdog waits four times as long
os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # to a file in the cache of the user
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=8))
tensor = torch.ones(4, device=device)
dist.all_reduce(tensor)
torch.cuda.synchronize()
"""


def failed(text: str, folder: Path, **more: object) -> str:
    """The titles and causes of the findings of a script on two GPUs, which fails."""
    script = folder / "train.py"
    script.write_text(HEAD + text)
    run = warm_run(script, nproc=2, device="cuda", **more)
    assert run.state.status.state == "failed"
    return " | ".join(f"{finding.title}. {finding.cause}" for finding in findings(run.state))


def test_nccl_fails_to_start(on_machine, tmp_path):
    on_machine("t4x2", nccl_error="socketStartConnect: Connect to 10.0.0.1<40001> failed : Connection refused")
    assert "NCCL failed" in failed("", tmp_path)


def test_out_of_memory(tmp_path):
    assert re.search("memory", failed("torch.empty(20 << 30, dtype=torch.uint8, device=device)\n", tmp_path))


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_only_ranks_initialise_cuda(strategy, on_machine, tmp_path):
    log = tmp_path / "calls.log"
    on_machine("t4x2", log=log)
    run = warm_run(strategy, workload="mlp", device="cuda", samples=64, batch_size=16, steps=2)
    initialised = {int(line.split()[0]) for line in log.read_text().splitlines() if " initialised " in line}
    assert initialised == {rank.pid for rank in run.state.ranks.values()}


def test_a_hang_is_found_before_nccls_watchdog_ends_it(tmp_path):
    text = "if rank == 0:\n    dist.all_reduce(tensor)\n    torch.cuda.synchronize()\ntime.sleep(60)\n"
    words = failed(text, tmp_path, hang_after=4)
    assert "rank 0 waited" in words and "rank 1 never reached it" in words
    assert "NCCL's watchdog ended the process" in words


def test_sends_that_wait_for_each_other_are_a_cycle(tmp_path):
    text = "dist.send(tensor, 1 - rank)\ntorch.cuda.synchronize()\ndist.recv(tensor, 1 - rank)\n"
    words = failed(text, tmp_path, hang_after=4)
    assert "rank 0 waits to send to 1, 1 to 0 at train.py:14" in words and "sends before it receives" in words
