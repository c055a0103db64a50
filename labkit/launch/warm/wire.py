"""Messages over a Unix socket: one JSON object each, with open files. Connections of other users are rejected."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.common.files import NotOurs, runtime_folder
from labkit.setup.environment import CLONE

RESERVED = "LABKIT_RESERVED"  # placeholder variable whose memory holds the environment of forked processes, for `ps`
ROOM = 1 << 15  # its size in bytes, and that of the placeholder argument for the command line
_MESSAGE = 1 << 16  # maximum bytes of a message; longer data, such as an environment, is passed as an open file
_MOST_FILES = 8
BUSY = 75  # EX_TEMPFAIL: exit code of a server that found another one
REFUSAL = "the warm server refused to serve"  # how the last line of a server's log begins that did not start
_PEER = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


def server_address() -> Path:
    """The socket of this user's server for this interpreter and this copy of labkit. Its folder may not exist yet."""
    key = "\0".join((sys.executable, sys.prefix, str(CLONE))).encode(errors="surrogateescape")
    return runtime_folder() / f"{hashlib.sha256(key).hexdigest()[:16]}.socket"


def server_log() -> Path:
    """What the server that was started last wrote."""
    return server_address().with_suffix(".log")


def lock() -> int:
    """Takes the lock of this user's server until the descriptor is closed. Raises `OSError`, which is `BlockingIOError`
    if another process has it."""
    import fcntl  # not on Windows

    file = os.open(server_address().with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def is_locked() -> bool:
    """Whether there is a server: one that starts, serves or ends."""
    try:
        os.close(lock())
    except BlockingIOError:
        return True
    except OSError:
        pass  # no server was ever started
    return False


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
