"""Warm starts: servers that fail, and the server's own life; it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import PATIENCE, server_is_ready, wait_until
from warm import CLONE, ENDS, how, started

from labkit.frontends.doctor import warm_start
from labkit.launch import local
from labkit.launch.warm import client
from labkit.launch.warm.client import Cold
from labkit.runs import handle
from labkit.runs.handle import run


@pytest.fixture
def place(tmp_path_factory, monkeypatch) -> Path:
    """A separate folder for the sockets of this test; a server that it starts there is stopped."""
    folder = Path(f"/tmp/labkit-test-{os.getpid()}-{time.monotonic_ns()}")  # a socket's path must be short
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("XDG_RUNTIME_DIR") == str(folder):
            process.kill()
    found = client.about()
    if isinstance(found, dict):
        psutil.Process(found["pid"]).kill()
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.fixture
def ends(tmp_path) -> Path:
    path = tmp_path / "ends.py"
    path.write_text(ENDS)
    return path


# ---- servers that fail


def test_a_server_that_hangs_is_not_waited_for_and_starts_nothing_later(warm_server, ends, monkeypatch):
    process = psutil.Process(warm_server()["pid"])
    process.suspend()
    try:
        handle = run(ends, nproc=1, device="cpu")
    finally:
        process.resume()
    handle.wait(120)
    assert handle.words == "finished" and how(handle) == (
        "cold",
        "the warm server did not respond: no answer within 0.3 s",
    )
    assert "started cold" in handle.state.note
    before = warm_server()["runs"]
    time.sleep(0.5)  # the server now receives the message sent while it was suspended
    assert warm_server()["runs"] == before
    assert handle.logs(0) == "done\n"


def test_a_start_that_nobody_waits_for_any_more_is_dropped(warm_server, runs, tmp_path, patient):
    before = warm_server()
    process = psutil.Process(before["pid"])
    children = process.children()  # the process that predictions are forked from
    given = client.consent(client.local.standing_environment(), [])
    assert isinstance(given, client.Consent)
    process.suspend()
    try:
        how = client.as_file({"run_dir": str(tmp_path), "started": "0.0", "environment": {}})
        client.send(given._connection, {"ask": "start"}, [how, how, how])
        given._connection.close()
        os.close(how)
    finally:
        process.resume()
    assert warm_server()["runs"] == before["runs"] and process.children() == children


def test_a_server_that_was_killed_is_told_of_once_and_replaced(place, ends, monkeypatch, patient):
    client.prepare()
    found = server_is_ready()
    os.kill(found["pid"], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(found["pid"]))
    handle = started(ends)
    assert how(handle) == ("cold", "the warm server has ended")
    again = server_is_ready()
    assert again["pid"] != found["pid"]
    assert how(started(ends)) == ("warm", "")


def test_a_server_that_dies_between_yes_and_start_costs_nothing(place, ends, monkeypatch, patient):
    client.prepare()
    found = server_is_ready()
    monkeypatch.setattr(client.Consent, "start", _killing(found["pid"], client.Consent.start))
    handle = started(ends)
    start, because = how(handle)
    assert start == "cold" and because.startswith("the warm server did not start the run: ")


def _killing(pid: int, start):
    def killed(self, *args):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE if psutil.pid_exists(pid) else True)
        return start(self, *args)

    return killed


def test_a_folder_with_wrong_permissions_is_not_used(place, ends):
    client.server_address().parent.mkdir(mode=0o755)
    client.server_address().parent.chmod(0o755)
    start, because = how(started(ends))
    folder = client.server_address().parent
    assert (
        start == "cold"
        and because == f"the warm server cannot be used: {folder} must be a folder of this user with mode 0700"
    )
    assert warm_start().level == "degraded" and "cannot be used" in warm_start().says


@pytest.mark.parametrize(
    ("imported", "reason"),
    [
        (
            "threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "it must have one thread, but its imports started 1 more",
        ),
        (
            "pathlib.Path.readlink = lambda path: pathlib.Path('/dev/nvidia0')",
            "it must not open a GPU, but its imports did",
        ),
    ],
)
def test_a_server_that_refused_to_serve_is_named_with_the_reason(place, ends, monkeypatch, tmp_path, imported, reason):
    """A library whose import starts a thread, or opens a GPU: neither survives a fork."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import pathlib, sys, threading\nif 'labkit.launch.warm.server' in sys.orig_argv:\n    {imported}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    client._start_server(local.standing_environment())  # returns when the server has ended
    said = client.about().reason
    assert said.startswith("the warm server refused to serve (process ")
    assert said.endswith(f" of {sys.executable}): {reason}")
    check = warm_start()
    assert (check.level, check.says) == ("degraded", said)
    assert how(started(ends)) == ("cold", said)


