"""Checks of torch in separate processes: the import may fail, crash or hang, and this process must not initialize
CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    env = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
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
                    error = error or _last_line(text) or f"exit code {rank.returncode}"
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
        return {}, _last_line(answer.stderr) or f"exit code {answer.returncode}"
    return json.loads(_last_line(answer.stdout)), ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
