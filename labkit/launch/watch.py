"""The supervisor's main loop while torchrun runs: status, system samples, silent ranks, requests to stop, torchrun's
report."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import psutil
from msgspec.structs import replace

from labkit.common.processes import TAG, identity, is_stopped, members, reap, send
from labkit.common.text import last_line
from labkit.exports.trainjob import Reports, Server
from labkit.launch import local, ras
from labkit.launch.ending import DISK_FULL, conclude, make_room
from labkit.launch.watchdog import end_all
from labkit.probe import lifetime
from labkit.record import clock
from labkit.record.documents import Failed, LaunchPlan, Status, Unreadable, Who
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.stacks import clipped, in_collective, of_crash
from labkit.record.writer import FULL, Writer
from labkit.setup.machine import Gpu, Machine

# ---- kills by the kernel because memory ran out


_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def out_of_memory_kills(cgroups: Path = _CGROUPS, mount: Path = _MOUNT) -> int | None:
    """The count since the control group was created; None if it is unavailable. Ranks are in the group of their
    supervisor.

    Version 2 has it in `memory.events`, version 1 in `memory.oom_control`. In a container the group is the root of the
    mount.
    """
    try:
        lines = [line.split(":", 2) for line in cgroups.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    groups = {controllers: path.lstrip("/") for _, controllers, path in (line for line in lines if len(line) == 3)}
    first = next((path for controllers, path in groups.items() if "memory" in controllers.split(",")), None)
    places = (
        [mount / "memory" / first / "memory.oom_control", mount / "memory" / "memory.oom_control"]
        if first is not None
        else []
    )
    second = groups.get("")
    for base in (mount, mount / "unified") if second is not None else ():
        places += [base / second / "memory.events", base / "memory.events"]
    return next((count for count in map(_count, places) if count is not None), None)


def _count(path: Path) -> int | None:
    try:
        fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


# ---- whether the folder is still there


_F_GETPATH = 50  # macOS: the path of an open file
_PATH_LIMIT = 1024


class Anchor:
    """The folder of one run, identified by device and inode. The open descriptor prevents reuse of the inode."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._file = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._stat = os.fstat(self._file)

    def lost(self) -> str:
        """What happened to the folder: `deleted`, `moved to …` or `emptied`; empty while it is in place."""
        if self._is_at(self._folder.path):
            return "" if self._folder.spec.exists() else "emptied"
        path = self.path()
        return "deleted" if path is None else f"moved to {path}"

    def path(self) -> Path | None:
        """The current path of the folder; None if it was deleted or the system cannot tell."""
        path = self._folder.path if self._is_at(self._folder.path) else self._path_by_kernel()
        return path if path is not None and self._is_at(path) else None

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), self._stat)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # stat failed for another reason: assume that nothing changed

    def _path_by_kernel(self) -> Path | None:
        if sys.platform == "linux":
            return Path(f"/proc/self/fd/{self._file}").readlink()
        if sys.platform == "darwin":
            import fcntl

            return Path(os.fsdecode(fcntl.fcntl(self._file, _F_GETPATH, bytes(_PATH_LIMIT)).rstrip(b"\0")))
        return None


# ---- ranks that cannot report themselves: stopped by a signal, or blocked in a C call that holds the GIL
#
# Once per second the supervisor checks the process of each rank and writes a `silent` event on behalf of such a rank; a
# `heard` event follows when the rank responds again. A C call that holds the GIL is detected by the stacks that
# faulthandler writes in the rank when its monitoring thread has not run for too long; see `probe/threads.py`. Both are
# reported after as many seconds as a rank that waits, `hang_after` of the Spec: a debugger or a shell may stop a
# process briefly.


_EVERY = 1.0  # seconds between two checks
_AGAIN = 10.0  # seconds between two reports
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass
class _Watched:
    """The process of one rank and its state. `cpu` and `heard` are of the newest position that it wrote."""

    process: psutil.Process
    heard: float = 0.0  # on the run's clock
    cpu: float = 0.0  # seconds
    since: float | None = None
    reported: float | None = None
    position: dict[str, Any] = field(default_factory=dict)


