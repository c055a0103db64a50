"""A real JupyterLab as `labkit lab` starts it: its kernels communicate over sockets that only their owner can open."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from conftest import wait_until
from jupyter_client import BlockingKernelClient

from labkit.cli import parser as cli
from labkit.cli import project
from labkit.setup.environment import CLONE

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no Unix sockets for ZeroMQ")


class Server:
    """JupyterLab on a port that it chooses; `ask` sends one request to its REST interface."""

    def __init__(self, folder: Path):
        arguments = cli.parse(["lab", "--no-browser", "--port", "18888", "--", "--ServerApp.log_level=INFO"])
        settings = {"JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "JUPYTER_CONFIG_DIR": str(folder / "config")}
        self.runtime = folder / "runtime"
        self._log = folder / "server.log"
        with self._log.open("w") as log:
            environment = os.environ | project.lab_environment() | settings
            self.process = subprocess.Popen(
                project.lab_command(arguments), cwd=CLONE, env=environment, stdout=log, stderr=log
            )
        found = wait_until(
            lambda: re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)", self._log.read_text()), 120
        )
        self._root, self._token = found[1], found[2]
        wait_until(self._answers)  # the address is logged before the port is open

    def _answers(self) -> bool:
        try:
            return self.ask("status") is not None
        except urllib.error.URLError:
            return False

    def ask(self, path: str, method: str = "GET", **body) -> dict | None:
        request = urllib.request.Request(
            f"{self._root}/api/{path}",
            method=method,
            data=json.dumps(body).encode() if method == "POST" else None,
            headers={"Authorization": f"token {self._token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def kernel_process(self) -> psutil.Process:
        (kernel,) = (
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "ipykernel" in " ".join(child.cmdline())
        )
        return kernel

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("s"))
    yield made
    made.close()


def value_of(client: BlockingKernelClient, code: str) -> str:
    """The value of an expression in the kernel, as text."""
    answer = client.execute(f"_result = repr({code})", reply=True, timeout=120, user_expressions={"r": "_result"})
    return answer["content"]["user_expressions"]["r"]["data"]["text/plain"].strip("'\"")


def test_kernels_of_the_lab_listen_on_no_port_that_others_can_read(server):
    kernel = server.ask("kernels", "POST", name="python3")["id"]
    connection = server.runtime / f"kernel-{kernel}.json"
    facts = json.loads(wait_until(lambda: connection.is_file() and connection.read_text()))
    assert facts["transport"] == "ipc"
    assert server.runtime.stat().st_mode & 0o077 == 0
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.start_channels()
    try:
        assert value_of(client, "6 * 7") == "42"
        sockets = [
            Path(f"{facts['ip']}-{facts[name]}")
            for name in ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
        ]
        assert all(stat.S_ISSOCK(path.stat().st_mode) and path.parent == server.runtime for path in sockets)
        listening = [one for one in server.kernel_process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
        # ipykernel keeps one port for the output of forked children; it only accepts messages with its 16 secret bytes.
        assert len(listening) <= 1 and all(one.laddr.ip == "127.0.0.1" for one in listening)
        assert not {one.laddr.port for one in listening} & {facts[name] for name in facts if name.endswith("_port")}

        # Jupyter's server may miss all messages of a kernel that is just starting, so the cell itself reports that it
        # runs. A kernel aborts for a moment what follows a cell that raised, unless it is told not to.
        executing = server.runtime / "executing"
        sleeps = f"import pathlib, time; pathlib.Path({str(executing)!r}).touch(); time.sleep(600)"
        asked = client.execute(sleeps, stop_on_error=False)
        wait_until(executing.exists)
        server.ask(f"kernels/{kernel}/interrupt", "POST")
        assert client._recv_reply(asked, timeout=60)["content"]["ename"] == "KeyboardInterrupt"

        value_of(client, "globals().update(kept=1)")
        server.ask(f"kernels/{kernel}/restart", "POST")
        assert value_of(client, "'kept' in globals()") == "False"
    finally:
        client.stop_channels()
    server.ask(f"kernels/{kernel}", "DELETE")
    wait_until(lambda: not any(path.exists() for path in (*sockets, connection)))


def test_runtime_folder_is_private_and_short_enough(tmp_path, monkeypatch):
    usual = tmp_path / "runtime"
    usual.mkdir()
    usual.chmod(0o777)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(usual))
    if len(str(usual / project._SOCKET)) < project._LONGEST_SOCKET_PATH:
        assert project.private_runtime_folder() == usual
        assert stat.S_IMODE(usual.stat().st_mode) == 0o700

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    found = project.private_runtime_folder()
    assert found.parent == Path("/tmp") and stat.S_IMODE(found.stat().st_mode) == 0o700
    assert len(str(found / project._SOCKET)) < project._LONGEST_SOCKET_PATH


def test_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.symlink_to(tmp_path)
    assert not project._is_made_private(theirs)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert not project._is_made_private(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--port -1", "--port must be an integer from 1 to 65535, got -1"),
        ("--port 65536", "--port must be an integer from 1 to 65535, got 65536"),
        ("--port x", "--port must be an integer from 1 to 65535, got 'x'"),
        ("--ip 999.1.1.1", "--ip must be an address of this machine, such as 127.0.0.1"),
        ("--ip 192.0.2.1", "--ip 192.0.2.1 is not an address of this machine"),
        ("--ip=", "--ip must be an address of this machine"),
    ],
)
def test_where_the_lab_listens_is_checked_before_it_starts(arguments, says):
    done = subprocess.run(
        [sys.executable, "-m", "labkit", "lab", *arguments.split()],
        cwd=CLONE,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and says in done.stderr
