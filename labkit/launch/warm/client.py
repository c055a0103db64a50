"""The launcher's side of a warm start: starts the server, checks whether a run can start warm, and starts it.

A run starts cold if a warm start could behave differently or the server does not answer in time; `Cold` gives the
reason. Warm starts exist only on Linux.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.common.files import check_folder, create
from labkit.common.processes import TAG
from labkit.launch import local
from labkit.launch.warm import wire
from labkit.launch.warm.facts import facts
from labkit.probe.lifetime import PARENT

FORCE_COLD = "LABKIT_COLD"  # environment variable; if set, every run starts cold
IDLE = 900.0  # seconds without a run after which a server exits
ANSWER = 0.3  # timeout of a server's answer, in seconds
_START = 20.0  # seconds to fork a supervisor on a very busy machine
_READY = 60.0  # seconds until a server that another process starts must be ready
_LOOK = 0.2  # seconds between two looks at it
_AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")


@dataclass(frozen=True)
class Cold:
    """A run starts cold. `reason` is empty if a cold start was requested or there is no server yet."""

    reason: str = ""


class Started:
    """A supervisor forked by the server, with the subset of `subprocess.Popen` that the launcher needs."""

    def __init__(self, pid: int, handle: int):
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle

    def wait(self) -> None:
        """Returns when it has ended. Only the server knows its exit code; `returncode` is set to 0."""
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        ended.poll()
        os.close(self._handle)
        self.returncode = 0


class Tracing:
    """A forked process that traces, with the part of `subprocess.Popen` that a tracer needs; only the server knows its
    exit code."""

    def __init__(self, pid: int, handle: int, requests: int, results: int):
        self.pid = pid
        self.stdin, self.stdout = open(requests, "wb"), open(results, "rb")  # noqa: SIM115 as long as the process
        self._handle = handle

    def poll(self) -> int | None:
        """0 if it has ended, None while it runs."""
        return self._ended(0)

    def wait(self) -> None:
        """Returns when it has ended."""
        self._ended(None)

    def kill(self) -> None:
        """Sends SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _ended(self, milliseconds: int | None) -> int | None:
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        return 0 if ended.poll(milliseconds) else None

    def __del__(self) -> None:
        os.close(self._handle)


