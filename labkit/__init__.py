"""labkit: choose a strategy, generate its training script, run it under torchrun, and watch it live.

Public names are imported on first access: importing this package loads no heavy dependency and never initializes CUDA.
This file and `__main__.py` must parse on old versions of Python, because `__main__.py` prints the error message for
them.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # no function may have the name of a subpackage: importing the subpackage would replace the function
    "Lab": "labkit.frontends.panel.lab",
    "Run": "labkit.runs.handle",
    "Spec": "labkit.plan.spec",
    "SpecError": "labkit.plan.spec",
    "advise": "labkit.api",
    "atlas": "labkit.api",
    "check": "labkit.course.exercises",
    "classroom": "labkit.frontends.panel.class_view",
    "compare": "labkit.api",
    "diff_scripts": "labkit.figures.code",
    "excerpt": "labkit.figures.code",
    "explain": "labkit.api",
    "guess": "labkit.runs.guesses",
    "my_progress": "labkit.course.exercises",
    "on_trial": "labkit.course.claims",
    "pictures": "labkit.course.pictures",
    "place": "labkit.runs.handle",
    "predict": "labkit.api",
    "report": "labkit.frontends.magic",
    "run": "labkit.runs.handle",
    "show": "labkit.api",
    "starter": "labkit.course.exercises",
    "write_script": "labkit.figures.code",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__.endswith(f".{name}") else getattr(home, name)
    globals()[name] = value
    return value


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext labkit`: the cell magic `%%torchrun`."""
    importlib.import_module("labkit.frontends.magic.torchrun").register(ipython)


def __dir__():
    return sorted({*globals(), *__all__})
