"""Messages over a Unix socket: one JSON object each, with open files. Connections of other users are rejected."""

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

RESERVED = "LABKIT_RESERVED"  # placeholder variable whose memory holds the environment of forked processes, for `ps`
ROOM = 1 << 15  # its size in bytes, and that of the placeholder argument for the command line
_MESSAGE = 1 << 16  # maximum bytes of a message; longer data, such as an environment, is passed as an open file
_MOST_FILES = 8
REFUSAL = "the warm server refused to serve"  # how the last line of a server's log begins that did not start
_PEER = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


class NotOurs(OSError):
    """The socket, its folder, or the peer process belongs to another user."""


def address() -> Path:
    """The socket of this user's server for this interpreter and this copy of labkit. Its folder may not exist yet."""
    place = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    key = "\0".join((sys.executable, sys.prefix, str(CLONE))).encode(errors="surrogateescape")
    return Path(place, f"labkit-{os.getuid()}", f"{hashlib.sha256(key).hexdigest()[:16]}.socket")


def log() -> Path:
    """What the server that was started last wrote."""
    return address().with_suffix(".log")


def check_folder(folder: Path) -> None:
    """Raises `NotOurs` unless only this user owns and can enter the folder, and `FileNotFoundError` if it does not
    exist.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise NotOurs(f"{folder} must be a folder of this user with mode 0700")


def endpoint() -> socket.socket:
    """A socket that preserves message boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket) -> int:
    """The pid of the peer process. Raises `NotOurs` if it belongs to another user."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise NotOurs(f"process {pid} belongs to another user")
    return pid


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Sends one message with open files. Raises `OSError` if the peer is gone."""
    socket.send_fds(connection, [json.dumps(message).encode()], files, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its files, which the caller must close. Raises `EOFError` at the end, `OSError` for an
    invalid message.
    """
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
        raise OSError("invalid message") from None


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection and everything that it sent was received."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def as_file(value: Any) -> int:
    """An in-memory file that contains a value as JSON."""
    file = os.memfd_create("labkit", os.MFD_CLOEXEC)
    with open(os.dup(file), "w", encoding="ascii") as text:
        json.dump(value, text)
    return file


def from_file(file: int) -> Any:
    """Reads the value that `as_file` wrote and closes the file."""
    with open(file, encoding="ascii") as text:
        text.seek(0)
        return json.load(text)
