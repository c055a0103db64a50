"""The environment that a command needs: the one that is active where it serves, else `.venv` in the clone. Standard library only.

The first rule that holds decides:

1. this Python has everything that the command needs: it is used as it is;
2. the active environment has a torch that serves: only what it lacks is added, and everything that is there is held at its version;
3. `.venv` is made in the clone, with the tested versions, and the command starts over in it. What stands in `.venv/labkit.json` says
   for what it was made, so that the next start goes straight through and a set-up that was cut short begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from labkit.setup import environment
from labkit.setup.environment import CLONE, CONSTRAINTS, PROJECT, VENV
from labkit.setup.progress import Progress

STATE = VENV / "labkit.json"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
HELD = VENV / "held.txt"
_TORCH = ("torch==", "torchvision==")
_TAIL = 15  # of pip's last lines, shown where it fails
_TELLING = ("Collecting", "Downloading", "Using cached", "Preparing", "Building", "Installing")  # lines of pip that say what it is at


class SetupError(Exception):
    """The environment cannot be made: one sentence with the way out."""


def ensure(extras: Sequence[str], argv: Sequence[str]) -> None:
    """Returns where this Python serves, after adding what it lacks; else starts `argv` over in the clone's own environment.

    Raises `SetupError` where no environment can be had.
    """
    if not PROJECT.is_file():
        return  # installed as a package, not a clone: whoever did that chose its environment
    if environment.is_own():
        if (_is_ready(extras) or not STATE.exists()) and not environment.missing(*extras):
            return
    elif not environment.missing(*extras):
        return
    elif environment.active() and environment.torch_serves():
        _add(extras)
        return
    elif VENV_PYTHON.exists() and (_is_ready(extras) or not STATE.exists()):
        become([str(VENV_PYTHON), "-m", "labkit", *argv])
    _make(extras)
    become([str(VENV_PYTHON), "-m", "labkit", *argv])


def become(command: Sequence[str], folder: Path | None = None) -> None:
    """Goes on as another program, in `folder` where one is given: its exit code is this process's."""
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


# ---- rule 2: an environment that somebody else made


def _add(extras: Sequence[str]) -> None:
    """Adds to this Python's environment what it lacks, and changes nothing that is there but what is too old to serve."""
    wanted = environment.missing(*extras)
    kept = [package for package in wanted if package.name in environment.WIDGETS and package.installed]
    wanted = [package for package in wanted if package not in kept]
    with Progress() as progress:
        for package in kept:
            progress.step(
                f"{package} is needed and {package.installed} is here; it stays, because JupyterLab's front end has its other half"
            )
        if not wanted:
            return
        names = ", ".join(package.name for package in wanted)
        if importlib.util.find_spec("pip") is None:
            raise SetupError(f"{environment.active()} lacks {names}, and has no pip; install them into it, or deactivate it")
        progress.step(f"using {environment.active()}; adding {names}")
        with tempfile.TemporaryDirectory() as folder:
            held = Path(folder) / "held.txt"
            held.write_text("\n".join(environment.held({package.name for package in wanted})) + "\n", encoding="utf-8")
            _install([sys.executable, "-m", "pip"], ["-c", str(held), *map(str, wanted)], progress)
    importlib.invalidate_caches()


# ---- rule 3: the clone's own environment


def _is_ready(extras: Sequence[str]) -> bool:
    state = _state()
    return state.get("made_from") == _made_from() and set(extras) <= set(state.get("extras", ()))


