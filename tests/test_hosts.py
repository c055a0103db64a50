"""Runs on two hosts with a network between them, in network namespaces."""

from __future__ import annotations

import math
import subprocess

import hosts
import pytest
from conftest import wait_until
from hosts import two_hosts

from labkit.plan.script import write_script
from labkit.runs.handle import Run
from labkit.runs.settling import settle

SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "steps": 4, "device": "cpu", "nproc": 2}
STRATEGIES = ("ddp", "fsdp2", "pp")
# one after another in the same two processes, because torch takes seconds to import; every group has a store of its own
_ALL = """
import os, runpy
for name in {names}:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    runpy.run_path(f"{folder}/{{name}}.py", run_name="__main__")
"""
# the ranks end together, after the file `enough` has appeared
_ENDLESS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
enough = torch.zeros(1)
while not enough.item():
    enough.fill_(os.path.exists({enough!r}))
    dist.all_reduce(enough)
    time.sleep(0.05)
dist.destroy_process_group()
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
    assert all(node.nodes[0]["hosts"] == {"0": two[0].name, "1": two[1].name} for node in nodes)
    for number, name in enumerate(STRATEGIES):
        alone = shared_run(name, **SMALL).state
        for step in range(4):
            losses = [loss for rank in ranks if not math.isnan(loss := rank.steps.loss[4 * number + step])]
            assert sum(losses) / len(losses) == pytest.approx(alone.loss_at(step), rel=1e-5)


def test_a_node_that_is_cut_off_is_reported_and_the_run_restarts(runs, tmp_path):
    """Both sides name the other host while the cable is out, and continue when it is in again."""
    script = tmp_path / "train.py"
    script.write_text(_ENDLESS.format(enough=str(enough := tmp_path / "enough")))
    with two_hosts() as two:
        own = ("--nproc", "2", "--device", "cpu", "--hang-after", "3", "--max-restarts", "1")
        nodes = start_nodes(two, str(script), *own)
        first, second = wait_until(lambda: len(found := sorted(runs.glob("*/events"))) == 2 and found)
        first, second = Run.attach(first.parent), Run.attach(second.parent)
        wait_until(lambda: first.state.nodes and second.state.nodes)
        two[1].plug("down")
        wait_until(lambda: len(first.state.nodes) == len(second.state.nodes) == 2)
        for run, other, rank in ((first, two[1], 1), (second, two[0], 0)):
            finding = run.findings()[0]
            assert finding.title == f"rank {rank} on {other.name} did not answer"
            assert finding.evidence == f"the node of rank {1 - rank} had no answer for 3 s"
        two[1].plug("up")
        wait_until(lambda: len(first.state.nodes) == len(second.state.nodes) == 3)
        assert all(rank.attempt == 1 for run in (first, second) for rank in run.state.ranks.values())
        enough.touch()
        assert [node.wait(240) for node in nodes] == [0, 0]
    summary = first.summary()
    names = [host.name for host in two]
    assert [(one["what"], one["hosts"]) for one in summary["nodes"]] == [
        ("met", names),
        ("cut off", names[1:]),
        ("met", names),
    ]
    assert summary["restarts"] == 1 and summary["findings"][0]["name"] == "cut_off"