class Silence:
    """Checks the ranks. `pids` maps ranks to pids and may grow; `patience` is in seconds; `write` appends an event to
    the supervisor's event file.
    """

    def __init__(self, folder: RunFolder, pids: dict[int, int], patience: float, write: Callable[..., None]):
        self._folder, self._pids, self._patience, self._write = folder, pids, patience, write
        self._watched: dict[int, _Watched] = {}
        self._next = 0.0

    def look(self) -> None:
        """Checks every rank, at most once per second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        for rank, pid in dict(self._pids).items():
            try:
                watched = self._watched.get(rank)
                if watched is None or watched.process.pid != pid:
                    watched = self._watched[rank] = _Watched(psutil.Process(pid))
                self._look_at(rank, watched)
            except psutil.Error:
                self._watched.pop(rank, None)

    def _look_at(self, rank: int, watched: _Watched) -> None:
        with watched.process.oneshot():
            status, times = watched.process.status(), watched.process.cpu_times()
        cpu = times.user + times.system
        position = _position(self._folder, rank)
        if position.get("t", 0.0) != watched.heard:
            watched.heard, watched.cpu, watched.position = position.get("t", 0.0), cpu, position
        stack = "" if position.get("over") else _held_by_c(self._folder, rank)
        if not stack and status not in _STOPPED:
            if watched.reported is not None:
                self._write("heard", rank=rank)
            watched.since, watched.reported = None, None
            return
        watched.since, now = watched.since or watched.heard or clock.now(), clock.now()
        if now - watched.since >= self._patience and (watched.reported is None or now - watched.reported >= _AGAIN):
            watched.reported = now
            self._report(rank, watched, status, stack, cpu)

    def _report(self, rank: int, watched: _Watched, status: str, stack: str, cpu: float) -> None:
        silent = max(clock.now() - watched.since, 1e-3)
        self._write(
            "silent",
            rank=rank,
            since=watched.since,
            process=str(status),
            computed=round(min(1.0, (cpu - watched.cpu) / silent), 3),
            stack=stack or clipped(str(watched.position.get("stack", ""))),
        )


def _held_by_c(folder: RunFolder, rank: int) -> str:
    dump = folder.end_of(folder.crash_of(rank))
    return clipped(of_crash(dump)) if dump.startswith("Timeout") else ""


def _position(folder: RunFolder, rank: int) -> dict[str, Any]:
    """The last position that a rank recorded, at most one second before its process ended; empty if there is none."""
    try:
        value = json.loads(folder.end_of(folder.position_of(rank)) or "{}")
    except ValueError:
        return {}  # it is being written
    valid = isinstance(value, dict) and isinstance(value.get("t", 0.0), (int, float))
    return value if valid else {}


# ---- system samples


INTERVAL = 0.2  # seconds between two samples at first
_SPREAD = 3000  # approximate number of samples of a run of any length; more if `_RAREST` limits the interval
_RAREST = 5.0  # maximum seconds between two samples


def interval(elapsed: float) -> float:
    """Seconds until the next sample, `elapsed` seconds after the first: 12 hours give 18,000 samples instead of
    216,000.
    """
    return min(max(INTERVAL, elapsed / _SPREAD), _RAREST)


class Sampler(threading.Thread):
    """Writes `system` events until `stop`, initially every `INTERVAL` seconds.

    `pids` maps ranks to pids and may grow; a rank that is silent for `patience` seconds is reported. It runs in a
    separate thread, because a faulty driver can block NVML.
    """

    def __init__(self, folder: RunFolder, pids: dict[int, int], patience: float):
        super().__init__(name="system", daemon=True)
        self.disk_full = False  # whether any sample found the disk full
        self._notes: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._folder = folder
        self._pids, self._patience = pids, patience
        self._over = threading.Event()

    def run(self) -> None:
        writer, gpus, ranks = Writer(self._folder.system), Gpus(), Ranks(self._pids)
        silence = Silence(self._folder, self._pids, self._patience, writer.write)
        cores = psutil.cpu_count() or 1
        psutil.cpu_percent()  # the first call only sets the reference point of the next
        began = time.monotonic()
        while not self._over.wait(interval(time.monotonic() - began)):
            sample = {"memory_used": _memory_used(), "gpus": gpus.sample(), "ranks": ranks.sample()}
            try:
                writer.write("system", cpu_percent=round(psutil.cpu_percent() * cores, 1), **sample)
                silence.look()
                while not self._notes.empty():
                    kind, fields = self._notes.get()
                    writer.write(kind, **fields)
                self.disk_full |= not _has_room(self._folder.system)
            except FileNotFoundError:
                break  # the folder was deleted or moved, which stops the run
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.disk_full = True
        writer.close()

    def note(self, kind: str, **fields: Any) -> None:
        """Writes an event with the next sample; for other threads."""
        self._notes.put((kind, fields))

    def stop(self) -> None:
        """Stops sampling; returns when the last sample is written, or after one second if a driver does not respond."""
        self._over.set()
        if self.is_alive():
            self.join(1.0)


class Ranks:
    """CPU utilisation (percent of one core) and resident memory (bytes) of each rank's process."""

    def __init__(self, pids: dict[int, int]):
        self._pids = pids
        self._processes: dict[int, psutil.Process] = {}

    def sample(self) -> dict[str, dict[str, Any]]:
        """One entry per rank whose process exists."""
        found = {}
        for rank, pid in dict(self._pids).items():
            try:
                process = self._processes.get(rank)
                if process is None or process.pid != pid:
                    process = self._processes[rank] = psutil.Process(pid)
                with process.oneshot():
                    row = {"cpu_percent": process.cpu_percent(), "rss": process.memory_info().rss}
            except psutil.Error:
                continue
            if row["rss"]:  # else a zombie
                found[str(rank)] = row
        return found


