"""Where ranks meet: the port of their store, the hosts of all ranks, and nodes that are cut off."""

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

# ---- the workers' store on a port that nobody else has


LOOPBACK = "127.0.0.1"
_LOOK = 0.02  # seconds between two polls for the port
_PATIENCE = timedelta(seconds=300)  # for the port if the script sets no timeout
_moved: dict[int, int] = {}  # ports of this process's stores by the port that was asked for


def place_stores(patches: Patches, run: str | os.PathLike[str]) -> None:
    """Lets rank 0 open the stores of `init_process_group` on a port of the system's choice, and the others find it.

    What torchrun found free, another process may take while the ranks start. The store is on loopback if the run has
    one node (LABKIT_LOOPBACK=1, set by the launcher), where `run` is the folder that tells the port; ranks of several
    nodes, which write their own logs (LABKIT_LOGS), tell it through torchrun's rendezvous (PET_RDZV_ENDPOINT).
    """
    if not dist.is_available() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own store
        return
    ports: _Folder | _Rendezvous
    if os.environ.get("LABKIT_LOOPBACK") == "1":
        ports = _Folder(Path(run) / "stores")
    elif {"LABKIT_LOGS", "PET_RDZV_ENDPOINT", "MASTER_ADDR"} <= os.environ.keys():
        ports = _Rendezvous(os.environ["PET_RDZV_ENDPOINT"], os.environ["MASTER_ADDR"])
    else:
        return
    patches.wrap("stores", "torch.distributed.rendezvous.TCPStore", lambda store: _placed(store, ports))


class _Folder:
    """Ports of stores between the ranks of one machine, as files."""

    def __init__(self, folder: Path):
        self._folder, self._attempt = folder, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def address_of(self, host: str) -> str | None:
        """The address of the ranks' store if `host` names it, otherwise None."""
        # the last may query DNS
        here = host in (LOOPBACK, "localhost", "::1") or host in (socket.gethostname(), socket.getfqdn())
        return LOOPBACK if here else None

    def listen(self) -> socket.socket:
        return socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)

    def tell(self, name: str, port: int) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        half = self._file(name).with_suffix(".half")
        half.write_text(str(port), encoding="ascii")
        half.replace(self._file(name))

    def ask(self, name: str, patience: timedelta) -> int | None:
        """The port that rank 0 told; None if it told none within `patience`."""
        last = time.monotonic() + patience.total_seconds()
        while not self._file(name).is_file():
            if time.monotonic() > last:
                return None
            time.sleep(_LOOK)
        return int(self._file(name).read_text(encoding="ascii"))

    def _file(self, name: str) -> Path:
        return self._folder / f"{self._attempt}-{name}"


class _Rendezvous:
    """Ports of stores between the ranks of several nodes, in the store through which their torchruns met.

    Nodes count restarts differently, but each attempt asks for another port.
    """

    def __init__(self, endpoint: str, rank_0: str):
        host, _, port = endpoint.rpartition(":")
        self._endpoint, self._rank_0 = (host.strip("[]"), int(port)), rank_0

    def address_of(self, host: str) -> str | None:
        """The address of the ranks' store if `host` names it, otherwise None."""
        return host if host == self._rank_0 else None

    def listen(self) -> socket.socket:
        """On all interfaces, as torch's own store."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)

    def tell(self, name: str, port: int) -> None:
        self._store(_MEETING_PATIENCE).set(f"labkit/store/{name}", str(port))

    def ask(self, name: str, patience: timedelta) -> int | None:
        """The port that rank 0 told; None if it told none within `patience`, or the store is gone."""
        try:
            return int(self._store(patience).get(f"labkit/store/{name}"))
        except RuntimeError:  # what torch raises for both
            return None

    def _store(self, patience: timedelta) -> dist.TCPStore:
        return dist.TCPStore(*self._endpoint, is_master=False, timeout=patience, wait_for_workers=False)


def _placed(make_store: Any, ports: _Folder | _Rendezvous) -> Any:
    # stores of this process by requested port; every rank creates them in the same order
    made: Counter[int] = Counter()

    def placed_store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
        address = ports.address_of(host_name)
        if address is None:
            return make_store(host_name, port, *args, is_master=is_master, **kwargs)
        made[port] += 1
        name = f"{port}-{made[port]}"
        if not is_master:
            _moved[port] = ports.ask(name, kwargs.get("timeout") or _PATIENCE) or port
            return make_store(address, _moved[port], *args, is_master=False, **kwargs)
        listener = ports.listen()
        try:
            _moved[port] = listener.getsockname()[1]
            # libuv in torch 2.6 accepts no socket
            own = {"is_master": True, "master_listen_fd": listener.fileno(), "use_libuv": False}
            ports.tell(name, _moved[port])
            store = make_store(address, _moved[port], *args, **kwargs | own)
        except BaseException:
            listener.close()
            raise
        listener.detach()  # now owned by the store
        return store

    return placed_store


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
    port = int(os.environ["MASTER_PORT"])
    address = os.environ["MASTER_ADDR"]
    return dist.TCPStore(address, _moved.get(port, port), is_master=False, timeout=timeout, wait_for_workers=False)


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
