"""Runs on two hosts with a network between them, in network namespaces."""

from __future__ import annotations

import math
import subprocess

import hosts
import pytest
from hosts import two_hosts

from labkit.plan.script import write_script
from labkit.runs.handle import Run
from labkit.runs.settling import settle

SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "steps": 4, "device": "cpu", "nproc": 2}
STRATEGIES = ("ddp", "fsdp2", "pp")
# one after another in the same two processes, because torch takes seconds to import; every group has a store of its own
_ALL = """
import os, runpy
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
for name in {names}:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    runpy.run_path(f"{folder}/{{name}}.py", run_name="__main__")
"""
pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"no two hosts: {hosts.missing()}")


def start_nodes(two: list[hosts.Host], *arguments: str) -> list[subprocess.Popen]:
    """The same command on each host, with its own rank."""
    meeting = ("--nodes", "2", "--rdzv-endpoint", f"{two[0].address}:29500")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    return [
        host.labkit("run", *arguments, *meeting, "--node-rank", str(rank), **quiet) for rank, host in enumerate(two)
    ]


def test_two_hosts_train_as_one_machine(runs, shared_run, tmp_path):
    """No host can resolve the name of the other one, and every strategy sends over the cable."""
    for name in STRATEGIES:
        (tmp_path / f"{name}.py").write_text(write_script(settle(name, **SMALL)))
    script = tmp_path / "all.py"
    script.write_text(_ALL.format(names=STRATEGIES, folder=tmp_path))
    with two_hosts() as two:
        nodes = start_nodes(two, str(script), "--nproc", "2", "--device", "cpu")
        assert [node.wait(240) for node in nodes] == [0, 0]
    nodes = [Run.attach(path).state for path in sorted(runs.iterdir())]
    ranks = [node.ranks[number] for number, node in enumerate(nodes)]
    assert [rank.host for rank in ranks] == [host.name for host in two]
    assert all(rank.hosts == {"0": two[0].name, "1": two[1].name} for rank in ranks)
    for number, name in enumerate(STRATEGIES):
        alone = shared_run(name, **SMALL).state
        for step in range(4):
            losses = [loss for rank in ranks if not math.isnan(loss := rank.steps.loss[4 * number + step])]
            assert sum(losses) / len(losses) == pytest.approx(alone.loss_at(step), rel=1e-5)
