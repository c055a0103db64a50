"""What the C library does with memory that was freed. Standard library only.

glibc returns to the system what is free at the end of its heap, and keeps the rest for later. What a profile takes and
frees lies between blocks that are still in use, so a rank would grow with most of its first hundreds of profiles.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_LARGEST = (32 << 20) - (64 << 10)  # bytes; with what glibc adds, less than its DEFAULT_MMAP_THRESHOLD_MAX


def keep_memory() -> None:
    """From now on, blocks of up to 32 MiB come from the heap, and glibc keeps up to 64 MiB at its end. Does nothing
    with a C library other than glibc.

    glibc raises both limits when a large block is freed, which would happen in one rank and not in another, by chance.
    Before that, each step takes the memory of its activations from the system anew: on the CNN, 9,000 page faults,
    which make a step of 80 ms 15 ms longer.
    """
    if _of_glibc("malloc_trim"):
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.free(ctypes.c_void_p(library.malloc(ctypes.c_size_t(_LARGEST))))


def give_back_memory() -> None:
    """Returns all free pages of the heap; does nothing with a C library other than glibc."""
    trim = _of_glibc("malloc_trim")
    if trim:
        trim(ctypes.c_size_t(0))


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
