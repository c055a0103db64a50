"""Writing of files: atomically, and only over what the lab wrote itself. Standard library only, because the setup of
the environment uses it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

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
        _require_replaceable(target)
        write_atomically(target, encoded, private)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _require_replaceable(path: Path) -> None:
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
