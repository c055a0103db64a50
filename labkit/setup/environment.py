"""The Python environment: the requirements of the lab, which of them this Python has, and the environment for a
command, which is the active one if it is suitable, otherwise `.venv` in the clone. Standard library only, because this
runs before the environment is set up.

What this Python has is read from package metadata: it takes milliseconds, without imports. Of the rules for the
environment of a command, the first one that applies decides:

1. This Python has everything that the command needs: it is used without changes.
2. The active environment has a supported torch: only missing packages are added, and all installed packages keep their
   versions.
3. `.venv` is created in the clone with the tested versions, and the command restarts in it. `.venv/labkit.json` records
   what it was created for, so that the next start needs no check by pip, and an interrupted setup starts again. A
   command that only prints text gets the few packages that it imports, and no torch.

Only an environment that this clone created, at the path where it created it, is ever emptied.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from labkit.common.arguments import shown
from labkit.common.files import write_atomically
from labkit.setup.progress import Progress

CLONE = Path(__file__).resolve().parents[2]
RENDERER_VARIABLE, RENDERER = "PLOTLY_RENDERER", "plotly_mimetype"  # how plotly shows figures in a notebook: as data
PROJECT = CLONE / "pyproject.toml"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
VENV = CLONE / ".venv"
FIREFOX = ("firefox-esr", "firefox")  # for tests
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")  # for tests and benchmarks

# The extras of `labkit setup --with`, and the module that shows whether each is installed.
OPTIONAL = {
    "deepspeed": "deepspeed",
    "handout": "nh3",
    "kubeflow": "kubeflow",
    "mcp": "mcp",
    "mlflow": "mlflow",
    "mnist": "torchvision",
    "parquet": "pyarrow",
    "skypilot": "sky",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
# In place of extras: a command that only prints text, and the packages that such commands import.
TEXT_ONLY = "text-only"
_FOR_TEXT = ("filelock", "msgspec", "numpy", "nvidia-ml-py", "psutil", "pyyaml", "rich", "ruff")
# Compiled for one version of torch: a different build does not load with the torch of an existing environment, so it is
# never added.
BUILT_FOR_TORCH = ("torchvision",)
# Kernel packages that must match JupyterLab's front end: a newer version would not render, so they are never upgraded.
WIDGETS = ("anywidget", "ipywidgets", "plotly")

_HOSTED = {"KAGGLE_KERNEL_RUN_TYPE": "Kaggle's image", "COLAB_RELEASE_TAG": "Colab's image"}
_PEP440 = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Requirement:
    """A package, its minimum version and those that do not work, as in pyproject.toml: `rich>=13.7,!=14.0.0`."""

    name: str
    minimum: str
    unfit: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}>={self.minimum}{''.join(f',!={version}' for version in self.unfit)}"

    @classmethod
    def of(cls, text: str) -> Requirement:
        known, *unfit = text.split(",!=")
        name, minimum = known.split(">=")
        return cls(name, minimum, tuple(unfit))

    @property
    def installed(self) -> str | None:
        """The installed version; None if the package is not installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    @property
    def met(self) -> bool:
        """Whether the package is installed in a version that works."""
        version = self.installed
        return version is not None and version not in self.unfit and release(version) >= release(self.minimum)


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without trailing zeros: (2, 13) for `2.13.0+cpu`."""
    numbers = [int(number) for number in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if number]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements(*extras: str) -> list[Requirement]:
    """The core dependencies of pyproject.toml and those of some extras, parsed by hand because Python 3.10 has no TOML
    parser. With TEXT_ONLY, only the core dependencies that commands import which print text."""
    project, found = PROJECT.read_text(encoding="utf-8"), []
    for table in ("dependencies", *(extra for extra in extras if extra != TEXT_ONLY)):
        block = re.search(rf"^{table} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[1]
        found += [Requirement.of(quoted) for quoted in re.findall(r'"(.+?)"', block)]
    return [package for package in dict.fromkeys(found) if TEXT_ONLY not in extras or package.name in _FOR_TEXT]


def missing(*extras: str) -> list[Requirement]:
    """The missing requirements of core, torch and some extras, without torchvision, which few workloads need; or those
    of a command that only prints text."""
    wanted = requirements(*extras) if TEXT_ONLY in extras else requirements("torch", *extras)
    return [package for package in wanted if package.name not in BUILT_FOR_TORCH and not package.met]


def has_supported_torch() -> bool:
    """Whether this Python has a supported version of torch."""
    return all(package.met for package in requirements("torch") if package.name == "torch")


def active() -> str | None:
    """The active environment in words; None for the system's Python."""
    if sys.prefix != sys.base_prefix:
        return f"the virtual environment {sys.prefix}"
    conda = os.environ.get("CONDA_PREFIX")
    if conda and Path(conda).resolve() == Path(sys.prefix).resolve():
        return f"the conda environment {conda}"
    return next((words for variable, words in _HOSTED.items() if variable in os.environ), None)


