"""The panel: choose, run, watch, stop, in a notebook.

`Lab` has the choices; `show_in_notebook` is the live view of one run without them.
"""

from labkit.panel.lab import Lab
from labkit.panel.live import show_in_notebook

__all__ = ["Lab", "show_in_notebook"]
