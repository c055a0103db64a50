"""Starts the supervisor of a run, warm or cold, and holds the lifeline that ends the run with this process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from labkit.common.processes import end, of_folder
from labkit.launch import report, watchdog
from labkit.launch.warm.client import Cold, Consent, Started, consent, dependence, module_files
from labkit.plan.spec import Spec
from labkit.record.documents import LaunchPlan
from labkit.record.folder import RunFolder

_START_LIMIT = 30.0  # seconds until the supervisor must have written its first status; usually it takes 0.1 s
_held: set[int] = set()  # the ends of lifelines and of the pipes of watchdogs that this process holds


class LaunchError(RuntimeError):
    """A run could not be started, or cannot be stopped from here; the message is one sentence with the reason."""


def warm_or_cold(spec: Spec, plan: LaunchPlan, cold: bool) -> Consent | Cold:
    """Asks the warm server whether it can start this run."""
    if cold:
        return Cold()
    environment, folders, scripts = os.environ | plan.env, [plan.cwd], []
    if spec.script is not None and spec.as_module:
        scripts = list(module_files(spec.script, folders))
    elif spec.script is not None:
        scripts = [Path(spec.script).resolve()]
        folders = sorted({plan.cwd, str(scripts[0].parent)})
    answer = consent(environment, folders)
    if isinstance(answer, Consent) and (reason := dependence(scripts, folders, environment)):
        answer.decline()
        return Cold(reason)
    return answer


def start_supervisor(
    folder: RunFolder, plan: LaunchPlan, asked: float, stdin: int | None, start: Consent | Cold
) -> None:
    """Starts the supervisor in its own session and waits for its first status, which replaces that of a former one; the
    lifeline stays open while this process lives. Raises `LaunchError` if it does not start.

    The watchdog is started first. Until the first status it ends the run if both this process and the supervisor are
    killed, and from then on if the supervisor is.
    """
    before = _written(folder)
    shell, pipe = watchdog.start(folder, os.environ | plan.env)
    lifeline = (os.open(os.devnull, os.O_RDONLY), None) if plan.detached else os.pipe()
    _held.update(file for file in (pipe, lifeline[1]) if file is not None)
    try:
        try:
            with open(folder.supervisor_log, "ab") as log:
                files = [lifeline[0], log.fileno(), pipe, *([] if stdin is None else [stdin])]
                process = _launch(folder, plan, asked, files, start)
        except BaseException:
            _close(lifeline[1])
            raise
        finally:
            os.close(lifeline[0])
        reap = threading.Thread(target=_reap, args=(process, shell, lifeline[1]), daemon=True)
        reap.name = f"labkit {folder.name}"
        reap.start()
        _await_status(folder, before, process)
    except BaseException:
        watchdog.release(pipe)
        shell.wait()
        raise
    finally:
        _close(pipe)


def _await_status(folder: RunFolder, before: int | None, process: Started | subprocess.Popen) -> None:
    last = time.monotonic() + _START_LIMIT
    while _written(folder) == before:
        if process.returncode is not None or time.monotonic() > last:
            why = (
                report.last_line(folder, folder.supervisor_log)
                or f"its supervisor wrote no status for {_START_LIMIT:g} s"
            )
            raise LaunchError(f"the run could not be started: {why}")
        time.sleep(0.005)


def _written(folder: RunFolder) -> int | None:
    """When the status was written, in nanoseconds; None if there is none."""
    return folder.status.stat().st_mtime_ns if folder.status.exists() else None


def _launch(
    folder: RunFolder, plan: LaunchPlan, asked: float, files: list[int], start: Consent | Cold
) -> Started | subprocess.Popen:
    """Writes the plan and starts the supervisor; `files` are its standard input, its log, the pipe of its watchdog, and
    the run's standard input, if any.
    """
    environment = os.environ | plan.env
    if isinstance(start, Consent):
        RunFolder.write_json(folder.launch, replace(plan, start="warm", cold_because=""))
        started = start.start(folder.path, asked, environment, files)
        if isinstance(started, Started):
            return started
        end(lambda: of_folder(folder.path), grace=0.0)  # it may have started without being able to answer
        start = started
    RunFolder.write_json(folder.launch, replace(plan, start="cold", cold_because=start.reason))
    stdin, log, *passed = files
    passed = [os.dup(file) for file in passed]  # not 0, which is the lifeline
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "labkit.launch.supervisor", str(folder.path), repr(asked), *map(str, passed)],
            pass_fds=passed,
            cwd=folder.path,  # a folder where no file of the user can shadow a module
            env=environment,
            stdin=stdin,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        for file in passed:
            os.close(file)


def _reap(process: Started | subprocess.Popen, shell: subprocess.Popen, lifeline: int | None) -> None:
    """Reaps the supervisor and its watchdog when they have ended, and closes the lifeline."""
    process.wait()
    shell.wait()
    _close(lifeline)


def _close(file: int | None) -> None:
    if file is not None:
        _held.discard(file)
        os.close(file)


def _drop_held() -> None:
    """In a forked child: a copy of a lifeline there would keep a run alive after the process that started it, and a
    copy of the pipe of a watchdog would hide the end of a supervisor."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_held)
