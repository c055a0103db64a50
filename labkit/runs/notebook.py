"""Which kind of kernel this process is: of a notebook with a person, of one that nobody watches, or none."""

from __future__ import annotations

import os
import sys


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: then IPython is there already."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def cell() -> int:
    """The number of the notebook's cell that runs now."""
    return sys.modules["IPython"].get_ipython().execution_count


def headless() -> bool:
    """Whether nobody watches this kernel: a cell must then not return before its run has ended.

    A front end with a person says in each request that it could ask for input; nbclient, papermill and Kaggle's batch runs do not.
    """
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch":
        return True
    request = sys.modules["IPython"].get_ipython().get_parent() or {}
    return request.get("content", {}).get("allow_stdin") is False
