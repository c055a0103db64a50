"""Handouts: a lab, a run or the whole course as pages of one file each, which open with the network off.

A lab is executed by nbclient in a working folder of its own and laid out by nbconvert with the template in `templates/`; its runs
stand below the cells that started them, with logs, script and diff in folds. plotly.js is in the page once, gzipped.
"""

import importlib
from typing import Any

_HOMES = {
    "LabError": "labkit.frontends.handout.files",
    "RunError": "labkit.frontends.handout.run",
    "course": "labkit.frontends.handout.index",
    "executed": "labkit.frontends.handout.execute",
    "lab_page": "labkit.frontends.handout.lab",
    "run_page": "labkit.frontends.handout.run",
    "to_import": "labkit.frontends.handout.notebook",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
