"""The commands of Slurm that follow and cancel a job."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LIMIT = 30.0  # seconds in which a command of Slurm answers, also if the controller is busy
_PAUSES = (0.0, 0.3, 1.0, 2.0, 4.0)  # seconds before each attempt to cancel a job
_FIELDS = {"state": "JobState", "reason": "Reason", "nodes": "NodeList", "code": "ExitCode", "limit": "TimeLimit"}
ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "UNKNOWN"),
)


def asked(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The result of a command of Slurm; a command that does not answer in time has failed."""
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer for {_LIMIT:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} cannot be started: {error.strerror}")


def job_of(number: int) -> dict[str, Any] | None:
    """`state`, `reason`, `nodes`, `code` and `limit` of a job as Slurm shows them, and its batch file, `command`.

    The state is UNKNOWN if Slurm does not know the job any more; None if Slurm does not answer.
    """
    done = asked(["scontrol", "show", "job", "--oneliner", str(number)])
    if done.returncode:
        return {"state": "UNKNOWN"} if "Invalid job id" in done.stderr else None
    values = dict(re.findall(r"(?:^|\s)(\w+)=(.*?)(?=\s\w+=|\s*$)", done.stdout, re.MULTILINE))
    found = {name: values.get(field, "") for name, field in _FIELDS.items()}
    return {name: "" if value in ("None", "(null)") else value for name, value in found.items()} | {
        "command": values.get("Command", "")
    }


def cancel(number: int, batch: Path | None = None) -> None:
    """Cancels a job, and asks again, for `_LIMIT` seconds at most, if Slurm did not answer or the job continues; with
    `batch`, only if that is its batch file, because the content of a run folder proves nothing."""
    last = time.monotonic() + _LIMIT
    for pause in _PAUSES:
        if time.monotonic() > last:
            return
        time.sleep(pause)
        job = job_of(number)
        if job is None:
            continue
        if job["state"] in (*ENDED, "COMPLETING") or (batch is not None and not is_batch_file(job, batch)):
            return
        asked(["scancel", str(number)])


def is_batch_file(job: dict[str, Any] | None, batch: Path) -> bool:
    """Whether a job was submitted with this batch file."""
    try:
        return job is not None and batch.samefile(job.get("command", ""))
    except OSError:  # one of them does not exist
        return False
