"""A lab as an `.ipynb` to be imported elsewhere: its first cell brings the project into an image that somebody else made."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

from labkit.frontends.handout.files import LabError, read_lab, write
from labkit.setup.environment import CLONE

# What is attached as data comes first, since it needs no network. `doctor` is started as every command is: it adds what the image lacks,
# holds everything that is there at its version, and says what the machine can do.
_BRING = """\
# Brings the lab into this notebook's image and adds only what that lacks: its torch stays as it is.
import importlib.util, os, subprocess, sys
from pathlib import Path

SOURCE = {source!r}  # the repository to clone where the project is not attached as data
if importlib.util.find_spec("labkit") is None:
    attached = [path.parent.parent for path in Path("/kaggle/input").rglob("labkit/__main__.py")]
    project = attached[0] if attached else Path("labkit-project").absolute()
    if not project.is_dir():
        if not SOURCE:
            raise FileNotFoundError("attach the project's folder to this notebook as data, or write its repository's address into SOURCE")
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", SOURCE, str(project)], check=True)
    subprocess.run([sys.executable, "-m", "labkit", "doctor"], cwd=project, check=False)
    sys.path.insert(0, str(project))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()
"""


def to_import(lab: Path, output: Path, source: str | None = None) -> Path:
    """Writes the lab as a notebook without outputs to `output`; gives that path. `source` is the repository that its first cell clones,
    where nothing is said this clone's origin.

    Raises `LabError` where the lab cannot be read, or `output` is there: somebody may have worked in it. Raises `OSError`.
    """
    notebook = read_lab(lab)
    if output.exists():
        raise LabError(f"{output} is there already, perhaps with somebody's work; move it away, or name another file with -o")
    notebook.cells.insert(0, new_code_cell(_BRING.format(source=_origin() if source is None else source)))
    for cell in notebook.cells:
        cell.pop("id", None)  # made anew at each conversion: the same lab gives the same file
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}  # not paired with a .py that is not there
    notebook.nbformat, notebook.nbformat_minor = 4, 4
    return write(output, nbformat.writes(notebook) + "\n")


def _origin() -> str:
    """The address that this clone came from, without a name or password in it; empty where it has none."""
    try:
        told = subprocess.run(["git", "remote", "get-url", "origin"], cwd=CLONE, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"(?<=://)[^/@]*@", "", told.stdout.strip())
