"""The panel: configure, run, watch, stop and compare training runs in a notebook.

`lab.Lab` is the whole panel; `view.show_in_notebook` is the live view of one run,
`compare.show_comparison_in_notebook` that of a comparison. Nothing is imported here: the first picture of a panel
should not wait for the others.
"""

import importlib
from typing import Any


def load_ipython_extension(ipython: Any) -> None:
    """Imports the panel. Kernels of `labkit lab` load this extension when they start: no cell waits for the import."""
    importlib.import_module("labkit.frontends.panel.lab")
