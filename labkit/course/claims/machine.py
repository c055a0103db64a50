"""Claims about what runs where: what torch says here, and what its documentation says of other systems."""

from __future__ import annotations

from labkit.course.claims.asked import ask
from labkit.course.claims.trials import Trials
from labkit.course.claims.verdict import FAILS, HOLDS, OPEN, Ruling

_NCCL = """
import json, platform, torch, torch.distributed as dist
there, said = dist.is_nccl_available(), ""
if not there:
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        said = str(error).splitlines()[0]
print(json.dumps({"system": platform.system(), "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": there, "said": said}))
"""
# torch.distributed, "Backends that come with PyTorch"; release notes of CUDA 10.2 (2019), "Operating systems".
_READ = (
    "Read, not run: by the documentation of torch.distributed NCCL is built in on Linux, and there only with CUDA; "
    "CUDA 10.2 was the last that macOS had. On macOS the backend is gloo."
)


def nccl_on_macos(trials: Trials) -> Ruling:
    """On macOS torch itself is asked; elsewhere the documentation decides, and what this machine says stands beside it."""
    here, error = ask(_NCCL)
    if error:
        return Ruling(OPEN, f"torch could not be asked: {error}.")
    answer = f"is_nccl_available() is {here['nccl']}" + (f", and asking for it says “{here['said']}”" if here["said"] else "")
    build = f"torch {here['torch']} with {'CUDA ' + here['cuda'] if here['cuda'] else 'no CUDA'}"
    if here["system"] == "Darwin":
        return Ruling(HOLDS if here["nccl"] else FAILS, f"Run here, on macOS ({build}): {answer}.")
    return Ruling(FAILS, f"{_READ} Run here, on {here['system']} ({build}): {answer}.")
