"""What several commands share: how a command refuses, what it prints on, and the runs that it speaks of."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.launch.status import current
from labkit.state import OVER
from labkit.summary import summarise

WIDE = 160  # columns of a table that is written to a file
_YOUNG = 60.0  # seconds in which a folder without a status may be that of a run which is just being made


class Refused(Exception):
    """A command that cannot do what it was asked: one sentence, and the exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def console(args: argparse.Namespace, width: int | None = None) -> Console:
    """Where people read: stdout, or stderr where stdout is for a program; `width` is for where there is no terminal to fit."""
    stream = sys.stderr if args.json else sys.stdout
    return Console(stderr=args.json, highlight=False, width=None if stream.isatty() else width)


def find(name: str) -> RunFolder:
    try:
        return RunFolder.find(name)
    except LookupError as error:
        raise Refused(error.args[0]) from None


def summary(folder: RunFolder) -> dict[str, Any]:
    """The figures as they were written when the run was over; of one that is not, as they are now."""
    recorded = RunFolder.read_json(folder.summary)
    if recorded:
        return recorded
    follower = Follower(folder)
    follower.poll()
    return summarise(follower.state, folder.name)


def is_over(folder: RunFolder) -> bool:
    status = current(folder)
    if status:
        return status.get("state") in OVER
    return time.time() - folder.path.stat().st_mtime > _YOUNG


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking off whatever is being read or drawn."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
