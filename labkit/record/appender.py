"""Appending to files on a disk that may be full, and room on it that is reserved for what must be written all the same.

Standard library only: this runs inside every rank.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # what writing fails with when the disk, or the user's share of it, is full


class Appender:
    """Appends whole lines to one file, each in one write, so that a reader sees whole lines and a kill loses none.

    A line of which a full disk took only a part is completed before anything else is written, so that the file never has a broken line
    in its middle. Threads may share an appender. With `lines=False` it appends records, which do not end with a newline.
    """

    def __init__(self, path: str | os.PathLike[str], lines: bool = True):
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._lock = threading.RLock()  # reentrant: a signal handler of the script may log while a line is being written
        self._rest = b"" if not lines or self._ends_whole() else b"\n"

    def append(self, line: bytes) -> None:
        """Appends one line. Raises `OSError` if the disk takes nothing of it; then it is lost."""
        with self._lock:
            self._flush()
            self._rest = line
            try:
                self._flush()
            except OSError:
                if len(self._rest) < len(line):
                    return  # the rest of it comes before the next line
                self._rest = b""
                raise

    def _flush(self) -> None:
        while self._rest:
            self._rest = self._rest[os.write(self._file, self._rest) :]

    def _ends_whole(self) -> bool:
        """Whether the file ends with a whole line; a process that was killed on a full disk leaves part of one."""
        try:
            size = os.fstat(self._file).st_size
            return size == 0 or os.pread(self._file, 1, size - 1) == b"\n"
        except OSError:
            return True  # not a file that can be read

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


class Reserve:
    """A file that occupies room on the disk, to be given back when the disk is full and something important must be written."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)

    @property
    def size(self) -> int:
        """Bytes that it occupies."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def make(self, size: int) -> None:
        """Occupies `size` bytes. Raises `OSError` if they are not there."""
        self._path.touch(mode=0o600)
        self._path.write_bytes(os.urandom(size))  # random, since some file systems store zeros in no room

    def shrink(self, size: int) -> None:
        """Gives back what is above `size` bytes."""
        if self.size > size:
            os.truncate(self._path, size)

    def release(self) -> None:
        """Gives back all of it."""
        self._path.unlink(missing_ok=True)
