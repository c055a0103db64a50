"""Atomic writing of files. Standard library only, because the setup of the environment uses it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str, private: bool = False, errors: str = "strict") -> None:
    """Writes `text` to `path`: a reader sees either the old file or the complete new one, never a part.

    `private`: only the owner can read the file; otherwise its permissions are those of any new file. `errors` is as in
    `open`. If anything is raised (`OSError`, `UnicodeEncodeError`), the old file stays.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=errors) as file:
            file.write(text)
        if not private:
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)  # mkstemp creates private files
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
