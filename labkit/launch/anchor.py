"""Anchor: holds a run folder open, so that its supervisor notices when the folder is deleted or moved while the run is
under way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from labkit.record.folder import RunFolder

_F_GETPATH = 50  # macOS: the path of an open file
_PATH_LIMIT = 1024


class Anchor:
    """The folder of one run, identified by device and inode. The open descriptor prevents reuse of the inode."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._file = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._stat = os.fstat(self._file)

    def lost(self) -> str:
        """What happened to the folder: `deleted`, `moved to …` or `emptied`; empty while it is in place."""
        if self._is_at(self._folder.path):
            return "" if self._folder.spec.exists() else "emptied"
        path = self.path()
        return "deleted" if path is None else f"moved to {path}"

    def path(self) -> Path | None:
        """The current path of the folder; None if it was deleted or the system cannot tell."""
        path = self._folder.path if self._is_at(self._folder.path) else self._path_by_kernel()
        return path if path is not None and self._is_at(path) else None

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), self._stat)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # stat failed for another reason: assume that nothing changed

    def _path_by_kernel(self) -> Path | None:
        if sys.platform == "linux":
            return Path(f"/proc/self/fd/{self._file}").readlink()
        if sys.platform == "darwin":
            import fcntl

            return Path(os.fsdecode(fcntl.fcntl(self._file, _F_GETPATH, bytes(_PATH_LIMIT)).rstrip(b"\0")))
        return None
