"""Caches data that takes seconds to generate in the user's cache folder, which may be deleted at any time."""

import hashlib
import inspect
import os
from tempfile import TemporaryDirectory

import torch

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def cached(make, *args) -> tuple[torch.Tensor, ...]:
    """The tensors of make(*args), computed once and then memory-mapped by all ranks."""
    key = repr((inspect.getsource(make), args, torch.__version__))
    path = f"{CACHE}/labkit/{hashlib.sha256(key.encode()).hexdigest()}.pt"
    try:
        if not os.path.exists(path):
            os.makedirs(f"{CACHE}/labkit", exist_ok=True)
            with TemporaryDirectory(dir=f"{CACHE}/labkit") as folder:
                torch.save(make(*args), f"{folder}/new")
                os.replace(f"{folder}/new", path)  # atomic: no rank reads half a file
        return torch.load(path, mmap=True, weights_only=True)
    except Exception as error:
        print(f"cache file {path} cannot be used (delete it if damaged): {error}")
        return make(*args)
