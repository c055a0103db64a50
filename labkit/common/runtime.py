"""The user's own folder for sockets: mode 0700, on this machine, and short enough for the path of a Unix socket."""

from __future__ import annotations

import os
import stat
from pathlib import Path

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
