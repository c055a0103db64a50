"""A process that wants a warm server gets one, whatever becomes of the server that it finds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from lifetimes import LINUX, ROOT

from labkit.launch import local
from labkit.launch.warm import client

pytestmark = LINUX


@pytest.fixture
def place(monkeypatch) -> Iterator[str]:
    """A folder without a server."""
    with tempfile.TemporaryDirectory(prefix="labkit-", dir="/tmp") as folder:  # a socket's path must be short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


@pytest.fixture
def servers(monkeypatch) -> list[int]:
    """The exit codes of the servers that are started; the last one serves until it is not needed any more."""
    codes = [0]
    monkeypatch.setattr(client, "_start_server", lambda environment: codes.pop(0))
    monkeypatch.setattr(client, "_LOOK", 0.01)
    return codes


def prepare() -> None:
    client._prepare(local.standing_environment())


def serving(*answers: Callable[[socket.socket], None]) -> threading.Thread:
    """A server that answers one message of each connection, and then closes the connection."""
    client.server_address().parent.mkdir(mode=0o700)
    listener = client.endpoint()
    listener.bind(str(client.server_address()))
    listener.listen()

    def serve() -> None:
        with listener:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    client.receive(connection)
                    answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_server_that_is_killed_while_it_is_asked_is_replaced(place, servers):
    thread = serving(lambda connection: None)
    prepare()
    thread.join()
    assert servers == []


def test_a_server_that_fits_is_not_replaced_and_one_that_others_need_neither(place, servers):
    thread = serving(lambda connection: client.send(connection, {"differs": ""}))
    prepare()
    thread.join()
    assert servers == [0]


def test_a_server_that_hangs_keeps_its_place(place, servers, monkeypatch):
    monkeypatch.setattr(client, "ANSWER", 0.05)
    asked = threading.Event()
    thread = serving(lambda connection: asked.wait(60))
    prepare()
    asked.set()
    thread.join()
    assert servers == [0]


def test_a_server_that_another_process_starts_is_waited_for(place, servers):
    """It may be one that nobody needs any more when it is ready."""
    client.server_address().parent.mkdir(mode=0o700)
    held = client.lock()
    waits = threading.Thread(target=prepare)
    waits.start()
    time.sleep(0.2)
    assert client.is_locked() and waits.is_alive() and servers == [0]
    os.close(held)
    waits.join()
    assert servers == [] and not client.is_locked()


def test_a_server_that_finds_another_says_so_and_its_starter_looks_again(place, servers):
    client.server_address().parent.mkdir(mode=0o700)
    held = client.lock()
    command = [sys.executable, "-m", "labkit.launch.warm.server", "1.0", str(os.getpid())]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert ended.returncode == client.BUSY
    os.close(held)
    servers.insert(0, client.BUSY)
    prepare()
    assert servers == []


def test_a_process_that_cannot_get_a_server_gives_up(place, servers, monkeypatch):
    monkeypatch.setattr(client, "_READY", 0.1)
    client.server_address().parent.mkdir(mode=0o700)
    held = client.lock()
    prepare()
    os.close(held)
    assert servers == [0], "runs start cold"


def test_a_server_is_not_started_in_a_folder_that_is_removed_meanwhile(place, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "create", lambda folder: None)
    monkeypatch.setattr(client, "server_log", lambda: tmp_path / "server.log")
    assert client._start_server(local.standing_environment()) is None
