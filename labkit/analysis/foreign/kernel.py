"""Lines of the kernel's log (dmesg, syslog) among those of a job: GPUs that failed, which NVIDIA's driver reports as
Xid, and processes that were killed because the memory of the host ran out. The numbers of Xid:
docs.nvidia.com/deploy/xid-errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from labkit.analysis.diagnose.finding import Finding, shorter

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[\w:.]+)\): (?P<code>\d{1,3})\b,? ?(?P<says>.*)")
_KILLED = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process|invoked oom-killer|oom-kill:constraint|oom_reaper: reaped")
_HARDWARE = {  # the others report what a program did, or that a process was stopped
    48: "an uncorrectable error of its memory (ECC)",
    62: "its microcontroller halted",
    64: "a row of its memory could not be replaced",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    94: "a contained error of its memory (ECC)",
    95: "an uncontained error of its memory (ECC)",
    119: "its firmware (GSP) does not answer",
    120: "an error of its firmware (GSP)",
    140: "an unrecovered error of its memory (ECC)",
    149: "a fatal error of NVLink",
}


def is_of_kernel(text: str) -> bool:
    """Whether a line says that a GPU failed, or that a process was killed for lack of memory."""
    return bool(_XID.search(text) or _KILLED.search(text))


def killed(lines: Sequence[str]) -> str | None:
    """The first line about a process that was killed for lack of memory."""
    said = [line for line in lines if _KILLED.search(line)]
    return next((line for line in said if "Kill" in line), said[0] if said else None)


def hardware(lines: Sequence[str]) -> Iterator[Finding]:
    """The first GPU that failed."""
    said = [found for line in lines if (found := _XID.search(line)) and int(found["code"]) in _HARDWARE]
    if not said:
        return
    first, gpus = said[0], sorted({found["gpu"] for found in said})
    yield Finding(
        "gpu_fault",
        "wrong",
        f"the GPU {shorter(first['gpu'], 30)} failed: {_HARDWARE[int(first['code'])]} (Xid {first['code']})"
        + (f"; {len(gpus) - 1} more reported errors" if len(gpus) > 1 else ""),
        shorter("; ".join(found[0] for found in said[:4])),
        "a defect of the GPU, its memory, its link or its power supply, not of the script",
        "leave the node out (Slurm: --exclude), resume from the last checkpoint, and tell the administrators its name"
        " and the Xid; `nvidia-smi -q -d ECC,ROW_REMAPPER` and `nvidia-smi nvlink -e` show more",
    )
