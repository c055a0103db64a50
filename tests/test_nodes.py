"""Runs on several nodes: two agents on this host, each with its own folder, and the folder of both."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import called
from fabricate import FakeRun

from labkit import SpecError
from labkit.launch import local, report
from labkit.plan.nodes import Node
from labkit.record.folder import RunFolder
from labkit.runs.gathering import GatherError, gather
from labkit.runs.handle import Run, start_node
from labkit.runs.settling import settle

SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "steps": 4, "device": "cpu"}


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_two_nodes_train_as_one_machine_and_are_gathered(shared_run, tmp_path, capsys):
    spec, meeting = settle("fsdp2", nproc=4, nodes=2, **SMALL), endpoint()
    nodes = [Run(start_node(spec, Node(2, rank, meeting))) for rank in range(2)]
    assert [node.wait(300).state.words for node in nodes] == ["finished", "finished"]
    assert [len(node.state.ranks) for node in nodes] == [2, 2]
    assert [node.state.step for node in nodes] == [4, 4]
    hosts = dict.fromkeys("0123", socket.gethostname())
    assert [rank.hosts for node in nodes for rank in node.state.ranks.values() if rank.hosts] == [hosts, hosts]
    assert not [finding for node in nodes for finding in node.findings() if finding.name == "not_there"]
    whole = tmp_path / "whole"
    assert called("gather", *(node.name for node in nodes), "-o", str(whole)) == 0
    assert "4 ranks" in capsys.readouterr().out
    found, alone = Run.attach(whole).summary(), shared_run("fsdp2", nproc=4, **SMALL).summary()
    assert (found["state"], found["steps"], [rank["exit_code"] for rank in found["ranks"]]) == ("finished", 4, [0] * 4)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert found["samples_per_second"] > 0
    assert "step 4: loss" in Run.attach(whole).logs(0)
    assert len({path for rank in range(4) if (path := RunFolder(whole).log_of(rank))}) == 4


def test_a_node_without_an_answer_says_what_to_do():
    """Node 1 asks at a port on which nobody listens; torchrun gives up after its timeout."""
    folder = RunFolder.create("x")
    for said, found in (
        ("RendezvousConnectionError: x", "nobody answers at a:1; start node 0 first"),
        ("RendezvousTimeoutError", "not all nodes have met at a:1 in time"),
        ("ValueError: x", ""),
    ):
        folder.launcher_log.write_text(said)
        why = report.unanswered(folder, "a:1")
        assert why.startswith(found) and bool(why) == bool(found)
    assert report.unanswered(folder, None) == ""


def test_the_command_of_a_node():
    spec = settle("ddp", nproc=4, nodes=2, **SMALL)
    folder = RunFolder.create("x")
    plan = local.plan(spec, folder, Node(2, 1, "127.0.0.1:29500"))
    for word in ("--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:29500", "--rdzv-id=ddp-x4"):
        assert word in plan["argv"]
    assert "--local-addr=127.0.0.1" in plan["argv"]
    assert plan["env"]["GLOO_SOCKET_IFNAME"] == ("lo" if sys.platform == "linux" else "lo0")
    assert plan["lease"]["wanted"] == plan["ranks_here"] == 2
    assert "is_host=false" in " ".join(plan["argv"])
    assert "LABKIT_LOOPBACK" not in plan["env"]


def test_an_endpoint_without_an_address_is_refused(monkeypatch, runs):
    """A name that nobody knows; and the name of this machine, if only the machine itself can use its address."""
    monkeypatch.setattr(socket, "getaddrinfo", addresses := Mock(side_effect=socket.gaierror(-2, "Name unknown")))
    spec = settle("ddp", nproc=2, nodes=2, **SMALL)
    with pytest.raises(
        SpecError, match=r"node0:29500: node0 cannot be reached from this machine \(Name unknown\); give"
    ):
        start_node(spec, Node(2, 0, "node0:29500"))
    addresses.side_effect = None
    addresses.return_value = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    with pytest.raises(SpecError, match=r"node0 is 127\.0\.\d\.1 on this machine, which no other machine reaches"):
        start_node(spec, Node(2, 0, "node0:29500"))
    assert not list(runs.iterdir())


def node_of_two(runs: Path) -> FakeRun:
    """The folder of node 0 of two, with rank 0 of two; rank 1 is on another host."""
    run = FakeRun(runs, nproc=2)
    run.start()
    run.status("running", ranks_here=1)
    run.writers[0].write("hosts", hosts={"0": "here", "1": "there"})
    run.step(3)
    for path in run.folder.events.glob("rank1.*"):
        path.unlink()
    return run


def test_a_node_that_is_cut_off_is_named(runs):
    run = node_of_two(runs)
    call = {"op": "all_reduce", "over": False, "group": "default", "ranks": [0, 1], "seq": 7, "sizes": [[4]]}
    run.writers[0].write("waiting", since=run.newest - 31.0, stack="", ops=[call], phase="backward", step=4)
    found = Run.attach(run.folder.path)
    assert found.state.words == "training"
    hang = next(finding for finding in found.findings() if finding.name == "hang")
    assert "rank 1 on there never reached it" in hang.title
    assert "rank 1: its events are in the run folder of its node" in hang.evidence


def test_a_node_that_dies_is_named(runs):
    run = node_of_two(runs)
    run.writers[0].write("error", type="RuntimeError", message="Connection closed by peer [10.0.0.2]:41", traceback="")
    run.status("failed", ranks_here=1, ended=run.newest)
    first = next(one for one in Run.attach(run.folder.path).findings() if one.name == "first_failure")
    assert first.cause == "a rank of another node is gone, rank 1 on there; read its run folder"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "2"), "--nodes 2 needs --node-rank (0 to 1) and --rdzv-endpoint HOST:PORT"),
        (("--node-rank", "1"), "--node-rank and --rdzv-endpoint need --nodes N"),
        (("--nodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"), "--node-rank must be an integer from 0 to 1"),
        (("--nodes", "2", "--node-rank", "1", "--rdzv-endpoint", "a"), "--rdzv-endpoint must be the address and"),
        (("--nodes", "2", "--node-rank", "1", "--rdzv-endpoint", "a:0"), "such as node0:29500, got 'a:0'"),
        (("--nodes", "3", "--node-rank", "1", "--rdzv-endpoint", "a:1"), "2 ranks cannot be divided equally among 3"),
    ],
)
def test_what_cannot_run_on_nodes_is_refused(arguments, said, capsys, runs):
    assert called("run", "ddp", "--nproc", "2", "--device", "cpu", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not runs.exists()


def test_a_strategy_in_one_process_has_no_nodes():
    with pytest.raises(SpecError, match="1 rank cannot be divided"):
        start_node(settle("dp", nproc=2, nodes=2, **SMALL), Node(2, 0, "a:1"))


def fabricated(runs: Path, *ranks: int, **spec) -> RunFolder:
    """A node's folder of a run of four ranks."""
    run = FakeRun(runs, nproc=4, **spec)
    run.start()
    run.end()
    for rank in set(range(4)) - {*ranks}:
        for path in run.folder.events.glob(f"rank{rank}.*"):
            path.unlink()
        shutil.rmtree(run.logs[rank])
    return run.folder


