"""Jobs that run without this lab or on another machine: a job as a plain value, and the files of torchrun, Slurm,
Kubeflow and SkyPilot that start it, packed as one zip.

It starts nothing. It never imports torch, the launcher or a front end.

`Portable` is a job without this lab: its files, what torchrun starts, nodes and ranks, and pinned packages; nothing is
executed to find them. Pure functions make text of it and a `Profile` of the site, and `pack` writes them as one zip
(`record/packed.py` unpacks it).
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import stat
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import yaml

from labkit.common.arguments import shown
from labkit.common.files import MARK, write_output
from labkit.common.units import counted, size
from labkit.plan.nodes import divided
from labkit.plan.script import source_of, write_script
from labkit.plan.spec import Spec, SpecError
from labkit.record.folder import RunFolder
from labkit.record.follow import torch_of
from labkit.record.packed import recording
from labkit.setup import limits

# ---- what a script imports


_LAB = "labkit"


def local_modules(root: Path, script: str = "", module: str = "") -> list[Path]:
    """The files below `root` that a script there, or a module, needs: itself and what it imports, directly or not."""
    finder = ModuleFinder(path=[str(root)])
    try:
        if script:
            finder.run_script(str(root / script))
        else:
            finder.import_hook(module)
            if (root.joinpath(*module.split("."), "__main__.py")).is_file():
                finder.import_hook(f"{module}.__main__")
    except SyntaxError as error:
        raise SpecError("script", f"{error.filename}:{error.lineno} is not valid Python: {error.msg}") from None
    except ImportError:
        raise SpecError("script", f"{root} has no module {module}; pack it from the folder that contains it") from None
    found = {Path(imported.__file__) for imported in finder.modules.values() if imported.__file__}
    return sorted(path for path in found if path.suffix == ".py" and path.is_relative_to(root))


def requirements(files: Mapping[str, str], torch: str = "") -> tuple[str, ...]:
    """`package==version` for each package that Python files import, as installed here; `torch` is the version that ran,
    if it is known. Local versions such as `+cpu` are left out, because no registry has them."""
    own = {path.partition("/")[0].removesuffix(".py") for path in files}
    wanted = {"torch"} | {name for text in files.values() for name in _imports(text)}
    distributions = metadata.packages_distributions()
    names = {distribution for name in wanted - own - {_LAB} for distribution in distributions.get(name, ())[:1]}
    pins = {name: metadata.version(name).partition("+")[0] for name in names - {_LAB}}
    if torch:
        pins["torch"] = torch
    return tuple(f"{name}=={version}" for name, version in sorted(pins.items()))


def _imports(text: str) -> set[str]:
    """The top-level names of the packages that a Python file imports, without those of the standard library."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return set()
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


# ---- portable


SCRIPT = "train.py"  # the name of a generated script
REQUIREMENTS = "requirements.txt"
_LARGEST_JOB = 16 << 20  # bytes of all files of a job


@dataclass(frozen=True)
class Portable:
    """A job that needs nothing of this lab.

    `files` are the script and the modules that it imports, by relative path; `target` is what torchrun starts, with its
    arguments. `nodes` × `per_node` ranks run it; started again, it `resumes` from checkpoints or starts from step 1.
    `requirements` are pinned packages. `draw` are the arguments of Python that draw its data first; empty if nothing is
    drawn.
    """

    name: str
    files: Mapping[str, str]
    target: tuple[str, ...]
    nodes: int
    per_node: int
    device: str
    max_restarts: int
    resumes: bool
    requirements: tuple[str, ...]
    draw: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.per_node

    @property
    def all_files(self) -> dict[str, str]:
        """The files that the job needs wherever it runs: its own, and the list of packages."""
        return {**self.files, REQUIREMENTS: "".join(f"{requirement}\n" for requirement in self.requirements)}


def of_spec(spec: Spec, nodes: int = 1) -> Portable:
    """The job of a Spec with its number of ranks resolved. A strategy's job starts from the beginning, without the
    checkpoint that the Spec resumes from. Raises `SpecError`."""
    per_node = per_node_of(spec, nodes)
    if spec.script is None:
        files, target = {SCRIPT: write_script(replace(spec, resume=None))}, (SCRIPT,)
    elif spec.as_module:
        files = _read(Path.cwd(), local_modules(Path.cwd(), module=spec.script))
        target = ("-m", spec.script, *spec.args)
    else:
        script = Path(spec.script).absolute()
        files = _read(script.parent, local_modules(script.parent, script=script.name))
        target = (script.name, *spec.args)
    return _job(spec, nodes, per_node, files, target)


