"""The channel between a notebook and ranks that stay: objects of JSON over a Unix socket, each followed by the bytes of
the tensors in it. Nothing is unpickled. Standard library only; what is said is in `probe/cells.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

LARGEST = 256 << 20  # bytes of all tensors of one message
_MESSAGE = 64 << 20  # bytes of JSON
_MOST = 100_000  # tensors


def socket_name(rank: int) -> str:
    """The socket of a rank in the run's folder for sockets."""
    return f"cells{rank}"


def send(connection: Connection, message: dict[str, Any], data: Sequence[bytes] = ()) -> None:
    """Sends a message and the bytes that belong to it. Raises `OSError` if the other end is gone."""
    connection.send_bytes(json.dumps(message | {"data": len(data)}).encode())
    for content in data:
        connection.send_bytes(content)


def receive(connection: Connection) -> tuple[dict[str, Any], list[bytes]]:
    """The next message and the bytes that belong to it. Raises `EOFError` or `OSError` if the other end is gone, or
    sends anything else than such messages."""
    try:
        message = json.loads(connection.recv_bytes(_MESSAGE))
        count = min(int(message["data"]), _MOST)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OSError(f"no message of this channel: {error}") from None
    data, left = [], LARGEST
    for _ in range(count):
        data.append(connection.recv_bytes(left))
        left -= len(data[-1])
    return message, data
