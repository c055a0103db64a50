"""The machines that the stand-in can be, and the environment variables of a process on them."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.setup.environment import CLONE

# GPU is t4, h100 or p100; further variables: KERNEL_US (microseconds that a kernel takes), LOG (a file of calls)
MACHINES = {
    "t4x1": {"GPU": "t4", "DEVICES": "1"},
    "t4x2": {"GPU": "t4", "DEVICES": "2"},
    "h100x1": {"GPU": "h100", "DEVICES": "1"},
    "h100x8": {"GPU": "h100", "DEVICES": "8"},
    "p100x1": {"GPU": "p100", "DEVICES": "1"},  # torch has no kernels for it
    "mig": {"GPU": "h100", "DEVICES": "1", "MIG": "2"},
    "old-driver": {"GPU": "t4", "DEVICES": "2", "DRIVER": "12020"},  # older than the CUDA of this torch
    "no-nvml": {"GPU": "t4", "DEVICES": "2", "NVML": "0"},  # as in some containers
}


def variables(machine: str, library: Path, folder: Path, **settings: object) -> dict[str, str]:
    """The environment variables, in addition to a process's own, that make it one on `machine`.

    `library` is the folder of the library. Processes that share `folder` are on the same machine: they see each other's
    memory and exchange collectives. It should be below /dev/shm, and its removal leaves nothing behind. `settings` are
    further variables of the stand-in: `kernel_us=50`, `log="calls.log"`.
    """
    own = MACHINES[machine] | {"FOLDER": str(folder)} | {name.upper(): str(value) for name, value in settings.items()}
    paths = [str(Path(__file__).with_name("site")), str(CLONE), os.environ.get("PYTHONPATH", "")]
    return {f"CUDA_STAND_IN_{name}": value for name, value in own.items()} | {
        "LD_PRELOAD": str(library / "libcudastandin.so"),
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