def of_run(folder: RunFolder, nodes: int = 1) -> Portable:
    """The job of a recorded run: the script that ran, with the version of torch that ran it. Raises `SpecError`."""
    if folder.read_imported() is not None:
        raise SpecError(
            "name",
            f"{folder.name} was imported, not launched here, so there is no script to pack; pack one by its path",
        )
    spec = folder.read_spec().to_spec()
    version = torch_of(folder).partition("+")[0]
    if spec.resume is None and folder.script.is_file():
        script = {SCRIPT: folder.text(folder.script)}
        return _job(spec, nodes, per_node_of(spec, nodes), script, (SCRIPT, *spec.args), version)
    where = Path(folder.read_launch().cwd or ".")
    if spec.script is not None:
        if spec.as_module or not (where / spec.script).is_file():
            raise SpecError(
                "script", f"the script of {folder.name}, {spec.script}, is not in {where} any more; pack it by its path"
            )
        spec = replace(spec, script=str(where / spec.script))
    job = of_spec(spec, nodes)
    return replace(job, requirements=requirements(job.files, version))


def per_node_of(spec: Spec, nodes: int) -> int:
    """Ranks on each of `nodes` nodes; `SpecError` if the ranks cannot be divided among them."""
    if spec.nproc is None:
        raise SpecError("nproc", "the job depends on the number of ranks, which is not set; add --nproc")
    return divided(spec.processes, nodes)


def _job(
    spec: Spec, nodes: int, per_node: int, files: Mapping[str, str], target: tuple[str, ...], torch: str = ""
) -> Portable:
    drawing = None if spec.script else spec.data_row.drawing(spec.train_samples, spec.options)
    draw: tuple[str, ...] = ()
    if drawing is not None:
        draw = (f"{drawing.module.rpartition('.')[2]}.py", *drawing.arguments)
        files = {**files, draw[0]: source_of(drawing.module)}
    return Portable(
        name=spec.name,
        files=files,
        target=target,
        nodes=nodes,
        per_node=per_node,
        device=spec.device if spec.device != "auto" else "cuda",
        max_restarts=spec.max_restarts,
        resumes=spec.save_every is not None,
        requirements=requirements(files, torch),
        draw=draw,
    )


def _read(root: Path, paths: list[Path]) -> dict[str, str]:
    """Python files below `root` as text, by relative path."""
    if sum(path.stat().st_size for path in paths) > _LARGEST_JOB:
        raise SpecError(
            "script", f"the script and its modules are larger than {size(_LARGEST_JOB, 0)}; pack fewer modules"
        )
    found = {}
    for path in paths:
        try:
            found[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise SpecError("script", f"{path} is not a text in UTF-8; save it as UTF-8") from None
    return found


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
        'export PET_RDZV_ENDPOINT="${hosts[0]}:$port"  # of torchrun, as --rdzv-endpoint',
        "",
        *(_drawing(job, profile) if job.draw else ()),
        "srun --kill-on-bad-exit=1 \\",
        *(f"  {words} \\" for words in (*_container(job, profile), shlex.join(launch.torchrun))),
        f'  --nnodes="$SLURM_NNODES" --nproc-per-node={job.per_node} --max-restarts={job.max_restarts} \\',
        '  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\',
        *(f"  {shlex.join([option])} \\" for option in launch.options),
        f"  {shlex.join(job.target)} &",
        "wait $!  # in the background, so that this shell handles signals",
        "",
    ]
    return "\n".join(lines)


def _drawing(job: Portable, profile: Profile) -> tuple[str, ...]:
    """The lines that draw the data of a job, in its folder, which its nodes share."""
    return (
        'export XDG_CACHE_HOME="$PWD/cache"  # where the script looks for the data, which are drawn once for all nodes',
        " ".join(["srun --nodes=1 --ntasks=1", *_container(job, profile), shlex.join(["python", *job.draw])]),
        "",
    )


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


# ---- the job files of Kubeflow Trainer and SkyPilot, in YAML


_LARGEST_TRAINJOB = 1_000_000  # bytes: Kubernetes stores objects of at most 1.5 MiB
_FOLDER = "job"  # of the files, on each node
_ACCELERATOR = "A100"  # of SkyPilot, if the profile has no GPU


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


RUNTIME = "torch-distributed"  # of Kubeflow Trainer: it tells torchrun nodes and their numbers by its environment


def trainjob_command(job: Portable, profile: Profile) -> list[str]:
    """The command of each node of a TrainJob, with the files of the job. torchrun names the local rank in front of each
    line, because a pod has one output for all of its ranks. Raises `SpecError` if the files are too large."""
    commands = [
        "set -e",
        "export PYTHONUNBUFFERED=1  # so that a line is seen when it is printed",
        *_prepared(job, profile),
        shlex.join(["torchrun", "--tee=3", *_ranks(job), *job.target]),
    ]
    text = re.sub(r"\$(?=[$(])", "$$", "\n".join(commands) + "\n")  # Kubernetes replaces $(NAME), and $$ by $
    if len(text.encode()) > _LARGEST_TRAINJOB:
        raise SpecError("script", f"the files of {job.name} are too large for a TrainJob; pack fewer modules")
    return ["bash", "-c", text]