class Gpus:
    """Memory (bytes), utilisation (percent) and power (watts) of the visible GPUs by NVML; `index` is the CUDA
    index."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        gpus = Machine.here().gpus
        if gpus:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handles = [self._ask(self._handle, gpu) for gpu in gpus]

    def sample(self) -> list[dict[str, Any]]:
        """One entry per GPU; None for values that a device does not report."""
        return [{"index": index, **self._row(handle)} for index, handle in enumerate(self._handles)]

    def _handle(self, gpu: Gpu) -> Any:
        """A MIG device has no index."""
        if gpu.index < 0:
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)

    def _row(self, handle: Any) -> dict[str, Any]:
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "memory_used": memory and memory.used,
            "memory_total": memory and memory.total,
            "utilisation": rates and rates.gpu,
            "power": milliwatts and milliwatts / 1000,
        }

    def _ask(self, question: Callable[[Any], Any], about: Any) -> Any:
        """The answer of NVML; None if there is none, or nothing to ask about."""
        try:
            return None if about is None else question(about)
        except self._nvml.NVMLError:
            return None


def _has_room(path: str | os.PathLike[str]) -> bool:
    """Whether the disk of a file has a free block for this user."""
    disk = os.statvfs(path)
    return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) > 0 or not disk.f_blocks


def _memory_used() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available


# ---- what torchrun reports: its final report is the only record of a rank that died without a message


_LONGEST = 500  # characters of a line that is a message
# One entry of ChildFailedError's report (torch.distributed.elastic.multiprocessing.errors); only the needed fields are
# read.
_ENTRY = re.compile(
    r"\btime\s*:\s*(?P<time>\S+)\s*\n(?:.*\n)??"
    r".*\brank\s*:\s*(?P<rank>\d+)\s*\(.*\n"
    r".*\bexitcode\s*:\s*(?P<code>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)"
)


def failures(folder: RunFolder) -> dict[int, Failed]:
    """The failed ranks by rank: exit_code, pid, signal (its name or None), t (Unix seconds, resolution 1 s), message.

    `traceback` is the stack at the fatal signal; without one it is the last recorded stack, and `last_seen` is true.
    """
    failed = {}
    for entry in _ENTRY.finditer(folder.end_of(folder.launcher_log)):
        code, rank = int(entry["code"]), int(entry["rank"])
        log, dump = folder.log_of(rank, "stderr"), folder.end_of(folder.crash_of(rank))
        printed = folder.end_of(log) if log else ""
        fatal = dump if "Fatal Python error" in dump else ""
        # the script may have enabled faulthandler itself, which then writes to stderr
        crash = clipped(of_crash(fatal)) or of_crash(printed.rpartition("Fatal Python error")[2])
        stack = crash or clipped(str(_position(folder, rank).get("stack", "")))
        failed[rank] = Failed(
            message=(_aborted if code < 0 else last_line)(printed)[:_LONGEST],
            traceback=stack,
            beside=clipped(in_collective(fatal)),
            last_seen=bool(stack) and not crash,
            exit_code=code,
            pid=int(entry["pid"]),
            signal=signal_name(code),
            t=_seconds(entry["time"]),
        )
    return failed


def unanswered(folder: RunFolder, endpoint: str | None) -> str:
    """Why the nodes of a run did not meet at `endpoint`; empty if they did, or if there is one node."""
    said = folder.end_of(folder.launcher_log) if endpoint else ""
    if "RendezvousConnectionError" in said:
        return (
            f"nobody answers at {endpoint}; start node 0 first, and check that this host reaches it and that no"
            " firewall closes the port"
        )
    if "RendezvousTimeoutError" in said:
        return f"not all nodes have met at {endpoint} in time; start the same command on every node, each with its rank"
    return ""


def signal_name(exit_code: int) -> str | None:
    """`SIGKILL` for -9; None for an exit code without a signal."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else None
    except ValueError:
        return f"signal {-exit_code}"


