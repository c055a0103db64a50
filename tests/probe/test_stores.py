"""The ranks' store: on a port that nobody else has, found through the run folder or torchrun's rendezvous."""

from __future__ import annotations

import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from labkit.probe import hosts
from labkit.probe.journal import Journal
from labkit.probe.patches import Patches


@pytest.fixture(params=["one node", "several nodes"])
def make(request, tmp_path):
    """Makes what a rank, which is a process of its own in a run, has in place of TCPStore."""
    if request.param == "one node":
        return lambda: hosts._placed(TCPStore, hosts._Folder(tmp_path / "stores"))
    meeting = TCPStore(hosts.LOOPBACK, 0, is_master=True, wait_for_workers=False)
    request.addfinalizer(lambda: meeting)  # keeps it
    return lambda: hosts._placed(TCPStore, hosts._Rendezvous(f"localhost:{meeting.port}", "localhost"))


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
            target=lambda made=made: made.append(rank_1("localhost", 29500, is_master=False, **SHORT))
        )
        other.start()
        store = rank_0("localhost", 29500, is_master=True, **SHORT)
        store.set("word", word)
        other.join(20)
        assert made[0].get("word") == word.encode()


def test_each_attempt_has_a_store_of_its_own(tmp_path, monkeypatch):
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        make = hosts._placed(TCPStore, hosts._Folder(tmp_path / "stores"))
        make("127.0.0.1", 29500, is_master=True, **{**SHORT, "world_size": 1})
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == ["0-29500-1", "1-29500-1"]
    assert (tmp_path / "stores").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("ports", [hosts._Folder(Path("nowhere")), hosts._Rendezvous("192.0.2.1:1", "192.0.2.2")])
def test_stores_of_other_machines_are_left_alone(ports):
    made = []
    store = hosts._placed(lambda host, port, **fields: made.append((host, port, fields)), ports)
    store("192.0.2.7", 29500, is_master=False, world_size=2)
    assert made == [("192.0.2.7", 29500, {"is_master": False, "world_size": 2})]


@pytest.mark.parametrize("agent", ["True", "False"])
def test_torchrun_s_own_store_is_left_alone(tmp_path, monkeypatch, agent):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setenv("LABKIT_LOOPBACK", "1")
    patches = Patches(Journal(tmp_path, 0))
    hosts.place_stores(patches, tmp_path)
    assert (sys.modules["torch.distributed.rendezvous"].TCPStore is TCPStore) == (agent == "True")
    patches.remove()


def test_who_waits_for_a_rank_0_that_never_comes_asks_the_port_that_was_given(tmp_path):
    made = []
    meeting = TCPStore(hosts.LOOPBACK, 0, is_master=True, wait_for_workers=False)
    for ports in (hosts._Folder(tmp_path / "stores"), hosts._Rendezvous(f"localhost:{meeting.port}", "localhost")):
        store = hosts._placed(lambda host, port, **fields: made.append(port), ports)
        store("localhost", 29500, is_master=False, timeout=timedelta(seconds=0.1))
    assert made == [29500, 29500]
