"""The warm server: imports the modules of a rank, then waits with one thread and without CUDA for runs to fork.

`python -u -m labkit.launch.warm.server IDLE_SECONDS PID`. The server exits when all processes that requested it have
ended (PID is the first), after IDLE_SECONDS without a run, and when another server replaces it. A run needs two
messages: the first asks whether it can start warm; the launcher sends the second only if the answer arrives in time,
and it is valid only while the launcher waits. A server that was suspended for a while therefore never starts a run that
has been started cold in the meantime.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.common.files import create
from labkit.launch.warm import client
from labkit.probe import lifetime

if TYPE_CHECKING:
    from labkit.launch.warm.fork import Child, Origin  # it imports torch

_IMPORTS = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.profiler",
    "torch.utils.data",
    "labkit.launch.supervisor",
    "labkit.launch.watch",
    "labkit.launch.warm.fork",
    "labkit.probe.__main__",
    "labkit.probe.runner",
    "labkit.probe.hooks",
    "labkit.probe.hosts",
    "labkit.probe.threads",
)
_LOOK = 1.0  # seconds between two checks of the processes that requested the server


class Server:
    """The server's state. `serve` returns when the server is no longer needed."""

    def __init__(self, listener: socket.socket, idle: float, own: dict[str, Any], origin: Origin):
        self._facts = own
        self._origin = origin
        self._idle = idle
        self._wanted_by: dict[int, str] = {}
        self._runs = 0
        self._used = time.monotonic()
        self._over = False
        self._granted: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(_wake_on_child(), selectors.EVENT_READ, _reap)

    def serve(self) -> None:
        """Answers messages until no process needs the server, or it has been idle for too long."""
        while not self._over and time.monotonic() - self._used < self._idle:
            for key, _ in self._selector.select(_LOOK):
                key.data(key.fileobj)
            self._wanted_by = {pid: who for pid, who in self._wanted_by.items() if lifetime.identity(pid) == who}
            self._over |= not self._wanted_by

    def want(self, pid: int) -> None:
        """Registers a process that needs the server."""
        if who := lifetime.identity(pid):  # else it has already ended
            self._wanted_by[pid] = who

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> None:
        """Answers one message; closes a connection that ends or sends an invalid message."""
        files: list[int] = []
        try:
            pid = client.peer(connection)
            message, files = client.receive(connection)
            forks = {"start": self._start, "trace": self._trace}
            if message["ask"] in forks:
                child = forks[message["ask"]](connection, files)
                files.append(os.pidfd_open(child.pid))
                client.send(connection, {"pid": child.pid}, files[-1:])
            else:
                answers = {"about": self._about, "want": self._want, "replace": self._replace, "consent": self._consent}
                client.send(connection, answers[message["ask"]](pid, message, connection))
        except (EOFError, OSError, LookupError, TypeError, ValueError):
            self._selector.unregister(connection)
            self._granted.discard(connection)
            connection.close()
        finally:
            for file in files:
                os.close(file)

    def _about(self, *_: Any) -> dict[str, Any]:
        return {"pid": os.getpid(), "runs": self._runs, "idle": round(time.monotonic() - self._used, 1)}

    def _want(self, pid: int, message: dict[str, Any], *_: Any) -> dict[str, Any]:
        """Registers the process if its facts match this server; returns the difference otherwise."""
        differs = client.difference(self._facts, message["facts"])
        if not differs:
            self.want(pid)
            self._used = time.monotonic()
        return {"differs": differs}

    def _replace(self, pid: int, *_: Any) -> dict[str, Any]:
        """Exits in favour of another server if no other process needs this one."""
        self._over = self._over or set(self._wanted_by) <= {pid}
        return {"leaves": self._over}

    def _consent(self, pid: int, message: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        """Whether a run can start warm: empty if it can, otherwise the reason."""
        if differs := client.difference(self._facts, message["facts"]):
            return {"cold": f"the warm server differs in {differs}"}
        if shadow := client.shadowing(set(message["folders"])):
            return {"cold": f"the warm server has already imported a different module than {shadow}"}
        self._granted.add(connection)
        return {"cold": ""}

    def _start(self, connection: socket.socket, files: list[int]) -> Child:
        """Forks a supervisor. The files are its arguments, its standard input, its log, the pipe of its watchdog, and
        the run's standard input, if any.
        """
        from labkit.launch.warm.fork import fork_supervisor

        how = self._agreed(connection, files)
        self._runs += 1
        return fork_supervisor(self._origin, how["run_dir"], how["started"], how["environment"], *files[1:])

    def _trace(self, connection: socket.socket, files: list[int]) -> Child:
        """Forks a process that traces scripts. The files are its arguments and its standard streams."""
        from labkit.launch.warm.fork import fork_tracer

        return fork_tracer(self._origin, self._agreed(connection, files)["environment"], *files[1:])

    def _agreed(self, connection: socket.socket, files: list[int]) -> dict[str, Any]:
        """The arguments of a process to which this server has consented."""
        self._granted.remove(connection)
        if client.is_closed(connection):
            raise EOFError  # this process was suspended, and the other one has started cold
        self._used = time.monotonic()
        return client.from_file(os.dup(files[0]))


def _wake_on_child() -> int:
    """A descriptor that becomes readable when a child has ended."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _reap(wakes: int) -> None:
    """Reaps children that have ended. One that a signal ended could not say so itself, so the server's log does."""
    os.read(wakes, 4096)
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if os.WIFSIGNALED(status):
                print(f"process {pid}, a supervisor or a tracer, was ended by signal {os.WTERMSIG(status)}")


def _refuse(reason: str) -> None:
    sys.exit(f"{client.REFUSAL} (process {os.getpid()} of {sys.executable}): {reason}")


def main(idle: str, wanted_by: str) -> None:
    """Serves unless this user already has a server. `wanted_by` is the pid of the process that requested it."""
    address = client.server_address()
    create(address.parent)
    try:
        lock = client.lock()
    except BlockingIOError:
        sys.exit(client.BUSY)
    # a notebook kernel ignores SIGINT, and forked processes would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    own = client.facts(os.environ)  # before the imports change the environment
    for name in _IMPORTS:
        importlib.import_module(name)
    from labkit.launch.warm.fork import Origin, has_gpu_open

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        _refuse(f"it must have one thread, but its imports started {threads - 1} more")
    if has_gpu_open():
        _refuse("it must not open a GPU, but its imports did")
    origin = Origin()
    origin.set_title([sys.executable, "-m", "labkit.launch.warm.server"])
    gc.collect()
    gc.freeze()
    with client.endpoint() as listener:
        address.unlink(missing_ok=True)
        listener.bind(str(address))
        listener.listen()
        server = Server(listener, float(idle), own, origin)
        server.want(int(wanted_by))
        server.serve()
        address.unlink(missing_ok=True)
        os.close(lock)  # before waiting clients notice the exit: from now on another server may start


if __name__ == "__main__":
    main(*sys.argv[1:3])
