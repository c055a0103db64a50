"""The batch file of Slurm: one task per node, each of which is torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.common.units import counted
from labkit.engines.portable import Portable
from labkit.engines.profiles import Profile

NOTICE = 120  # seconds before the time limit at which a job that saves checkpoints is requeued
_PATIENCE = 90  # most seconds that the job waits for that checkpoint
_PORTS = 20_000, 20_000  # the first port, and how many: a job's own follows from its number


@dataclass(frozen=True)
class Launch:
    """How the tasks of a job are started: the words before torchrun's own arguments and after them, variables, and the
    file for the output of all of them (`%x` is the name of the job, `%j` its number). `save` is the file that asks the
    script for a checkpoint."""

    torchrun: tuple[str, ...] = ("torchrun",)
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    output: str = "%x-%j.log"
    save: str = "save"


BARE = Launch()


def sbatch(job: Portable, profile: Profile, launch: Launch = BARE) -> str:
    """The batch file, to be submitted from the folder that holds the files of the job. A job that resumes from its
    checkpoints is requeued before its time limit."""
    directives = [
        f"--job-name={job.name}",
        *([f"--partition={profile.partition}"] if profile.partition else []),
        *([f"--account={profile.account}"] if profile.account else []),
        f"--time={profile.time}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1  # one torchrun per node, which starts the ranks of that node",
        *_resources(job, profile),
        f"--output={launch.output}",
        "--open-mode=append  # a job that starts again continues its output",
        *(
            ["--requeue", f"--signal=B:USR1@{NOTICE}  # seconds before the time limit"]
            if job.resumes
            else ["--no-requeue"]
        ),
    ]
    lines = [
        "#!/bin/bash",
        f"# {job.name}: {counted(job.ranks, 'rank')} on {counted(job.nodes, 'node')}.",
        *(f"#SBATCH {one}" for one in directives),
        *("", "set -euo pipefail"),
        *([f"module load {profile.modules}"] if profile.modules else []),
        *([profile.setup] if profile.setup else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in launch.variables.items()),
        *(["", *_requeue(launch.save)] if job.resumes else []),
        "",
        "# The ranks meet on the first node of the job; SLURM_LAUNCH_NODE_IPADDR may be the login node.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"port=$(({_PORTS[0]} + SLURM_JOB_ID % {_PORTS[1]}))  # jobs that share a node have different ports",
        "",
        "srun --kill-on-bad-exit=1 \\",
        *(f"  {one} \\" for one in (*_container(job, profile), _words(launch.torchrun))),
        f'  --nnodes="$SLURM_NNODES" --nproc-per-node={job.per_node} --max-restarts={job.max_restarts} \\',
        '  --rdzv-backend=c10d --rdzv-endpoint="${hosts[0]}:$port" \\',
        '  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\',
        *(f"  {_words([one])} \\" for one in launch.options),
        f"  {_words(job.target)} &",
        "wait $!  # in the background, so that this shell handles signals",
        "",
    ]
    return "\n".join(lines)


def _requeue(save: str) -> tuple[str, ...]:
    """The lines that save and requeue a job at Slurm's signal."""
    return (
        "# Before the time limit the ranks write a checkpoint, from which the job resumes after waiting in the queue.",
        f"save={shlex.quote(save)}  # the script removes this file when the checkpoint is complete",
        "requeue() {",
        '  echo "the time limit is near: the job saves a checkpoint and goes back to the queue"',
        '  touch "$save"',
        f'  for _ in {{1..{_PATIENCE}}}; do if [ -e "$save" ]; then sleep 1; fi; done',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "}",
        "trap requeue USR1",
    )


def _resources(job: Portable, profile: Profile) -> list[str]:
    if job.device == "cuda":
        gpus = [f"--gpus-per-node={profile.gpu + ':' if profile.gpu else ''}{job.per_node}"]
        return [*gpus, *([f"--cpus-per-task={int(profile.cpus) * job.per_node}"] if profile.cpus else [])]
    return [f"--cpus-per-task={int(profile.cpus or 1) * job.per_node}"]


def _container(job: Portable, profile: Profile) -> list[str]:
    """The words before torchrun: an Apptainer image is a file `.sif`; any other one is for Slurm's plugin pyxis."""
    if not profile.container:
        return []
    if profile.container.endswith(".sif"):
        return [f'apptainer exec {"--nv " if job.device == "cuda" else ""}--bind "$PWD" {profile.container}']
    return [f'--container-image={profile.container} --container-mounts="$PWD" --container-workdir="$PWD"']


def _words(words: tuple[str, ...] | list[str]) -> str:
    return shlex.join(words)
