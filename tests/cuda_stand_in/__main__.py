"""`python -m cuda_stand_in MACHINE ARGUMENTS…`: Python with these arguments on one of the machines."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cuda_stand_in import environment, library
from cuda_stand_in.machines import MACHINES, variables
from labkit.setup.environment import SetupError
from labkit.setup.progress import Progress


def main(machine: str, *arguments: str) -> int:
    """Makes environment and library if necessary, runs Python, and returns its exit code."""
    with Progress() as progress:
        python = environment.python(progress)
        folder = library.built(python, progress)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cuda-stand-in-") as shared:
        own = variables(machine, folder, Path(shared))
        return subprocess.call([str(python), *arguments], env=os.environ | own)


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in MACHINES:
        sys.exit(f"cuda_stand_in: name a machine ({', '.join(MACHINES)}) and what its Python is to run")
    try:
        sys.exit(main(*sys.argv[1:]))
    except SetupError as error:
        sys.exit(f"cuda_stand_in: {error}")
