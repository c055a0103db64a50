"""A lab as an `.ipynb` for Kaggle or Colab: its first cell installs the project into the existing image."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

from labkit.common.arguments import shown
from labkit.common.atomic import write_atomically
from labkit.frontends.handout.files import LabError, read_lab
from labkit.setup.environment import CLONE

# A data attachment is tried first, because it needs no network. `doctor`, like every command, first installs missing
# packages and keeps the versions of installed ones; then it reports what the machine supports.
_BRING = """\
# Installs the lab into this notebook's image. Only missing packages are added; the installed torch is kept.
import importlib.util, os, subprocess, sys
from pathlib import Path

SOURCE = {source!r}  # the repository to clone if the project is not attached as data
if importlib.util.find_spec("labkit") is None:
    attached = [path.parent.parent for path in Path("/kaggle/input").rglob("labkit/__main__.py")]
    project = attached[0] if attached else Path("labkit-project").absolute()
    if not project.is_dir():
        if not SOURCE:
            raise FileNotFoundError("attach the project's folder as data, or set SOURCE to its repository's URL")
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", SOURCE, str(project)], check=True)
    subprocess.run([sys.executable, "-m", "labkit", "doctor"], cwd=project, check=False)
    sys.path.insert(0, str(project))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()
"""


def to_import(lab: Path, output: Path, source: str | None = None) -> Path:
    """Writes the lab as a notebook without outputs to `output` and returns that path.

    `source` is the repository that the first cell clones (default: the origin of this clone). Raises `LabError` if the
    lab cannot be read or `output` exists, because it may contain work, and `OSError` if it cannot be written.
    """
    notebook = read_lab(lab)
    if os.path.lexists(output):
        raise LabError(f"{output} already exists and may contain work; move it, or name another file with -o")
    notebook.cells.insert(0, new_code_cell(_BRING.format(source=_origin() if source is None else source)))
    for cell in notebook.cells:
        cell.pop("id", None)  # random at each conversion; without it the same lab gives the same file
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    # not paired with a .py file that does not exist
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 4
    write_atomically(output, nbformat.writes(notebook) + "\n", errors="replace")
    return output


def for_kaggle(notebook: Path, user: str) -> tuple[Path, str]:
    """The path and the text of the `kernel-metadata.json` with which `kaggle kernels push` uploads a notebook as a
    private one of `user`, on a machine with two T4. Raises `LabError` if the name is none, or if the file exists.

    The keys are those of the Kaggle API's documentation of kernel metadata.
    """
    if not _KAGGLE_NAME.fullmatch(user):
        raise LabError(f"the Kaggle user name has letters, digits and hyphens, got {shown(user)}")
    path = notebook.with_name("kernel-metadata.json")
    if os.path.lexists(path):
        raise LabError(f"{path} already exists and may describe another notebook; move it, or write to another folder")
    slug = f"labkit-{re.sub(r'[^a-z0-9]+', '-', notebook.stem.lower()).strip('-')}"
    metadata = {
        "id": f"{user.lower()}/{slug}",
        "title": slug.replace("-", " "),
        "code_file": notebook.name,
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": True,
        "enable_internet": True,
        "machine_shape": "NvidiaTeslaT4",
        "dataset_sources": [],
        "competition_sources": [],
        "kernel_sources": [],
        "model_sources": [],
    }
    return path, json.dumps(metadata, indent=2) + "\n"


_KAGGLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,49}")


def _origin() -> str:
    """The URL of this clone's origin, without user name and password; empty if it has none."""
    command = ["git", "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"(?<=://)[^/@]*@", "", done.stdout.strip())
