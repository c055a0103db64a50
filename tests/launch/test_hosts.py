"""Runs on two hosts with a network between them, in network namespaces."""

from __future__ import annotations

import subprocess

import hosts
import pytest
from commands import called
from conftest import wait_until
from hosts import two_hosts
from strategies_at_once import check_losses, script_of_all

from labkit import figures
from labkit.runs.handle import Run

# collectives until the file `enough` appears
_ENDLESS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
enough = torch.zeros(1)
print("trained", flush=True)
while not enough.item():
    enough.fill_(os.path.exists("{folder}/enough"))
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
    time.sleep(0.05)
dist.destroy_process_group()
"""
pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"no two hosts: {hosts.missing()}")


@pytest.mark.parametrize(
    ("number", "hang_after"),
    # an elastic run waits as long for its second host, before it begins alone
    [("2", "3"), pytest.param("1:2", "20", marks=pytest.mark.slow)],
)
def test_two_hosts_train_as_one_machine_lose_each_other_and_meet_again(runs, shared_run, tmp_path, number, hang_after):
    """No host can resolve the name of the other one. While the cable is out, both name the other host; an elastic run
    continues on the first one alone. When the cable is in again, both continue together."""
    alone = [("met", ["lab-host1"])] if number == "1:2" else []
    script = script_of_all(tmp_path, _ENDLESS.format(folder=tmp_path))
    own = ("--nproc", "2", "--device", "cpu", "--hang-after", hang_after, "--max-restarts", "3", "--nodes", number)
    with two_hosts() as two:
        meeting = ("--rdzv-endpoint", f"{two[0].address}:29500")
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        nodes = []
        for rank, host in enumerate(two):  # one after the other: the folders' names are in the order of the nodes
            nodes.append(host.labkit("run", str(script), *own, *meeting, "--node-rank", str(rank), **quiet))
            wait_until(lambda number=rank + 1: len(list(runs.glob("*/spec.json"))) == number, 180)
        paths = sorted(runs.glob("*/spec.json"))
        first, second = (Run.attach(path.parent) for path in paths)
        wait_until(lambda: "trained" in first.logs(0) and "trained" in second.logs(1), 180)
        check_losses([first.state.ranks[0], second.state.ranks[1]], shared_run)
        two[1].plug("down")
        wait_until(lambda: len(first.state.nodes) == 2 + len(alone) and len(second.state.nodes) == 2)
        for run, other, rank in ((first, two[1], 1), (second, two[0], 0)):
            finding = next(one for one in run.findings() if one.name == "cut_off")
            assert finding.title == f"rank {rank} on {other.name} did not answer"
            assert finding.evidence == f"the node of rank {1 - rank} had no answer for {hang_after} s"
        assert first.state.world_size == 2 - len(alone)
        two[1].plug("up")
        wait_until(lambda: len(first.state.met) == 2 + len(alone))
        (tmp_path / "enough").touch()
        assert [node.wait(180) for node in nodes] == [0, 0]
    summary, names = first.summary(), [host.name for host in two]
    assert [(one["what"], one["hosts"]) for one in summary["nodes"]] == [
        ("met", names),
        ("cut off", names[1:]),
        *alone,
        ("met", names),
    ]
    assert (summary["restarts"], summary["world_size"]) == (1 + len(alone), 2)
    note = figures.chart("loss", first.state).note
    assert note.startswith("2 nodes met (") and f", {names[1]} cut off (" in note
    assert (", 1 node met (" in note) == bool(alone)
    assert called("gather", first.name, second.name, "-o", str(tmp_path / "whole")) == 0
    whole = Run.attach(tmp_path / "whole").summary()
    assert (whole["state"], [rank["exit_code"] for rank in whole["ranks"]]) == ("finished", [0, 0])
    assert {host for one in whole["nodes"] if one["what"] == "cut off" for host in one["hosts"]} == set(names)
