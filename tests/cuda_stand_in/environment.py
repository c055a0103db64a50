"""The Python that has the CUDA build of torch: an environment of its own in the user's cache, several GB.

`LABKIT_CUDA_ENV` names an environment that exists already; it is used as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from labkit.common.files import user_cache, write_atomically
from labkit.setup.environment import CONSTRAINTS, SetupError, requirements
from labkit.setup.progress import Progress

CACHE = user_cache() / "labkit" / "cuda"
_EXTRAS = ("torch", "deepspeed", "handout", "mnist", "test")
_MORE = ("coverage>=7.6", "setuptools")


def python(progress: Progress) -> Path:
    """The Python of the CUDA environment, which is made or completed if necessary.

    Raises `SetupError` if there is none and it cannot be made.
    """
    given = os.environ.get("LABKIT_CUDA_ENV")
    path = Path(given or CACHE / "environment", "bin", "python")
    if given and not path.exists():
        raise SetupError(f"LABKIT_CUDA_ENV={given!r} has no bin/python; name a virtual environment, or unset it")
    if not given:
        _complete(path, progress)
    if not (site_packages(path) / "nvidia").is_dir():
        raise SetupError(f"the torch of {path} is not a CUDA build; install torch from PyPI's wheels in it")
    return path


def site_packages(python: Path) -> Path:
    """The folder of an environment's packages."""
    return next(python.parent.parent.glob("lib/python3*/site-packages"))


def _complete(path: Path, progress: Progress) -> None:
    wanted = [*map(str, requirements(*_EXTRAS)), *_MORE]
    state = path.parent.parent / "labkit.json"
    made_from = hashlib.sha256(json.dumps(wanted).encode() + CONSTRAINTS.read_bytes()).hexdigest()
    if state.exists() and json.loads(state.read_text(encoding="utf-8")) == made_from:
        return
    if not path.exists():
        progress.step(f"creating {path.parent.parent}")
        _run(sys.executable, "-m", "venv", str(path.parent.parent))
    progress.step("installing the CUDA build of torch and the lab's packages, several GB")
    _run(str(path), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS), *wanted)
    write_atomically(state, json.dumps(made_from))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise SetupError(f"{' '.join(command[:4])} failed: {' '.join(last)}")
