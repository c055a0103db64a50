"""What torchrun says at its end of the ranks that failed: the only witness of a rank that died without a word."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

from labkit.launch.folder import RunFolder

# One entry of ChildFailedError's report (torch.distributed.elastic.multiprocessing.errors), read for no more than is needed.
_ENTRY = re.compile(
    r"\btime\s*:\s*(?P<time>\S+)\s*\n(?:.*\n)??"
    r".*\brank\s*:\s*(?P<rank>\d+)\s*\(.*\n"
    r".*\bexitcode\s*:\s*(?P<code>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)"
)
_TAIL = 1 << 18  # bytes at the end of a log that a report or a last word is looked for in


def failures(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """The ranks that torchrun reported, by rank: exit_code, pid, signal (its name, or None), t (unix seconds, to the second), message."""
    found = {}
    for entry in _ENTRY.finditer(tail(folder.launcher_log)):
        code = int(entry["code"])
        found[entry["rank"]] = {
            "exit_code": code,
            "pid": int(entry["pid"]),
            "signal": signal_name(code),
            "t": _seconds(entry["time"]),
            "message": _aborted(folder, int(entry["rank"])) if code < 0 else _last_word(folder, int(entry["rank"])),
        }
    return found


def signal_name(exit_code: int) -> str | None:
    """`SIGKILL` for -9; None for a code that is not a signal's."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else None
    except ValueError:
        return f"signal {-exit_code}"


def last_line(path: Path) -> str:
    """The last line of a file that is not blank; empty where there is none."""
    lines = [line.strip() for line in tail(path).splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def tail(path: Path) -> str:
    """The end of a text file; empty where it is missing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _aborted(folder: RunFolder, rank: int) -> str:
    """What a C++ exception said that nobody caught; empty where the rank died without a word."""
    path = folder.log_of(rank, "stderr")
    said = re.findall(r"^ *what\(\): *(.+)$", tail(path), re.MULTILINE) if path else []
    return said[-1][:500] if said else ""


def _last_word(folder: RunFolder, rank: int) -> str:
    path = folder.log_of(rank, "stderr")
    return last_line(path) if path else ""


def _seconds(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d_%H:%M:%S"))
    except ValueError:
        return time.time()
