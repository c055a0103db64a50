"""Handouts: a lab, a run or the whole course as self-contained HTML pages that work offline.

nbclient executes a lab in a separate working folder, and nbconvert renders it with the template in `templates/`. Its
runs are shown below the cells that started them, with logs, script and diff in collapsible sections. plotly.js is
embedded once, gzipped.
"""

import importlib
from typing import Any

_HOMES = {
    "LabError": "labkit.frontends.handout.execute",
    "RunError": "labkit.frontends.handout.page",
    "class_page": "labkit.frontends.handout.page",
    "course": "labkit.frontends.handout.page",
    "executed": "labkit.frontends.handout.execute",
    "for_kaggle": "labkit.frontends.handout.execute",
    "lab_page": "labkit.frontends.handout.page",
    "run_page": "labkit.frontends.handout.page",
    "to_import": "labkit.frontends.handout.execute",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
