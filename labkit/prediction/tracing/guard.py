"""Refuses what a traced script must not do: write, rename or remove files, start processes, open connections. A folder
that it creates is not created, and nothing is said: many scripts begin with one for their checkpoints.

A refusal is a `PermissionError`, as on a disk that cannot be written, so that a library that can do without its cache
continues. It comes from an audit hook of Python; C++ code that opens files itself is stopped by a limit of 0 bytes per
file, and `torch.save` is replaced.
"""

from __future__ import annotations

import errno
import multiprocessing.process
import os
import resource
import stat
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit event: what it does to the path that is its first argument
    "os.rmdir": "removes the folder",
    "os.remove": "removes",
    "os.rename": "renames",
    "os.link": "links",
    "os.symlink": "creates a link to",
    "os.truncate": "truncates",
    "os.chmod": "changes the mode of",
    "os.chown": "changes the owner of",
    "os.utime": "changes the time of",
    "shutil.rmtree": "removes the folder",
    "sqlite3.connect": "opens the database",
}
_PROCESSES = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")
_START = "starts a process", "leave it to torchrun to start the ranks"
_LISTED = ("os.listdir", "os.scandir")


class Refused(PermissionError):
    """The script wanted to do what a trace refuses; the message says what, as a clause without a subject, and `fix`
    what would make the trace possible. `newest` is the message of the last one, which a library may have caught."""

    newest = ""

    def __init__(self, clause: str, fix: str = "do this after that step"):
        super().__init__(clause)
        self.fix, Refused.newest = fix, clause


class Refusals:
    """Refuses from its creation on, for the rest of the process, while `active`. `read` are the absolute paths of files
    and folders that were read."""

    def __init__(self) -> None:
        tempfile.gettempdir()  # stored: it is found by writing
        self.active = True
        self.read: set[str] = set()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        sys.addaudithook(self._audit)
        multiprocessing.process.BaseProcess.start = _refusing(*_START)
        torch.multiprocessing.spawn = torch.multiprocessing.start_processes = _refusing(*_START)
        torch.save = _refusing("saves a file with torch.save")
        os.mkdir = _does_not_create

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes)):
                self._opens(os.fsdecode(path), flags or 0)
        elif event in _CHANGES:
            raise Refused(f"{_CHANGES[event]} {_named(args[0])}")
        elif event in _LISTED and isinstance(args[0], (str, bytes)):
            self.read.add(os.path.abspath(os.fsdecode(args[0])))  # noqa: PTH100 without links
        elif event == "subprocess.Popen":
            raise Refused(f"starts the program {_named(args[0])}")
        elif event in _PROCESSES:
            raise Refused(*_START)
        elif event in _CONNECTIONS:
            raise Refused("opens a connection")

    def _opens(self, path: str, flags: int) -> None:
        if not flags & _WRITING:
            self.read.add(os.path.abspath(path))  # noqa: PTH100
        elif not _is_device(path):
            raise Refused(f"writes to {_named(path)}")


def _refusing(*reason: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Refused(*reason)

    return refuse


def _does_not_create(path: Any, *_: Any, **__: Any) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _named(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return False
