"""The engines that submit a run to a scheduler: Slurm with a batch file, Kubeflow Trainer with a TrainJob.

The supervisor runs here as for any other run, and starts `labkit.launch.slurm_agent` or `labkit.launch.kubeflow_agent`
instead of torchrun. `follow_again` starts a new supervisor for a run that has lost its own.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from labkit.jobs import RUNTIME, Launch, Portable, Profile, label, of_spec, per_node_of, sbatch, trainjob_command
from labkit.launch import kubeflow_agent, slurm_agent
from labkit.launch.job import Job, LaunchError, start_submitted, start_supervisor
from labkit.launch.local import probe_environment
from labkit.launch.warm.client import Cold
from labkit.plan.spec import Spec
from labkit.record.documents import LaunchPlan, TrainJob
from labkit.record.folder import RunFolder
from labkit.record.follow import hidden_supervisor, is_here, supervisor_of
from labkit.record.state import OVER
from labkit.setup.environment import has, how_to_add

SLURM, KUBEFLOW = "slurm", "kubeflow"
_SLURM_AGENT, _KUBEFLOW_AGENT = "labkit.launch.slurm_agent", "labkit.launch.kubeflow_agent"
_LONGEST_NAME = 40  # characters of a TrainJob's name: Kubernetes adds to it in the names of pods

# ---- Slurm: the run folder must be on a file system that the nodes share


def submit_to_slurm(spec: Spec, nodes: int, profile: Profile, **options: Any) -> Job:
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
    return start_submitted(spec, partial(_slurm_job, nodes=nodes, profile=profile), slurm_agent.cancel, **options)


def _slurm_job(spec: Spec, folder: RunFolder, submitted: list[int], nodes: int, profile: Profile) -> LaunchPlan:
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
    return _slurm_plan(folder, submitted[0], environment)


def _slurm_plan_again(folder: RunFolder, plan: LaunchPlan) -> LaunchPlan | None:
    """The launch plan of a new supervisor; None unless Slurm knows the job, and its batch file is this folder's."""
    number = plan.batch_job
    if number is None or not slurm_agent.is_batch_file(slurm_agent.job_of(number), folder.batch):
        return None
    return _slurm_plan(folder, number, probe_environment(folder.read_spec().to_spec(), folder))


def _slurm_plan(folder: RunFolder, number: int, environment: dict[str, str]) -> LaunchPlan:
    """The launch plan of the supervisor, whose command follows the job."""
    return LaunchPlan(
        v=1,
        engine=SLURM,
        argv=[sys.executable, "-m", _SLURM_AGENT, str(folder.path), str(number)],
        env=environment,
        cwd=str(folder.path),
        batch_job=number,
    )


