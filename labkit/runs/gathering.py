"""Runs on other machines: submitting one, putting the folders of several nodes together, and making a run of what files
of a job say that ran elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from labkit.analysis.foreign import ForeignError, Page
from labkit.analysis.summary import summarise
from labkit.common.arguments import check_choice, shown
from labkit.common.files import write_output
from labkit.common.text import visible_line
from labkit.jobs import DEFAULT, Portable, Profile, of_spec, profile, skypilot, trainjob
from labkit.launch.ending import conclude
from labkit.launch.schedulers import SCHEDULERS, SLURM
from labkit.plan.spec import Spec, SpecError
from labkit.record import events
from labkit.record.documents import IMPORTED, Imported, SpecFields, Status
from labkit.record.events import RANKS, OfRank, Start
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, is_over, torch_of
from labkit.record.writer import PHASES, Writer, steps_path
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
    engine: str = SLURM,
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


# ---- a run of files, so that it is shown, compared and exported like any other
#
# The folder has the ordinary events and documents. Its `imported.json` says which files it was made from, and its state
# is `imported`. What the files do not have is not written, so that it is unknown and never zero.


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_LONGEST = 2_000  # characters of a text that a file determines


def check_name(name: str) -> str:
    """The name, which ends the name of the run's folder. Raises `ValueError` for one that no folder may have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"the name of a run has letters, digits, . _ and - (at most 80), got {shown(name)}")
    return name


def name_for(path: Path) -> str:
    """A name for a run that is made of a file or folder: its own without suffixes, as far as a name may have it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name.partition(".")[0] or path.resolve().name).strip("-._")
    return name[:80] or "job"


def keep_files(pages: Sequence[Page], name: str) -> RunFolder:
    """The new run `<date>-<time>-<name>` of what `pages` say.

    Raises `ForeignError` with one sentence if the files cannot be one run, `OSError` if it cannot be written.
    """
    by_rank = _checked(pages)
    known = [event.t for of_rank in by_rank.values() for event in of_rank if event.t]
    started, ended = min(known, default=None), max(known, default=None)
    here = max(by_rank, default=0) + 1
    world = max([here, *(page.world_size or 1 for page in pages)])
    status = Status("imported", started=started, ended=ended, ranks_here=len(by_rank) or None)
    findings = [finding.recorded() for page in pages for finding in page.findings]
    imported = Imported(
        v=IMPORTED,
        sources=[visible_line(path.name)[:_LONGEST] for page in pages for path in page.files],
        titles=[visible_line(page.title)[:_LONGEST] for page in pages],
        notes=[visible_line(note)[:_LONGEST] for page in pages for note in page.notes],
        findings=findings,
    )
    device = next((start.device.partition(":")[0] for start in _starts(by_rank) if start.device), None)
    folder = RunFolder.create(check_name(name))
    try:
        for rank, of_rank in by_rank.items():
            _write(folder, rank, of_rank, started)
        RunFolder.write_json(folder.imported, imported)
        RunFolder.write_json(folder.status, status)
        # the Spec last: a folder without one is no run yet
        spec = SpecFields(script=name, nproc=world if world <= RANKS else here, device=device)
        RunFolder.write_json(folder.spec, spec)
        follower = Follower(folder)
        follower.poll()
        RunFolder.write_json(folder.summary, summarise(follower.state, folder.name))
    except BaseException:
        folder.delete()
        raise
    return folder


def _checked(pages: Sequence[Page]) -> dict[int, list[OfRank]]:
    """The events of each rank, its start first, as a reader of the folder will accept them."""
    by_rank: dict[int, list[OfRank]] = {}
    for page in pages:  # profiles first, which say most about a rank
        for event in page.events():
            try:
                events.checked(_fields(event) | {"kind": event.kind})
            except ValueError as error:
                reason = f"these files have a value that a run cannot hold ({visible_line(str(error))})"
                raise ForeignError(f"{reason}; explain them without keeping them") from None
            of_rank = by_rank.setdefault(event.rank, [])
            if not (of_rank and isinstance(event, Start)):
                of_rank.append(event)
    return dict(sorted(by_rank.items()))


def _starts(by_rank: dict[int, list[OfRank]]) -> list[Start]:
    return [event for of_rank in by_rank.values() for event in of_rank if isinstance(event, Start)]


def _fields(event: OfRank) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return fields


def _write(folder: RunFolder, rank: int, of_rank: Sequence[OfRank], started: float | None) -> None:
    writer = Writer(folder.events_of(rank), rank)
    try:
        for event in of_rank:
            fields = _fields(event)
            kind, _ = fields.pop("kind"), fields.pop("rank")  # the writer knows the rank
            fields["t"] = event.t or started or 0.0
            if kind == "step":
                fields["seconds"] = dict.fromkeys(PHASES) | fields["seconds"]
            writer.write(kind, **fields)
    finally:
        writer.close()
