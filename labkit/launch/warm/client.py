"""The launcher's side of a warm start: the server's own start, whether a run can start warm, and its start.

A run starts cold whenever warm could differ, and whenever the server does not answer in time; `Cold` says why. There is no warm start on
other systems than Linux.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.common.processes import TAG
from labkit.launch import local
from labkit.launch.warm import wire
from labkit.launch.warm.facts import facts
from labkit.probe.lifetime import PARENT

FORCE_COLD = "LABKIT_COLD"  # an environment variable: every run starts cold
IDLE = 900.0  # seconds without a run after which a server ends
ANSWER = 0.3  # seconds that a server has to answer; a run does not wait longer
_START = 20.0  # seconds to fork a supervisor on a very busy machine
_AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")


@dataclass(frozen=True)
class Cold:
    """A run starts cold. `reason` is empty where that needs no explanation: it was asked for, or no server was ever started."""

    reason: str = ""


class Started:
    """A supervisor that the server has forked; the part of `subprocess.Popen` that its starter needs."""

    def __init__(self, pid: int, handle: int):
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle

    def wait(self) -> None:
        """Returns when it has ended. Its exit code is the server's to know; it is taken for 0."""
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        ended.poll()
        os.close(self._handle)
        self.returncode = 0


class Consent:
    """A server's word that it starts one run, if it is called upon soon."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def start(self, run_dir: Path, asked: float, environment: Mapping[str, str], files: Sequence[int]) -> Started | Cold:
        """Has the supervisor forked. `files` are its standard input, its log, and the run's standard input if it has one."""
        how = wire.as_file({"run_dir": str(run_dir), "started": repr(asked), "environment": dict(environment)})
        with self._connection:
            try:
                self._connection.settimeout(_START)
                wire.send(self._connection, {"ask": "start"}, [how, *files])
                answer, handles = wire.receive(self._connection)
            except (EOFError, OSError) as error:
                return Cold(f"the warm server did not start it: {_in_words(error)}")
            finally:
                os.close(how)
        return Started(answer["pid"], handles[0])


def consent(environment: Mapping[str, str], folders: Sequence[str]) -> Consent | Cold:
    """Asks the server for a start with this environment. Of `folders`, modules are imported: the working folder and the script's."""
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


def about() -> dict[str, Any] | Cold:
    """The server's `pid`, the `runs` that it has started, and for how many seconds it has been `idle`; or why there is none to ask."""
    connection = _connect()
    if isinstance(connection, Cold):
        return connection
    with connection:
        return _ask(connection, {"ask": "about"})


def prepare() -> None:
    """Starts a server for this process if there is none that serves it; returns at once, some seconds before the server is ready.

    The server ends when this process has ended and no other one wants it.
    """
    threading.Thread(target=_prepare, daemon=True, name="labkit warm server").start()


def _prepare() -> None:
    environment = local.standing_environment()
    if not _AVAILABLE or environment.get(FORCE_COLD):
        return
    connection = _connect()
    if not isinstance(connection, Cold):
        with connection:
            answer = _ask(connection, {"ask": "want", "facts": facts(environment)})
            if isinstance(answer, Cold) or not answer["differs"]:
                return
            answer = _ask(connection, {"ask": "replace"})
            if isinstance(answer, Cold) or not answer["leaves"]:
                return
            with suppress(EOFError, OSError):
                wire.receive(connection)  # until it has left
    _start_server(environment)


def _start_server(environment: Mapping[str, str]) -> None:
    """Starts a server and waits for it, so that it is no zombie when it has ended."""
    address = wire.address()
    try:
        address.parent.mkdir(mode=0o700, exist_ok=True)
        wire.check_folder(address.parent)
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(address.with_suffix(".log"), flags, 0o600)
    except OSError:
        return  # runs start cold and say why
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "labkit.launch.warm.server", repr(IDLE), str(os.getpid()), "." * wire.ROOM],
            cwd=address.parent,  # where no file can stand in for a module
            env={wire.RESERVED: "." * wire.ROOM} | {name: value for name, value in environment.items() if name not in (TAG, PARENT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    process.wait()


def _connect() -> socket.socket | Cold:
    if not _AVAILABLE:
        return Cold()
    address = wire.address()
    connection = wire.endpoint()
    connection.settimeout(ANSWER)
    try:
        wire.check_folder(address.parent)
        connection.connect(str(address))
        wire.peer(connection)
        return connection
    except FileNotFoundError:
        problem = Cold()
    except ConnectionRefusedError:
        problem = Cold("the warm server has ended")
    except OSError as error:
        problem = Cold(f"the warm server cannot be used: {_in_words(error)}")
    connection.close()
    return problem


def _ask(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any] | Cold:
    try:
        wire.send(connection, message)
        return wire.receive(connection)[0]
    except (EOFError, OSError) as error:
        return Cold(f"the warm server did not answer: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing for {ANSWER:g} s"
    return getattr(error, "strerror", None) or str(error) or "it has ended"
