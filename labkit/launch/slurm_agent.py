"""The commands of Slurm that follow and cancel a job, and the program that follows one.

`python -m labkit.launch.slurm_agent RUN_DIR JOB`: follows a job of Slurm until it has ended.

The supervisor starts it instead of torchrun. It writes each state of the job as an event, exits with 0 if the job was
completed, and cancels the job on SIGTERM.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from labkit.common.files import is_same_file
from labkit.record.folder import RunFolder
from labkit.record.writer import Writer

# ---- the commands of Slurm


_LIMIT = 30.0  # seconds in which a command of Slurm answers, also if the controller is busy
_PAUSES = (0.0, 0.3, 1.0, 2.0, 4.0)  # seconds before each attempt to cancel a job
_FIELDS = {"state": "JobState", "reason": "Reason", "nodes": "NodeList", "code": "ExitCode", "limit": "TimeLimit"}
ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
    "OUT_OF_MEMORY", "REVOKED", "UNKNOWN",
)  # fmt: skip


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
    shown = {name: values.get(field, "") for name, field in _FIELDS.items()}
    return {name: "" if value in ("None", "(null)") else value for name, value in shown.items()} | {
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
    return job is not None and is_same_file(batch, job.get("command", ""))


# ---- following a job


_FIRST, _MOST, _GROWTH = 1.0, 10.0, 1.2  # seconds between two questions: few for the controller of a long job


def main(run_dir: str, number: str) -> int:
    job = int(number)
    signal.signal(signal.SIGTERM, lambda *_: _stop(job))
    writer, known, pause = Writer(RunFolder(run_dir).system), {}, _FIRST
    while True:
        reported = job_of(job) or known | {"reason": "Slurm does not answer"}
        shown = {name: reported.get(name, "") for name in ("state", "reason", "nodes")}
        if shown != {name: known.get(name, "") for name in shown}:
            writer.write("queue", job=job, **shown)
            known, pause = reported, _FIRST
        if reported.get("state") in ENDED:
            return _ended(job, reported)
        time.sleep(pause)
        pause = min(pause * _GROWTH, _MOST)


def _stop(job: int) -> NoReturn:
    cancel(job)
    sys.exit(130)


def _ended(job: int, found: dict[str, Any]) -> int:
    state = found["state"]
    if state == "COMPLETED":
        return 0
    why = f"Slurm job {job} ended with state {state}"
    if state == "TIMEOUT":
        limit = found.get("limit") or "its profile"
        why += f": its time limit is {limit}; raise time in its profile, or save checkpoints with --save-every N"
    elif found.get("reason"):
        why += f" ({found['reason']})"
    print(why, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
