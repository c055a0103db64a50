"""A generated script as a module, and the data that it would load."""

from __future__ import annotations

import linecache
import sys
import types
from typing import Any

import torch
from torch.utils.data import TensorDataset

_NAME = "train"


def load(path: str, source: str) -> Any:
    """The module of a script, which need not exist as a file; `inspect` finds its source all the same."""
    script = types.ModuleType(_NAME)
    script.__file__ = path
    sys.modules[_NAME] = script
    sys.argv = [path]
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), script.__dict__)
    return script


def batch(script: Any, sample: Any, count: int) -> TensorDataset:
    """`count` samples of shape `sample`, with the shapes of the script's own data set, which no device holds."""
    if hasattr(script, "windows"):
        return script.windows(torch.zeros(sample[0] + count + 1, dtype=torch.int64), count)
    return TensorDataset(torch.zeros(count, *sample), torch.zeros(count, dtype=torch.int64))
