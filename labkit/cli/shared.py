"""What several commands share: how a command refuses, what it prints on, and the runs that it speaks of."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.common.text import visible_line
from labkit.frontends.console import Console
from labkit.record.folder import RunFolder

WIDE = 160  # columns of a table that is written to a file


class Refused(Exception):
    """A command that cannot do what it was asked: one sentence, and the exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def console(args: argparse.Namespace, width: int | None = None) -> Console:
    """Where people read: stdout, or stderr where stdout is for a program; `width` is for where there is no terminal to fit."""
    stream = sys.stderr if args.json else sys.stdout
    return Console(stderr=args.json, width=None if stream.isatty() else width)


def say(*lines: str) -> None:
    """Prints lines for people on stdout. No command calls `print` for anything but JSON: names and paths may come from anybody."""
    for line in lines:
        print(visible_line(line))


def find(name: str) -> RunFolder:
    """The run that `name` names; `Refused` if there is none (2), or if it cannot be read (1)."""
    try:
        folder = RunFolder.find(name)
    except LookupError as error:
        raise Refused(error.args[0]) from None
    folder.require_readable()
    return folder


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking off whatever is being read or drawn."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
