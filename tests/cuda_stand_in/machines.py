"""The machines that the stand-in can be, and the environment variables of a process on them."""

from __future__ import annotations

import os
from pathlib import Path

from labkit.setup.environment import CLONE

# gpu is t4, h100 or p100; further settings: kernel_us (microseconds that a kernel takes, 5), log (a file for notes),
# nccl_error (the text of the system error with which every communicator fails)
MACHINES = {
    "t4x1": {"gpu": "t4", "devices": "1"},
    "t4x2": {"gpu": "t4", "devices": "2"},
    "h100x1": {"gpu": "h100", "devices": "1"},
    "h100x8": {"gpu": "h100", "devices": "8"},
    "p100x1": {"gpu": "p100", "devices": "1"},  # torch has no kernels for it
    "mig": {"gpu": "h100", "devices": "1", "mig": "2"},
    "old-driver": {"gpu": "t4", "devices": "2", "driver": "12020"},  # older than the CUDA of this torch
    "no-nvml": {"gpu": "t4", "devices": "2", "nvml": "0"},  # as in some containers
}


def variables(machine: str, library: Path, folder: Path, **more: object) -> dict[str, str]:
    """The environment variables, in addition to a process's own, that make it one on `machine`: those of `settings`,
    and the library, which is in the folder `library`."""
    own = Path(__file__).parent
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [
        str(own / "site"),
        str(CLONE),
        *(path for path in inherited if path not in ("", str(own.parent), str(CLONE))),
    ]
    return settings(machine, folder, **more) | {
        "LD_PRELOAD": str(library / "libcudastandin.so"),
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def settings(machine: str, folder: Path, **more: object) -> dict[str, str]:
    """The stand-in's own variables. Processes that share `folder` are on the same machine: they see each other's memory
    and exchange collectives. It should be below /dev/shm, and its removal leaves nothing behind. `more` are further
    settings: `kernel_us=50`, `log="calls.log"`, `nccl_error="Connection refused"`.
    """
    own = MACHINES[machine] | {"folder": str(folder)} | {name: str(value) for name, value in more.items()}
    return {f"CUDA_STAND_IN_{name.upper()}": value for name, value in own.items()}
