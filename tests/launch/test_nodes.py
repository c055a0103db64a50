"""Runs on several nodes: two agents on this host, each with its own folder, and the folder of both."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import called
from fabricate import FakeRun

from labkit import SpecError
from labkit.launch import local, watch
from labkit.plan.nodes import Node
from labkit.probe import hosts
from labkit.probe.hosts import Beats
from labkit.probe.journal import Journal
from labkit.record.folder import RunFolder
from labkit.runs.gathering import GatherError, gather
from labkit.runs.handle import Run, check_sizes, settle, start_node

SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "steps": 4, "device": "cpu"}


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow  # test_hosts.py has a run of one rank per node
def test_two_nodes_train_as_one_machine_and_are_gathered(shared_run, tmp_path, capsys):
    spec, meeting = settle("fsdp2", nproc=4, nodes=2, **SMALL), endpoint()
    nodes = [Run(start_node(spec, Node(2, rank, meeting))) for rank in range(2)]
    assert [node.wait(300).state.words for node in nodes] == ["finished", "finished"]
    assert [len(node.state.ranks) for node in nodes] == [2, 2]
    assert [node.state.step for node in nodes] == [4, 4]
    hosts = dict.fromkeys(range(4), socket.gethostname())
    assert [event.hosts for node in nodes for event in node.state.nodes] == [hosts, hosts]
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
        why = watch.unanswered(folder, "a:1")
        assert why.startswith(found) and bool(why) == bool(found)
    assert watch.unanswered(folder, None) == ""


def test_the_command_of_a_node():
    spec = settle("ddp", nproc=4, nodes=2, **SMALL)
    folder = RunFolder.create("x")
    plan = local.plan(spec, folder, Node(2, 1, "127.0.0.1:29500"))
    for word in ("--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:29500", "--rdzv-id=ddp-x4"):
        assert word in plan.argv
    assert "--local-addr=127.0.0.1" in plan.argv
    assert plan.env["GLOO_SOCKET_IFNAME"] == ("lo" if sys.platform == "linux" else "lo0")
    assert plan.lease.wanted == plan.ranks_here == 2
    assert "is_host=false" in " ".join(plan.argv)
    assert "LABKIT_LOOPBACK" not in plan.env


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


class Store(dict):
    """What the ranks' store does for two nodes."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch": "1.0"}, r"torch is \S+ on \S+ and 1.0 on there; install the same version on all nodes"),
        ({"script": "0"}, r"SHA-256 of the script is \w{12} on \S+ and 0 on there; copy one script to all nodes"),
        (
            {"arguments": "--x"},
            r"arguments of the script are .+ on \S+ and --x on there; start all nodes with the same",
        ),
        ({}, ""),
    ],
)
def test_nodes_with_different_software_do_not_train(changed, said, monkeypatch, tmp_path):
    store = Store()
    for name, value in {
        "LABKIT_LOGS": "x",
        "MASTER_ADDR": "x",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts, "connected", lambda timeout: store)
    monkeypatch.setattr(hosts.Beats, "start", lambda beats: None)
    store.set("labkit/rank/1", json.dumps(hosts._facts() | {"host": "there", "node": "1"} | changed))
    journal = Journal(tmp_path, 0)
    if changed:
        with pytest.raises(hosts.NodesDiffer, match=said):
            hosts.exchange(journal)
    else:
        hosts.exchange(journal)
    found = next(event for event in RunFolder(tmp_path).reader(tmp_path / "events" / "rank0.jsonl").poll())
    assert found.hosts == {0: socket.gethostname(), 1: "there"}


