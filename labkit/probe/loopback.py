"""The workers' store listens on this machine only, and on a port that nobody else can have taken.

Rank 0 hosts the TCPStore through which the ranks find each other. By default it listens on every interface, and on a port that the
launcher found free seconds before: another process may have it by then. A run of one node needs none of that. Its store is given a
socket that is bound to 127.0.0.1 on a port of the system's choice, and the other ranks read which one it is in the run folder.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
_LOOK = 0.02  # seconds between two looks for the port
_PATIENCE = 300.0  # seconds that it is waited for where the script says nothing


def keep_stores_local(run: str | os.PathLike[str]) -> None:
    """Binds the stores of `init_process_group` to loopback where the launcher says that the run has one node (LABKIT_LOOPBACK=1).

    `run` is the run folder.
    """
    if os.environ.get("LABKIT_LOOPBACK") != "1":
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed.rendezvous is a function
    if hasattr(rendezvous, "TCPStore"):  # a torch built without distributed has none
        rendezvous.TCPStore = _local_store(rendezvous.TCPStore, Path(run) / "stores")


def _local_store(make_store: Any, folder: Path) -> Any:
    made: Counter[int] = Counter()  # stores of this process, by the port that was asked for: every rank makes them in one order

    def local_store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
        if not _is_here(host_name) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # that one is torchrun's own
            return make_store(host_name, port, *args, is_master=is_master, **kwargs)
        made[port] += 1
        place = folder / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{port}-{made[port]}"
        if not is_master:
            timeout = kwargs.get("timeout")
            told = _told(place, timeout.total_seconds() if timeout else _PATIENCE)
            return make_store(LOOPBACK, told or port, *args, is_master=False, **kwargs)
        listener = _listen()
        try:
            own = {"is_master": True, "master_listen_fd": listener.fileno(), "use_libuv": False}  # torch 2.6's libuv takes no socket
            _tell(place, listener.getsockname()[1])
            store = make_store(LOOPBACK, listener.getsockname()[1], *args, **kwargs | own)
        except BaseException:
            listener.close()
            raise
        listener.detach()  # the store's own now
        return store

    return local_store


def _is_here(host: str) -> bool:
    return host in (LOOPBACK, "localhost", "::1") or host in (socket.gethostname(), socket.getfqdn())  # the last may ask a name server


def _listen() -> socket.socket:
    """A listening socket on loopback, on a port of the system's choice."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _tell(place: Path, port: int) -> None:
    """Writes the port so that a reader sees all of it or nothing."""
    place.parent.mkdir(mode=0o700, exist_ok=True)
    half = place.with_suffix(".half")
    half.write_text(str(port), encoding="ascii")
    half.replace(place)


def _told(place: Path, patience: float) -> int | None:
    """The port that rank 0 wrote; None where it did not within `patience` seconds."""
    last = time.monotonic() + patience
    while not place.is_file():
        if time.monotonic() > last:
            return None
        time.sleep(_LOOK)
    return int(place.read_text(encoding="ascii"))
