"""The supervisor asks NCCL's RAS service about ranks that wait. The service is a server of the tests, because no NCCL
runs here: the ranks are real and use gloo."""

from __future__ import annotations

import json
import stat
from queue import SimpleQueue

import pytest
from conftest import wait_until
from places import SCRIPTS
from ras_server import communicator, group, missing, rank, ras_server, report, text

from labkit import run
from labkit.analysis.diagnose import findings
from labkit.analysis.diagnose.hang import answer_in_words
from labkit.analysis.foreign import opening
from labkit.analysis.foreign.ras import parsed
from labkit.launch import local, ras
from labkit.plan.spec import Spec
from labkit.record.events import Ras, checked
from labkit.record.folder import RunFolder

HEALTHY = report(communicator([rank(0), rank(1)])).encode()


# ---- the protocol


def test_json_is_asked_for_and_text_is_taken_of_older_versions():
    with ras_server(lambda: HEALTHY) as server:
        assert ras.ask(server.address) == HEALTHY
        assert server.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]
    old = text(group(0, 1, 2), version="2.24.3").encode()
    with ras_server(lambda: old, knows_json=False) as server:
        assert ras.ask(server.address) == old


@pytest.mark.parametrize(
    ("replies", "answer", "said"),
    [
        ({"CLIENT": b"HTTP/1.1 400 Bad Request\r\n"}, b"", "does not speak the protocol"),
        ({"CLIENT": b""}, b"", "timed out|in time"),
        ({"SET": b"x" * 500}, b"", "timed out|in time"),
        ({}, b"x" * (9 << 20), "more than 8,388,608 bytes"),
    ],
    ids=["other", "silent", "half", "endless"],
)
def test_a_service_that_is_no_ras_or_does_not_answer_is_left(replies, answer, said):
    with ras_server(lambda: answer, replies=replies) as server, pytest.raises(OSError, match=said):
        ras.ask(server.address, patience=1.0 if "time" in said else 30.0)


@pytest.mark.parametrize("address", ["203.0.113.7:28028", "example.org:80", "127.0.0.1", "127.0.0.1:x", "", "🏠:1"])
def test_only_this_machine_is_asked(address):
    with pytest.raises(OSError, match="no address on loopback"):
        ras.ask(address)


def test_nobody_listens():
    with ras_server(lambda: b"") as server:
        address = server.address
    with pytest.raises(OSError):
        ras.ask(address)


# ---- the environment of a run


def test_a_cuda_run_has_a_port_of_its_own(monkeypatch, tmp_path):
    def environment(device: str) -> dict[str, str]:
        return local._environment(Spec("ddp", nproc=2, device=device), RunFolder(tmp_path), None)

    for name in ("NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    host, port = environment("cuda")["NCCL_RAS_ADDR"].split(":")
    assert host == "127.0.0.1" and 0 < int(port) != 28028 and "NCCL_RAS_ADDR" not in environment("cpu")
    monkeypatch.setenv("NCCL_RAS_ADDR", "localhost:4711")
    assert environment("cuda")["NCCL_RAS_ADDR"] == "localhost:4711"
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    assert "NCCL_RAS_ADDR" not in environment("cuda")


# ---- ranks of the run


def story(*communicators: dict, pids: dict[int, int], world_size: int) -> str:
    answer = parsed(report(*communicators).encode(), RunFolder("r").ras(".json"))
    about = [ras.of_run(told, answer.processes[told.name], pids, world_size) for told in answer.communicators[:64]]
    fields = {
        "kind": "ras",
        "t": 1.0,
        "saved": "nccl_ras.json",
        "communicators": [ras._shortened(told) for told in about],
    }
    event = checked(json.loads(json.dumps(fields)))
    assert isinstance(event, Ras)
    return answer_in_words(event)


def test_ranks_of_a_smaller_communicator_are_named_as_ranks_of_the_run():
    pids = {200 + number: number for number in range(4)}
    pair = communicator([rank(0, pid=202), rank(1, 3, pid=203)])
    assert story(pair, pids=pids, world_size=4) == ("NCCL RAS: rank 3 has launched 3 AllReduce, rank 2 57")
    elsewhere = communicator([rank(0, pid=202)], [missing(1, dead=True, pid=999)])
    assert story(elsewhere, pids=pids, world_size=4) == (
        "NCCL RAS: rank 1 did not answer and is considered dead (process 999 on 172.16.64.213, GPU 1)"
        " (ranks of communicator 0xae94423cfbb2ef4a of 2 ranks)"
    )


def test_much_to_say_is_shortened():
    many = [communicator([rank(0), rank(1, number)], name=hex(number)) for number in range(100, 300)]
    said = story(*many, pids={100: 0, 101: 1}, world_size=2)
    assert said.count(";") == 8 and said.endswith("; 56 more in nccl_ras.json")


# ---- a run


@pytest.mark.parametrize("whose", ["own", "another job's"])
def test_what_ras_says_is_part_of_the_story_of_a_hang(whose, monkeypatch):
    answers: SimpleQueue[bytes] = SimpleQueue()
    original = local.probe_environment
    with ras_server(lambda: answers.get(timeout=15)) as server:
        monkeypatch.setattr(
            local, "probe_environment", lambda *args: original(*args) | {"NCCL_RAS_ADDR": server.address}
        )
        job = run(SCRIPTS / "hangs.py", nproc=2, device="cpu", args=("elsewhere",), hang_after=3)
        try:
            wait_until(lambda: all(number in job.state.ranks and job.state.ranks[number].pid for number in (0, 1)), 120)
            pids = [job.state.ranks[number].pid for number in (0, 1)] if whose == "own" else [1, 2]
            answers.put(report(communicator([rank(0, pid=pids[0]), rank(1, 56, pid=pids[1])])).encode())
            wait_until(lambda: job.state.ranks[0].waiting, 120)
            wait_until(lambda: "VERBOSE STATUS" in server.commands, 120)
            if whose == "own":
                wait_until(lambda: job.state.ras, 120)
        finally:
            job.stop()
    found = findings(job.state)[0]
    saved = job.folder.ras(".json")
    assert found.name == "hang" and found.title.startswith("rank 0 waited for")
    if whose == "own":
        assert "; NCCL RAS: rank 1 has launched 56 AllReduce, rank 0 57" in found.evidence
        assert stat.S_IMODE(saved.stat().st_mode) == 0o600
        assert opening.explain([saved])[0].findings[0].ranks == (1,)
    else:
        assert "RAS" not in found.evidence and not saved.exists() and job.state.ras is None
