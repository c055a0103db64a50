"""The panel: configure, run, watch, stop and compare training runs in a notebook.

`Lab` is the whole panel; `show_in_notebook` is the live view of one run, `show_comparison_in_notebook` that of a
comparison.
"""

from labkit.frontends.panel.compare import show_comparison_in_notebook
from labkit.frontends.panel.lab import Lab
from labkit.frontends.panel.view import show_in_notebook

__all__ = ["Lab", "show_comparison_in_notebook", "show_in_notebook"]
