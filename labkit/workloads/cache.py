"""What takes seconds to make and is the same each time is kept in the user's cache folder, which may be deleted at any time."""

import hashlib
import inspect
import os
import sys
import tempfile
from pathlib import Path

import torch

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def cached(make, *args) -> tuple[torch.Tensor, ...]:
    """The tensors of make(*args): made once, then mapped from a file that all ranks share."""
    versions = sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability()
    key = hashlib.sha256(repr((inspect.getsource(make), args, versions)).encode())
    path = Path(CACHE, "labkit", f"{make.__name__}-{key.hexdigest()}.pt")
    problem = None
    try:
        return torch.load(path, mmap=True, weights_only=True)
    except FileNotFoundError:
        pass
    except Exception as error:  # the file is damaged
        problem = error
    tensors = make(*args)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                whole = Path(folder, path.name)
                torch.save(tensors, whole)
                whole.replace(path)  # at once: no rank reads half of a file
        except Exception as error:  # the disk is full, or the folder is read-only
            problem = error
        if problem:
            print(f"cannot use the cache file {path}: {problem}", file=sys.stderr)
    return tensors
