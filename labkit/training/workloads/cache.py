"""Caches data that takes seconds to generate in the user's cache folder, which may be deleted at any time."""

import hashlib
import inspect
import os
import sys
from pathlib import Path

import torch

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def cached(make, *args) -> tuple[torch.Tensor, ...]:
    """The tensors of make(*args), computed once and then memory-mapped by all ranks."""
    key = repr((inspect.getsource(make), args, sys.version, torch.__version__))
    path = Path(CACHE, "labkit", hashlib.sha256(key.encode()).hexdigest() + ".pt")
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return torch.load(path, mmap=True, weights_only=True)
    except OSError:
        pass  # not cached yet
    except Exception as error:
        if writes:
            print(f"cache file {path} is damaged: {error}", file=sys.stderr)
    tensors, temporary = make(*args), path.with_suffix(f".{os.getpid()}")
    try:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(tensors, temporary)
            temporary.replace(path)  # atomic: no rank reads a partial file
    except Exception as error:
        print(f"cache file {path} cannot be written: {error}", file=sys.stderr)
        if temporary.exists():
            temporary.unlink()
    return tensors
