"""Files of the user: reading regular files only, atomic writing, the cache folder, and the folder for sockets. Standard
library only."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from labkit.common.arguments import shown

# ---- reading, of regular files only: a pipe would block, and a device may never end


_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading. Links are followed. Raises `OSError`, whose `strerror` ends a sentence about `path`,
    also for a pipe, a device, a socket or a folder."""
    opened = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    except BaseException:
        os.close(opened)
        raise
    return os.fdopen(opened, "rb")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file, as `open_regular`; `OSError` also if it has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(Path(path)))
    return content


def is_folder(path: Path) -> bool:
    """Whether there is a folder; `Path.is_dir` raises `OSError` for a name that is too long."""
    return os.path.isdir(path)  # noqa: PTH112


def is_same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to the same file or folder; False if one of them does not exist."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):  # a null character in a path
        return False


def read_json_object(what: str, path: Path, most: int, must: str, in_folder: str = "") -> dict[str, Any]:
    """The JSON object in a small file of the user, or in the file `in_folder` of a folder. Raises `ValueError` with one
    sentence: `what` is the name of the argument, `must` says what the object must be."""
    named = f"{what} {shown(os.fspath(path))}"
    try:
        if in_folder and is_folder(path):
            return read_json_object(what, path / in_folder, most, must)
        if path.exists() and not path.is_file():  # a pipe would block
            raise ValueError(f"{named} must be a file")
        with open_regular(path) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{named} cannot be read: {error.strerror}") from None
    try:
        value = json.loads(content) if len(content) <= most else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{named} must be a JSON object {must}")
    return value


# ---- writing


MARK = "Written by labkit"  # near the beginning or the end of every output, which may then be written again
_NEAR = 512  # bytes


def write_atomically(path: Path, data: str | bytes, private: bool = False, errors: str = "strict") -> None:
    """Writes `data` to `path`: a reader sees either the old file or the complete new one, never a part.

    `private`: only the owner can read the file; otherwise its permissions are those of any new file. `errors` is as in
    `open`, for text. If anything is raised (`OSError`, `UnicodeEncodeError`), the old file stays.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode(errors=errors) if isinstance(data, str) else data)
        if not private:
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)  # mkstemp creates private files
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_output(path: Path, data: str | bytes, private: bool = False) -> None:
    """Writes a file that a user named, as `write_atomically`; `data` contains `MARK`. A link is followed.

    Raises `OSError`, whose `strerror` ends a sentence about `path`, also if there is anything that the lab did not
    write.
    """
    encoded = data.encode(errors="replace") if isinstance(data, str) else data
    if not _has_mark(encoded[:_NEAR] + encoded[-_NEAR:]):
        raise ValueError(f"{path.name} has no mark, so it could not be written again")
    target = Path(os.path.realpath(path))
    try:
        require_replaceable(target)
        write_atomically(target, encoded, private)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def require_replaceable(path: Path) -> None:
    """Raises `OSError` if there is anything at `path` but a file that the lab wrote."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "it exists and is no regular file; name another file")
    with path.open("rb") as file:
        begin = file.read(_NEAR)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _NEAR))
        if not _has_mark(begin + file.read(_NEAR)):
            raise FileExistsError(
                errno.EEXIST, "it exists and was not written by labkit; move it, or name another file"
            )


def _has_mark(data: bytes) -> bool:
    return MARK.encode() in data


# ---- the user's cache folder, which may be deleted at any time


def user_cache() -> Path:
    """The folder for the caches of all programs: `XDG_CACHE_HOME`, or `~/.cache`."""
    # expanduser of pathlib raises for a user without a home
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111


# ---- the user's own folder for sockets


_LONGEST = 50  # bytes of the folder that contains it: the path of a Unix socket has at most 107


class NotOurs(OSError):
    """A folder or a process belongs to another user."""


def runtime_folder() -> Path:
    """`labkit-UID` in XDG_RUNTIME_DIR, or in /tmp if that is not set or too long. It may not exist yet."""
    place = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(place if 0 < len(os.fsencode(place)) <= _LONGEST else "/tmp", f"labkit-{os.getuid()}")


def check_folder(folder: Path) -> None:
    """Raises `NotOurs` unless only this user owns and can enter the folder, and `FileNotFoundError` if it does not
    exist.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise NotOurs(f"{folder} must be a folder of this user with mode 0700")


def create(folder: Path) -> None:
    """Creates the folder unless it exists. Raises `OSError`, which is `NotOurs` if others can use the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)
