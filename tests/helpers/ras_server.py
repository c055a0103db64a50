"""A server that speaks the protocol of NCCL's RAS service, and reports in its two formats, written after NCCL 2.24 to
2.30 (`src/ras/client_support.cc` and the user guide). No NCCL runs here."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

HOST = "172.16.64.213"
OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


# ---- JSON, since NCCL 2.28.7


def rank(number: int, all_reduces: int = 57, pid: int | None = None, **status: Any) -> dict[str, Any]:
    """A rank that answered."""
    state = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number,
        "host": HOST,
        "pid": 100 + number if pid is None else pid,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": state | status,
        "collective_counts": dict.fromkeys(OPERATIONS, 0) | {"Broadcast": 3, "AllReduce": all_reduces},
    }


def missing(number: int, dead: bool = False, unresponsive: bool = True, pid: int | None = None) -> dict[str, Any]:
    """A rank that did not answer."""
    fields = rank(number, pid=pid)
    del fields["collective_counts"]
    return fields | {"status": {"unresponsive": unresponsive, "considered_dead": dead}}


def communicator(ranks: Sequence[Any], absent: Sequence[Any] = (), name: str = "0xae94423cfbb2ef4a") -> dict[str, Any]:
    """A communicator with the ranks that answered and those that did not."""
    return {
        "hash": name,
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(ranks) + len(absent),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(absent),
        "ranks": [*ranks],
        "missing_ranks": [*absent],
    }


def report(*communicators: Any, time: str = "2026-11-27 13:06:53", timeouts: int = 0) -> str:
    """The whole answer."""
    fields = {
        "nccl_version": "2.29.1",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": time,
        "communicators_count": len(communicators),
        "communicators": [*communicators],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": timeouts},
    }
    return json.dumps(fields, indent=2) + "\n"


# ---- text


def text(groups: str = "", errors: str = "", warnings: str = "", version: str = "2.26.2") -> str:
    """The answer as text: rows of the table of communicators, and what stands below Errors and Warnings."""
    table = "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
    table += "    #  in group  per comm  per node  per comm  in group\n"
    return (
        f"NCCL version {version} compiled with CUDA 12.8\nCUDA runtime version 12080, driver version 12080\n\n"
        "Job summary\n===========\n\n  Nodes  Processes         GPUs  Processes     GPUs\n"
        "(total)   per node  per process    (total)  (total)\n      4          8            1         32       32\n\n"
        f"Communicators... (0.000s)\n=============\n\n{table}{groups}\n"
        f"Errors\n======\n\n{errors}Warnings\n========\n\n{warnings}"
    )


def group(number: int, count: int, ranks: int, errors: str = "OK", status: str = "RUNNING") -> str:
    """A row of the table."""
    return f"{number:5d}  {count:8d}  {4:8d}  {'8':>8}  {ranks:8d}  {count * ranks:8d}  {status:>8}  {errors:>6}\n"


def gpu(number: int, pid: int) -> str:
    """How a line names a process."""
    return f"GPU {number} managed by process {pid} on node {HOST}"


# ---- the server


@contextmanager
def ras_server(
    answer: Callable[[], bytes], knows_json: bool = True, replies: Mapping[str, bytes] | None = None
) -> Iterator[Any]:
    """A server on a port of loopback; its `address` is as in NCCL_RAS_ADDR, and `commands` has what it was asked.
    `replies` replaces the replies to commands before the question."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                command = line.decode().strip()
                server.commands.append(command)
                if command == "VERBOSE STATUS":
                    self.wfile.write(answer())
                    return
                self.wfile.write(self._reply(command))

        @staticmethod
        def _reply(command: str) -> bytes:
            for beginning, reply in (replies or {}).items():
                if command.startswith(beginning):
                    return reply
            if command.startswith("CLIENT PROTOCOL "):
                return b"SERVER PROTOCOL 2\n"
            if command.startswith("SET FORMAT ") and not knows_json:
                return f"ERROR: Unknown command {command}\n".encode()
            return b"OK\n"

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hangs up early is what some tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        server.commands = []
        server.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
