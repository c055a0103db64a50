"""NCCL's RAS service (since NCCL 2.24) as a witness of a hang: while ranks wait, the supervisor asks it once per
minute.

Every process that uses NCCL has a thread for it, which runs without the GIL and knows the processes on all nodes: which
of them do not answer, and how many collectives the ranks of each communicator have launched. The threads of one machine
share a port on its loopback. By default that is port 28028 for all jobs, so that another job may answer: each run has a
port of its own (`NCCL_RAS_ADDR`), unless the user has chosen one.

Who answers is not trusted: time and bytes are limited, and an answer that names processes counts only if one of them is
of this run.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from labkit.common.files import write_atomically
from labkit.record.documents import plain
from labkit.record.events import RANKS, Communicator
from labkit.record.folder import RunFolder
from labkit.record.state import RunState
from labkit.setup.machine import is_loopback

ADDRESS = "NCCL_RAS_ADDR"
_TIMEOUT = 5  # seconds for which RAS waits for the other processes; its default
_PATIENCE = 15.0  # seconds for the whole answer
_MOST = 8 << 20  # bytes of it
_AGAIN = 60.0  # seconds between two questions; after as many RAS considers a process dead
_COMMUNICATORS = 64  # that an event has at most


def environment() -> dict[str, str]:
    """The variable that gives a run a port of its own, or the user's own choice; empty if RAS is turned off."""
    if os.environ.get("NCCL_RAS_ENABLE", "1") == "0":
        return {}
    if os.environ.get(ADDRESS):
        return {ADDRESS: os.environ[ADDRESS]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {ADDRESS: f"127.0.0.1:{free.getsockname()[1]}"}


# ---- the protocol: lines of text; the answer ends when RAS closes the connection


def ask(address: str, patience: float = _PATIENCE) -> bytes:
    """The state of the job by the RAS service at `address`: JSON, or text before NCCL 2.28.7.

    Raises `OSError` if nobody answers in time, or not as RAS does.
    """
    host, port = _on_loopback(address)
    deadline = time.monotonic() + patience
    with socket.create_connection((host, port), timeout=min(1.0, patience)) as connection:
        if not _reply(connection, "CLIENT PROTOCOL 2", deadline).startswith(b"SERVER PROTOCOL "):
            raise OSError("it does not speak the protocol of RAS")
        _reply(connection, f"TIMEOUT {_TIMEOUT}", deadline)
        _reply(connection, "SET FORMAT json", deadline)  # before NCCL 2.28.7 an error, and the format remains text
        connection.sendall(b"VERBOSE STATUS\n")
        answer = bytearray()
        while chunk := _received(connection, deadline):
            answer += chunk
            if len(answer) > _MOST:
                raise OSError(f"the answer has more than {_MOST:,} bytes")
    return bytes(answer)


def _reply(connection: socket.socket, command: str, deadline: float) -> bytes:
    connection.sendall(f"{command}\n".encode())
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < 1024:
        byte = _received(connection, deadline, 1)
        if not byte:
            raise ConnectionResetError("the connection was closed")
        line += byte
    return bytes(line)


def _received(connection: socket.socket, deadline: float, most: int = 1 << 16) -> bytes:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("there was no complete answer in time")
    connection.settimeout(left)
    return connection.recv(most)


def _on_loopback(address: str) -> tuple[str, int]:
    """Host and port of an address; only this machine is asked."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host) and port.isdigit():
        return host, int(port)
    raise OSError(f"{address} is no address on loopback")


# ---- asking while ranks wait


class Witness:
    """Asks the RAS service of one run at `address`, if there is one. `write` appends an event to the supervisor's file,
    also from another thread."""

    def __init__(self, folder: RunFolder, address: str | None, write: Callable[..., None]):
        self._folder, self._address, self._write = folder, address, write
        self._next = 0.0
        self._asking: threading.Thread | None = None

    def look(self, state: RunState) -> None:
        """Asks in a thread of its own if ranks wait and the last question is long enough ago."""
        held_up = any(rank.waiting or rank.silent for rank in state.ranks.values())
        now = time.monotonic()
        if not self._address or not held_up or now < self._next or (self._asking and self._asking.is_alive()):
            return
        self._next = now + _AGAIN
        pids = {rank.pid: number for number, rank in state.ranks.items() if rank.pid}
        self._asking = threading.Thread(target=self._ask, args=(pids, state.world_size), name="ras", daemon=True)
        self._asking.start()

    def _ask(self, pids: Mapping[int, int], world_size: int) -> None:
        from labkit.analysis.foreign import ForeignError
        from labkit.analysis.foreign.ras import parsed

        with suppress(OSError, ForeignError):  # no RAS, such as an older NCCL; or a folder that is gone
            answer = ask(str(self._address))
            saved = self._folder.ras(".json" if answer.lstrip().startswith(b"{") else ".txt")
            report = parsed(answer, saved)
            named = {pid for processes in report.processes.values() for pid in processes.values()}
            if named and not named & pids.keys():
                return  # of another job
            write_atomically(saved, answer, private=True)
            told = [about for about in report.communicators if about.missing or about.failed or about.differ]
            events = [
                _shortened(of_run(about, report.processes.get(about.name, {}), pids, world_size))
                for about in told[:_COMMUNICATORS]
            ]
            self._write("ras", saved=saved.name, communicators=events)


def of_run(about: Communicator, processes: Mapping[int, int], pids: Mapping[int, int], world_size: int) -> Communicator:
    """The communicator with the ranks of the run instead of its own, if all of them are known: from their `processes`,
    whose ranks in the run `pids` has for this machine, or because it has all ranks, in torch's order."""
    if about.size == world_size:
        return replace(about, of_run=True)
    named = {rank.rank for rank in (*about.missing, *about.failed)}
    named |= {rank for part in about.differ for rank in part.ranks}
    known = {rank: pids[processes[rank]] for rank in named if processes.get(rank) in pids}
    if len(known) < len(named):
        return about
    missing, failed = (
        [replace(rank, rank=known[rank.rank]) for rank in ranks] for ranks in (about.missing, about.failed)
    )
    differ = [replace(part, ranks=[known[rank] for rank in part.ranks]) for part in about.differ]
    return replace(about, missing=missing, failed=failed, differ=differ, of_run=True)


def _shortened(about: Communicator) -> dict[str, Any]:
    """The communicator as an event has it."""
    parts = [replace(part, ranks=part.ranks[:RANKS]) for part in about.differ[:RANKS]]
    return plain(replace(about, missing=about.missing[:RANKS], failed=about.failed[:RANKS], differ=parts))
