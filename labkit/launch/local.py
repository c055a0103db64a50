"""The engine of this machine: from a settled Spec and a run folder to the plan of launch, a plain value that can be shown."""

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

_STANDING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # added to the environment of every run


def plan(spec: Spec, folder: RunFolder) -> dict[str, Any]:
    """What is started, as `launch.json` holds it: `argv`, the `env` that is added, the working folder `cwd`.

    `spec` is settled: its device and number of processes are known.
    """
    return {
        "v": 1,
        "engine": "local",
        "argv": _argv(spec, folder),
        "env": _environment(spec, folder),
        "cwd": str(Path.cwd()),
    }


def _argv(spec: Spec, folder: RunFolder) -> list[str]:
    # A script is named as the user named it, so that its sys.argv[0] is that of bare torchrun.
    script = [str(folder.script)] if spec.script is None else ["-m", spec.script] if spec.as_module else [spec.script]
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # as torchrun itself: no random.py of the working folder in the launcher
    return [
        *(sys.executable, *safe, "-m", "torch.distributed.run"),
        "--nnodes=1",
        f"--nproc-per-node={spec.processes}",
        # Instead of --standalone, which opens its store on every interface.
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
    """The environment of this process with what is added to it for most runs: that of several ranks."""
    return os.environ | _STANDING | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | _import_path()


def _environment(spec: Spec, folder: RunFolder) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    added = {
        TAG: str(folder.path),
        clock.VARIABLE: clock.reference(),
        "LABKIT_LOOPBACK": "1",
        **_STANDING,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    added |= {"LABKIT_SAMPLE_EVERY": str(spec.sample_every), "LABKIT_HANG_AFTER": str(spec.hang_after)}
    if spec.tensors:
        added["LABKIT_TENSORS"] = "1"
    if "OMP_NUM_THREADS" not in os.environ and (spec.device == "cpu" or spec.processes > 1):
        added["OMP_NUM_THREADS"] = "1"  # one CPU rank stands for one device; for several ranks torchrun sets the same, and warns
    if spec.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""
    elif "CUDA_DEVICE_ORDER" not in os.environ:
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that cuda:0 is the device that NVML calls 0
    return added | _import_path()


def _import_path() -> dict[str, str]:
    """PYTHONPATH with this package's place in front; nothing where it is there, or among the interpreter's own packages."""
    home = str(Path(__file__).resolve().parents[2])
    installed = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if home in installed | set(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)}
