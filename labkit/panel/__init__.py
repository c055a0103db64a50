"""The panel: choose, run, watch, stop, in a notebook. `Lab` has the choices; `show` is the live view of one run without them."""

from labkit.panel.lab import Lab
from labkit.panel.show import show

__all__ = ["Lab", "show"]
