"""Helpers of several commands: refusals, the console, and finding runs and the places of files."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.common.text import visible_line
from labkit.frontends.console import Console
from labkit.record.folder import RunFolder

WIDE = 160  # columns of a table that is written to a file


class Refused(Exception):
    """A command cannot be executed: one sentence, and the exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


@contextmanager
def refusing(*errors: type[Exception], code: int = 2) -> Iterator[None]:
    """Within this context, such an error becomes a refusal with its message."""
    try:
        yield
    except errors as error:
        raise Refused(error.args[0] if isinstance(error, LookupError) else str(error), code) from None


@contextmanager
def refusing_files(verb: str, otherwise: object = "", code: int = 2) -> Iterator[None]:
    """Within this context, an error of the file system is a refusal that names the file, or else `otherwise`, and says
    what it cannot be: `written`, `copied`."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{error.filename or otherwise} cannot be {verb}: {error.strerror}", code) from None


def file_to_write(given: str | None, default: str) -> Path:
    """The file of -o, or the default."""
    path = Path(given or default)
    if os.path.isdir(path):  # noqa: PTH112 a name that is too long is no folder
        raise Refused(f"{path} is a folder; give the name of the file with -o")
    return path


def console(args: argparse.Namespace, width: int | None = None) -> Console:
    """The console for output that people read: stdout, or stderr with --json; `width` applies if it is not a
    terminal."""
    stream = sys.stderr if args.json else sys.stdout
    return Console(stderr=args.json, width=None if stream.isatty() else width)


def say(*lines: str) -> None:
    """Prints lines for people on stdout, with control characters escaped. Commands call `print` only for JSON."""
    for line in lines:
        print(visible_line(line))


def find(name: str) -> RunFolder:
    """The run called `name`; `Refused` with exit code 2 if there is none, or 1 if it cannot be read."""
    with refusing(LookupError):
        folder = RunFolder.find(name)
    folder.require_readable()
    return folder


def find_followed(name: str) -> RunFolder:
    """The run called `name` as `find`; a submitted job that has lost its supervisor is followed again."""
    from labkit.launch.job import LaunchError
    from labkit.launch.schedulers import follow_again

    folder = find(name)
    with refusing(LaunchError, OSError, code=1):
        follow_again(folder)
    return folder


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Within this context, Ctrl-C and SIGTERM set the event instead of ending the process."""
    interrupted = threading.Event()
    ends = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: interrupted.set()) for number in ends}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
