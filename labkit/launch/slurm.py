"""Slurm as the engine of a run: submits its batch file, asks for its state, and cancels it.

The supervisor runs here as for any other run, and starts `labkit.launch.slurm_agent` instead of torchrun. The run
folder must be on a file system that the nodes share.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from labkit.jobs import Launch, Portable, Profile, per_node_of, sbatch
from labkit.launch.job import Job, LaunchError, start_submitted
from labkit.launch.local import probe_environment
from labkit.launch.slurm_agent import asked, cancel, is_batch_file, job_of
from labkit.plan.spec import Spec
from labkit.record.documents import LaunchPlan
from labkit.record.folder import RunFolder

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
    return start_submitted(spec, partial(_planned, nodes=nodes, profile=profile), cancel, **options)


def _planned(spec: Spec, folder: RunFolder, submitted: list[int], nodes: int, profile: Profile) -> LaunchPlan:
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


def plan_again(folder: RunFolder, plan: LaunchPlan) -> LaunchPlan | None:
    """The launch plan of a new supervisor; None unless Slurm knows the job, and its batch file is this folder's."""
    number = plan.batch_job
    if number is None or not is_batch_file(job_of(number), folder.batch):
        return None
    return _plan(folder, number, probe_environment(folder.read_spec().to_spec(), folder))


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
