"""What a run needs besides its Spec, declared by the tables as plain values, and the checks for it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.common.text import last_line
from labkit.setup import environment

# ---- what a row of the tables needs


@dataclass(frozen=True)
class Files:
    """The files of a data set, relative to the data folder, and where they are downloaded from.

    Each entry of `required` is a tuple of alternatives, of which one must exist. `put` says which files to put into
    `folder` by hand.
    """

    title: str
    folder: str
    required: tuple[tuple[str, ...], ...]
    host: str
    put: str


@dataclass(frozen=True)
class Needs:
    """The requirements of a strategy, workload or data set in addition to torch.

    - `extra`: the optional extra of the project that adds its package; `module` and `package` name a package of the
      lab's own requirements instead, as it is imported and as it is installed.
    - `files`: the files that are read, downloaded if possible.
    - `instead`: the nearest choice that needs none of this, as a user writes it.
    """

    extra: str | None = None
    module: str = ""
    package: str = ""
    files: Files | None = None
    instead: str = ""


NOTHING = Needs()


# ---- the checks


_LIMIT = 60.0  # seconds; an import from a slow network disk can take long

_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "available": torch.cuda.is_available(),
    "archs": torch.cuda.get_arch_list() if torch.cuda.is_available() else [],
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
}))
"""
_TORCHVISION = """
import json
from importlib.metadata import version
try:
    import torchvision
    print(json.dumps({"version": version("torchvision")}))
except BaseException as error:
    print(json.dumps({"version": version("torchvision"), "error": f"{type(error).__name__}: {error}"}))
"""
_ALL_REDUCE = """
import datetime, sys, torch, torch.distributed as dist
backend, rank, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
if device.type == "cuda":
    torch.cuda.set_device(device)
timeout = datetime.timedelta(seconds=20)
dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=2, timeout=timeout)
number = torch.ones(1, device=device)
dist.all_reduce(number)
assert number.item() == 2, f"the all-reduce of 1 and 1 returned {number.item()}"
dist.destroy_process_group()
"""


# ---- the needs of strategies, workloads and data sets


def installed(name: str, needs: Needs) -> str | None:
    """One sentence if a package that `name` needs is missing, otherwise None. Nothing is imported."""
    package, module, command = needs.package, needs.module, "add it with: python3 -m labkit setup"
    if needs.extra is not None:
        package = module = environment.OPTIONAL[needs.extra]
        command = environment.how_to_add(needs.extra)
    if module and importlib.util.find_spec(module) is None:
        return f"{name} needs the package {package}, which is not installed; {command}{_or_use(needs)}"
    return None


def compiler_missing(what: str, instead: str) -> str | None:
    """One sentence if there is no C++ compiler for `what`, which needs one; otherwise None."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return None
    return f"{what}, and {compiler} is not on the PATH; install it (apt install g++), or use {instead}"


def available(name: str, needs: Needs, folder: str) -> str | None:
    """One sentence if an installed package does not load, or if files are neither in the data folder nor can be
    downloaded; otherwise None. The first call may take seconds."""
    refusal = _not_loading(name, environment.OPTIONAL[needs.extra], needs) if _is_built_for_torch(needs) else None
    return refusal or (_files_missing(needs.files, needs, Path(folder)) if needs.files else None)


def takes_long(needs: Needs) -> bool:
    """Whether `available` has something to look for."""
    return needs.files is not None or _is_built_for_torch(needs)


def _is_built_for_torch(needs: Needs) -> bool:
    return needs.extra is not None and environment.OPTIONAL[needs.extra] in environment.BUILT_FOR_TORCH


def _or_use(needs: Needs) -> str:
    return f", or use {needs.instead}" if needs.instead else ""


def _not_loading(name: str, package: str, needs: Needs) -> str | None:
    """Why a package that is built for one version of torch does not load; asked once per installed version."""
    found = [path for path in map(_version_file, ("torch", package)) if path.is_file()]
    version, error = _loaded(tuple((str(path), path.stat().st_mtime_ns) for path in found))
    if not error:
        return None
    if f"{package}::nms" in error:
        error = "it was built for a different torch"
    return (
        f"{name} needs {package}, and {package} {version} does not load with the installed torch ({error}); "
        f"install matching versions of both from the same source{_or_use(needs)}"
    )


def _version_file(package: str) -> Path:
    """A file that every installation of the package rewrites."""
    package_spec = importlib.util.find_spec(package)
    return Path(package_spec.origin).with_name("version.py") if package_spec and package_spec.origin else Path()


@lru_cache(maxsize=1)
def _loaded(installed: tuple[tuple[str, int], ...]) -> tuple[str, str]:
    return torchvision()


def _files_missing(files: Files, needs: Needs, folder: Path) -> str | None:
    if all(any((folder / name).exists() for name in names) for names in files.required):
        return None
    if is_reachable(files.host, int(time.monotonic() / 60)):
        return None
    return (
        f"{files.title} is not in {folder / files.folder}, and {files.host} is not reachable; put {files.put} there,"
        f" name a folder with --data-dir{_or_use(needs)}"
    )


@lru_cache(maxsize=2)
def is_reachable(host: str, minute: int) -> bool:
    """Whether a host accepts a connection; tried at most once per minute, because a panel asks after every change."""
    try:
        socket.create_connection((host, 443), timeout=3).close()
    except OSError:
        return False
    return True


# ---- torch

_LO = "lo0" if sys.platform == "darwin" else "lo"
LOOPBACK = {"GLOO_SOCKET_IFNAME": _LO, "NCCL_SOCKET_IFNAME": _LO}  # keeps the ranks of one node on this machine


@dataclass(frozen=True)
class Torch:
    """The properties of the installed torch; only `error` is set if it cannot be imported."""

    error: str = ""
    version: str = ""
    cuda: str | None = None
    available: bool = False
    archs: tuple[str, ...] = ()
    gloo: bool = False
    nccl: bool = False


@lru_cache(maxsize=1)
def torch() -> Torch:
    """The properties of torch, determined once."""
    answer, error = _ask(_TORCH)
    return Torch(error=error) if error else Torch(**answer | {"archs": tuple(answer["archs"])})


def torchvision() -> tuple[str, str]:
    """The version of torchvision, and the error of its import (empty if it succeeds)."""
    answer, error = _ask(_TORCHVISION)
    return answer.get("version", ""), answer.get("error", "") or error


def all_reduce(backend: str) -> tuple[float, str]:
    """Seconds that two ranks need to start and run an all-reduce, and the error (empty on success). No process is left
    running."""
    began = time.monotonic()
    env = os.environ | LOOPBACK | {"OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[str]] = []
    error = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in (0, 1):
                command = [sys.executable, "-c", _ALL_REDUCE, backend, str(rank), f"{folder}/store"]
                ranks.append(
                    subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                )
            for rank in ranks:
                _, text = rank.communicate(timeout=max(1.0, began + _LIMIT - time.monotonic()))
                if rank.returncode:
                    error = error or last_line(text) or f"exit code {rank.returncode}"
        except subprocess.TimeoutExpired:
            error = f"no answer within {_LIMIT:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                rank.stderr.close()
    return time.monotonic() - began, error


def _ask(code: str) -> tuple[dict[str, Any], str]:
    """The JSON object in the last line that the code prints, and the error in one line (empty on success)."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_LIMIT:g} s"
    if answer.returncode:
        return {}, last_line(answer.stderr) or f"exit code {answer.returncode}"
    return json.loads(last_line(answer.stdout)), ""
