"""Appending to files on a disk that may be full, and disk space reserved for data that must be written in any case.

Standard library only: this runs inside every rank.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a write when the disk, or the user's quota, is full


class Appender:
    """Appends complete lines to one file, each in one write, so that readers see complete lines and a kill loses none.

    A line that a full disk accepted only in part is completed before anything else is written, so that the file never
    has a broken line in its middle. Threads may share an appender. With `lines=False` it appends records without
    newlines.
    """

    def __init__(self, path: str | os.PathLike[str], lines: bool = True):
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._lock = (
            threading.RLock()
        )  # reentrant: a signal handler of the script may log while a line is being written
        self._rest = b"" if not lines or self._ends_whole() else b"\n"

    def append(self, line: bytes) -> None:
        """Appends one line. Raises `OSError` if nothing of it could be written; the line is then lost."""
        with self._lock:
            self._flush()
            self._rest = line
            try:
                self._flush()
            except OSError:
                if len(self._rest) < len(line):
                    return  # the rest is written before the next line
                self._rest = b""
                raise

    def _flush(self) -> None:
        while self._rest:
            self._rest = self._rest[os.write(self._file, self._rest) :]

    def _ends_whole(self) -> bool:
        """Whether the file ends with a complete line; a process killed on a full disk leaves a partial one."""
        try:
            size = os.fstat(self._file).st_size
            return size == 0 or os.pread(self._file, 1, size - 1) == b"\n"
        except OSError:
            return True  # the file cannot be read

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


class Reserve:
    """A file that reserves disk space, released when the disk is full and something important must be written."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)

    @property
    def size(self) -> int:
        """The reserved bytes."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def make(self, size: int) -> None:
        """Reserves `size` bytes. Raises `OSError` if the disk does not have them."""
        self._path.touch(mode=0o600)
        self._path.write_bytes(os.urandom(size))  # random, because some file systems do not store zeros

    def shrink(self, size: int) -> None:
        """Releases all but `size` bytes."""
        if self.size > size:
            os.truncate(self._path, size)

    def release(self) -> None:
        """Releases all of it."""
        self._path.unlink(missing_ok=True)
