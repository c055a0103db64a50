"""Binds the workers' store to loopback, on a port that no other process can have taken.

Rank 0 hosts the TCPStore for the rendezvous of the ranks. By default it listens on every interface, on a port that the
launcher found free seconds earlier and that another process may have taken since. For a run on one node, the store gets
a socket that is bound to 127.0.0.1 on a port chosen by the system, and the other ranks read the port from the run
folder.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labkit.probe.patches import Patches

LOOPBACK = "127.0.0.1"
_LOOK = 0.02  # seconds between two polls for the port
_PATIENCE = 300.0  # seconds to wait for the port if the script sets no timeout


def keep_stores_local(patches: Patches, run: str | os.PathLike[str]) -> None:
    """Binds the stores of `init_process_group` to loopback if the run has one node (LABKIT_LOOPBACK=1, set by the
    launcher).

    `run` is the run folder.
    """
    if os.environ.get("LABKIT_LOOPBACK") == "1" and dist.is_available():
        patches.wrap(
            "loopback", "torch.distributed.rendezvous.TCPStore", lambda store: _local_store(store, Path(run) / "stores")
        )


def _local_store(make_store: Any, folder: Path) -> Any:
    # stores of this process by requested port; every rank creates them in the same order
    made: Counter[int] = Counter()

    def local_store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
        if not _is_here(host_name) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own store
            return make_store(host_name, port, *args, is_master=is_master, **kwargs)
        made[port] += 1
        place = folder / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{port}-{made[port]}"
        if not is_master:
            timeout = kwargs.get("timeout")
            actual = _read_port(place, timeout.total_seconds() if timeout else _PATIENCE)
            return make_store(LOOPBACK, actual or port, *args, is_master=False, **kwargs)
        listener = _listen()
        try:
            # libuv in torch 2.6 accepts no socket
            own = {"is_master": True, "master_listen_fd": listener.fileno(), "use_libuv": False}
            _write_port(place, listener.getsockname()[1])
            store = make_store(LOOPBACK, listener.getsockname()[1], *args, **kwargs | own)
        except BaseException:
            listener.close()
            raise
        listener.detach()  # now owned by the store
        return store

    return local_store


def _is_here(host: str) -> bool:
    # the last may query DNS
    return host in (LOOPBACK, "localhost", "::1") or host in (socket.gethostname(), socket.getfqdn())


def _listen() -> socket.socket:
    """A listening socket on loopback, on a port chosen by the system."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _write_port(place: Path, port: int) -> None:
    """Writes the port atomically."""
    place.parent.mkdir(mode=0o700, exist_ok=True)
    half = place.with_suffix(".half")
    half.write_text(str(port), encoding="ascii")
    half.replace(place)


def _read_port(place: Path, patience: float) -> int | None:
    """The port that rank 0 wrote; None if it wrote none within `patience` seconds."""
    last = time.monotonic() + patience
    while not place.is_file():
        if time.monotonic() > last:
            return None
        time.sleep(_LOOK)
    return int(place.read_text(encoding="ascii"))
