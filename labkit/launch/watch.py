"""What the supervisor does once torchrun runs: keeps the status, ends everything when asked to, and writes the summary."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
import traceback
from typing import Any

from labkit.launch import report
from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.launch.processes import end, identity
from labkit.launch.system import Sampler
from labkit.summary import summarise

STOP_GRACE = 2.0  # seconds that torchrun and its ranks have to leave by themselves when the run is stopped
END_GRACE = 1.0  # the same for what a run that came to its own end has left behind
_LIFELINE = 0


class Watch:
    """Watches one run from its start to its last word. `signals` is a pipe on which signal numbers arrive as bytes."""

    def __init__(self, folder: RunFolder, plan: dict[str, Any], agent: subprocess.Popen, started: float, signals: int):
        self._folder = folder
        self._agent = agent
        self._signals = signals
        self._detached = bool(plan.get("detached"))
        self._follower = Follower(folder)
        self._pids: dict[int, int] = {}
        self._status = {
            "v": 1,
            "state": "starting",
            "started": started,
            "ended": None,
            "supervisor": identity() | {"host": socket.gethostname()},
            "agent": identity(agent.pid),
            "ranks": {},
            "exit_code": None,
            "failures": {},
            "restarts": 0,
            "detached": self._detached,
            "message": "",
        }

    def run(self) -> None:
        """Returns when no process of the run is left, and summary and final state are written."""
        self._write()
        sampler = Sampler(self._folder.system, self._pids)
        sampler.start()
        stopped = False
        try:
            reason = self._watch()
            stopped = reason is not None
            if stopped:
                self._stop(reason)
        finally:  # whatever went wrong here: no process outlives this one
            left = end(str(self._folder.path), grace=0.0 if stopped else END_GRACE)
        sampler.stop()
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self._status["message"] = f"process {pids} cannot be ended: it waits inside the kernel for a device or a disk"
        self._finish(stopped)

    def _watch(self) -> str | None:
        """Waits until torchrun has ended, and gives None; or until the run is to be stopped, and gives the reason."""
        wanted = [self._signals] if self._detached else [self._signals, _LIFELINE]
        while self._agent.poll() is None:
            self._follow()
            ready, _, _ = select.select(wanted, [], [], 1.0 if self._status["state"] == "running" else 0.1)
            if _LIFELINE in ready and not os.read(_LIFELINE, 1):
                return "the process that had started it is gone"
            if self._signals in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(self._signals, 64)):
                return "it was asked to stop"
        return None

    def _follow(self) -> None:
        """Folds what the ranks wrote, a little at a time, so that the end has little left to fold; notes the ranks' pids."""
        self._follower.poll()
        state = self._follower.state
        pids = {number: rank.pid for number, rank in sorted(state.ranks.items()) if rank.pid}
        restarts = max((rank.attempt for rank in state.ranks.values()), default=0)
        if pids != self._pids or restarts != self._status["restarts"]:
            self._pids.update(pids)
            everyone = len(pids) >= state.world_size and all(rank.attempt == restarts for rank in state.ranks.values())
            named = {str(number): pid for number, pid in pids.items()}
            self._write(ranks=named, state="running" if everyone else "starting", restarts=restarts)

    def _stop(self, reason: str) -> None:
        self._write(state="stopping", message=reason)
        self._agent.terminate()
        try:
            self._agent.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            return  # a rank hangs, or will not hear: the caller ends them all

    def _finish(self, stopped: bool) -> None:
        exit_code = self._agent_exit_code()
        self._folder.rendezvous.unlink(missing_ok=True)
        self._follower.poll()
        state = self._follower.state
        restarts = max((rank.attempt for rank in state.ranks.values()), default=0)
        final = self._status | {"exit_code": exit_code, "ended": time.time(), "restarts": restarts}
        if all(number in state.ranks and state.ranks[number].exit_code == 0 for number in range(state.world_size)):
            final["state"] = "finished"  # a rank may still fall over on its way out, after a training that went well
        elif stopped:
            final["state"] = "stopped"
        elif exit_code == 0:
            final["state"] = "finished"
        else:
            final |= {"state": "failed", "failures": report.failures(self._folder)}
            if not final["failures"] and not final["message"]:
                final["message"] = self._launcher_failure(exit_code)
        self._summarise(final)
        self._write(**final)

    def _agent_exit_code(self) -> int | None:
        try:
            return self._agent.wait(1.0)
        except subprocess.TimeoutExpired:
            return None  # it is one of those that cannot be ended

    def _launcher_failure(self, exit_code: int | None) -> str:
        signal_name = report.signal_name(exit_code or 0)
        if signal_name:
            return f"torchrun was ended by {signal_name}"
        return f"torchrun ended with exit code {exit_code}: {report.last_line(self._folder.launcher_log)}"

    def _summarise(self, final: dict[str, Any]) -> None:
        """Writes the summary before anybody can see the final state; a summary that fails must not hide the state."""
        try:
            self._follower.state.apply({"kind": "status", "status": final})
            RunFolder.write_json(self._folder.summary, summarise(self._follower.state, self._folder.name))
        except Exception:
            traceback.print_exc()

    def _write(self, **changes: Any) -> None:
        self._status |= changes
        RunFolder.write_json(self._folder.status, self._status)
