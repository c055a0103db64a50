"""Leases of GPUs and CPU slots: in order, once each, released by death, between users."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from commands import called
from conftest import started_warm, wait_until

from labkit.launch import leases
from labkit.launch.leases import Lease, LeaseError, tickets
from labkit.setup.machine import Gpu, _visible

POOL = ("a", "b", "c", "d")
HOLD = """
import sys, time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from labkit.launch.leases import Lease
lease = Lease("other", "cpu", int(sys.argv[2]), ("a", "b", "c", "d"), Path(sys.argv[1]))
while not lease.take():
    time.sleep(0.01)
print(*lease.ticket.granted, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The leases of this test, for all of its processes."""
    monkeypatch.setenv("LABKIT_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


def holder(place: Path, wanted: int, **options) -> subprocess.Popen:
    """Another process that takes devices and holds them until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(place), str(wanted)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def test_devices_are_granted_in_order_and_once(place):
    first, second, third, fourth = (Lease(name, "cpu", wanted, POOL) for name, wanted in zip("1234", (3, 2, 1, 1)))
    assert first.take()
    assert not second.take()
    assert not third.take()  # one device is free, but the second run asked first
    assert second.words.startswith("waiting for 2 CPU slots: position 1 in the queue; ")
    assert "has 3 CPU slots for 0 s" in second.words
    assert "position 2 in the queue" in third.words
    first.release()
    assert not third.take()
    assert second.take() and third.take() and fourth.take()
    granted = [one.ticket.granted for one in (second, third, fourth)]
    assert sorted(device for devices in granted for device in devices) == list(POOL)
    for one in (second, third, fourth):
        one.release()
    assert tickets() == []


def test_a_run_that_waits_for_other_devices_does_not_block(place):
    first, second, third = Lease("1", "gpu", 1, ("x",)), Lease("2", "gpu", 1, ("x",)), Lease("3", "gpu", 1, ("y",))
    assert first.take() and not second.take()
    assert third.take()
    for one in (first, second, third):
        one.release()


@pytest.mark.skipif(sys.platform != "linux", reason="file locks of a killed process")
def test_the_lease_of_a_killed_process_is_free(place):
    process = holder(place, 4)
    assert process.stdout.readline().split() == list(POOL)
    lease = Lease("1", "cpu", 1, POOL)
    assert not lease.take()
    assert [(one.run, one.wanted, len(one.granted)) for one in tickets()] == [("other", 4, 4), ("1", 1, 0)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert lease.take()
    assert [one.run for one in tickets()] == ["1"]
    lease.release()
    assert not [path for path in place.iterdir() if path.name != "queue"]


def _as_nobody(place: Path, said: Connection) -> None:
    """What the process of another user does: it asks, waits for a word, and asks again."""
    os.setresgid(65_534, 65_534, 65_534)
    os.setresuid(65_534, 65_534, 65_534)
    leases.user_name = lambda: "nobody"  # in this process alone
    lease = Lease("2", "cpu", 2, POOL, place)
    said.send((lease.take(), len(tickets(place))))
    said.recv()
    said.send(lease.take())
    said.recv()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as two users")
def test_users_share_the_queue():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "leases")
        own = Lease("1", "cpu", 3, POOL, place)
        assert own.take()
        said, there = Pipe()
        other = get_context("fork").Process(target=_as_nobody, args=(place, there), daemon=True)
        other.start()
        assert said.recv() == (False, 2)
        assert [(one.user, bool(one.granted)) for one in tickets(place)][1] == ("nobody", False)
        own.release()
        said.send("now")
        assert said.recv()
        said.send("end")
        other.join(30)
        assert tickets(place) == []


def test_twenty_clients_are_all_served_and_no_device_twice(place):
    """At any moment the tickets of all clients hold each device at most once."""

    def served(number: int) -> tuple[str, ...]:
        lease = Lease(str(number), "cpu", 1 + number % 3, POOL)
        while not lease.take():
            held = [device for one in tickets() for device in one.granted]
            assert len(held) == len(set(held))
            time.sleep(0.01)
        granted = lease.ticket.granted
        lease.release()
        return granted

    with ThreadPoolExecutor(20) as clients:
        granted = list(clients.map(served, range(20)))
    assert [len(one) for one in granted] == [1 + number % 3 for number in range(20)]
    assert tickets() == []


def test_invalid_descriptions_and_a_held_queue(place, monkeypatch):
    lease = Lease("1", "cpu", 1, POOL)
    assert lease.take()
    for text in ("", "[1]", '{"user": 1}', "[" * 100_000):
        (place / f"{lease.ticket.number}.json").write_text(text)
        assert tickets() == []
    monkeypatch.setattr(leases, "_PATIENCE", 0.05)
    with leases._queue(place), pytest.raises(LeaseError, match=r"has been locked for 0.05 s; find the process"):
        tickets()
    lease.release()
    (place / "file").write_text("")
    with pytest.raises(LeaseError, match=r"cannot be used for leases: .*; set LABKIT_LEASES"):
        Lease("1", "cpu", 1, POOL, place / "file" / "x")


def test_a_run_waits_for_its_slots_says_so_and_starts(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "labkit.conf").write_text("[limits]\ncpu_slots = 2\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    other = Lease("of-another", "cpu", 1, ("0", "1"))
    assert other.take()
    small = {"workload": "mlp", "samples": 64, "batch_size": 32, "steps": 2, "nproc": 2, "device": "cpu"}
    run, next_run = started_warm("ddp", **small), started_warm("ddp", **small)
    assert run.state.words.startswith("waiting for 2 CPU slots: position 1 in the queue; ")
    wait_until(lambda: "position 2" in next_run.state.words)
    assert called("runs", "--all-users", "--json") == 0
    found = json.loads(capsys.readouterr().out)["leases"]
    assert [(one["run"], one["wanted"], len(one["granted"])) for one in found] == [
        ("of-another", 1, 1),
        (run.name, 2, 0),
        (next_run.name, 2, 0),
    ]
    assert called("runs", "--all-users") == 0
    assert "waits, position 2" in capsys.readouterr().out
    assert next_run.stop().state.words == "stopped"
    other.release()
    assert run.wait(240).state.words == "finished"
    assert tickets() == []
    assert called("runs", "--all-users") == 0
    assert "no run holds" in capsys.readouterr().out


def test_mig_devices_are_chosen_by_uuid(monkeypatch):
    every = [("GPU-1", Gpu(0, "A100", 1, (8, 0), "GPU-1")), ("MIG-2", Gpu(-1, "A100", 1, (8, 0), "MIG-2"))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert [gpu.uuid for gpu in _visible(every)[0]] == ["MIG-2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.uuid for gpu in _visible(every)[0]] == ["GPU-1"]


@pytest.mark.skipif(os.name != "posix", reason="links need privileges on Windows")
def test_a_link_that_another_user_has_put_there_is_not_followed(place, tmp_path):
    place.mkdir()
    mine = tmp_path / "mine"
    mine.write_text("keep")
    (place / "1.json").symlink_to(mine)
    (place / "1.half").symlink_to(mine)
    lease = Lease("run", "cpu", 1, POOL)
    assert lease.take() and mine.read_text() == "keep" and not (place / "1.json").is_symlink()
    assert [one.run for one in tickets()] == ["run"]
    lease.release()
