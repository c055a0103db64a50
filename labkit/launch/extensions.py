"""The lock of PyTorch's C++ extensions (`torch.utils.cpp_extension`), which a package such as DeepSpeed compiles at its
first use.

One process compiles and holds the lock, a file that it keeps open and removes at the end; all others wait until the
file is gone. If that process is killed, the file stays, and every later run waits forever.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import psutil

from labkit.common.cache import user_cache


def abandoned_lock() -> str:
    """A sentence that names a lock that no process holds, and the fix; empty if there is none."""
    locks = _locks()
    held = {file.path for process in psutil.process_iter() for file in _open_files(process)} if locks else set()
    for lock in locks:
        if str(lock) not in held and lock.exists():  # else it was released just now
            return (
                f"{lock} was left by a run that was killed while it compiled an extension, and this run would wait for "
                f"its removal forever; delete it and start again: rm {shlex.quote(str(lock))}"
            )
    return ""


def _locks() -> list[Path]:
    """The lock of each extension, where torch stores them."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return sorted(Path(chosen).resolve().glob("*/lock"))
    return sorted((user_cache().resolve() / "torch_extensions").glob("*/*/lock"))


def _open_files(process: psutil.Process) -> list:
    """The files that a process has open; empty for a process of another user, or one that has ended."""
    try:
        return process.open_files()
    except (psutil.Error, OSError):
        return []
