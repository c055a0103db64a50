"""Ranks on several nodes: the workers' store on loopback, the hosts of all ranks, and nodes that are cut off."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.probe.journal import Journal
from labkit.probe.lifetime import exit_process
from labkit.probe.patches import Patches

# ---- the workers' store on loopback


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


# ---- notices a node that is cut off


_OVER = "over"
_LOOKS = 8  # within `patience`
_GOODBYE = 1.0  # seconds in which the store takes the last value


class Beats:
    """Observes the other nodes from `start` until this process ends. `nodes` has the node of each rank, `hosts` its
    host; `connect` opens a connection to the store with a timeout.

    Two threads, because a read of the store that is cut off returns after minutes.
    """

    def __init__(
        self,
        journal: Journal,
        connect: Callable[[timedelta], Any],
        nodes: Mapping[int, str],
        hosts: Mapping[str, str],
        patience: float,
        end: Callable[[int], Any] = exit_process,
    ):
        self._journal, self._patience, self._end = journal, patience, end
        self._own, self._nodes, self._hosts = os.environ.get("GROUP_RANK", "0"), dict(nodes), hosts
        # longer than until the report, so that an error before it means that the store is gone
        self._store = connect(timedelta(seconds=4 * patience))
        self._looks = {node: 0 for node in self._nodes.values() if node != self._own}  # since its number grew
        self._ended: set[str] = set()
        self._over = threading.Event()
        self._talks = threading.Thread(target=self._talk, name="labkit beats", daemon=True)

    def start(self) -> None:
        """Starts both threads."""
        atexit.register(self._say_goodbye)
        self._talks.start()
        threading.Thread(target=self._watch, name="labkit nodes", daemon=True).start()

    def _say_goodbye(self) -> None:
        self._over.set()
        self._talks.join(_GOODBYE)

    def _talk(self) -> None:
        """Writes and reads until this rank ends, or the store does, with rank 0: gloo and NCCL notice that."""
        beat, known = 0, {}
        try:
            while not self._over.wait(self._patience / _LOOKS):
                beat += 1
                self._store.set(f"labkit/beat/{self._own}", str(beat))
                for node in self._looks.keys() - self._ended:
                    said = self._store.get(f"labkit/beat/{node}").decode()
                    if said == _OVER:
                        self._ended.add(node)
                    elif said != known.get(node):
                        known[node], self._looks[node] = said, 0
            self._store.set(f"labkit/beat/{self._own}", _OVER)
        except RuntimeError:  # what torch raises for a store that is gone
            self._over.set()

    def _watch(self) -> None:
        """Counts looks, not time, so that a process that was stopped does not blame the others when it continues."""
        while not self._over.wait(self._patience / _LOOKS):
            for node in self._looks:
                self._looks[node] += 1
            silent = {node for node, looks in self._looks.items() if looks > _LOOKS} - self._ended
            if silent:
                self._report(silent)
                return

    def _report(self, silent: set[str]) -> None:
        ranks = {str(rank): self._hosts[str(rank)] for rank, node in self._nodes.items() if node in silent}
        self._journal.write("cut_off", hosts=ranks, seconds=self._patience)
        names = " and ".join(dict.fromkeys(ranks.values()))
        said = f"{names} has not answered for {self._patience:g} s"
        self._journal.write("error", type="NodeLost", message=said, traceback="", ops=[], owners={})
        self._end(1)


# ---- what the nodes of a run on several tell each other when their ranks have met


_MEETING_PATIENCE = timedelta(seconds=30)  # for the other ranks, which have met this one already


class NodesDiffer(SystemExit):
    """The nodes run different software; the message is one sentence with both values and the fix."""


def exchange(journal: Journal) -> None:
    """Writes the hosts of all ranks as one `hosts` event, in the first rank of a node that writes its own logs, which
    from then on observes the other nodes.

    The store is the one through which the ranks met; the exchange is over before the script continues. Raises
    `NodesDiffer`.
    """
    if not os.environ.get("LABKIT_LOGS") or "MASTER_ADDR" not in os.environ:
        return
    store = connected(_MEETING_PATIENCE)
    store.set(f"labkit/beat/{os.environ.get('GROUP_RANK', '0')}", "0")
    store.set(f"labkit/rank/{os.environ['RANK']}", json.dumps(_facts()))
    if os.environ.get("LOCAL_RANK") != "0":
        return
    every = {rank: json.loads(store.get(f"labkit/rank/{rank}")) for rank in range(int(os.environ["WORLD_SIZE"]))}
    hosts = {str(rank): facts["host"] for rank, facts in every.items()}
    journal.write("hosts", hosts=hosts)
    if differs := difference(every):
        raise NodesDiffer(differs)
    if len({facts["node"] for facts in every.values()}) > 1:
        patience = float(os.environ.get("LABKIT_HANG_AFTER", "30"))
        Beats(journal, connected, {rank: facts["node"] for rank, facts in every.items()}, hosts, patience).start()


def connected(timeout: timedelta) -> dist.TCPStore:
    """A connection to the store of the ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def difference(every: Mapping[int, Mapping[str, str]]) -> str:
    """One sentence if ranks have different versions of torch or different scripts; otherwise empty."""
    first = every[0]
    for name, what, fix in (
        ("torch", "torch is", "install the same version on all nodes"),
        (
            "script",
            "the SHA-256 of the script is",
            "copy one script to all nodes, and start all of them with one command",
        ),
        ("arguments", "the arguments of the script are", "start all nodes with the same command"),
    ):
        other = next((facts for facts in every.values() if facts[name] != first[name]), None)
        if other is not None:
            return f"{what} {first[name]} on {first['host']} and {other[name]} on {other['host']}; {fix}"
    return ""


def _facts() -> dict[str, str]:
    file = getattr(sys.modules["__main__"], "__file__", None)
    text = Path(file).read_bytes() if file and os.path.isfile(file) else b""  # noqa: PTH113 a name may be too long for a path
    return {
        "host": socket.gethostname(),
        "node": os.environ.get("GROUP_RANK", "0"),
        "torch": torch.__version__,
        "script": hashlib.sha256(text).hexdigest()[:12],
        "arguments": " ".join(sys.argv[1:]) or "none",
    }
