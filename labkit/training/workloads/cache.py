"""Caches data that takes seconds to generate in the user's cache folder, which may be deleted at any time."""

import hashlib
import inspect
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def cached(make, *args) -> tuple[torch.Tensor, ...]:
    """The tensors of make(*args), computed once and then memory-mapped by all ranks."""
    key = repr((inspect.getsource(make), args, torch.__version__))
    path = Path(CACHE, "labkit", hashlib.sha256(key.encode()).hexdigest() + ".pt")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:
                torch.save(make(*args), Path(folder, "new"))
                Path(folder, "new").replace(path)  # atomic: no rank reads half a file
        return torch.load(path, mmap=True, weights_only=True)
    except Exception as error:
        print(f"cache file {path} cannot be used: {error}")
        return make(*args)
