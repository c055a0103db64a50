"""Ends a rank's process as python does, but without tearing down the interpreter."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from contextlib import suppress

exit_process = os._exit  # Python's own, before the probe wraps it


def leave(code: int) -> None:
    """Does what python does at exit, as far as a script can notice, and exits.

    The interpreter and libraries are not torn down, because live threads of torch's C++ libraries can then abort the
    process after a successful training ("terminate called without an active exception").
    """
    for last in (threading._shutdown, atexit._run_exitfuncs, _close_files, _flush):
        try:
            last()
        except BaseException:
            with suppress(BaseException):
                traceback.print_exc()
    exit_process(code)


def _close_files() -> None:
    """Closes files that the script left open for writing, in the order of their layers: text, compression, bytes."""
    standard = {id(stream) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    standard |= {
        id(getattr(stream, "buffer", None)) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    }
    files = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), (io.TextIOBase, io.BufferedIOBase)) and id(thing) not in standard
    ]
    for file in sorted(
        files,
        key=lambda file: (
            not isinstance(file, io.TextIOBase),
            isinstance(file, (io.BufferedWriter, io.BufferedRandom)),
        ),
    ):
        with suppress(Exception):
            if not file.closed and file.writable():
                file.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # output of C libraries
