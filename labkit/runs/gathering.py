"""Runs on other machines: submitting one, and putting the folders of several nodes together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from labkit.common.arguments import check_choice
from labkit.common.files import write_output
from labkit.common.text import visible_line
from labkit.jobs import DEFAULT, Portable, Profile, of_spec, profile, skypilot, trainjob
from labkit.launch import slurm
from labkit.launch.ending import conclude
from labkit.launch.schedulers import SCHEDULERS
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import Status
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, is_over, torch_of
from labkit.record.writer import steps_path
from labkit.runs.handle import Run, named, with_ranks
from labkit.setup.environment import has

# ---- submitting


# The file of an engine, and the command that submits it elsewhere.
FILES: dict[str, tuple[Callable[[Portable, Profile], str], str]] = {
    "kubeflow": (trainjob, "kubectl create -f"),
    "skypilot": (skypilot, "sky launch"),
}
ENGINES = tuple(dict.fromkeys((*SCHEDULERS, *FILES)))


def submit(
    what: str | os.PathLike[str] | Spec,
    *,
    engine: str = slurm.ENGINE,
    nodes: int = 1,
    profile_name: str = DEFAULT,
    output: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> Run | Path:
    """Submits a job to Slurm or Kubeflow and returns its run, which is followed as any other one and survives this
    process; or writes the file of an engine to `output` and returns its path, which SkyPilot always does (default:
    NAME-ENGINE.yaml).

    `nproc` is the number of ranks of all `nodes`. Raises `SpecError`, `ConfigError` for the profile, and `LaunchError`
    if the scheduler is absent or refuses the job; `OSError` if there is a file at `output` that the lab did not write.
    """
    check_choice("engine", engine, ENGINES)
    site = profile(profile_name)
    spec = named(what, **fields)
    spec = with_ranks(replace(spec, device="cuda") if spec.device == "auto" and site.gpu else spec)
    if engine in SCHEDULERS and output is None:
        return Run(SCHEDULERS[engine].start(spec, nodes, site))
    path = Path(output or f"{spec.name}-{engine}.yaml")
    text = FILES[engine][0](of_spec(spec, nodes), site)
    if engine == "skypilot":
        check_task(text)
    write_output(path, text)
    return path


def check_task(text: str) -> None:
    """Lets SkyPilot's SDK read a task, if it is installed: its schema, and the form of its resources. Raises
    `SpecError` with what it refuses."""
    if not has("skypilot"):
        return
    import yaml
    from sky import Task

    try:
        Task.from_yaml_config(yaml.safe_load(text))
    except Exception as error:  # those of its schema and of its resources have no common class
        said = visible_line(" ".join(str(error).split()))
        why = f"SkyPilot refuses the task: {said}; check gpu, cpus and container of the profile"
        raise SpecError("engine", why) from None


# ---- putting folders together


_WORST = ("failed", "lost", "stopped", "finished")  # the state of the whole run is the first one that a node has


class GatherError(ValueError):
    """Folders cannot be gathered; the message is one sentence with the folder and the fix."""


def gather(folders: Sequence[RunFolder], target: Path) -> RunFolder:
    """A new run folder at `target` with the ranks of all `folders`, which stay as they are.

    Times are those of each node's own clock; timelines are set by common collectives. Raises `GatherError` if the
    folders are not those of one run, or if one is still in progress; `Unreadable`, and `OSError` if the folder cannot
    be written.
    """
    _check(folders, target)
    whole = folders[0].copy(target)
    try:
        for folder in folders[1:]:
            for rank in folder.event_files():
                _copied(folder, whole, rank)
        whole.summary.unlink(missing_ok=True)
        whole.system.unlink(missing_ok=True)  # samples of one machine are not those of all
        status = _status(folders)
        RunFolder.write_json(whole.status, status)
        follower = Follower(whole)
        follower.poll()
        conclude(whole, follower.state, status)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return whole


def _check(folders: Sequence[RunFolder], target: Path) -> None:
    """Raises `GatherError` unless these are the folders of one run that is over."""
    if len(folders) < 2:
        raise GatherError("gather needs the folders of at least two nodes; name one per node")
    if os.path.lexists(target):
        raise GatherError(f"{target} exists; name a new folder with -o")
    first, owners = folders[0], {}
    for folder in folders:
        folder.require_readable()
        if folder.read_imported() is not None:
            raise GatherError(
                f"{folder.name} was imported, not launched here; give the files of all nodes to one labkit explain"
            )
        if not is_over(folder):
            raise GatherError(f"{folder.name} is still in progress; gather when all nodes have ended")
        mine, its = folder.read_spec(), first.read_spec()
        differs = [name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(its, name)]
        if differs:
            raise GatherError(
                f"{folder.name} and {first.name} are not of one run: their {', '.join(differs)} differ; start all nodes"
                " with the same command"
            )
        if folder.script.is_file() and folder.text(folder.script) != first.text(first.script):
            raise GatherError(
                f"{folder.name} and {first.name} ran different scripts; start all nodes with the same one"
            )
        version, other = torch_of(folder), torch_of(first)
        if version and other and version != other:
            raise GatherError(
                f"{folder.name} ran with torch {version} and {first.name} with torch {other}; install the same version"
                " on all nodes, and run again"
            )
        for rank in folder.event_files():
            if rank in owners:
                raise GatherError(f"{folder.name} and {owners[rank]} both have rank {rank}; they are not of one run")
            owners[rank] = folder.name


def _copied(source: RunFolder, target: RunFolder, rank: int) -> None:
    """Copies the events and the output of a rank, plain files only."""
    pairs = [(source.events_of(rank), target.events_of(rank))]
    pairs += [(steps_path(original), steps_path(copy)) for original, copy in pairs]
    pairs += [(source.crash_of(rank), target.crash_of(rank)), (source.position_of(rank), target.position_of(rank))]
    for stream in ("stdout", "stderr"):
        for (_, of), path in source.log_files(stream).items():
            if of == rank:
                pairs.append((path, target.path / path.relative_to(source.path)))
    for original, copy in pairs:
        if original.exists():
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with source.open(original) as file, open(copy, "xb") as made:
                shutil.copyfileobj(file, made)


def _status(folders: Sequence[RunFolder]) -> Status:
    """The status of the whole run: the earliest start, the latest end, and the worst state."""
    every = [folder.read_status() for folder in folders]
    says = [f"{folder.name}: {status.message}" for folder, status in zip(folders, every) if status.message]
    return structs.replace(
        every[0],
        state=min((status.state for status in every), key=_WORST.index),
        failures={rank: failed for status in every for rank, failed in (status.failures or {}).items()},
        message="; ".join(says),
        ranks_here=None,
        started=min((status.started for status in every if status.started is not None), default=None),
        ended=max((status.ended for status in every if status.ended is not None), default=None),
    )
