"""Reading files that a user named: regular files only, because a pipe would block and a device may never end. Standard
library only."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from labkit.common.arguments import shown

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
