"""Parses torchrun's final report of failed ranks, the only record of a rank that died without a message."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from labkit.launch.silence import crash_stack, last_position, stack_beside
from labkit.record import clock
from labkit.record.documents import Failed
from labkit.record.folder import RunFolder
from labkit.record.stacks import of_crash

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
    found = {}
    for entry in _ENTRY.finditer(folder.end_of(folder.launcher_log)):
        code, rank = int(entry["code"]), int(entry["rank"])
        crash = crash_stack(folder, rank) or _printed_crash(folder, rank)
        stack = crash or last_position(folder, rank)
        found[rank] = Failed(
            message=(_aborted if code < 0 else _last_stderr_line)(folder, rank),
            traceback=stack,
            beside=stack_beside(folder, rank),
            last_seen=bool(stack) and not crash,
            exit_code=code,
            pid=int(entry["pid"]),
            signal=signal_name(code),
            t=_seconds(entry["time"]),
        )
    return found


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


def _printed_crash(folder: RunFolder, rank: int) -> str:
    """The stack of a fatal signal on stderr, which is there if the script enabled faulthandler itself."""
    path = folder.log_of(rank, "stderr")
    printed = folder.end_of(path).rpartition("Fatal Python error")[2] if path else ""
    return of_crash(printed)


def signal_name(exit_code: int) -> str | None:
    """`SIGKILL` for -9; None for an exit code without a signal."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else None
    except ValueError:
        return f"signal {-exit_code}"


def last_line(folder: RunFolder, path: Path) -> str:
    """The last line of a log that is not blank; empty if there is none."""
    lines = [line.strip() for line in folder.end_of(path).splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _aborted(folder: RunFolder, rank: int) -> str:
    """The message of an uncaught C++ exception; empty if there was none."""
    path = folder.log_of(rank, "stderr")
    said = re.findall(r"^ *what\(\): *(.+)$", folder.end_of(path), re.MULTILINE) if path else []
    return said[-1][:500] if said else ""


def _last_stderr_line(folder: RunFolder, rank: int) -> str:
    path = folder.log_of(rank, "stderr")
    return last_line(folder, path) if path else ""


def _seconds(text: str) -> float:
    try:
        return round(time.mktime(time.strptime(text, "%Y-%m-%d_%H:%M:%S")) + clock.shift(), 3)
    except ValueError:
        return clock.now()
