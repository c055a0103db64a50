"""`python -m labkit.launch.slurm_agent RUN_DIR JOB`: follows a job of Slurm until it has ended.

The supervisor starts it instead of torchrun. It writes each state of the job as an event, exits with 0 if the job was
completed, and cancels the job on SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any, NoReturn

from labkit.launch.slurm_client import ENDED, cancel, job_of
from labkit.record.folder import RunFolder
from labkit.record.writer import Writer

_FIRST, _MOST, _GROWTH = 1.0, 10.0, 1.2  # seconds between two questions: few for the controller of a long job


def main(run_dir: str, number: str) -> int:
    """The exit code for the supervisor."""
    job = int(number)
    signal.signal(signal.SIGTERM, lambda *_: _stop(job))
    writer, known, pause = Writer(RunFolder(run_dir).system), {}, _FIRST
    while True:
        found = job_of(job) or known | {"reason": "Slurm does not answer"}
        shown = {name: found.get(name, "") for name in ("state", "reason", "nodes")}
        if shown != {name: known.get(name, "") for name in shown}:
            writer.write("queue", job=job, **shown)
            known, pause = found, _FIRST
        if found.get("state") in ENDED:
            return _ended(job, found)
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
