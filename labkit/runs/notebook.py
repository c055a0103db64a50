"""Detects whether this process is the kernel of an interactive notebook, of a headless notebook, or not a kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "JPY_SESSION_NAME"  # the variable in which Jupyter gives the path of a kernel's notebook


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which has imported IPython already."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def notebook() -> str:
    """The name of this kernel's notebook without its suffix; empty if it is not known, as outside Jupyter."""
    return Path(os.environ.get(NAME, "")).stem


def cell() -> int:
    """The execution count of the current notebook cell."""
    return sys.modules["IPython"].get_ipython().execution_count


def headless() -> bool:
    """Whether this kernel is headless, so that a cell must not return before its run is over.

    Interactive front ends set `allow_stdin` in each request; nbclient, papermill and Kaggle's batch runs do not.
    """
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch":
        return True
    request = sys.modules["IPython"].get_ipython().get_parent() or {}
    return request.get("content", {}).get("allow_stdin") is False
