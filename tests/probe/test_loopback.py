"""The ranks' store: on loopback alone, on a port that nobody else has, found through the run folder."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from labkit.probe import hosts


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    folder = tmp_path / "stores"
    return lambda: hosts._local_store(TCPStore, folder)  # one for each rank, which are processes of their own in a run


SHORT = {"world_size": 2, "timeout": timedelta(seconds=20), "multi_tenant": True}


def test_a_port_that_another_process_has_taken_is_no_matter(make):
    """What torchrun found free may be taken by the time rank 0 comes to it."""
    with socket.socket() as taken:
        taken.bind((hosts.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        others = []
        other = threading.Thread(target=lambda: others.append(make()("localhost", port, is_master=False, **SHORT)))
        other.start()
        store = make()("localhost", port, is_master=True, **SHORT)
        other.join(20)
    store.set("word", "met")
    assert store.port == others[0].port != port
    assert others[0].get("word") == b"met"


def test_the_second_store_of_a_process_is_another_one(make):
    rank_0, rank_1 = make(), make()
    for word in ("first", "second"):
        made = []
        other = threading.Thread(
            target=lambda made=made: made.append(rank_1("127.0.0.1", 29500, is_master=False, **SHORT))
        )
        other.start()
        store = rank_0("127.0.0.1", 29500, is_master=True, **SHORT)
        store.set("word", word)
        other.join(20)
        assert made[0].get("word") == word.encode()


def test_each_attempt_has_a_store_of_its_own(make, tmp_path, monkeypatch):
    alone = {**SHORT, "world_size": 1}
    make()("127.0.0.1", 29500, is_master=True, **alone)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    make()("127.0.0.1", 29500, is_master=True, **alone)
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == ["0-29500-1", "1-29500-1"]
    assert (tmp_path / "stores").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("agent", [False, True])
def test_stores_of_other_machines_and_torchrun_s_own_are_left_alone(tmp_path, monkeypatch, agent):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    made = []
    store = hosts._local_store(lambda host, port, **fields: made.append((host, port, fields)), tmp_path / "stores")
    host = "127.0.0.1" if agent else "192.0.2.7"
    store(host, 29500, is_master=False, world_size=2)
    assert made == [(host, 29500, {"is_master": False, "world_size": 2})]
    assert not (tmp_path / "stores").exists()


def test_who_waits_for_a_rank_0_that_never_comes_asks_the_port_that_was_given(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    made = []
    store = hosts._local_store(lambda host, port, **fields: made.append(port), tmp_path / "stores")
    store("localhost", 29500, is_master=False, timeout=timedelta(seconds=0.1))
    assert made == [29500]