def test_only_the_folders_of_one_run_are_gathered(runs, tmp_path):
    one, two, other = fabricated(runs, 0, 1), fabricated(runs, 2, 3), fabricated(runs, 2, 3, seed=5)
    target = tmp_path / "whole"
    for folders, said in (
        ([one], "at least two nodes"),
        ([one, other], "their seed differ; start all nodes with the same command"),
        ([one, one], "both have rank 0"),
    ):
        with pytest.raises(GatherError, match=said):
            gather(folders, target)
        assert not target.exists()
    one.script.write_text("1")
    two.script.write_text("2")
    with pytest.raises(GatherError, match="different scripts"):
        gather([one, two], target)
    two.script.write_text("1")
    RunFolder.write_json(two.status, {"state": "failed", "started": 1.0, "ended": 2.0, "message": "node lost"})
    whole = gather([one, two], target)
    assert sorted(whole.event_files()) == [0, 1, 2, 3]
    status = whole.read_status()
    assert (status["state"], status["started"], status["message"]) == ("failed", 1.0, f"{two.name}: node lost")
    with pytest.raises(GatherError, match="exists; name a new folder"):
        gather([one, two], target)


def test_nodes_divide_what_a_strategy_needs():
    assert Node(2, 0, "[::1]:29500").share(8) == 4
    with pytest.raises(SpecError, match="3 ranks cannot be divided equally"):
        Node(2, 0, "a:1").share(3)
