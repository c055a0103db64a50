"""The supervisor while its run waits for devices: the status says what it waits for, and the run can be stopped."""

from __future__ import annotations

import os
import select
import signal

from msgspec.structs import replace

from labkit.common.processes import here, identity
from labkit.launch.ending import conclude
from labkit.launch.leases import Lease
from labkit.record import clock
from labkit.record.documents import LaunchPlan, Status, Who
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

_EVERY = 0.5  # seconds between two attempts
_LIFELINE = 0


def wait_for_turn(folder: RunFolder, plan: LaunchPlan, lease: Lease, started: float, signals: int) -> bool:
    """Waits until the lease is taken; False if the run was stopped, whose final status is then written."""
    status = Status(
        "starting",
        v=1,
        started=started,
        supervisor=Who(**identity(), **here()),
        detached=bool(plan.detached),
        start=plan.start,
        cold_because=plan.cold_because,
    )
    shown = ""
    wanted = [signals] if plan.detached else [signals, _LIFELINE]
    while not lease.take():
        if folder.is_gone:
            return False
        if lease.words != shown:
            shown = lease.words
            RunFolder.write_json(folder.status, replace(status, waiting=shown))
        ready, _, _ = select.select(wanted, [], [], _EVERY)
        why = ""
        if _LIFELINE in ready and not os.read(_LIFELINE, 1):
            why = "the process that started it has ended"
        elif signals in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(signals, 64)):
            why = "stop requested"
        if why:
            lease.release()
            message = f"{why}, before it had its devices"
            conclude(folder, RunState(), replace(status, state="stopped", message=message, ended=clock.now()))
            return False
    return True
