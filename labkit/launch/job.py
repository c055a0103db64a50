"""Job: one run, started here or found again. Everything that it knows is in the run folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from labkit.launch import local, report
from labkit.launch.folder import RunFolder
from labkit.launch.logs import LogTail
from labkit.launch.processes import TAG, end
from labkit.launch.status import current, is_folder, is_here, is_lost, supervisor_of
from labkit.script import command, write_script
from labkit.spec import Spec
from labkit.state import OVER

_START_LIMIT = 30.0  # seconds for the supervisor's first word; it takes a tenth of one where nothing is wrong
_LOOK = 0.2  # seconds between two looks of `wait`: each costs a millisecond that the ranks do not have on a full machine
_lifelines: set[int] = set()


class LaunchError(RuntimeError):
    """A run that could not be started, or could not be stopped from here; one sentence with the reason."""


class Job:
    """A run by its folder. Made by `start` or `attach`; every method works from any process of the same user and host."""

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def __repr__(self) -> str:
        return f"Job({self.folder.name}: {self.state})"

    @classmethod
    def start(cls, spec: Spec, *, detached: bool = False, root: Path | None = None, source: str | None = None) -> Job:
        """Starts a settled Spec (see `Spec.on`) in a folder of its own and returns as soon as torchrun is on its way.

        Where the script is not a file yet, `source` is its text: it is written into the folder, whatever name `spec.script` has.
        The run ends with this process, by whatever this process may end, unless it is `detached`.
        Raises `LaunchError` or `OSError` where it cannot start, and then nothing is left behind.
        """
        asked = time.time()
        folder = RunFolder.create(spec.name, root)
        try:
            if source is not None:
                RunFolder.write_text(folder.script, source)
                spec = replace(spec, script=str(folder.script))
            plan = local.plan(spec, folder) | {"detached": detached}
            RunFolder.write_json(folder.spec, spec.to_json())
            if spec.script is None:
                RunFolder.write_text(folder.script, write_script(spec))
            RunFolder.write_text(folder.command, command(spec) + "\n")
            RunFolder.write_json(folder.plan, plan)
            _start_supervisor(folder, plan, asked)
        except BaseException:
            end(str(folder.path), grace=0.0)
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        return cls(folder)

    @classmethod
    def attach(cls, folder: RunFolder) -> Job:
        """The job of a run that was started before, here or elsewhere, running or over."""
        if not folder.spec.is_file():
            raise LookupError(f"{folder.path} is not a run folder: it has no {folder.spec.name}")
        return cls(folder)

    def status(self) -> dict[str, Any]:
        """What is known from outside the ranks now, as in `status.json`."""
        return current(self.folder)

    @property
    def state(self) -> str:
        """starting, running, stopping, finished, failed or stopped."""
        return self.status().get("state", "starting")

    def wait(self, timeout: float | None = None) -> str:
        """Waits until the run is over and nothing of it is left, `timeout` seconds at most; gives the state that it is in then."""
        last = None if timeout is None else time.monotonic() + timeout
        while self.state not in OVER:
            if last is not None and time.monotonic() > last:
                return self.state
            time.sleep(_LOOK)
        self._see_off()
        return self.state

    def stop(self, timeout: float = 10.0) -> str:
        """Ends the run, from any process, and gives its last state; a run that is over is left as it is.

        The supervisor does the work, and goes on with it where this call is interrupted. Raises `LaunchError` where the run
        is another host's or another user's.
        """
        status = self.status()
        if status.get("state") not in OVER:
            self._ask_to_stop(status)
            if self.wait(timeout) not in OVER:
                self._end_without_supervisor()
        return self.wait(timeout)

    def log(self, rank: int, stream: str = "stdout") -> LogTail:
        """A reader of one rank's output, which may have none yet."""
        return LogTail(lambda: self.folder.log_of(rank, stream))

    # ---- the ends of it

    def _ask_to_stop(self, status: dict[str, Any]) -> None:
        supervisor = supervisor_of(self.folder, status)
        if supervisor is None and not is_here(status):
            host = (status.get("supervisor") or {}).get("host", "no host yet")
            raise LaunchError(f"run {self.folder.name} runs on {host}; stop it there")
        try:
            if supervisor is not None:
                supervisor.terminate()
        except psutil.AccessDenied:
            raise LaunchError(f"run {self.folder.name} is {supervisor.username()}'s, who alone can stop it") from None
        except psutil.NoSuchProcess:
            pass  # it ended between the two looks

    def _see_off(self) -> None:
        """After the last word: lets the supervisor leave, and ends what a lost one has left."""
        status = RunFolder.read_json(self.folder.status)
        supervisor = supervisor_of(self.folder, status)
        if supervisor is not None:
            psutil.wait_procs([supervisor], timeout=2.0)
        elif is_lost(self.folder, status):
            self._end_all()

    def _end_without_supervisor(self) -> None:
        """Where it does not answer: ends it first, so that it starts nothing more, and then the rest."""
        supervisor = supervisor_of(self.folder, self.status())
        if supervisor is not None:
            with suppress(psutil.NoSuchProcess):
                supervisor.kill()
        self._end_all()

    def _end_all(self) -> None:
        tag = RunFolder.read_json(self.folder.plan).get("env", {}).get(TAG)
        if tag and is_folder(tag, self.folder):
            end(tag, grace=0.0)


def _start_supervisor(folder: RunFolder, plan: dict[str, Any], asked: float) -> None:
    """Starts it in a session of its own and waits for its first word; the lifeline stays open for as long as this process lives."""
    lifeline = None if plan["detached"] else os.pipe()
    argv = [sys.executable, "-m", "labkit.launch.supervisor", str(folder.path), repr(asked)]
    try:
        with open(folder.supervisor_log, "ab") as log:
            process = subprocess.Popen(
                argv,
                cwd=folder.path,  # where no file of the user's can stand in for a module
                env=os.environ | plan["env"],
                stdin=lifeline[0] if lifeline else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except BaseException:
        if lifeline:
            os.close(lifeline[1])
        raise
    finally:
        if lifeline:
            os.close(lifeline[0])
    if lifeline:
        _lifelines.add(lifeline[1])
    threading.Thread(target=_see_out, args=(folder, process, lifeline), daemon=True, name=f"labkit {folder.name}").start()
    last = time.monotonic() + _START_LIMIT
    while not folder.status.exists():
        if process.returncode is not None or time.monotonic() > last:
            why = report.last_line(folder.supervisor_log) or f"its supervisor said nothing for {_START_LIMIT:g} s"
            raise LaunchError(f"the run could not be started: {why}")
        time.sleep(0.005)


def _see_out(folder: RunFolder, process: subprocess.Popen, lifeline: tuple[int, int] | None) -> None:
    """Reaps the supervisor when it has ended, ends what it left if it was lost, and gives the lifeline back."""
    process.wait()
    if is_lost(folder, RunFolder.read_json(folder.status)):
        end(str(folder.path), grace=0.0)
    if lifeline:
        _lifelines.discard(lifeline[1])
        os.close(lifeline[1])


def _drop_lifelines() -> None:
    """In a forked child: a copy of a lifeline there would keep a run alive after the process that started it."""
    while _lifelines:
        os.close(_lifelines.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_lifelines)
