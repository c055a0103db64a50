"""The supervisor while its run waits for devices: the status says what it waits for, and the run can be stopped."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

from labkit.common.processes import here, identity
from labkit.launch.ending import conclude
from labkit.launch.leases import Lease
from labkit.record import clock
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

_EVERY = 0.5  # seconds between two attempts
_LIFELINE = 0


def wait_for_turn(folder: RunFolder, plan: dict[str, Any], lease: Lease, started: float, signals: int) -> bool:
    """Waits until the lease is taken; False if the run was stopped, whose final status is then written."""
    status = {
        "v": 1,
        "state": "starting",
        "started": started,
        "supervisor": identity() | here(),
        "detached": bool(plan.get("detached")),
        "start": plan["start"],
        "cold_because": plan["cold_because"],
    }
    shown = ""
    wanted = [signals] if plan.get("detached") else [signals, _LIFELINE]
    while not lease.take():
        if folder.is_gone:
            return False
        if lease.words != shown:
            shown = lease.words
            RunFolder.write_json(folder.status, status | {"waiting": shown})
        ready, _, _ = select.select(wanted, [], [], _EVERY)
        why = ""
        if _LIFELINE in ready and not os.read(_LIFELINE, 1):
            why = "the process that started it has ended"
        elif signals in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(signals, 64)):
            why = "stop requested"
        if why:
            lease.release()
            final = {"state": "stopped", "message": f"{why}, before it had its devices", "ended": clock.now()}
            conclude(folder, RunState(), status | final)
            return False
    return True
