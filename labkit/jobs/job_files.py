"""The files that start a job at a site: its profile, the commands of torchrun, the batch file of Slurm, and the YAML of
Kubeflow and SkyPilot."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from labkit.common.arguments import shown
from labkit.common.files import MARK
from labkit.common.units import counted
from labkit.jobs.portable import REQUIREMENTS, Portable
from labkit.plan.spec import SpecError
from labkit.setup import limits

# ---- profiles


DEFAULT = "default"
_PREFIX = "profile "
# A time limit as sbatch reads it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.
_TIME = re.compile(r"\d+-\d+(:\d\d){0,2}|\d+(:\d\d){0,2}")
_WORD = re.compile(r"[^\s'\"`$\\;&|<>]+")


@dataclass(frozen=True)
class Profile:
    """The settings of one site. All are text; an empty one is left to the site's default.

    `time` is the limit in Slurm's format, `gpu` the type of GPU (Slurm's gres type, SkyPilot's accelerator), `cpus` the
    cores per rank, `container` the image in which the ranks run, `modules` environment modules, separated by spaces,
    and `setup` one line of shell that is run before them, such as `source /opt/venv/bin/activate`.
    """

    partition: str = ""
    account: str = ""
    time: str = "01:00:00"
    gpu: str = ""
    cpus: str = ""
    container: str = ""
    modules: str = ""
    setup: str = ""


def profile(name: str = DEFAULT) -> Profile:
    """The profile called `name`. Raises `ConfigError` for an unknown name or an invalid value."""
    found, known = {}, []
    for path in limits.files():
        for title, values in limits.sections(path).items():
            if title.startswith(_PREFIX):
                known.append(title.removeprefix(_PREFIX).strip())
                if known[-1] == name:
                    found |= _checked(path, title, values)
    if name not in (*known, DEFAULT):
        there = ", ".join(dict.fromkeys(known)) or "none yet"
        raise limits.ConfigError(
            f"there is no profile {shown(name)}; add a section [profile {name}] to {limits.user_file()} (profiles there"
            f" are: {there})"
        )
    return Profile(**found)


def _checked(path: object, title: str, values: dict[str, str]) -> dict[str, str]:
    limits.check_names(path, title, values, (option.name for option in fields(Profile)))
    for name, value in values.items():
        if "\n" in value:
            raise limits.ConfigError(f"{path}: {name} in [{title}] must be one line, got {shown(value)}")
        if name == "time" and not _TIME.fullmatch(value):
            raise limits.ConfigError(
                f"{path}: time in [{title}] must be such as 01:30:00 or 2-00:00:00, got {shown(value)}"
            )
        if name == "cpus" and not (value.isascii() and value.isdigit() and int(value)):
            raise limits.ConfigError(
                f"{path}: cpus in [{title}] must be a number of cores per rank, got {shown(value)}"
            )
        if name in ("partition", "account", "gpu", "container") and not _WORD.fullmatch(value):
            raise limits.ConfigError(f"{path}: {name} in [{title}] must be one word, got {shown(value)}")
        if name == "modules" and not all(_WORD.fullmatch(word) for word in value.split()):
            raise limits.ConfigError(
                f"{path}: modules in [{title}] must be names separated by spaces, got {shown(value)}"
            )
    return values


# ---- the commands that start a job by hand


PORT = 29_500  # torchrun's own default
_HOST = "HOST"  # stands for the address of node 0


def commands(job: Portable, endpoint: str = f"{_HOST}:{PORT}") -> list[str]:
    """The command for each node, in order; `endpoint` is the address and port of node 0 as the others reach it."""
    if job.nodes == 1:
        return [shlex.join(["torchrun", "--standalone", *_ranks(job), *job.target])]
    host, _, port = endpoint.rpartition(":")
    return [
        shlex.join(
            [
                *("torchrun", f"--nnodes={job.nodes}", f"--node-rank={node}"),
                *(f"--master-addr={host}", f"--master-port={port}"),
                *_ranks(job),
                *job.target,
            ]
        )
        for node in range(job.nodes)
    ]


def _ranks(job: Portable) -> list[str]:
    restarts = [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    return [f"--nproc-per-node={job.per_node}", *restarts]


# ---- the batch file of Slurm


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
        *(f"#SBATCH {directive}" for directive in directives),
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
        *(f"  {words} \\" for words in (*_container(job, profile), _words(launch.torchrun))),
        f'  --nnodes="$SLURM_NNODES" --nproc-per-node={job.per_node} --max-restarts={job.max_restarts} \\',
        '  --rdzv-backend=c10d --rdzv-endpoint="${hosts[0]}:$port" \\',
        '  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\',
        *(f"  {_words([option])} \\" for option in launch.options),
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


# ---- the job files of Kubeflow Trainer and SkyPilot, in YAML


_LARGEST = 1_000_000  # bytes: Kubernetes stores objects of at most 1.5 MiB
_FOLDER = "job"  # of the files, on each node
_ACCELERATOR = "A100"  # of SkyPilot, if the profile has no GPU


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def trainjob(job: Portable, profile: Profile) -> str:
    """A TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) for the runtime `torch-distributed`, which tells
    torchrun nodes and ranks by its environment. The files of the job are part of its command. Raises `SpecError` if
    they are too large."""
    commands = ["set -e", *_prepared(job, profile)]
    commands.append(shlex.join(["torchrun", f"--max-restarts={job.max_restarts}", *job.target]))
    text = re.sub(r"\$(?=[$(])", "$$", "\n".join(commands) + "\n")  # Kubernetes replaces $(NAME), and $$ by $
    if len(text.encode()) > _LARGEST:
        raise SpecError("script", f"the files of {job.name} are too large for a TrainJob; pack fewer modules")
    trainer: dict[str, Any] = {"numNodes": job.nodes, "numProcPerNode": job.per_node, "command": ["bash", "-c", text]}
    if profile.container:
        trainer["image"] = profile.container
    if job.device == "cuda":
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": job.per_node}}
    return _dumped(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": _label(job.name)},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
        }
    )


def skypilot(job: Portable, profile: Profile) -> str:
    """A task of SkyPilot, whose setup writes the files of the job on every node."""
    resources: dict[str, Any] = {"cpus": f"{job.per_node * int(profile.cpus or 1)}+"}
    if job.device == "cuda":
        resources["accelerators"] = f"{profile.gpu or _ACCELERATOR}:{job.per_node}"
    if profile.container:
        resources["image_id"] = f"docker:{profile.container}"
    run = [
        *([profile.setup] if profile.setup else []),
        f"cd {_FOLDER}",
        "torchrun --nnodes=$SKYPILOT_NUM_NODES --node-rank=$SKYPILOT_NODE_RANK \\",
        f'  --master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1) --master-port={PORT} \\',
        f"  --nproc-per-node={job.per_node} --max-restarts={job.max_restarts} {shlex.join(job.target)}",
    ]
    return _dumped(
        {
            "name": _label(job.name),
            "num_nodes": job.nodes,
            "resources": resources,
            "setup": "\n".join(_prepared(job, profile)) + "\n",
            "run": "\n".join(run) + "\n",
        }
    )


def _dumped(document: dict[str, Any]) -> str:
    return f"# {MARK}\n" + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def _prepared(job: Portable, profile: Profile) -> list[str]:
    """Commands that write the files of a job to a folder, enter it, and install its packages."""
    lines = [*([profile.setup] if profile.setup else []), f"mkdir -p {_FOLDER}", f"cd {_FOLDER}"]
    for path, text in job.all_files.items():
        end = next(name for n in range(len(text) + 1) if (name := f"END_OF_FILE_{n}") not in text)
        folder, _, _ = path.rpartition("/")
        lines += [f"mkdir -p {shlex.quote(folder)}"] if folder else []
        lines += [f"cat > {shlex.quote(path)} <<'{end}'", text.rstrip("\n"), end]
    return [*lines, f"pip install -r {REQUIREMENTS}"]


def _label(name: str) -> str:
    """A name as Kubernetes accepts it: at most 63 lower-case letters, digits and hyphens, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:56].strip("-")
    return label if label[:1].isalpha() else f"job-{label}".strip("-")
