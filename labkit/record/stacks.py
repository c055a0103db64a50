"""Stacks and error texts of Python, faulthandler and torchrun: finding the script's line in them, and limiting their
length; and waiting until the other threads of a process are at rest.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

TEXT_LIMIT = 1 << 14  # characters of a traceback, or of any other text of an event
MESSAGE_LIMIT = 1 << 12  # characters of an error's message, which findings search with regular expressions

_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:,? in (?P<function>\S+))?')
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) .*\(most recent call first\):$", re.MULTILINE)
# parts of paths that do not belong to a script
LIBRARIES = ("site-packages", "/lib/python", "/labkit/probe/", "/labkit/record/")
# frames of this file, and those outside of it, are not the script's
RUNNER = str(Path(__file__).parents[1] / "probe" / "runner.py")
_NAMED = re.compile(r"^(?P<type>(?:\w+\.)*\w*(?:Error|Exception|Warning|Interrupt|Exit)): (?P<message>.*)$", re.DOTALL)


def clipped(text: str, limit: int = TEXT_LIMIT) -> str:
    """A text of about `limit` characters at most: its beginning and its end, and the number of characters left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def place(stack: str | None) -> str:
    """The innermost line of a stack that is not in a library: `train.py:139 in step`; empty if there is none.

    A SyntaxError has a line but no function: `train.py:3`.
    """
    frames = [frame for frame in _FRAME.finditer(stack or "") if not any(part in frame["file"] for part in LIBRARIES)]
    if not frames:
        return ""
    file = frames[-1]["file"].replace("\\", "/").rpartition("/")[2]
    return f"{file}:{frames[-1]['line']}" + (f" in {frames[-1]['function']}" if frames[-1]["function"] else "")


@contextmanager
def uncollected() -> Iterator[None]:
    """Runs its block without the collector, which is turned on again afterwards if it was on."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def frame_of(thread: threading.Thread) -> FrameType | None:
    """The current frame of a thread; None if it has ended.

    Before Python 3.12, a garbage collection inside `sys._current_frames` can block the process for ever with the GIL
    held, for example when it frees a `threading.local` (python/cpython#106883), so there is none meanwhile.
    """
    with uncollected():
        return sys._current_frames().get(thread.ident or 0)


def of_script(frame: FrameType | None = None) -> list[traceback.FrameSummary]:
    """The script's frames outside of `frame` (default: this call), the outermost first."""
    frames = traceback.extract_stack(frame or sys._getframe(1))
    begins = max(
        (index + 1 for index, call in enumerate(frames) if call.filename == RUNNER and call.name == "_run"), default=0
    )
    return [call for call in frames[begins:] if not call.filename.startswith((str(Path(RUNNER).parent), "<frozen"))]


def of_crash(dump: str) -> str:
    """The script's stack in a dump of faulthandler, innermost frame last, as in a traceback; empty if there is none.

    It is that of the thread that crashed, or else of the main thread, which faulthandler writes last. Of several dumps,
    the last counts.
    """
    threads = list(_THREAD.finditer(dump))
    if not threads:
        return ""
    last_crash = next((thread for thread in reversed(threads) if thread["current"] == "Current thread"), None)
    chosen = last_crash or threads[-1]
    end = next((thread.start() for thread in threads if thread.start() > chosen.start()), len(dump))
    frames = []
    for line in dump[chosen.end() : end].splitlines()[1:]:
        if not line.startswith("  File ") or f'"{RUNNER}"' in line:
            break
        frames.append(line)
    return "\n".join(reversed(frames))


def in_collective(dump: str) -> str:
    """The stack of a thread that Python started and that calls a collective in a dump of faulthandler; empty if there
    is none."""
    threads = re.split(r"^(?:Current thread|Thread) .*\n", dump, flags=re.MULTILINE)[1:]
    stacks = (text for text in threads if "_bootstrap" in text and "/distributed/distributed_c10d.py" in text)
    return "\n".join(reversed(next(stacks, "").strip().splitlines()))


def error_in(line: str) -> tuple[str, str] | None:
    """Type and message of the last line of a traceback, such as `NameError: name 'x' is not defined`; None for any
    other line."""
    named = _NAMED.match(line.strip())
    return (named["type"].rpartition(".")[2], named["message"]) if named else None


# ---- threads at rest


_UNREST = 0.5  # maximum seconds to wait
_LOOKS = 5  # consecutive checks, 1 ms apart, in which all threads sleep: a thread that was just woken shows up late
_MOMENT = 0.02  # seconds to wait if the state of threads is unknown


def wait_for_other_threads() -> None:
    """Waits up to `_UNREST` seconds until no other thread of this process runs.

    A gloo thread first wakes the thread that waits for its operation, and then notes its end and releases its tensors,
    on a busy machine much later. If the system does not report the state of threads, it sleeps for `_MOMENT` seconds.
    """
    tasks, own, last = Path("/proc/self/task"), str(threading.get_native_id()), time.monotonic() + _UNREST
    if not tasks.is_dir():
        time.sleep(_MOMENT)
        return
    at_rest = 0
    while at_rest < _LOOKS and time.monotonic() < last:
        at_rest = at_rest + 1 if not any(_runs(task) for task in tasks.iterdir() if task.name != own) else 0
        time.sleep(0.001)


def _runs(task: Path) -> bool:
    """Whether a thread is running or runnable."""
    try:
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].startswith("R")
    except OSError:
        return False  # it has just ended
