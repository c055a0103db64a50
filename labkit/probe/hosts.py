"""On which host each rank of a run on several nodes is: what the ranks tell each other when they have met, because the
run folder of one node knows only its own ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from labkit.probe.journal import Journal

_PATIENCE = timedelta(seconds=30)  # for the other ranks, which have met this one already


def exchange(journal: Journal) -> None:
    """Writes the hosts of all ranks as one `hosts` event, in the first rank of a node that writes its own logs.

    The store is the one through which the ranks met; the exchange is over before the script continues.
    """
    if not os.environ.get("LABKIT_LOGS") or "MASTER_ADDR" not in os.environ:
        return
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=_PATIENCE,
        wait_for_workers=False,
    )
    attempt = f"labkit/host/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{attempt}/{os.environ['RANK']}", socket.gethostname())
    if os.environ.get("LOCAL_RANK") == "0":
        ranks = range(int(os.environ["WORLD_SIZE"]))
        journal.write("hosts", hosts={str(rank): store.get(f"{attempt}/{rank}").decode() for rank in ranks})