class Consent:
    """A server's agreement to start one run soon."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def start(
        self, run_dir: Path, asked: float, environment: Mapping[str, str], files: Sequence[int]
    ) -> Started | Cold:
        """Requests the fork of the supervisor. `files` are its standard input, its log, the pipe of its watchdog, and
        the run's standard input, if any.
        """
        how = {"run_dir": str(run_dir), "started": repr(asked), "environment": dict(environment)}
        forked = self._fork("start", how, files)
        return forked if isinstance(forked, Cold) else Started(*forked)

    def trace(self, environment: Mapping[str, str], errors: int) -> Tracing | Cold:
        """Requests the fork of a process that traces; `errors` is its standard error."""
        (stdin, requests), (results, stdout) = os.pipe(), os.pipe()
        forked = self._fork("trace", {"environment": dict(environment)}, (stdin, stdout, errors))
        os.close(stdin)
        os.close(stdout)
        if isinstance(forked, Cold):
            os.close(requests)
            os.close(results)
            return forked
        return Tracing(*forked, requests, results)

    def _fork(self, what: str, arguments: Mapping[str, Any], files: Sequence[int]) -> tuple[int, int] | Cold:
        """The pid of a forked process, and a handle of it."""
        how = wire.as_file(arguments)
        with self._connection:
            try:
                self._connection.settimeout(_START)
                wire.send(self._connection, {"ask": what}, [how, *files])
                answer, handles = wire.receive(self._connection)
            except (EOFError, OSError) as error:
                return Cold(f"the warm server did not start the run: {_in_words(error)}")
            finally:
                os.close(how)
        return answer["pid"], handles[0]


def consent(environment: Mapping[str, str], folders: Sequence[str]) -> Consent | Cold:
    """Asks the server for a warm start with this environment. `folders` are searched for modules: working folder and
    script folder.
    """
    if environment.get(FORCE_COLD):
        return Cold()
    connection = _connect()
    if isinstance(connection, Cold):
        return connection
    answer = _ask(connection, {"ask": "consent", "facts": facts(environment), "folders": list(folders)})
    if isinstance(answer, Cold) or answer["cold"]:
        connection.close()
        return answer if isinstance(answer, Cold) else Cold(answer["cold"])
    return Consent(connection)


def tracing(environment: Mapping[str, str], errors: int) -> Tracing | None:
    """A process that traces, forked by the server; None if there is no server that can. `environment` is added to the
    standing one, and `errors` is the standard error."""
    standing = local.standing_environment()
    agreed = consent(standing, ())
    found = agreed if isinstance(agreed, Cold) else agreed.trace(standing | environment, errors)
    return None if isinstance(found, Cold) else found


def about() -> dict[str, Any] | Cold:
    """The server's `pid`, the number of `runs` that it has started, and the seconds that it has been `idle`; or why it
    is unavailable.
    """
    connection = _connect()
    if isinstance(connection, Cold):
        return connection
    with connection:
        return _ask(connection, {"ask": "about"})


def prepare(environment: Mapping[str, str] | None = None) -> None:
    """Starts a server for this process unless a suitable one runs; returns immediately, some seconds before the server
    is ready. `environment` is that of the runs to come (default: the present one).

    The server exits when this process and all others that requested it have ended.
    """
    args = (local.standing_environment() if environment is None else environment,)
    threading.Thread(target=_prepare, args=args, daemon=True, name="labkit warm server").start()


def _prepare(environment: Mapping[str, str]) -> None:
    """A server that is found may end before it answers, and one that another process starts is not ready for seconds:
    both are looked at again."""
    if not _AVAILABLE or environment.get(FORCE_COLD):
        return
    last = time.monotonic() + _READY
    while not _is_served(environment) and time.monotonic() < last:
        if not wire.is_locked() and _start_server(environment) != wire.BUSY:
            return
        time.sleep(_LOOK)


def _is_served(environment: Mapping[str, str]) -> bool:
    """Registers this process with the server. False if there is no server, or one that ends, so that another can be
    started."""
    connection = _connect()
    if isinstance(connection, Cold):
        return False
    with connection, suppress(EOFError, OSError):  # if it was killed in the meantime
        try:
            wire.send(connection, {"ask": "want", "facts": facts(environment)})
            if not wire.receive(connection)[0]["differs"]:
                return True
            wire.send(connection, {"ask": "replace"})
            if not wire.receive(connection)[0]["leaves"]:
                return True  # others need it
        except TimeoutError:
            return True  # it hangs, and does not give up its lock
        wire.receive(connection)  # wait until it has exited
    return False


def _start_server(environment: Mapping[str, str]) -> int | None:
    """Starts a server and waits for it, so that it does not become a zombie. Returns its exit code; None if it cannot
    be started."""
    address = wire.server_address()
    try:
        create(address.parent)
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(wire.server_log(), flags, 0o600)
    except OSError:
        return None  # runs start cold and report why
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "labkit.launch.warm.server", repr(IDLE), str(os.getpid()), "." * wire.ROOM],
            cwd=address.parent,  # a folder where no file can shadow a module
            env={wire.RESERVED: "." * wire.ROOM}
            | {name: value for name, value in environment.items() if name not in (TAG, PARENT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    return process.wait()


def _connect() -> socket.socket | Cold:
    if not _AVAILABLE:
        return Cold()
    address = wire.server_address()
    connection = wire.endpoint()
    connection.settimeout(ANSWER)
    try:
        check_folder(address.parent)
        connection.connect(str(address))
        wire.peer(connection)
        return connection
    except FileNotFoundError:
        problem = Cold(_refusal())
    except ConnectionRefusedError:
        problem = Cold("the warm server has ended")
    except OSError as error:
        problem = Cold(f"the warm server cannot be used: {_in_words(error)}")
    connection.close()
    return problem


def _refusal() -> str:
    """Why the server that was started last does not serve; empty if it did not refuse, or none was started."""
    try:
        *_, last = wire.server_log().read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    except OSError:
        return ""
    return last if last.startswith(wire.REFUSAL) else ""


def _ask(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any] | Cold:
    try:
        wire.send(connection, message)
        return wire.receive(connection)[0]
    except (EOFError, OSError) as error:
        return Cold(f"the warm server did not respond: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER:g} s"
    return getattr(error, "strerror", None) or str(error) or "the connection was closed"
