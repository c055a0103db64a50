"""The workers' store listens on this machine only.

Rank 0 hosts the TCPStore through which the ranks find each other, and by default it listens on every interface. A run of one
node needs none of that: the store is given a socket that is already bound to 127.0.0.1.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

LOOPBACK = "127.0.0.1"


def keep_stores_local() -> None:
    """Binds the stores of `init_process_group` to loopback where the launcher says that the run has one node (LABKIT_LOOPBACK=1)."""
    if os.environ.get("LABKIT_LOOPBACK") != "1":
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed.rendezvous is a function
    if hasattr(rendezvous, "TCPStore"):  # a torch built without distributed has none
        rendezvous.TCPStore = _local_store(rendezvous.TCPStore)


def _local_store(make_store: Any) -> Any:
    def local_store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
        if not _is_here(host_name):
            return make_store(host_name, port, *args, is_master=is_master, **kwargs)
        listener = _listen(port) if is_master else None
        if listener is None:
            return make_store(LOOPBACK, port, *args, is_master=is_master, **kwargs)
        try:
            own = {"is_master": True, "master_listen_fd": listener.fileno(), "use_libuv": False}  # torch 2.6's libuv takes no socket
            store = make_store(LOOPBACK, listener.getsockname()[1], *args, **kwargs | own)
        except BaseException:
            listener.close()
            raise
        listener.detach()  # the store's own now
        return store

    return local_store


def _is_here(host: str) -> bool:
    return host in (LOOPBACK, "localhost", "::1") or host in (socket.gethostname(), socket.getfqdn())  # the last may ask a name server


def _listen(port: int) -> socket.socket | None:
    """A listening socket on loopback; None where the port is taken, which in this process means by an earlier, shared store."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener
