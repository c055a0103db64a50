"""Messages over a Unix socket: one JSON object each, and open files with it. Only this user's processes are spoken to."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.setup.environment import CLONE

RESERVED = "LABKIT_RESERVED"  # a variable of the server whose room in memory takes the environment of what is forked from it, for `ps`
ROOM = 1 << 15  # bytes of it, and of an argument that serves for the command
_MESSAGE = 1 << 16  # bytes of a message; what may be longer, such as an environment, travels as an open file
_MOST_FILES = 8
_PEER = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


class NotOurs(OSError):
    """The socket, its folder, or the process at its other end is another user's."""


def address() -> Path:
    """The socket of this user's server for this interpreter and this copy of labkit. Its folder may not exist yet."""
    place = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    key = "\0".join((sys.executable, sys.prefix, str(CLONE))).encode(errors="surrogateescape")
    return Path(place, f"labkit-{os.getuid()}", f"{hashlib.sha256(key).hexdigest()[:16]}.socket")


def check_folder(folder: Path) -> None:
    """Raises `NotOurs` unless this is a folder of this user's that nobody else may enter, and `FileNotFoundError` without one."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise NotOurs(f"{folder} is not a folder that only this user may enter")


def endpoint() -> socket.socket:
    """A socket that keeps messages apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket) -> int:
    """The pid of the process at the other end. Raises `NotOurs` if it is another user's."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise NotOurs(f"process {pid} is another user's")
    return pid


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Sends one message with open files. Raises `OSError` where nobody takes it."""
    socket.send_fds(connection, [json.dumps(message).encode()], files, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message, and its files, which the caller closes. Raises `EOFError` at the end, `OSError` for what is no message."""
    data, files, flags, _ = socket.recv_fds(connection, _MESSAGE, _MOST_FILES)
    if not data and not files:
        raise EOFError
    try:
        message = json.loads(data)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not isinstance(message, dict):
            raise ValueError
        return message, files
    except ValueError:
        for file in files:
            os.close(file)
        raise OSError("what came is no message") from None


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end was closed, after everything that it sent was received."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def as_file(value: Any) -> int:
    """An open file in memory with a value as JSON."""
    file = os.memfd_create("labkit", os.MFD_CLOEXEC)
    with open(os.dup(file), "w", encoding="ascii") as text:
        json.dump(value, text)
    return file


def from_file(file: int) -> Any:
    """What `as_file` wrote; the file is closed."""
    with open(file, encoding="ascii") as text:
        text.seek(0)
        return json.load(text)
