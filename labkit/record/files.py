"""Opening files of an untrusted folder: only below that folder, only regular files, and only up to a size limit.

Symbolic links below the folder are refused, wherever they lead, and so are FIFOs, sockets and devices. The path of the
folder itself is chosen by the user and may contain links. Each component is opened relative to its parent, so replacing
one by a link in the meantime has no effect. If the system has no `openat` (Windows), components are compared before and
after opening. A hard link cannot be distinguished from the file; creating one requires write access to the same file
system.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

ENTRIES = 10_000  # names read from one directory
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO without a writer would block the open
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_JUNCTION = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1)  # a directory of Windows that leads elsewhere
_HAS_OPENAT = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


class NotPlain(OSError):
    """A path that is not a regular file, or leads through something that is not a directory; the message is one
    clause."""


def open_below(root: Path, path: Path) -> BinaryIO:
    """Opens the regular file `path`, which lies below `root`, for reading.

    Raises `FileNotFoundError` if there is no such file, `NotPlain` for a link, FIFO, device, socket or directory, and
    `OSError` as `open` does.
    """
    *parents, name = _parts(root, path)
    opened = _openat(root, parents, name) if _HAS_OPENAT else _compared(root, parents, name)
    try:
        _require_regular(os.fstat(opened), name)
    except BaseException:
        os.close(opened)
        raise
    return os.fdopen(opened, "rb")


def read_below(root: Path, path: Path, limit: int) -> bytes:
    """The content of a file, opened by `open_below`. Raises `NotPlain` if it has more than `limit` bytes."""
    with open_below(root, path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise NotPlain(f"{path.name} is larger than {limit:,} bytes")
    return content


def names_below(root: Path, path: Path) -> list[str]:
    """The sorted names in the directory `path`, at most `ENTRIES`; none if it is missing or not a directory."""
    try:
        with _directory(root, path) as place, os.scandir(place) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(ENTRIES)))
    except (OSError, ValueError):
        return []


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory or a regular file, not a link."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _parts(root: Path, path: Path) -> tuple[str, ...]:
    parts = path.relative_to(root).parts
    if not parts or ".." in parts or any("\0" in part for part in parts):
        raise NotPlain(f"{path} does not lie below {root}")
    return parts


def _require_regular(found: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = (
            (stat.S_ISLNK, "symbolic link"),
            (stat.S_ISFIFO, "FIFO"),
            (stat.S_ISDIR, "directory"),
            (stat.S_ISSOCK, "socket"),
        )
        kind = next((words for is_kind, words in kinds if is_kind(found.st_mode)), "device")
        raise NotPlain(f"{name} is a {kind}, not a regular file")


def _openat(root: Path, parents: list[str], name: str) -> int:
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | getattr(os, "O_CLOEXEC", 0))
    try:
        for parent in parents:
            above, place = place, _step(place, parent, _DIRECTORY)
            os.close(above)
        return _step(place, name, _FILE)
    finally:
        os.close(place)


def _step(place: int, name: str, flags: int) -> int:
    """Opens one component; errors caused by O_NOFOLLOW, O_DIRECTORY or a socket become a `NotPlain` that names the
    reason.
    """
    try:
        return os.open(name, flags, dir_fd=place)
    except FileNotFoundError:
        raise
    except OSError:
        mode = os.stat(name, dir_fd=place, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise NotPlain(f"{name} is a symbolic link, which is not followed") from None
        if stat.S_ISSOCK(mode) or (flags == _DIRECTORY and not stat.S_ISDIR(mode)):
            raise NotPlain(f"{name} is not a {'directory' if flags == _DIRECTORY else 'regular file'}") from None
        raise


def _compared(root: Path, parents: list[str], name: str) -> int:
    """Without `openat`: no component is a link before or after opening, and the opened file is the one that was
    checked.
    """
    path = root.joinpath(*parents, name)
    before = _look(root, parents, name)
    _require_regular(before[-1], name)  # before opening: a device may act on being opened
    opened = os.open(path, _FILE)
    after = [*_look(root, parents, name)[:-1], os.fstat(opened)]
    if any((status.st_dev, status.st_ino) != (other.st_dev, other.st_ino) for status, other in zip(before, after)):
        os.close(opened)
        raise NotPlain(f"{name} was replaced while it was opened")
    return opened


def _look(root: Path, parents: list[str], name: str) -> list[os.stat_result]:
    found, path = [], root
    for part in (*parents, name):
        path = path / part
        found.append(os.lstat(path))
        if stat.S_ISLNK(found[-1].st_mode) or getattr(found[-1], "st_reparse_tag", 0) == _JUNCTION:
            raise NotPlain(f"{part} is a symbolic link, which is not followed")
    return found


@contextmanager
def _directory(root: Path, path: Path) -> Iterator[int | str]:
    """What `os.scandir` takes for the directory `path` below `root`, or `root` itself."""
    if path == root:
        yield str(root)
        return
    parts = list(_parts(root, path))
    if not _HAS_OPENAT or os.scandir not in os.supports_fd:
        _look(root, parts[:-1], parts[-1])
        yield str(path)
        return
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | getattr(os, "O_CLOEXEC", 0))
    try:
        for part in parts:
            above, opened = opened, _step(opened, part, _DIRECTORY)
            os.close(above)
        yield opened
    finally:
        with suppress(OSError):
            os.close(opened)
