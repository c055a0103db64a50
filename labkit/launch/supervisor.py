"""The supervisor: a small process in its own session that starts torchrun, monitors it, and terminates all its
processes.

`python -m labkit.launch.supervisor RUN_DIR STARTED WATCHDOG [STDIN]`. WATCHDOG is the pipe of the watchdog, and STDIN a
file descriptor that becomes the standard input of torchrun and of the ranks (default: empty). The supervisor's own
standard input is the lifeline, a pipe whose other end the launching process keeps open while it lives. When the run has
its devices, torchrun is started before any heavy import, because it takes longest to start.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from msgspec.structs import replace

from labkit.launch.leases import Lease, LeaseError
from labkit.launch.watchdog import create_temporary, release
from labkit.probe import lifetime
from labkit.record import clock
from labkit.record.documents import LaunchPlan, Status
from labkit.record.folder import RunFolder


def main(
    run_dir: str, started: str, watchdog: str, stdin: str | None = None, popen: Callable[..., Any] = subprocess.Popen
) -> None:
    """Runs the plan in the run folder to its end. `started` is the Unix time at which the run was requested.

    `popen` starts torchrun's agent; a warm start passes a function that forks it.
    """
    signals = _wake_on_signals()
    lifetime.adopt_orphans()
    folder = RunFolder(run_dir)
    plan = folder.read_launch()
    try:
        lease = _lease(plan, folder)
        if lease is not None and not (lease.take() or wait_for_turn(folder, plan, lease, float(started), signals)):
            _leave(int(watchdog))
    except LeaseError as error:
        sys.exit(str(error))
    if lease is not None and lease.ticket.kind == "gpu":
        os.environ |= _only(lease.ticket.granted)
    create_temporary(folder.path)
    agent = _start(popen, plan, folder, subprocess.DEVNULL if stdin is None else int(stdin))
    if stdin is not None:
        os.close(int(stdin))  # a writer must get an error when the ranks have ended

    from labkit.launch.watch import Watch  # now, while torchrun imports torch

    Watch(folder, plan, agent, float(started), signals).run()
    _leave(int(watchdog))


def _only(granted: tuple[str, ...]) -> dict[str, str]:
    """The environment variables that show only these GPUs to the ranks: by index in the order of NVML, because some
    libraries (DeepSpeed) cannot read UUIDs. A MIG device has no index."""
    from labkit.setup.machine import Machine

    indices = {gpu.uuid: str(gpu.index) for gpu in Machine.here().gpus if gpu.index >= 0}
    if not indices.keys() >= set(granted):
        return {"CUDA_VISIBLE_DEVICES": ",".join(granted)}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(indices[uuid] for uuid in granted)}


def _leave(watchdog: int) -> NoReturn:
    """Exits when the run has ended."""
    release(watchdog)
    with suppress(OSError):  # a full disk
        sys.stderr.flush()
    os._exit(0)  # everything is written: no thread, NVML or destructor may delay the exit


def _wake_on_signals() -> int:
    """The read end of a pipe on which each signal arrives as one byte, so that signals interrupt nothing."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)  # a handler, not SIG_IGN, which torchrun would inherit
    return read


def _lease(plan: LaunchPlan, folder: RunFolder) -> Lease | None:
    """The lease of the devices that the plan names; the kernel ends it with this process."""
    wanted = plan.lease
    return Lease(folder.name, wanted.kind, wanted.wanted, wanted.pool) if wanted else None


def _start(popen: Callable[..., Any], plan: LaunchPlan, folder: RunFolder, stdin: int) -> Any:
    with open(folder.launcher_log, "ab") as log:
        return popen(plan.argv, cwd=plan.cwd, stdin=stdin, stdout=log, stderr=log, preexec_fn=_bind_to_this_process())


def _bind_to_this_process() -> Callable[[], None]:
    """The function that torchrun's process calls before exec: it ties its lifetime, and that of its ranks, to this
    process.

    Do not pass `env` to the Popen that takes this: it would replace the environment in which the child announces
    itself.
    """
    supervisor = lifetime.identity(os.getpid())

    def bind() -> None:
        lifetime.end_with_parent(supervisor)
        lifetime.announce()

    return bind


# ---- waiting for devices


_EVERY = 0.5  # seconds between two attempts
_LIFELINE = 0  # the descriptor


def wait_for_turn(folder: RunFolder, plan: LaunchPlan, lease: Lease, started: float, signals: int) -> bool:
    """Waits until the lease is taken; False if the run was stopped, whose final status is then written."""
    status, shown = Status.of_start(plan, started), ""
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
            from labkit.launch.ending import conclude
            from labkit.record.state import RunState

            lease.release()
            message = f"{why}, before it had its devices"
            conclude(folder, RunState(), replace(status, state="stopped", message=message, ended=clock.now()))
            return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
