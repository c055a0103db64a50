"""The job files of Kubeflow Trainer and SkyPilot, in YAML. Neither is submitted from here."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from labkit.common.atomic import MARK
from labkit.engines.portable import REQUIREMENTS, Portable
from labkit.engines.profiles import Profile
from labkit.engines.torchrun import PORT
from labkit.plan.spec import SpecError

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
