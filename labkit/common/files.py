"""Files of the user: atomic writing, the cache folder, and the folder for sockets. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

# ---- writing of files


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
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise NotOurs(f"{folder} must be a folder of this user with mode 0700")


def create(folder: Path) -> None:
    """Creates the folder unless it exists. Raises `OSError`, which is `NotOurs` if others can use the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)
