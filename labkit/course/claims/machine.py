"""Claims about platforms: what torch reports here, and what its documentation says about other systems."""

from __future__ import annotations

from labkit.course.claims.asked import ask
from labkit.course.claims.trials import Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, Ruling

_NCCL = """
import json, platform, torch, torch.distributed as dist
available, message = dist.is_nccl_available(), ""
if not available:
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        message = str(error).splitlines()[0]
versions = {"system": platform.system(), "torch": torch.__version__, "cuda": torch.version.cuda}
print(json.dumps(versions | {"nccl": available, "message": message}))
"""
# torch.distributed, "Backends that come with PyTorch"; release notes of CUDA 10.2 (2019), "Operating systems".
_DOCUMENTED = (
    "Documented, not run: according to the documentation of torch.distributed, NCCL is included in builds for Linux"
    " with CUDA; CUDA 10.2 was the last release that supported macOS. On macOS the backend is gloo."
)


def nccl_on_macos(trials: Trials) -> Ruling:
    """On macOS, torch on this machine decides; elsewhere the documentation decides, and the result here is added to
    it."""
    here, error = ask(_NCCL)
    if error:
        return Ruling(OPEN, f"torch could not be queried: {error}.")
    failure = f", and init_process_group fails with “{here['message']}”" if here["message"] else ""
    answer = f"is_nccl_available() is {here['nccl']}{failure}"
    build = f"torch {here['torch']} {'with CUDA ' + here['cuda'] if here['cuda'] else 'without CUDA'}"
    if here["system"] == "Darwin":
        return Ruling(HOLDS if here["nccl"] else FAILS, f"Run here, on macOS ({build}): {answer}.")
    return Ruling(FAILS, f"{_DOCUMENTED} Run here, on {here['system']} ({build}): {answer}.")