def has(extra: str) -> bool:
    """Whether the packages of an optional extra (a key of OPTIONAL) can be imported by this Python; nothing is
    imported."""
    return importlib.util.find_spec(OPTIONAL[extra]) is not None


def how_to_add(extra: str) -> str:
    """The fix for a missing extra, as the end of a sentence: the command that adds it."""
    return f"add it with: python3 -m labkit setup --with {extra}"


def why_not_added(extra: str) -> str:
    """Why a successful setup did not install an optional extra, and the fix."""
    package = OPTIONAL[extra]
    if not PROJECT.is_file():
        return (
            f"labkit is installed as a package in {sys.prefix} and does not change it; install {package} with the tool"
            " that manages it"
        )
    where = active() or f"the Python at {sys.prefix}"
    if package in BUILT_FOR_TORCH:
        return (
            f"{package} must match the torch of {where}, so setup does not add it; install it from the same source as"
            " that torch"
        )
    return f"{package} was not added to {where}; install it there, or deactivate that environment and run setup again"


def is_own() -> bool:
    """Whether this Python belongs to the clone's own `.venv`; an environment that is only linked there is not its
    own."""
    return not VENV.is_symlink() and Path(sys.prefix).resolve() == VENV.resolve()


def pinned(upgraded: set[str]) -> list[str]:
    """Constraints that pin every installed package to its version, except the ones to be upgraded (by name)."""
    lines = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version and _PEP440.fullmatch(version) and name.lower() not in upgraded:
            lines.setdefault(name.lower(), f"{name}=={version}")
    return sorted(lines.values())


# ---- the environment for a command

STATE = VENV / "labkit.json"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
PINS = VENV / "held.txt"
_TORCH = ("torch==", "torchvision==")
_TAIL = 15  # last lines of pip that are printed if it fails
# The first words of pip's progress lines.
_ACTIVITIES = ("Collecting", "Downloading", "Using cached", "Preparing", "Building", "Installing")


class SetupError(Exception):
    """The environment cannot be set up: one sentence with the fix."""


def ensure(extras: Sequence[str], argv: Sequence[str]) -> None:
    """Returns if this Python is suitable, after adding missing packages; otherwise restarts `argv` in the clone's own
    environment.

    Raises `SetupError` if no environment can be set up.
    """
    if not PROJECT.is_file():
        return  # installed as a package, not a clone: its environment was chosen with the installation
    if is_own():
        if (_is_ready(extras) or not STATE.exists()) and not missing(*extras):
            return
    elif not missing(*extras):
        return
    elif active() and has_supported_torch():
        _add(extras)
        return
    elif not VENV.is_symlink() and VENV_PYTHON.exists() and (_is_ready(extras) or not STATE.exists()):
        become([str(VENV_PYTHON), "-m", "labkit", *argv])
    _make(extras)
    become([str(VENV_PYTHON), "-m", "labkit", *argv])


