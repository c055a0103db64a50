"""Executes a lab headless, from top to bottom, with this Python in a temporary working folder."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from labkit.frontends.handout.files import LabError, first_line, read_lab
from labkit.launch.job import Job
from labkit.record.folder import RunFolder
from labkit.record.state import OVER
from labkit.runs.notebook import NAME
from labkit.setup.environment import CLONE, RENDERER, RENDERER_VARIABLE

_PATIENCE = 1800  # timeout of one cell, in seconds
_STAND_IN = "from labkit.frontends.handout.recorded import stand_in; stand_in({folder!r})"


def executed(
    path: str | os.PathLike[str],
    *,
    skip: Iterable[str] = (),
    runs: Path | None = None,
    recorded: Path | None = None,
    report: Callable[[str], None] = lambda words: None,
) -> NotebookNode:
    """Executes the lab at `path` and returns it with outputs; a cell that started runs lists them in
    `metadata.labkit_runs`.

    Cells with a tag in `skip` are removed. Run folders go to `runs` (default: LABKIT_RUNS, else a temporary folder).
    With `recorded`, a folder of runs, no run is started: each is copied from there. `report` is called with the
    progress. Raises `LabError`, which names the cell that failed. In every case the kernel and the runs of the lab are
    terminated.
    """
    notebook = read_lab(Path(path))
    left_out = set(skip)
    notebook.cells = [cell for cell in notebook.cells if not left_out & set(cell.metadata.get("tags", ()))]
    with tempfile.TemporaryDirectory(prefix="labkit-") as place:
        given = runs or os.environ.get("LABKIT_RUNS")
        root = Path(given).absolute() if given else Path(place) / "runs"
        work = Path(place) / "work"
        work.mkdir()
        before = {folder.name for folder in RunFolder.all(root)}
        try:
            _Execution(Path(path).name, notebook, root, report).run(work, recorded)
        finally:
            for folder in RunFolder.all(root):
                if folder.name not in before and Job.attach(folder).state not in OVER:
                    Job.attach(folder).stop()
    return notebook


class _Execution:
    """One execution: tracks the current cell and the runs that each cell started."""

    def __init__(self, name: str, notebook: NotebookNode, root: Path, report: Callable[[str], None]):
        self._name, self._notebook, self._root, self._report = name, notebook, root, report
        self._of = sum(cell.cell_type == "code" for cell in notebook.cells)
        self._at, self._number = "", 0  # the first line and the number of the current code cell

    def run(self, work: Path, recorded: Path | None) -> None:
        client = NotebookClient(
            self._notebook,
            km=_manager(work.parent),
            timeout=_PATIENCE,
            resources={"metadata": {"path": str(work)}},
        )
        try:
            # the kernel's own messages, not cell outputs
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with client.setup_kernel(env=self._environment(work), cleanup_kc=True, **quiet):
                if recorded is not None:
                    self._prepare(client, _STAND_IN.format(folder=str(recorded.absolute())))
                self._cells(client)
        except (CellControlSignal, DeadKernelError, TimeoutError) as error:
            raise LabError(self._failure(error)) from None

    def _environment(self, work: Path) -> dict[str, str]:
        """The kernel's environment: it finds labkit, ignores the user's IPython settings, and outputs figures as
        data."""
        path = os.pathsep.join(filter(None, (str(CLONE), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "LABKIT_RUNS": str(self._root), "IPYTHONDIR": str(work.parent / "ipython")}
        own[NAME] = self._name
        return os.environ | own | {RENDERER_VARIABLE: RENDERER, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}

    def _prepare(self, client: NotebookClient, code: str) -> None:
        """Runs code that is not part of the lab, as a temporary cell."""
        self._notebook.cells.insert(0, new_code_cell(code))
        client.execute_cell(self._notebook.cells[0], 0)
        del self._notebook.cells[0]

    def _cells(self, client: NotebookClient) -> None:
        seen = {folder.name for folder in RunFolder.all(self._root)}
        for index, cell in enumerate(self._notebook.cells):
            if cell.cell_type != "code":
                continue
            self._at, self._number = first_line(cell), self._number + 1
            self._report(f"cell {self._number} of {self._of}: {self._at}")
            client.execute_cell(cell, index)
            new = [folder.name for folder in RunFolder.all(self._root) if folder.name not in seen]
            seen |= set(new)
            if new:
                cell.metadata["labkit_runs"] = new

    def _failure(self, error: Exception) -> str:
        if not self._number:
            return f"{self._name} could not be executed: its kernel did not start ({error})"
        where = f"{self._name}, code cell {self._number} ({self._at})"
        if isinstance(error, DeadKernelError):
            return f"{where}: its kernel died"
        if isinstance(error, TimeoutError):
            return f"{where}: it took longer than {_PATIENCE} s"
        said = str(getattr(error, "evalue", error)).strip()
        return f"{where}: {getattr(error, 'ename', type(error).__name__)}" + (
            f": {said.splitlines()[0]}" if said else ""
        )


def _manager(place: Path) -> AsyncKernelManager:
    """A manager for a kernel of this Python, regardless of installed kernels; it uses Unix sockets instead of ports if
    possible.
    """
    ways = {} if os.name == "nt" else {"transport": "ipc", "connection_file": str(place / "kernel.json")}
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **ways)
