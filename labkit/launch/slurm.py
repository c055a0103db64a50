"""Slurm as the engine of a run: submits its batch file, asks for its state, and cancels it.

The supervisor runs here as for any other run, and starts `labkit.launch.slurm_agent` instead of torchrun. The run
folder must be on a file system that the nodes share.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from labkit.jobs import Launch, Portable, Profile, per_node_of, sbatch
from labkit.launch.job import Job, LaunchError, start_supervisor
from labkit.launch.local import probe_environment
from labkit.launch.slurm_agent import asked, cancel, is_batch_file, job_of
from labkit.launch.warm.client import Cold
from labkit.plan.spec import Spec
from labkit.record.documents import LaunchPlan
from labkit.record.folder import RunFolder
from labkit.record.state import OVER
from labkit.record.status import hidden_supervisor, is_here, supervisor_of

ENGINE = "slurm"
_AGENT = "labkit.launch.slurm_agent"


def start(spec: Spec, nodes: int, profile: Profile, **options: Any) -> Job:
    """Submits a run, which then survives this process, and returns as soon as its state is followed.

    `options` are those of `Job.start`. Raises `SpecError`, and `LaunchError` if Slurm is absent or refuses the job;
    nothing is left in that case.
    """
    per_node_of(spec, nodes)
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch on the PATH; run this on a login node of the cluster (or load its Slurm module first),"
            " or take the job there with: labkit pack"
        )
    submitted: list[int] = []
    try:
        planned = partial(_planned, nodes=nodes, profile=profile, submitted=submitted)
        return Job.start(spec, detached=True, cold=True, planned=planned, **options)
    except BaseException:
        for job in submitted:
            cancel(job)
        raise


def _planned(spec: Spec, folder: RunFolder, nodes: int, profile: Profile, submitted: list[int]) -> LaunchPlan:
    """Writes and submits the batch file; returns the launch plan, whose command follows the job."""
    environment = probe_environment(spec, folder)
    script = [str(folder.script)] if spec.script is None else [*(["-m"] if spec.as_module else []), spec.script]
    job = Portable(
        name=spec.name,
        files={},
        target=("-m", "labkit.probe", *script, *spec.args),
        nodes=nodes,
        per_node=per_node_of(spec, nodes),
        device=spec.device,
        max_restarts=spec.max_restarts,
        resumes=spec.save_every is not None,
        requirements=(),
    )
    launch = Launch(
        torchrun=("python" if profile.container else sys.executable, "-m", "torch.distributed.run"),
        variables=environment | {"LABKIT_LOGS": str(folder.logs)},
        output=str(folder.launcher_log),
        save=str(folder.save_request),
    )
    RunFolder.write_text(folder.batch, sbatch(job, profile, launch))
    submitted.append(_submitted(["sbatch", "--parsable", f"--chdir={os.getcwd()}", str(folder.batch)]))  # noqa: PTH109
    return _plan(folder, submitted[0], environment)


def follow_again(folder: RunFolder) -> None:
    """Starts a new supervisor for a submitted run that has lost its own, if Slurm knows its job and the batch file of
    that job is this folder's; otherwise does nothing. Raises `LaunchError` if the supervisor cannot start."""
    number, status = folder.read_launch().batch_job, folder.read_status()
    if number is None or status.state in OVER or not is_here(status):
        return
    with folder.closing():  # so that only one process does it
        status = folder.read_status()
        if (
            supervisor_of(folder, status)
            or hidden_supervisor(status)
            or not is_batch_file(job_of(number), folder.batch)
        ):
            return
        environment = probe_environment(folder.read_spec().to_spec(), folder)
        plan = replace(_plan(folder, number, environment), detached=True)
        start_supervisor(folder, plan, status.started or time.time(), None, Cold())


def _plan(folder: RunFolder, number: int, environment: dict[str, str]) -> LaunchPlan:
    """The launch plan of the supervisor, whose command follows the job."""
    return LaunchPlan(
        v=1,
        engine=ENGINE,
        argv=[sys.executable, "-m", _AGENT, str(folder.path), str(number)],
        env=environment,
        cwd=str(folder.path),
        batch_job=number,
    )


def _submitted(command: Sequence[str]) -> int:
    """The number of the job that sbatch submitted. Variables of this lab stay here: the batch file sets its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    done = asked(command, environment)
    number = re.match(r"\d+", done.stdout)
    if done.returncode == 0 and number:
        return int(number[0])
    said = [line.removeprefix("sbatch: error: ") for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    why = "; ".join(said) or f"sbatch exited with code {done.returncode}"
    raise LaunchError(
        f"Slurm refused the job: {why}. Check partition, account, time and gpu of the profile in labkit.conf; sinfo"
        " lists the partitions"
    )