def _state() -> dict:
    try:
        state = json.loads(STATE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(**state: object) -> None:
    temporary = STATE.with_suffix(".new")
    temporary.write_text(json.dumps(state) + "\n", encoding="utf-8")
    temporary.replace(STATE)


def _made_from() -> str:
    """What the environment is made from, as one word: the packages asked for, their versions, and the place (scripts in it name it)."""
    said = hashlib.sha256(str(VENV).encode())
    for path in (PROJECT, CONSTRAINTS):
        said.update(path.read_bytes())
    return said.hexdigest()


def _make(extras: Sequence[str]) -> None:
    """Makes `.venv` or mends it, under a lock: a second start waits, and finds it made."""
    with Progress() as progress, _lock(progress) as lock:
        if _is_whole(extras):
            return
        before = _state()
        if not _can_go_on(before):
            progress.step(f"making {VENV}")
            _create()
            before = {}
        extras = sorted({"torch", "lab", *before.get("extras", ()), *extras})
        progress.step("installing torch, JupyterLab and the lab")
        _write_state(place=str(VENV), building=True)
        try:
            _install(_pip_for_venv(), ["-c", str(_versions()), "-e", f"{CLONE}[{','.join(extras)}]"], progress, lock)
        except SetupError:
            # pip downloads everything before it changes anything: what was there still is.
            _write_state(place=str(VENV), extras=before.get("extras", []))
            raise
        _write_state(place=str(VENV), made_from=_made_from(), extras=extras)
        if not _is_whole(extras):
            raise SetupError(f"{VENV} was made and still lacks what the lab needs; delete that folder and start again")


def _is_whole(extras: Sequence[str]) -> bool:
    """Whether `.venv` is as its state says, asked of its own Python: the one below it may have changed since."""
    question = f"import sys; from labkit import environment; sys.exit(bool(environment.missing(*{list(extras)!r})))"
    return _is_ready(extras) and _runs([str(VENV_PYTHON), "-c", question])


def _can_go_on(state: dict) -> bool:
    """Whether what stands in `.venv` can be added to: a whole environment, in its place, whose Python starts."""
    if state.get("building") or state.get("place", str(VENV)) != str(VENV) or not VENV_PYTHON.exists():
        return False
    return _runs([str(VENV_PYTHON), "-c", "pass"])


def _create() -> None:
    base = getattr(sys, "_base_executable", None) or sys.executable
    flags = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
    torch_below = environment.torch_serves() and not environment.is_own()
    if torch_below:
        flags.append("--system-site-packages")  # this Python's torch, which may be one that cannot be had again
    made = subprocess.run([base, "-m", "venv", "--clear", *flags, str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode:
        last = (made.stderr or made.stdout).strip().splitlines()[-1:]
        raise SetupError(f"{VENV} could not be made: {' '.join(last) or 'python -m venv failed'}; mend that, or activate an environment")
    if torch_below:
        theirs = [line for line in environment.held(set()) if line.startswith(_TORCH)]
        HELD.write_text("\n".join(theirs) + "\n", encoding="utf-8")


def _pip_for_venv() -> list[str]:
    """The venv's own pip; where it has none (Debian without python3-venv), the one of this Python, working on it."""
    if _runs([str(VENV_PYTHON), "-m", "pip", "--version"]):
        return [str(VENV_PYTHON), "-m", "pip"]
    from_here = [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON)]
    if _runs([*from_here, "--version"]):
        return from_here
    raise SetupError(f"no pip was found for {sys.executable}; install one (on Debian: apt install python3-venv) and start again")


def _versions() -> Path:
    """The tested versions as constraints, but for torch's where the venv was made to see the torch of the Python below it."""
    if not HELD.exists():
        return CONSTRAINTS
    ours = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith(_TORCH)]
    path = HELD.with_name("constraints.txt")
    path.write_text("\n".join(ours) + "\n" + HELD.read_text(encoding="utf-8"), encoding="utf-8")
    return path


@contextlib.contextmanager
def _lock(progress: Progress) -> Iterator[int]:
    """Holds the clone's environment against other starts. The lock is on pyproject.toml, which is always there and never replaced by us."""
    if not (os.access(CLONE, os.W_OK) and os.access(PROJECT, os.W_OK)):
        raise SetupError(
            f"{CLONE} cannot be written to by you; clone it to a folder of your own, or activate an environment that has torch"
        )
    with PROJECT.open("r+b") as file:
        waiting = False
        while not _try_lock(file):
            if not waiting:
                progress.step("another start is making the environment; waiting for it")
                waiting = True
            time.sleep(0.2)
        yield file.fileno()


def _try_lock(file) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(1 << 20)  # beyond the end: the text itself stays readable
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
    """Runs `pip install`, showing what it is at; it inherits the lock, so that one whose parent was killed still keeps others out."""
    command = [*pip, "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off", *arguments]
    inherited = {"pass_fds": (lock,)} if lock is not None and os.name != "nt" else {}
    settings = os.environ | {"PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    last: deque[str] = deque(maxlen=_TAIL)
    with subprocess.Popen(
        command, cwd=CLONE, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **inherited
    ) as process:
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                if line.lstrip().startswith(_TELLING):
                    progress.detail(line.strip().partition(":")[0])  # without the list of all that is installed
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        progress.lines(last)
        raise SetupError(
            f"pip could not install what the lab needs (exit code {process.returncode}, its last lines are above); "
            "mend what they name, most often the network or the disk, and start again"
        )
