"""The engines that submit a run to a scheduler, and a new supervisor for a run that has lost its own."""

from __future__ import annotations

import time

from msgspec.structs import replace

from labkit.launch import kubeflow, slurm
from labkit.launch.job import start_supervisor
from labkit.launch.warm.client import Cold
from labkit.record.folder import RunFolder
from labkit.record.follow import hidden_supervisor, is_here, supervisor_of
from labkit.record.state import OVER

# By name: `start` submits a run, and `plan_again` makes the launch plan of a new supervisor.
SCHEDULERS = {slurm.ENGINE: slurm, kubeflow.ENGINE: kubeflow}


def follow_again(folder: RunFolder) -> None:
    """Starts a new supervisor for a submitted run that has lost its own, if the scheduler knows its job and the job is
    this folder's; otherwise does nothing. Raises `LaunchError` if the supervisor cannot start."""
    plan, status = folder.read_launch(), folder.read_status()
    if not plan.is_scheduled or plan.engine not in SCHEDULERS or status.state in OVER or not is_here(status):
        return
    with folder.closing():  # so that only one process does it
        status = folder.read_status()
        if supervisor_of(folder, status) or hidden_supervisor(status):
            return
        again = SCHEDULERS[plan.engine].plan_again(folder, plan)
        if again is not None:
            start_supervisor(folder, replace(again, detached=True), status.started or time.time(), None, Cold())