def become(command: Sequence[str], folder: Path | None = None) -> None:
    """Replaces this process with another program, optionally in `folder`; its exit code becomes the exit code of this
    process."""
    if folder:
        os.chdir(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execv(command[0], list(command))
    try:
        sys.exit(subprocess.call(list(command)))
    except KeyboardInterrupt:
        sys.exit(130)


# ---- rule 2: an existing environment


def _add(extras: Sequence[str]) -> None:
    """Adds missing packages to this Python's environment, and replaces only packages that are too old or of a version
    that does not work."""
    wanted = missing(*extras)
    kept = [package for package in wanted if package.name in WIDGETS and package.installed]
    wanted = [package for package in wanted if package not in kept]
    with Progress() as progress:
        for package in kept:
            progress.step(
                f"keeping {package.name} {package.installed} instead of {package}, because it must match JupyterLab's"
                " front end"
            )
        if not wanted:
            return
        names = ", ".join(package.name for package in wanted)
        if importlib.util.find_spec("pip") is None:
            raise SetupError(f"{active()} lacks {names} and has no pip; install them in it, or deactivate it")
        progress.step(f"using {active()}; adding {names}")
        with tempfile.TemporaryDirectory() as folder:
            pins = Path(folder) / "pins.txt"
            pins.write_text("\n".join(pinned({package.name for package in wanted})) + "\n", encoding="utf-8")
            _install([sys.executable, "-m", "pip"], ["-c", str(pins), *map(str, wanted)], progress)
    importlib.invalidate_caches()


# ---- rule 3: the clone's own environment


def _is_ready(extras: Sequence[str]) -> bool:
    """Whether `.venv` is up to date and has these extras: because they were asked for, or, seen from inside, because
    other extras brought the same packages."""
    state, asked = _state(), _asked(extras)
    if state.get("made_from") != _made_from():
        return False
    if asked <= set(state.get("extras", ())):
        return True
    return is_own() and all(package.met for package in requirements(*asked))


def _asked(extras: Sequence[str]) -> set[str]:
    """The extras of pyproject.toml in an environment for a command: none if it only prints text."""
    return set() if TEXT_ONLY in extras else {"torch", "lab", *extras}


def _state() -> dict:
    try:
        state = json.loads(STATE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(**state: object) -> None:
    write_atomically(STATE, json.dumps(state) + "\n")


def _made_from() -> str:
    """A hash of what the environment is made from: required packages, their versions, and its path (which its scripts
    contain)."""
    digest = hashlib.sha256(str(VENV).encode())
    for path in (PROJECT, CONSTRAINTS):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _make(extras: Sequence[str]) -> None:
    """Creates or repairs `.venv` under a lock: a second start waits and then uses it."""
    with Progress() as progress, _lock(progress) as lock:
        if _is_complete(extras):
            return
        before = _state()
        if not _is_reusable(before):
            _require_own(before)
            progress.step(f"creating {VENV}")
            _create()
            before = {"place": str(VENV)}
        created = {"place": str(VENV)} if "place" in before else {}  # one of the user's own is only added to
        wanted = sorted({*before.get("extras", ()), *_asked(extras)})
        if wanted:
            progress.step("installing torch, JupyterLab and the lab")
            packages = ["-e", f"{CLONE}[{','.join(wanted)}]"]
        else:
            progress.step("installing the packages of the commands that only print text")
            packages = list(map(str, requirements(TEXT_ONLY)))
        if created:
            _write_state(**created, building=True)
        try:
            # compiling all 19,000 modules takes longer than the rest; Python compiles each when it is first imported
            _install(_pip_for_venv(), ["--no-compile", "-c", str(_versions()), *packages], progress, lock)
        except SetupError:
            # pip downloads everything before it changes anything, so the previous packages are still installed.
            if created:
                _write_state(**created, extras=before.get("extras", []))
            raise
        _write_state(**created, made_from=_made_from(), extras=wanted)
        if not _is_complete(extras):
            raise SetupError(f"{VENV} still lacks packages after the installation; delete that folder and start again")


def _is_complete(extras: Sequence[str]) -> bool:
    """Whether `.venv` has what its state says, checked by its own Python, because the base Python may have changed."""
    check = f"import sys; from labkit.setup import environment; sys.exit(bool(environment.missing(*{list(extras)!r})))"
    return _is_ready(extras) and _runs([str(VENV_PYTHON), "-c", check])


def _is_reusable(state: dict) -> bool:
    """Whether packages can be added to `.venv`: a complete environment at its original path, whose Python starts."""
    if VENV.is_symlink() or state.get("building") or state.get("place", str(VENV)) != str(VENV):
        return False
    return VENV_PYTHON.exists() and _runs([str(VENV_PYTHON), "-c", "pass"])


def _require_own(state: dict) -> None:
    """Raises `SetupError` if there is something at the path of `.venv` that this clone did not create there."""
    if VENV.is_symlink():
        what, way = f"is a link to {VENV.resolve()}", "remove the link, or activate that environment"
    elif not VENV.exists() or state.get("place") == str(VENV) or (VENV.is_dir() and not any(VENV.iterdir())):
        return
    elif "place" in state:
        what, way = f"was created as {shown(state['place'])}, not by this clone", "move or delete it"
    else:
        what, way = "was not created by this clone, and its Python does not start", "repair, move or delete it"
    raise SetupError(f"{VENV} {what}; labkit empties only what it created, so {way}, and start again")


def _create() -> None:
    """Creates `.venv`, empty but for its state, which says from the first moment on whose it is."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    flags = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
    uses_base_torch = has_supported_torch() and not is_own()
    if uses_base_torch:
        flags.append("--system-site-packages")  # use this Python's torch, which may be impossible to install again
    try:
        VENV.mkdir(exist_ok=True)
        _write_state(place=str(VENV), building=True)
        for path in VENV.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != STATE:
                path.unlink()
    except OSError as error:
        raise SetupError(f"{error.filename or VENV} cannot be changed ({error.strerror}); delete {VENV}") from None
    made = subprocess.run([base, "-m", "venv", *flags, str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode:
        last = (made.stderr or made.stdout).strip().splitlines()[-1:]
        raise SetupError(
            f"{VENV} could not be created: {' '.join(last) or 'python -m venv failed'}; fix this, or activate an"
            " environment"
        )
    if uses_base_torch:
        torch = [line for line in pinned(set()) if line.startswith(_TORCH)]
        PINS.write_text("\n".join(torch) + "\n", encoding="utf-8")


def _pip_for_venv() -> list[str]:
    """The pip of the venv; if it has none (Debian without python3-venv), this Python's pip with `--python`."""
    if _runs([str(VENV_PYTHON), "-m", "pip", "--version"]):
        return [str(VENV_PYTHON), "-m", "pip"]
    from_here = [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON)]
    if _runs([*from_here, "--version"]):
        return from_here
    raise SetupError(f"{sys.executable} has no pip; install it (Debian: apt install python3-venv) and start again")


def _versions() -> Path:
    """The tested versions as constraints; for torch, the installed version if the venv uses the torch of its base
    Python."""
    if not PINS.exists():
        return CONSTRAINTS
    tested = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith(_TORCH)]
    path = PINS.with_name("constraints.txt")
    path.write_text("\n".join(tested) + "\n" + PINS.read_text(encoding="utf-8"), encoding="utf-8")
    return path


