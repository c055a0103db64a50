"""Runs a lab in a kernel of this Python, over pipes, in a temporary folder, if wanted with recorded runs in place of
new ones."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from labkit.common.arguments import shown
from labkit.common.files import read_regular, write_atomically, write_output
from labkit.launch.job import Job
from labkit.launch.local import import_path
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import Guesses, SpecFields, plain
from labkit.record.folder import RunFolder, runs_root
from labkit.record.follow import current_status
from labkit.record.packed import SHIPPED, shipped_like
from labkit.record.state import OVER
from labkit.runs.notebook import NAME
from labkit.setup.environment import CLONE, RENDERER, RENDERER_VARIABLE

# ---- reading labs and writing pages

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


# ---- a lab as an `.ipynb` for Kaggle or Colab

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


# ---- executing a lab

_PATIENCE = 1800  # timeout of one cell, in seconds
_STAND_IN = "from labkit.frontends.handout.execute import stand_in; stand_in({folder!r})"


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
            coalesce_streams=True,  # a line that arrives in two parts is one line
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
        """The kernel's environment: it finds labkit as runs do, so that a warm server of this process forks its ranks,
        ignores the user's IPython settings, and outputs figures as data."""
        own = {"LABKIT_RUNS": str(self._root), "IPYTHONDIR": str(work.parent / "ipython"), NAME: self._name}
        own |= import_path()
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


# ---- recorded runs in place of new ones

_OF_A_MACHINE = ("device", "precision", "data_dir")  # fields that `Spec.on` sets for a machine


class RecordedRuns:
    """The finished runs of a folder; each can be taken once."""

    def __init__(self, root: Path):
        self._root = root
        runs, self._unreadable = RunFolder.readable(RunFolder.all(root))
        self._runs = [folder for folder in reversed(runs) if current_status(folder).state in OVER]
        self._asked = {folder.name: _asked(_complete(folder.read_spec()), _text(folder)) for folder in self._runs}

    def take(self, spec: Spec, source: str | None = None) -> RunFolder:
        """The newest run of the same Spec that was not taken yet; else one that differs only in device and precision.

        `source` is the text of a script generated for this run only. Raises `LookupError` if there is no such run.
        """
        exact = _asked(spec.to_json(), source)
        for wanted in (exact, _anywhere(exact)):
            for folder in self._runs:
                has = self._asked[folder.name]
                if wanted in (has, _anywhere(has)):
                    self._runs.remove(folder)
                    return folder
        raise LookupError(
            f"{self._root} has no further run of {spec.name} with these settings; "
            f"run the lab once with LABKIT_RUNS={self._root}, or create the handout without --recorded"
            + "".join(f"; {name} cannot be read: {why}" for name, why in self._unreadable.items())
        )


class ShippedRuns:
    """The runs that come with the lab: one of each strategy, which takes the place of all of its runs, whatever their
    settings."""

    def take(self, spec: Spec, source: str | None = None) -> RunFolder | None:
        """The run of the same strategy; None for a script of the lab's own, which is started."""
        name = shipped_like(spec.strategy, spec.processes) if spec.strategy and source is None else None
        return RunFolder.find(name) if name else None


def stand_in(folder: str) -> None:
    """Makes every run started in this process a copy of a recorded one from `folder`, with the predictions of the
    lab that starts it."""
    recorded = ShippedRuns() if Path(folder) == SHIPPED else RecordedRuns(Path(folder))
    start_now = Job.start

    def start(
        cls: type[Job],
        spec: Spec,
        *,
        root: Path | None = None,
        source: str | None = None,
        guess: Guesses | None = None,
        **others: Any,
    ) -> Job:
        recording = recorded.take(spec, source)
        if recording is None:
            return start_now(spec, root=root, source=source, guess=guess, **others)
        place = (root or runs_root()) / recording.name
        again = len([*place.parent.glob(f"{place.name}*")])  # of shipped runs: others are taken once
        copied = recording.copy(place.with_name(f"{place.name}-{again + 1}") if again else place)
        if guess is not None:
            RunFolder.write_json(copied.guess, guess)
        return cls(copied)

    Job.start = classmethod(start)


def _asked(spec: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The Spec without paths: a checkpoint by the name of its run, a script by its text or file name."""
    script, resume = spec.get("script"), spec.get("resume")
    return spec | {"script": script and (text or Path(script).name), "resume": resume and run_of(Path(resume))}


def _complete(spec: SpecFields) -> dict[str, Any]:
    """A recorded Spec with defaults for fields that its version did not have; unchanged if this version rejects it."""
    try:
        return spec.to_spec().to_json()
    except SpecError:
        return plain(spec)


def run_of(checkpoint: Path) -> str:
    """The name of the run that wrote a checkpoint, or of the checkpoint's folder if no run wrote it."""
    folder = next((parent for parent in (checkpoint, *checkpoint.parents) if parent.name == "checkpoints"), None)
    return folder.parent.name if folder else checkpoint.name


def _text(folder: RunFolder) -> str | None:
    try:
        return folder.text(folder.script)
    except OSError:
        return None


def _anywhere(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in _OF_A_MACHINE}
