"""Kubeflow Trainer as the engine of a run: submits a TrainJob through Kubeflow's SDK.

The supervisor runs here as for any other run, and starts `labkit.launch.kubeflow_agent` instead of torchrun. Pods share
no file system with this machine: the job is that of `labkit pack`, its logs come back through the SDK, and its events
do not.
"""

from __future__ import annotations

import secrets
import sys
from functools import partial
from typing import Any

import msgspec

from labkit.jobs import RUNTIME, Portable, Profile, label, of_spec, trainjob_command
from labkit.launch.job import Job, LaunchError, start_submitted
from labkit.launch.kubeflow_agent import FOLDER, ClusterError, cancel, client, current_context, is_own, seen, words
from labkit.launch.local import probe_environment
from labkit.plan.spec import Spec
from labkit.record.documents import LaunchPlan, TrainJob
from labkit.record.folder import RunFolder
from labkit.setup.environment import has, how_to_add

ENGINE = "kubeflow"
_AGENT = "labkit.launch.kubeflow_agent"
_LONGEST = 40  # characters of a name: Kubernetes adds to it in the names of pods


def start(spec: Spec, nodes: int, profile: Profile, **options: Any) -> Job:
    """Submits a run, which then survives this process, and returns as soon as its state is followed.

    `options` are those of `Job.start`. Raises `SpecError`, and `LaunchError` if the SDK or a cluster is absent, or if
    the cluster refuses the job; nothing is left in that case.
    """
    job = of_spec(spec, nodes)
    if not has(ENGINE):
        raise LaunchError(
            f"the engine kubeflow needs Kubeflow's SDK, which is not installed; {how_to_add(ENGINE)}, or write the file"
            " of the job with -o FILE.yaml"
        )
    return start_submitted(spec, partial(_planned, job=job, profile=profile), cancel, **options)


def _planned(spec: Spec, folder: RunFolder, submitted: list[TrainJob], job: Portable, profile: Profile) -> LaunchPlan:
    """Submits the job; returns the launch plan, whose command follows it."""
    try:
        context, namespace = current_context()
        trainer = client(namespace, context)
    except ClusterError as error:
        raise LaunchError(
            f"no cluster was found: {error}; set KUBECONFIG, or write the file of the job with -o FILE.yaml"
        ) from None
    name = f"{label(job.name)[:_LONGEST].rstrip('-')}-{secrets.token_hex(3)}"
    found = TrainJob(name, trainer.backend.namespace, context, job.nodes, job.per_node)
    try:
        _submit(trainer, job, profile, name, folder)
    except Exception as error:  # the SDK raises what its cluster, its models or its kubeconfig make it raise
        raise LaunchError(
            f"the cluster {_host(trainer)} refused the job: {words(error)}. Check that kubectl get"
            f" clustertrainingruntimes lists {RUNTIME}, and that you may create TrainJobs in the namespace"
            f" {found.namespace}"
        ) from None
    submitted.append(found)
    return plan_of(found, folder, spec)


def _host(trainer: Any) -> str:
    """The address of the API server that a client asks."""
    return trainer.backend.core_api.api_client.configuration.host


def _submit(trainer: Any, job: Portable, profile: Profile, name: str, folder: RunFolder) -> None:
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
        runtime=runtime, trainer=container, options=[Name(name), Annotations({FOLDER: str(folder.path)}), command]
    )


def plan_of(job: TrainJob, folder: RunFolder, spec: Spec) -> LaunchPlan:
    """The launch plan of the supervisor, whose command follows a TrainJob; no rank writes events here."""
    return LaunchPlan(
        v=1,
        engine=ENGINE,
        argv=[sys.executable, "-m", _AGENT, str(folder.path), msgspec.json.encode(job).decode()],
        env=probe_environment(spec, folder),
        cwd=str(folder.path),
        trainjob=job,
        ranks_here=0,
    )


def plan_again(folder: RunFolder, plan: LaunchPlan) -> LaunchPlan | None:
    """The launch plan of a new supervisor; None unless the cluster has the job, and it is this folder's."""
    if plan.trainjob is None:
        return None
    try:
        found = seen(client(plan.trainjob.namespace, plan.trainjob.context), plan.trainjob)
    except (ClusterError, ImportError):
        return None
    return plan_of(plan.trainjob, folder, folder.read_spec().to_spec()) if is_own(found, folder) else None
