"""The memory that a rank keeps, and what it gives back."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other C libraries decide by themselves")

FRAGMENTED = """
import ctypes, resource
from labkit.probe.memory import give_back_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
blocks = [libc.malloc(20_000) for _ in range(2_000)]
for block in blocks:
    ctypes.memset(block, 1, 20_000)
for block in blocks[:-1]:
    libc.free(block)
held = resident()
give_back_memory()
print(held - resident())
"""
TRAINING = """
import resource, sys
from labkit.probe.memory import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
for step in range(20):
    activations = [b"x" * (12 << 20) for _ in range(3)]
    del activations
    if step == 9:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_rank_gives_back_memory_that_is_free_below_a_block_in_use():
    assert printed(FRAGMENTED) > 30e6, "of 40 MB that were freed"


def test_memory_that_a_step_frees_is_there_for_the_next_one():
    """Three blocks in each of ten steps, of together 9,216 pages of 4 KiB."""
    assert printed(TRAINING, "kept") < 1_000 < 10_000 < printed(TRAINING, "returned")


def printed(code: str, *arguments: str) -> int:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)