def _aborted(printed: str) -> str:
    """The message of an uncaught C++ exception; empty if there was none."""
    said = re.findall(r"^ *what\(\): *(.+)$", printed, re.MULTILINE)
    return said[-1] if said else ""


def _seconds(text: str) -> float:
    try:
        return round(time.mktime(time.strptime(text, "%Y-%m-%d_%H:%M:%S")) + clock.shift(), 3)
    except ValueError:
        return clock.now()


# ---- the main loop


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
        self._sampler = Sampler(folder, self._pids, float(plan.env.get("LABKIT_HANG_AFTER", "30")))
        server = Server.of(os.environ) if plan.engine == local.ENGINE else None
        self._reports = server and Reports(server, self._note_unreported)
        self._killed_before = out_of_memory_kills()
        self._witness = ras.Witness(folder, plan.env.get(ras.ADDRESS), self._sampler.note)
        self._status = replace(
            Status.of_start(plan, started),
            agent=Who(**identity(agent.pid)),
            agent_began=lifetime.began(agent.pid),
            ranks={},
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
        processes = members(self._tag)
        self._known.update(process.pid for process in processes)
        return processes

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
        """Folds new events of the ranks incrementally, so that little is left at the end; records the ranks' pids, and
        asks NCCL's RAS service if ranks wait."""
        self._read()
        state = self._follower.state
        self._witness.look(state)
        pids = {number: rank.pid for number, rank in sorted(state.ranks.items()) if rank.pid}
        restarts = max((rank.attempt for rank in state.ranks.values()), default=0)
        if pids != self._pids or restarts != self._status.restarts:
            self._pids.update(pids)
            expected = self._status.ranks_here or state.world_size
            everyone = len(pids) >= expected and all(rank.attempt == restarts for rank in state.ranks.values())
            self._write(ranks=pids, state="running" if everyone else "starting", restarts=restarts)
        if self._reports:
            self._reports.offer(state)

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
        final = self._final(reason, exit_code, left)
        if self._reports:
            self._reports.end(self._follower.state, final.state == "finished")
            self._read()
        conclude(self._folder, self._follower.state, final)

    def _final(self, reason: _Reason | None, exit_code: int | None, left: list[psutil.Process]) -> Status:
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
            final.state, final.failures = "failed", failures(self._folder)
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
        name = signal_name(exit_code or 0)
        if name:
            return f"torchrun was terminated by {name}"
        said = last_line(self._folder.end_of(self._folder.launcher_log))[:_LONGEST]
        if self._engine != local.ENGINE:
            return said
        return unanswered(self._folder, self._endpoint) or f"torchrun exited with code {exit_code}: {said}"

    def _note_disk_full(self) -> None:
        """Adds the message to the status of the active run, once."""
        if self._status.message != DISK_FULL:
            make_room(self._folder)
            self._write(message=DISK_FULL)

    def _note_unreported(self, reason: str) -> None:
        """Records why the status of the TrainJob does not arrive; called in another thread."""
        with suppress(OSError):  # the folder was deleted, or its disk is full
            writer = Writer(self._folder.system)
            writer.write("unreported", reason=reason)
            writer.close()

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
