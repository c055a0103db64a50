"""labkit: pick a strategy, write out the script, run it under torchrun, watch it live.

The public names are loaded when they are first asked for: importing this package loads nothing heavy and never touches CUDA.
Old Pythons must be able to read this file and `__main__.py`, which tells them so.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Lab": "labkit.panel",
    "Run": "labkit.api",
    "Spec": "labkit.spec",
    "SpecError": "labkit.spec",
    "compare": "labkit.comparison",
    "diff_scripts": "labkit.script",
    "run": "labkit.api",
    "show": "labkit.api",
    "write_script": "labkit.script",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
