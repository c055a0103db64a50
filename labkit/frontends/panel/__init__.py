"""The panel: choose, run, watch, stop, compare, in a notebook.

`Lab` has the choices; `show_in_notebook` is the live view of one run without them, `show_comparison_in_notebook` that of a comparison.
"""

from labkit.frontends.panel.compare import show_comparison_in_notebook
from labkit.frontends.panel.lab import Lab
from labkit.frontends.panel.live import show_in_notebook

__all__ = ["Lab", "show_comparison_in_notebook", "show_in_notebook"]
