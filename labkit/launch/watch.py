"""The supervisor's main loop while torchrun runs: updates the status, stops the run on request, and writes the
summary."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from msgspec.structs import replace

from labkit.common.processes import TAG, here, identity, is_stopped, members, reap, send
from labkit.launch import local, report
from labkit.launch.anchor import Anchor
from labkit.launch.cgroup import out_of_memory_kills
from labkit.launch.ending import DISK_FULL, conclude, make_room
from labkit.launch.remains import end_all
from labkit.launch.system import Sampler
from labkit.probe import lifetime
from labkit.record import clock
from labkit.record.documents import LaunchPlan, Status, Unreadable, Who
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.writer import FULL

STOP_GRACE = 2.0  # seconds between SIGTERM and SIGKILL when the run is stopped
END_GRACE = 1.0  # the same for processes that remain after a run ended by itself
_LIFELINE = 0


class _Reason(NamedTuple):
    """Why a run is stopped early, and its final state."""

    state: str
    message: str


class Watch:
    """Monitors one run from its start to its final status. `signals` is a pipe on which signal numbers arrive as
    bytes."""

    def __init__(self, folder: RunFolder, plan: LaunchPlan, agent: subprocess.Popen, started: float, signals: int):
        self._folder = folder
        self._anchor = Anchor(folder)
        self._began = clock.now()
        self._tag = os.environ[TAG]
        self._agent = agent
        self._signals = signals
        self._limit = plan.limit
        self._detached = bool(plan.detached)
        self._follower = Follower(folder)
        self._pids: dict[int, int] = {}
        self._known: set[int] = set()  # pids of the processes that were terminated
        self._engine, self._endpoint = plan.engine, plan.endpoint
        self._sampler = Sampler(folder, self._pids)
        self._killed_before = out_of_memory_kills()
        self._status = Status(
            "starting",
            v=1,
            started=started,
            supervisor=Who(**identity(), **here()),
            agent=Who(**identity(agent.pid)),
            agent_began=lifetime.began(agent.pid),
            ranks={},
            detached=self._detached,
            start=plan.start,
            cold_because=plan.cold_because,
            ranks_here=plan.ranks_here,
        )

    def run(self) -> None:
        """Returns when all processes of the run have ended and summary and final status are written."""
        self._write()
        if self._engine == local.ENGINE:  # otherwise the ranks run on other machines
            self._sampler.start()
        reason = None
        try:
            reason = self._watch()
            if reason is not None:
                self._stop(reason)
        finally:  # whatever failed: no process outlives this one
            grace = END_GRACE if reason is None else 0.0
            left = end_all(Path(self._tag), self._members, grace, known={*self._known, *self._pids.values()})
        self._sampler.stop()
        self._finish(reason, left)

    def _members(self) -> list[psutil.Process]:
        reap(self._agent)
        found = members(self._tag)
        self._known.update(process.pid for process in found)
        return found

    def _watch(self) -> _Reason | None:
        """Waits until torchrun has ended and returns None, or until the run must be stopped and returns the reason."""
        wanted = [self._signals] if self._detached else [self._signals, _LIFELINE]
        while self._agent.poll() is None:
            if lost := self._anchor.lost():
                return _Reason(
                    "failed", f"the run folder was {lost} while the run was under way, so the run was stopped"
                )
            if self._limit is not None and clock.now() - self._began > self._limit:
                hours = f"{self._limit / 3600:g}"
                return _Reason("stopped", f"it reached the limit of {hours} hours for a run (see labkit doctor)")
            self._follow()
            if self._sampler.disk_full:
                self._note_disk_full()
            ready, _, _ = select.select(wanted, [], [], 1.0 if self._status.state == "running" else 0.1)
            if _LIFELINE in ready and not os.read(_LIFELINE, 1):
                return _Reason("stopped", "the process that started it has ended")
            if self._signals in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(self._signals, 64)):
                return _Reason("stopped", "stop requested")
            reap(self._agent)
        return None

    def _follow(self) -> None:
        """Folds new events of the ranks incrementally, so that little is left at the end; records the ranks' pids."""
        self._read()
        state = self._follower.state
        pids = {number: rank.pid for number, rank in sorted(state.ranks.items()) if rank.pid}
        restarts = max((rank.attempt for rank in state.ranks.values()), default=0)
        if pids != self._pids or restarts != self._status.restarts:
            self._pids.update(pids)
            expected = self._status.ranks_here or state.world_size
            everyone = len(pids) >= expected and all(rank.attempt == restarts for rank in state.ranks.values())
            self._write(ranks=pids, state="running" if everyone else "starting", restarts=restarts)

    def _stop(self, reason: _Reason) -> None:
        self._write(state="stopping", message=reason.message)
        self._agent.terminate()
        send(filter(is_stopped, self._members()), psutil.Process.resume)  # a stopped process cannot handle SIGTERM
        try:
            self._agent.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            return  # a rank hangs or ignores the signal: the caller kills all processes

    def _finish(self, reason: _Reason | None, left: list[psutil.Process]) -> None:
        path = self._anchor.path()
        if path != self._folder.path and not os.path.lexists(self._folder.spec):
            self._folder.delete_recreated()
        if path is None:
            return  # the folder was deleted; followers of the run notice that themselves
        if path != self._folder.path:
            self._folder = RunFolder(path)
            self._follower = Follower(self._folder)
        exit_code = self._agent_exit_code()
        self._folder.rendezvous.unlink(missing_ok=True)
        self._read()
        conclude(self._folder, self._follower.state, self._final(reason, exit_code, left))

    def _final(self, reason: _Reason | None, exit_code: int | None, left: list[psutil.Process]) -> Status:
        """The final status."""
        state = self._follower.state
        restarts = max((rank.attempt for rank in state.ranks.values()), default=0)
        final = replace(self._status, exit_code=exit_code, ended=clock.now(), restarts=restarts)
        messages = [DISK_FULL] if self._sampler.disk_full else []
        messages += [reason.message] if reason is not None else []
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            messages.append(f"process {pids} cannot be killed: it is blocked in the kernel or belongs to another user")
        final.message = "; ".join(messages)
        if all(number in state.ranks and state.ranks[number].exit_code == 0 for number in range(state.world_size)):
            final.state = "finished"  # a rank may be killed during shutdown, after the training has finished
        elif reason is not None:
            final.state = reason.state
        elif exit_code == 0:
            final.state = "finished"
        else:
            killed, before = out_of_memory_kills(), self._killed_before
            final.state, final.failures = "failed", report.failures(self._folder)
            final.oom_kills = killed - before if killed is not None and before is not None else None
            if not final.failures and not final.message:
                final.message = self._launcher_failure(exit_code)
        return final

    def _agent_exit_code(self) -> int | None:
        try:
            return self._agent.wait(1.0)
        except subprocess.TimeoutExpired:
            return None  # it cannot be killed

    def _launcher_failure(self, exit_code: int | None) -> str:
        signal = report.signal(exit_code or 0)
        if signal:
            return f"torchrun was terminated by {signal_name}"
        said = report.last_line(self._folder, self._folder.launcher_log)
        if self._engine != local.ENGINE:
            return said
        return report.unanswered(self._folder, self._endpoint) or f"torchrun exited with code {exit_code}: {said}"

    def _note_disk_full(self) -> None:
        """Adds the message to the status of the active run, once."""
        if self._status.message != DISK_FULL:
            make_room(self._folder)
            self._write(message=DISK_FULL)

    def _read(self) -> None:
        """Reads what is new in the run folder. If someone has damaged a file there, training continues; the status is
        written again."""
        try:
            self._follower.poll()
        except Unreadable:
            self._write()

    def _write(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        try:
            self._write_status()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._sampler.disk_full = True
            make_room(self._folder)
            with suppress(OSError):  # ranks may have used the space; the final status has its own reserve
                self._write_status()

    def _write_status(self) -> None:
        if self._anchor.lost():
            return  # the next check stops the run
        with suppress(FileNotFoundError):
            RunFolder.write_json(self._folder.status, self._status)
