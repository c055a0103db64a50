"""What is read and written: labs as notebooks, and files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from labkit.setup.environment import CLONE


class LabError(Exception):
    """A lab that cannot be read, or a cell of it that failed: one sentence that names it."""


def read_lab(path: Path) -> NotebookNode:
    """The lab at `path`, a `.py` in Jupytext's percent format or an `.ipynb`, as a notebook. Raises `LabError` where it is none."""
    if path.suffix not in (".py", ".ipynb"):
        raise LabError(f"{path} is not a lab: its name must end in .py or .ipynb")
    try:
        notebook = jupytext.read(path)
    except FileNotFoundError:
        raise LabError(f"there is no lab {path}; the labs are in {CLONE / 'labs'}") from None
    except Exception as error:  # jupytext, nbformat and json each have errors of their own
        raise LabError(f"{path} cannot be read as a notebook: {error}") from None
    if not any(cell.cell_type == "markdown" for cell in notebook.cells):
        raise LabError(f"{path} is not a lab: it has no cell with prose (# %% [markdown])")
    return notebook


def first_line(cell: NotebookNode) -> str:
    """What a cell begins with."""
    return next((line.strip() for line in cell.source.splitlines() if line.strip()), "empty")


def write(path: Path, text: str) -> Path:
    """Writes `text` so that at `path` there is the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # a handout is there to be passed on
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
