"""Reads labs as notebooks, and writes files atomically."""

from __future__ import annotations

import io
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from labkit.common.atomic import write_output
from labkit.common.reading import read_regular
from labkit.setup.environment import CLONE

_LARGEST = 64 << 20  # bytes of a notebook with its outputs


class LabError(Exception):
    """A lab cannot be read, or one of its cells failed; the message is one sentence that names it."""


def read_lab(path: Path) -> NotebookNode:
    """Reads the lab at `path`, a `.py` in Jupytext's percent format or an `.ipynb`. Raises `LabError` if it is not a
    lab.
    """
    if path.suffix not in (".py", ".ipynb"):
        raise LabError(f"{path} is not a lab: its name must end in .py or .ipynb")
    try:
        text = read_regular(path, _LARGEST).decode()
        notebook = jupytext.read(io.StringIO(text, newline=None), fmt={"extension": path.suffix})
    except FileNotFoundError:
        raise LabError(f"there is no lab {path}; the labs are in {CLONE / 'labs'}") from None
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # jupytext, nbformat and json raise different errors
        raise LabError(f"{path} cannot be read as a notebook: {error}") from None
    if not any(cell.cell_type == "markdown" for cell in notebook.cells):
        raise LabError(f"{path} is not a lab: it has no markdown cell (# %% [markdown])")
    return notebook


def first_line(cell: NotebookNode) -> str:
    """The first line of a cell that is not blank."""
    return next((line.strip() for line in cell.source.splitlines() if line.strip()), "empty")


def write(path: Path, text: str) -> Path:
    """Writes a page to `path`, or replaces one that was written before. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text)
    return path