@contextlib.contextmanager
def _lock(progress: Progress) -> Iterator[int]:
    """Locks the clone's environment against other starts. The lock is on pyproject.toml, which always exists and is
    never replaced."""
    if not (os.access(CLONE, os.W_OK) and os.access(PROJECT, os.W_OK)):
        raise SetupError(
            f"{CLONE} is not writable; clone the project to a writable folder, or activate an environment that has"
            " torch"
        )
    with PROJECT.open("r+b") as file:
        waiting = False
        while not _try_lock(file):
            if not waiting:
                progress.step("waiting for another start that is creating the environment")
                waiting = True
            time.sleep(0.2)
        yield file.fileno()


def _try_lock(file) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(1 << 20)  # beyond the end, so that the text stays readable
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# ---- pip


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, cwd=CLONE, capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _install(pip: Sequence[str], arguments: Sequence[str], progress: Progress, lock: int | None = None) -> None:
    """Runs `pip install` and displays its progress. pip inherits the lock, so that it stays locked if this process is
    killed."""
    command = [*pip, "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off", *arguments]
    inherited = {"pass_fds": (lock,)} if lock is not None and os.name != "nt" else {}
    settings = os.environ | {"PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    last: deque[str] = deque(maxlen=_TAIL)
    with subprocess.Popen(
        command,
        cwd=CLONE,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **inherited,
    ) as process:
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                if line.lstrip().startswith(_ACTIVITIES):
                    progress.detail(line.strip().partition(":")[0])  # without the list of all packages
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        progress.lines(last)
        raise SetupError(
            f"pip install failed with exit code {process.returncode} (its last lines are above); "
            "fix the reported problem, usually the network or the disk, and start again"
        )
