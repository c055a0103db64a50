"""Job: a handle to one run, started here or attached to. All its state is in the run folder."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from labkit.analysis.metrics import pace
from labkit.common.files import user_cache
from labkit.common.processes import (
    end,
    is_stopped,
    is_supervisor,
    living,
    of_folder,
    send,
    tag_of,
    tagged,
    watchdog_tag,
)
from labkit.common.text import last_line, visible_line
from labkit.common.units import size
from labkit.launch import kubeflow_agent, local, slurm_agent, watchdog
from labkit.launch.ending import close, end_processes, reserve
from labkit.launch.warm.client import Cold, Consent, Started, consent, dependence, module_files
from labkit.plan.script import command, write_script
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import Guesses, LaunchPlan, Plan, Status, Unreadable
from labkit.record.folder import RunFolder, runs_root
from labkit.record.follow import current_status, hidden_supervisor, is_abandoned, is_here, is_over, supervisor_of
from labkit.record.state import OVER, RunState
from labkit.setup.limits import Limits, in_force
from labkit.training.rows import Drawing

# ---- starts the supervisor of a run, warm or cold, and holds the lifeline that ends the run with this process


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
            said = last_line(folder.end_of(folder.supervisor_log))[:500]
            why = said or f"its supervisor wrote no status for {_START_LIMIT:g} s"
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
        RunFolder.write_json(folder.launch, structs.replace(plan, start="warm", cold_because=""))
        started = start.start(folder.path, asked, environment, files)
        if isinstance(started, Started):
            return started
        end(lambda: of_folder(folder.path), grace=0.0)  # it may have started without being able to answer
        start = started
    RunFolder.write_json(folder.launch, structs.replace(plan, start="cold", cold_because=start.reason))
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


# ---- the data of a run that are drawn


def undrawn(spec: Spec) -> Drawing | None:
    """What draws the data of a Spec into the cache folder; None if they are there, or are not drawn."""
    drawing = None if spec.script else spec.data_row.drawing(spec.train_samples, spec.options)
    if drawing is None:
        return None
    path = _drawn_to(drawing)
    return None if path.is_file() and path.stat().st_size >= drawing.size else drawing


def _drawn_to(drawing: Drawing) -> Path:
    return user_cache() / "labkit" / drawing.file


def draw_data(spec: Spec) -> None:
    """Draws the data of a Spec if they are missing, which takes seconds: once on a machine, for all ranks of all runs.
    Raises `SpecError` if it fails."""
    drawing = undrawn(spec)
    if drawing is None:
        return
    path = _drawn_to(drawing)
    home = Path(__file__).parents[2]  # where no file of the user can shadow a module
    argv = [sys.executable, "-m", drawing.module, *drawing.arguments]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it fails before torch is imported
        done = subprocess.run(argv, cwd=home, capture_output=True, encoding="utf-8", errors="replace")
        why = (last_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise SpecError(
            "data", f"{spec.data} could not be drawn into {path}: {why}; set XDG_CACHE_HOME to a folder with space"
        )


# ---- the quota of the disk


def keep_quota(limits: Limits, root: Path | None = None, needed: str | None = None) -> list[str]:
    """Removes the oldest finished runs under `root` until all runs take less than the quota, and returns their names.

    A run that is not over, that cannot be read, or that `needed` (a checkpoint) belongs to stays. Raises `LaunchError`
    if that leaves too much.
    """
    if limits.disk is None:
        return []
    root = root or runs_root()
    taken = {folder: _bytes(folder.path) for folder in RunFolder.all(root)}
    removed = []
    for folder in list(taken):
        if sum(taken.values()) < limits.disk:
            break
        kept = needed is not None and Path(needed).absolute().is_relative_to(folder.path)
        if not (kept or folder.trouble()) and is_over(folder):
            folder.delete()
            removed.append(folder.name)
            del taken[folder]
    if sum(taken.values()) >= limits.disk:
        raise LaunchError(
            f"the runs in {root} take {size(sum(taken.values()))}, and the quota is {size(limits.disk)}"
            f" ({limits.sources['disk']}); none of them may be removed: stop some, or delete files there"
        )
    return removed


def _bytes(path: Path) -> int:
    """Bytes that the files of a folder take on the disk; links are not followed."""
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118 many files
            except OSError:
                continue  # removed in the meantime
    return total


# ---- profiling a step of an active run


_AHEAD = 1.0  # seconds: a request is read within 0.2 s, and the state may lag by the same time


def ask(folder: RunFolder, state: RunState, snapshot: bool = False) -> int:
    """Requests a profile and returns its step, which is far enough ahead that no rank is past it when it reads the
    request.
    """
    newest = max((int(rank.steps.step[-1]) for rank in state.ranks.values() if len(rank.steps)), default=0)
    step = newest + 2 + math.ceil(_AHEAD / max(pace(state) or _AHEAD, 1e-4))
    RunFolder.write_json(folder.capture, {"step": step, "snapshot": snapshot})
    return step


# ---- the handle


_ANSWER = 2.0  # seconds in which a responsive supervisor reports that it is stopping the run
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for the processes of a run without a supervisor
_LEAVE = 5.0  # seconds in which a supervisor whose folder was deleted ends its run
# seconds between two polls of `wait`: each takes a millisecond of CPU time from the ranks on a busy machine
_LOOK = 0.2


class Job:
    """A run, identified by its folder. Created by `start` or `attach`; every method works from any process of the same
    user and host.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def __repr__(self) -> str:
        return f"Job({visible_line(self.folder.name)}: {self.state})"

    @classmethod
    def start(
        cls,
        spec: Spec,
        *,
        detached: bool = False,
        cold: bool = False,
        root: Path | None = None,
        source: str | None = None,
        stdin: int | None = None,
        prediction: Plan | None = None,
        guess: Guesses | None = None,
        name: str | None = None,
        planned: Callable[[Spec, RunFolder], LaunchPlan] | None = None,
    ) -> Job:
        """Starts a resolved Spec (see `Spec.on`) in a new folder and returns as soon as torchrun is starting.

        `source` is the text of a script that is not a file yet; it is written to the folder, whatever name
        `spec.script` has. `stdin` is a file descriptor that all ranks inherit as standard input, as under torchrun
        (default: empty). `prediction` and `guess` are stored with the run. Unless `detached`, the run ends with this
        process, however that ends. `name` is the end of the folder's name (default: that of the Spec); `planned` makes
        the launch plan, of torchrun on this machine by default, when all other files are written. The run starts warm
        if possible, unless `cold`; the plan and the status record which it was, and why the start was cold. Data
        that are drawn are drawn first, once. Raises `LaunchError`, `SpecError` or `OSError` if it cannot start; no
        files or processes are left in that case.
        """
        asked = time.time()
        draw_data(spec)
        keep_quota(in_force(), root, spec.resume)
        folder = RunFolder.create(name or spec.name, root)
        try:
            reserve(folder)
            if source is not None:
                RunFolder.write_text(folder.script, source)
                spec = replace(spec, script=str(folder.script))
            RunFolder.write_json(folder.spec, spec.to_json())
            if prediction is not None:
                RunFolder.write_json(folder.prediction, prediction)
            if guess is not None:
                RunFolder.write_json(folder.guess, guess)
            if spec.script is None:
                RunFolder.write_text(folder.script, write_script(spec))
            RunFolder.write_text(folder.command, command(spec) + "\n")
            plan = (planned or local.plan)(spec, folder)
            plan.detached = detached
            start_supervisor(folder, plan, asked, stdin, warm_or_cold(spec, plan, cold))
        except BaseException:
            end_processes(folder)
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        return cls(folder)

    @classmethod
    def attach(cls, folder: RunFolder) -> Job:
        """The job of an existing run, started here or elsewhere, active or over. Raises `Unreadable`, a
        `LookupError`."""
        if not os.path.lexists(folder.spec):
            raise LookupError(f"{folder.path} is not a run folder: it has no {folder.spec.name}")
        folder.require_readable()
        return cls(folder)

    def status(self) -> Status:
        """The current status as seen by the supervisor, as in `status.json`."""
        return current_status(self.folder)

    @property
    def state(self) -> str:
        """starting, running, stopping, finished, failed, stopped, or lost (its end cannot be determined here)."""
        state = self.status().state
        if state == "ready":  # nothing has written a status
            return "failed" if is_over(self.folder) else "starting"
        return state

    def wait(self, timeout: float | None = None) -> str:
        """Waits up to `timeout` seconds until the run is over and all its processes have ended; returns its state."""
        last = None if timeout is None else time.monotonic() + timeout
        while self.state not in OVER:
            if last is not None and time.monotonic() > last:
                return self.state
            time.sleep(_LOOK)
        self._clean_up()
        return self.state

    def stop(self, timeout: float = 10.0) -> str:
        """Stops the run from any process and returns its final state; does nothing if the run is over.

        The supervisor stops the run, and continues if this call is interrupted. A supervisor that does not respond is
        killed together with the run. Raises `LaunchError` if the run is on another host or belongs to another user.
        What still runs then is found by its tag alone: the documents of the run may be damaged or false.
        """
        try:
            if self.state not in OVER:
                supervisor = self._supervisor()
                if not (supervisor is not None and self._obeys(supervisor) and self._closed(timeout)):
                    self._end_without(supervisor)
                self._cancel()  # what follows a job of Slurm may have been stopped before it could
            state = self.wait(timeout)
        except Unreadable:
            state = "stopped"
        if self.has_processes:
            self._stop_by_tag(timeout)
        return state

    @property
    def has_processes(self) -> bool:
        """Whether a process of this machine carries the tag of the run."""
        return bool(of_folder(self.folder.path))

    def _stop_by_tag(self, timeout: float) -> None:
        supervisors = list(filter(is_supervisor, of_folder(self.folder.path)))
        send(supervisors, psutil.Process.terminate)
        send(filter(is_stopped, supervisors), psutil.Process.resume)
        psutil.wait_procs(supervisors, timeout)  # it writes the final status, if it can
        send(supervisors, psutil.Process.kill)
        with self.folder.closing():
            self._end_all()

    # ---- termination

    def _supervisor(self) -> psutil.Process | None:
        """The supervisor's process; None if there is none, for example because it was killed."""
        status = self.folder.read_status()
        supervisor = supervisor_of(self.folder, status)
        if supervisor is not None:
            return supervisor
        if (other := hidden_supervisor(status)) is not None:
            raise LaunchError(_foreign(self.folder, other.username()))
        processes = of_folder(self.folder.path)
        if status.state != "ready" and not is_here(status) and not processes:
            host = (status.supervisor and status.supervisor.host) or "an unknown host"
            raise LaunchError(f"run {self.folder.name} runs on {host}; stop it there")
        return next(filter(is_supervisor, processes), None)

    def _obeys(self, supervisor: psutil.Process) -> bool:
        """Asks the supervisor to stop the run; False if it has ended or does not respond in time."""
        try:
            supervisor.terminate()
            if is_stopped(supervisor):
                supervisor.resume()
        except psutil.AccessDenied:
            raise LaunchError(_foreign(self.folder, supervisor.username())) from None
        except psutil.NoSuchProcess:
            pass  # it ended in the meantime
        last = time.monotonic() + _ANSWER
        while not self._has("stopping", *OVER):
            if living(supervisor.pid) != supervisor or time.monotonic() > last:
                return self._has(*OVER)
            time.sleep(_LOOK / 4)
        return True

    def _closed(self, timeout: float) -> bool:
        last = time.monotonic() + timeout
        while not self._has(*OVER) and time.monotonic() < last:
            time.sleep(_LOOK / 4)
        return self._has(*OVER)

    def _has(self, *states: str) -> bool:
        """Whether the state in the status file is one of these."""
        return self.folder.read_status().state in states

    def _end_without(self, supervisor: psutil.Process | None) -> None:
        """Kills the supervisor first, so that it starts no more processes, and then the others."""
        why = "; its supervisor did not respond, so it was killed" if supervisor is not None else ""
        with self.folder.closing():  # before others can notice that the supervisor has ended
            if supervisor is not None:
                with suppress(psutil.NoSuchProcess):
                    supervisor.kill()
            self._end_all()
            close(self.folder, "stopped", f"stop requested{why}")

    def _clean_up(self) -> None:
        """After the end: waits for the supervisor to exit, or for the watchdog of a run that has lost its supervisor,
        and terminates the processes that remain.
        """
        path = self.folder.path
        supervisor = supervisor_of(self.folder, self.folder.read_status())
        if supervisor is not None:
            psutil.wait_procs([supervisor], timeout=2.0)
            return
        if self.folder.is_gone:
            psutil.wait_procs(of_folder(path), timeout=_LEAVE)
            self._end_all()
        elif is_abandoned(self.folder):
            with self.folder.closing():
                self._end_all()
                close(self.folder, "failed", self.status().message)
        psutil.wait_procs(tagged(lambda tag: tag == watchdog_tag(path)), timeout=_LEAVE)

    def _cancel(self) -> None:
        with suppress(Unreadable):
            plan = self.folder.read_launch()
            if plan.batch_job is not None:
                slurm_agent.cancel(plan.batch_job, self.folder.batch)
            if plan.trainjob is not None:
                kubeflow_agent.cancel(plan.trainjob, self.folder)

    def _end_all(self) -> None:
        self._cancel()
        end_processes(self.folder)