def test_a_socket_of_another_user_is_rejected(place, monkeypatch):
    client.server_address().parent.mkdir(mode=0o700)
    with client.endpoint() as listener:
        listener.bind(str(client.server_address()))
        listener.listen()
        monkeypatch.setattr(client, "_PEER", _of_user(os.getuid() + 1))
        found = client.consent(os.environ, [])
        assert isinstance(found, Cold) and "belongs to another user" in found.reason


def _of_user(uid: int):
    class Peer:
        size = 12

        @staticmethod
        def unpack(data: bytes) -> tuple[int, int, int]:
            return 4321, uid, uid

    return Peer


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"ask": 1}',
        b'{"ask": "start"}',
        b'{"ask": "consent"}',
        b'{"ask": "want", "facts": 3}',
    ],
)
def test_what_is_no_message_does_the_server_no_harm(message, server):
    with client.endpoint() as connection:
        connection.connect(str(client.server_address()))
        connection.send(message)
        connection.settimeout(PATIENCE)
        assert connection.recv(100) == b""  # the server closed the connection
    assert client.about()["pid"] == server["pid"]


def test_a_run_goes_on_when_the_server_that_forked_it_is_killed(place, tmp_path, patient):
    client.prepare()
    found = server_is_ready()
    path = tmp_path / "waits.py"
    path.write_text(
        "import pathlib, time\nprint('waits', flush=True)\nwhile not pathlib.Path(f'{__file__}.go').exists():\n   "
        " time.sleep(0.05)\n"
    )
    handle = run(path, nproc=2, device="cpu")
    wait_until(lambda: handle.state.over or all("waits" in handle.logs(rank) for rank in (0, 1)))
    os.kill(found["pid"], signal.SIGKILL)
    Path(f"{path}.go").touch()
    assert handle.wait(60).words == "finished" and how(handle) == ("warm", "")


# ---- the server's own life


def test_a_server_ends_with_all_who_wanted_it(place, patient, monkeypatch):
    # otherwise this process would also request the server, for the run of an earlier test
    monkeypatch.setattr("labkit.runs.handle.prepare", lambda environment: None)
    code = (
        "import sys; from labkit.launch import local; from labkit.launch.warm import client; client.ANSWER = 60;"
        " client.{}; print(1, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": CLONE}
    first = subprocess.Popen([sys.executable, "-c", code.format("prepare()")], **pipes)
    found = server_is_ready()
    wants = "_prepare(local.standing_environment())"  # returns when the server knows it
    second = subprocess.Popen([sys.executable, "-c", code.format(wants)], **pipes)
    second.stdout.readline()
    process = psutil.Process(found["pid"])
    first.kill()
    first.wait()
    time.sleep(2.5)
    assert process.is_running() and client.about()["pid"] == found["pid"]
    second.kill()
    second.wait()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert list(client.server_address().parent.glob("*.socket")) == []


def test_an_idle_server_ends(place, patient, monkeypatch):
    monkeypatch.setattr(client, "IDLE", 0.5)
    client._prepare(client.local.standing_environment())  # returns when it has ended
    assert client.about() == Cold()


def test_a_server_that_fits_no_more_is_replaced(place, patient, monkeypatch):
    client.prepare()
    found = server_is_ready()
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    client.prepare()
    other = server_is_ready(other_than=found["pid"])
    assert "TORCH_SHOW_CPP_STACKTRACES" in os.environ and other["runs"] == 0


def test_a_server_is_prepared_for_the_environment_in_which_its_run_was_started(ends, monkeypatch):
    asked = []
    monkeypatch.setattr(handle, "prepare", asked.append)
    one = run(ends, nproc=1, device="cpu")
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    one.wait(120)
    wait_until(lambda: asked)
    assert "TORCH_SHOW_CPP_STACKTRACES" not in asked[0]


def test_importing_labkit_starts_nothing(place):
    code = "import labkit, labkit.api, labkit.frontends.panel, labkit.frontends.magic, time; time.sleep(1)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CLONE)
    assert list(place.iterdir()) == []


def test_a_server_has_one_thread_and_little_memory(server):
    process = psutil.Process(server["pid"])
    assert process.num_threads() == 1
    assert process.memory_info().rss < 400 << 20
    mode = client.server_address().parent.stat().st_mode & 0o777
    assert mode == 0o700 and process.net_connections(kind="inet") == []
    assert warm_start().level == "fine" and str(server["pid"]) in warm_start().says


def least_held(process: psutil.Process) -> tuple[int, int]:
    """The minimum of descriptors and threads within a second: answering a message briefly needs a connection."""
    seen = []
    for _ in range(20):
        seen.append((process.num_fds(), process.num_threads()))
        time.sleep(0.05)
    return min(fds for fds, _ in seen), min(threads for _, threads in seen)


def test_runs_leave_nothing_in_the_server(server, ends):
    process = psutil.Process(server["pid"])
    started(ends)
    before = least_held(process)
    memory = process.memory_info().rss
    for _ in range(3):
        assert how(started(ends)) == ("warm", "")
    assert least_held(process) == before
    assert process.memory_info().rss - memory < 5 << 20
    wait_until(lambda: not process.children())