def trainjob(job: Portable, profile: Profile) -> str:
    """A TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1). Raises `SpecError` as `trainjob_command`."""
    trainer: dict[str, Any] = {
        "numNodes": job.nodes,
        "numProcPerNode": job.per_node,
        "command": trainjob_command(job, profile),
    }
    if profile.container:
        trainer["image"] = profile.container
    if job.device == "cuda":
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": job.per_node}}
    return _dumped(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": label(job.name)},
            "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer},
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
            "name": label(job.name),
            "num_nodes": job.nodes,
            "resources": resources,
            "setup": "\n".join(_prepared(job, profile)) + "\n",
            "run": "\n".join(run) + "\n",
        }
    )


def _dumped(document: dict[str, Any]) -> str:
    return f"# {MARK}\n" + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def _prepared(job: Portable, profile: Profile) -> list[str]:
    """Commands that write the files of a job to a folder, enter it, install its packages, and draw its data."""
    lines = [*([profile.setup] if profile.setup else []), f"mkdir -p {_FOLDER}", f"cd {_FOLDER}"]
    for path, text in job.all_files.items():
        end = next(name for n in range(len(text) + 1) if (name := f"END_OF_FILE_{n}") not in text)
        folder, _, _ = path.rpartition("/")
        lines += [f"mkdir -p {shlex.quote(folder)}"] if folder else []
        lines += [f"cat > {shlex.quote(path)} <<'{end}'", text.rstrip("\n"), end]
    lines.append(f"pip install -r {REQUIREMENTS}")
    return [*lines, shlex.join(["python", *job.draw])] if job.draw else lines


def label(name: str) -> str:
    """A name as Kubernetes accepts it: at most 63 lower-case letters, digits and hyphens, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:56].strip("-")
    return label if label[:1].isalpha() else f"job-{label}".strip("-")


_DATE = (1980, 1, 1, 0, 0, 0)  # of all files: the same job is the same zip


def contents(job: Portable, profile: Profile) -> dict[str, str]:
    """The files of a job by path, with those that start it on torchrun, Slurm, Kubeflow and SkyPilot."""
    return {
        "README.md": _readme(job),
        **job.all_files,
        "torchrun.txt": "".join(f"{line}\n" for line in commands(job)),
        "job.sbatch": sbatch(job, profile),
        "trainjob.yaml": trainjob(job, profile),
        "skypilot.yaml": skypilot(job, profile),
    }


def pack(job: Portable, profile: Profile, path: Path, run: RunFolder | None = None) -> Path:
    """Writes a job as a zip, with the recording of the `run` that it was; or replaces one that was packed before.
    Raises `OSError` if it cannot be written."""
    files: dict[str, str | bytes] = {**contents(job, profile)}
    if run is not None:
        files |= recording(run)
    write_output(path, zipped(files), private=True)
    return path


def zipped(files: Mapping[str, str | bytes], written: float | None = None) -> bytes:
    """A zip of files by path; the same files are the same bytes. `written` is their time in Unix seconds, which a zip
    has in steps of two seconds, here in UTC (default: none)."""
    date = _DATE if written is None else max(_DATE, time.gmtime(written)[:6])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.comment = MARK.encode()
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, date)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data)
    return packed.getvalue()


def _readme(job: Portable) -> str:
    nodes = "one machine" if job.nodes == 1 else f"{job.nodes} nodes"
    elsewhere = "" if job.nodes == 1 else " Replace HOST by the address of the first node, which the others must reach."
    first = f"On each machine, draw the data: `{shlex.join(['python', *job.draw])}`. Then r" if job.draw else "R"
    return f"""# {job.name}

A PyTorch training job: {counted(job.ranks, "rank")} on {nodes}, started by torchrun.

1. Install torch for your GPUs (pytorch.org), then `pip install -r {REQUIREMENTS}`: the versions it was packed with.
2. {first}un the commands of `torchrun.txt`, one per node, in this folder.{elsewhere}
3. Slurm: `sbatch job.sbatch`, after filling in partition and account of your site.
4. Kubeflow Trainer: `kubectl create -f trainjob.yaml`. SkyPilot: `sky launch skypilot.yaml`.

It runs on GPUs if there are any; with `CUDA_VISIBLE_DEVICES=` in front of torchrun it runs on CPU cores.
"""
