"""What the nodes of a run on several tell each other when their ranks have met: their hosts, because the run folder of
one node knows only its own ranks, and what must be equal on all of them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from labkit.probe.beats import Beats
from labkit.probe.journal import Journal

_HOSTS_PATIENCE = timedelta(seconds=30)  # for the other ranks, which have met this one already


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
    store = connected(_HOSTS_PATIENCE)
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
