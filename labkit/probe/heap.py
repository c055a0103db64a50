"""Returns memory that was freed to the system. Standard library only.

glibc returns by itself only what is free at the end of its heap, and keeps the rest for later. What a profile takes and
frees lies between blocks that are still in use, so a rank would grow with most of its first hundreds of profiles.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_memory() -> None:
    """Returns all free pages of the heap; does nothing with a C library other than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