def start_submitted(
    spec: Spec,
    planned: Callable[[Spec, RunFolder, list[Any]], LaunchPlan],
    cancel: Callable[[Any], None],
    **options: Any,
) -> Job:
    """Starts a run that a scheduler has: `planned` submits a job, and adds it to the list that it is given. If the run
    cannot start, `cancel` gets that job. `options` are those of `Job.start`, which see for what is raised."""
    submitted: list[Any] = []
    try:
        return Job.start(spec, detached=True, cold=True, planned=lambda *given: planned(*given, submitted), **options)
    except BaseException:
        for job in submitted:
            cancel(job)
        raise


def end_deleted(name: str) -> str:
    """Terminates the processes of a run whose folder or Spec was deleted; `name` is as in `RunFolder.find`.

    Returns the former path of the folder; empty if there is no such process. Raises `LookupError` if `name` is
    ambiguous.
    """
    place, given = runs_root().resolve(), Path(name).absolute()
    tags = {tag_of(process) for process in tagged(lambda tag: not os.path.lexists(RunFolder(tag).spec))} - {None, ""}
    paths = [path for path in map(Path, tags) if path.parent.resolve() == place or path == given]
    folders = [path for path in paths if path.name == name or path == given]
    folders = folders or [path for path in paths if path.name.startswith(name) or path.name.endswith(name)]
    if len(folders) > 1:
        names = ", ".join(path.name for path in folders)
        raise LookupError(f"{name!r} is ambiguous: it matches {names} (folders deleted); give the full name")
    if folders:
        end(lambda: of_folder(folders[0]), grace=_GRACE)
    return str(folders[0]) if folders else ""


def _foreign(folder: RunFolder, user: str) -> str:
    return f"run {folder.name} belongs to {user}, and only that user can stop it"