@pytest.mark.parametrize("ends", ["silent", "over", "gone"])
def test_only_a_node_that_is_silent_is_reported(ends, monkeypatch, tmp_path):
    """Not one that has ended, and none if the store is gone with rank 0."""
    monkeypatch.setenv("GROUP_RANK", "0")
    store, codes = Store(), []
    store.set("labkit/beat/1", "1" if ends == "silent" else "over")
    if ends == "gone":
        monkeypatch.setattr(store, "get", Mock(side_effect=RuntimeError))
    beats = Beats(
        Journal(tmp_path, 0), lambda timeout: store, {0: "0", 1: "1"}, {"0": "a", "1": "b"}, 0.05, codes.append
    )
    monkeypatch.setattr(beats._over, "wait", Mock(side_effect=[False] * 20 + [True] * 9))
    monkeypatch.setattr("atexit.register", lambda function: None)
    if ends != "silent":
        beats._talk()
        beats._over.wait.side_effect = [beats._over.is_set() or one for one in [False] * 20 + [True]]
    beats._watch()
    assert codes == ([1] if ends == "silent" else [])
    written = [event.kind for event in RunFolder(tmp_path).reader(tmp_path / "events" / "rank0.jsonl").poll()]
    assert written == (["cut_off", "error"] if ends == "silent" else [])


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
        (("--nodes", "1:2"), "--nodes 1:2 needs --node-rank (0 to 1)"),
        (("--nodes", "x:2"), "--nodes must be an integer from 1 to 65536, got 'x'"),
        (("--nodes", "3", "--node-rank", "1", "--rdzv-endpoint", "a:1"), "2 ranks cannot be divided equally among 3"),
    ],
)
def test_what_cannot_run_on_nodes_is_refused(arguments, said, capsys, runs):
    assert called("run", "ddp", "--nproc", "2", "--device", "cpu", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not runs.exists()


@pytest.mark.parametrize(
    ("what", "fields", "least", "said"),
    [
        ("ddp", {"nproc": 4}, 1, "--nodes 1:2 needs --max-restarts of at least 1: when a node leaves"),
        ("ddp", {"nproc": 4, "scaling": "strong", "max_restarts": 1}, 1, "script has BATCH_PER_RANK = 16 instead of 8"),
        ("ddp", {"nproc": 4, "max_restarts": 1}, 3, "MIN of --nodes MIN:MAX must be an integer from 1 to 2, got 3"),
        (
            "fsdp2_tp",
            {"nproc": 4, "max_restarts": 1, "options": {"tp_size": 4}},
            1,
            "admits 1 node with 2 ranks, on which",
        ),
    ],
)
def test_an_elastic_run_that_does_not_work_with_each_size_is_refused(what, fields, least, said, runs):
    with pytest.raises(SpecError, match=said):
        start_node(settle(what, nodes=2, **SMALL | fields), Node(2, 0, "127.0.0.1:29500", least))
    assert not runs.exists()


def test_the_command_of_an_elastic_node():
    spec = settle("ddp", nproc=4, nodes=2, max_restarts=1, **SMALL | {"steps": None})
    node = Node(2, 1, "127.0.0.1:29500", 1)
    check_sizes(spec, node)
    plan = local.plan(spec, RunFolder.create("x"), node)
    assert "--nnodes=1:2" in plan.argv and "--nproc-per-node=2" in plan.argv


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
    started = two.events / "rank2.jsonl"
    text = started.read_text()
    started.write_text(text.replace('"kind":"start"', '"kind":"start","torch":"1.0"', 1))
    one_started = one.events / "rank0.jsonl"
    one_started.write_text(one_started.read_text().replace('"kind":"start"', '"kind":"start","torch":"2.0"', 1))
    with pytest.raises(GatherError, match=r"ran with torch 1.0 and .* with torch 2.0; install the same version"):
        gather([one, two], target)
    started.write_text(text)
    RunFolder.write_json(two.status, {"state": "failed", "started": 1.0, "ended": 2.0, "message": "node lost"})
    whole = gather([one, two], target)
    assert sorted(whole.event_files()) == [0, 1, 2, 3]
    status = whole.read_status()
    assert (status.state, status.started, status.message) == ("failed", 1.0, f"{two.name}: node lost")
    with pytest.raises(GatherError, match="exists; name a new folder"):
        gather([one, two], target)


def test_nodes_divide_what_a_strategy_needs():
    assert Node(2, 0, "[::1]:29500").share(8) == 4
    with pytest.raises(SpecError, match="3 ranks cannot be divided equally"):
        Node(2, 0, "a:1").share(3)