def _submitted(command: Sequence[str]) -> int:
    """The number of the job that sbatch submitted. Variables of this lab stay here: the batch file sets its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    done = slurm_agent.asked(command, environment)
    number = re.match(r"\d+", done.stdout)
    if done.returncode == 0 and number:
        return int(number[0])
    said = [line.removeprefix("sbatch: error: ") for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    why = "; ".join(said) or f"sbatch exited with code {done.returncode}"
    raise LaunchError(
        f"Slurm refused the job: {why}. Check partition, account, time and gpu of the profile in labkit.conf; sinfo"
        " lists the partitions"
    )


# ---- Kubeflow Trainer, through its SDK
#
# Pods share no file system with this machine: the job is that of `labkit pack`, its logs come back through the SDK, and
# its events do not.


def submit_to_kubeflow(spec: Spec, nodes: int, profile: Profile, **options: Any) -> Job:
    """Submits a run, which then survives this process, and returns as soon as its state is followed.

    `options` are those of `Job.start`. Raises `SpecError`, and `LaunchError` if the SDK or a cluster is absent, or if
    the cluster refuses the job; nothing is left in that case.
    """
    job = of_spec(spec, nodes)
    if not has(KUBEFLOW):
        raise LaunchError(
            f"the engine kubeflow needs Kubeflow's SDK, which is not installed; {how_to_add(KUBEFLOW)}, or write the"
            " file of the job with -o FILE.yaml"
        )
    return start_submitted(spec, partial(_train_job, job=job, profile=profile), kubeflow_agent.cancel, **options)


def _train_job(spec: Spec, folder: RunFolder, submitted: list[TrainJob], job: Portable, profile: Profile) -> LaunchPlan:
    """Submits the job; returns the launch plan, whose command follows it."""
    try:
        context, namespace = kubeflow_agent.current_context()
        trainer = kubeflow_agent.client(namespace, context)
    except kubeflow_agent.ClusterError as error:
        raise LaunchError(
            f"no cluster was found: {error}; set KUBECONFIG, or write the file of the job with -o FILE.yaml"
        ) from None
    name = f"{label(job.name)[:_LONGEST_NAME].rstrip('-')}-{secrets.token_hex(3)}"
    created = TrainJob(name, trainer.backend.namespace, context, job.nodes, job.per_node)
    try:
        _create(trainer, job, profile, name, folder)
    except Exception as error:  # the SDK raises what its cluster, its models or its kubeconfig make it raise
        server = trainer.backend.core_api.api_client.configuration.host
        raise LaunchError(
            f"the cluster {server} refused the job: {kubeflow_agent.words(error)}. Check that kubectl get"
            f" clustertrainingruntimes lists {RUNTIME}, and that you may create TrainJobs in the namespace"
            f" {created.namespace}"
        ) from None
    submitted.append(created)
    return _kubeflow_plan(created, folder, spec)


def _create(trainer: Any, job: Portable, profile: Profile, name: str, folder: RunFolder) -> None:
    from kubeflow.trainer import CustomTrainerContainer
    from kubeflow.trainer.options import Annotations, Name, TrainerCommand

    runtime = trainer.get_runtime(RUNTIME)
    cores = int(profile.cpus or 1) * job.per_node
    container = CustomTrainerContainer(
        image=profile.container or runtime.trainer.image,
        num_nodes=job.nodes,
        resources_per_node={"gpu": job.per_node} if job.device == "cuda" else {"cpu": cores},
    )
    command = TrainerCommand(trainjob_command(job, profile))
    trainer.train(
        runtime=runtime,
        trainer=container,
        options=[Name(name), Annotations({kubeflow_agent.FOLDER: str(folder.path)}), command],
    )


def _kubeflow_plan(job: TrainJob, folder: RunFolder, spec: Spec) -> LaunchPlan:
    """The launch plan of the supervisor, whose command follows a TrainJob; no rank writes events here."""
    return LaunchPlan(
        v=1,
        engine=KUBEFLOW,
        argv=[sys.executable, "-m", _KUBEFLOW_AGENT, str(folder.path), msgspec.json.encode(job).decode()],
        env=probe_environment(spec, folder),
        cwd=str(folder.path),
        trainjob=job,
        ranks_here=0,
    )


def _kubeflow_plan_again(folder: RunFolder, plan: LaunchPlan) -> LaunchPlan | None:
    """The launch plan of a new supervisor; None unless the cluster has the job, and it is this folder's."""
    if plan.trainjob is None:
        return None
    try:
        client = kubeflow_agent.client(plan.trainjob.namespace, plan.trainjob.context)
        job = kubeflow_agent.seen(client, plan.trainjob)
    except (kubeflow_agent.ClusterError, ImportError):
        return None
    if not kubeflow_agent.is_own(job, folder):
        return None
    return _kubeflow_plan(plan.trainjob, folder, folder.read_spec().to_spec())


# ---- both


class Scheduler(NamedTuple):
    """`start` submits a run; `plan_again` makes the launch plan of a new supervisor, None if the job is not known."""

    start: Callable[..., Job]
    plan_again: Callable[[RunFolder, LaunchPlan], LaunchPlan | None]


SCHEDULERS = {
    SLURM: Scheduler(submit_to_slurm, _slurm_plan_again),
    KUBEFLOW: Scheduler(submit_to_kubeflow, _kubeflow_plan_again),
}


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
