"""The local launcher: turns a resolved Spec and a run folder into a launch plan, a plain value that can be
displayed."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from labkit.common.processes import TAG
from labkit.plan.spec import Spec
from labkit.record import clock
from labkit.record.folder import RunFolder
from labkit.setup.preflight import LOOPBACK

_COMMON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # added to the environment of every run


def plan(spec: Spec, folder: RunFolder) -> dict[str, Any]:
    """The launch plan as stored in `launch.json`: `argv`, the additional environment `env`, the working folder `cwd`.

    `spec` must be resolved by `Spec.on`: its device and number of processes are known.
    """
    return {
        "v": 1,
        "engine": "local",
        "argv": _argv(spec, folder),
        "env": _environment(spec, folder),
        "cwd": str(Path.cwd()),
    }


def _argv(spec: Spec, folder: RunFolder) -> list[str]:
    # The script path is passed as the user wrote it, so that sys.argv[0] is the same as under plain torchrun.
    script = [str(folder.script)] if spec.script is None else ["-m", spec.script] if spec.as_module else [spec.script]
    # like torchrun itself: do not import a random.py from the working folder
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [
        *(sys.executable, *safe, "-m", "torch.distributed.run"),
        "--nnodes=1",
        f"--nproc-per-node={spec.processes}",
        # Instead of --standalone, which opens the store on every network interface.
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={folder.rendezvous}",
        "--local-addr=127.0.0.1",
        f"--log-dir={folder.logs}",
        "--redirects=3",
        f"--max-restarts={spec.max_restarts}",
        *("-m", "labkit.probe"),
        *script,
        *spec.args,
    ]


def standing_environment() -> dict[str, str]:
    """The environment of this process with the additions of a typical run with several ranks."""
    return os.environ | _COMMON | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | _import_path()


def _environment(spec: Spec, folder: RunFolder) -> dict[str, str]:
    added = {
        TAG: str(folder.path),
        clock.VARIABLE: clock.reference(),
        "LABKIT_LOOPBACK": "1",
        **_COMMON,
        **LOOPBACK,
    }
    added |= {"LABKIT_SAMPLE_EVERY": str(spec.sample_every), "LABKIT_HANG_AFTER": str(spec.hang_after)}
    if spec.tensors:
        added["LABKIT_TENSORS"] = "1"
    if "OMP_NUM_THREADS" not in os.environ and (spec.device == "cpu" or spec.processes > 1):
        # one CPU rank emulates one device; for several ranks torchrun sets the same, with a warning
        added["OMP_NUM_THREADS"] = "1"
    if spec.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
    elif "CUDA_DEVICE_ORDER" not in os.environ:
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that cuda:0 is device 0 in NVML
    return added | _import_path()


def _import_path() -> dict[str, str]:
    """PYTHONPATH with this package's folder in front; empty if it is already there or in the interpreter's
    site-packages.
    """
    home = str(Path(__file__).resolve().parents[2])
    installed = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if home in installed | set(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)}
