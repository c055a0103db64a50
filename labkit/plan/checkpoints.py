"""Checkpoints before a launch: which one a Spec resumes from, and whether it can be loaded.

A checkpoint is a folder such as `step00000030`. In addition to the files of the state it has a manifest, which the training
script writes last: what the checkpoint is (`identity`), its step, the number of ranks that wrote it, and the SHA-256 of every
file. The script verifies the manifest again before it loads anything, so it refuses the same checkpoints when it is run by
hand. This module uses the standard library only, and unpickles nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

if TYPE_CHECKING:
    from labkit.training.request import Request

FORMAT = 1
MANIFEST = "manifest.json"
LAYOUTS = {
    "whole": "the whole state in one file",
    "shards": "shards of the whole model's parameters",
    "stages": "the parameters of pipeline stages",
}
_OWN = {"step", "world_size", "sha256"}  # of one checkpoint; all else in a manifest is its identity
_LARGEST = 1 << 22  # bytes of a manifest
_NAME = re.compile(r"step\d+")
_FILE = re.compile(r"(?!\.+$)[\w.-]+")  # a plain name: no folder, and not . or ..
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WITHOUT = "start without --resume"


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from: one sentence that names it, the reason and the fix."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it; `sha256` has the digest of every file by its name."""

    path: Path
    identity: Mapping[str, Any]
    step: int
    world_size: int
    sha256: Mapping[str, str]


def identity(spec: Request) -> dict[str, Any]:
    """What the checkpoints of a Spec say of themselves: one that says the same can be loaded."""
    row = spec.strategy_row
    model = {option.name: spec.options[option.name] for option in spec.workload_row.options}
    return {"format": FORMAT, "layout": row.layout, "workload": spec.workload, **model, **row.layout_details(spec)}


def resumable(spec: Request) -> Path:
    """The folder of the checkpoint that a settled Spec resumes from; `CheckpointError` if it cannot."""
    path = newest(Path(spec.resume))
    checkpoint = read(path)
    for difference in (_other_identity(checkpoint, spec), _nothing_to_do(checkpoint, spec), damage(checkpoint)):
        if difference:
            raise CheckpointError(difference)
    return path


def newest(place: Path) -> Path:
    """The checkpoint that `place` names: itself, or the newest one in a folder of checkpoints or in a run folder."""
    place = place.absolute()
    if (place / MANIFEST).is_file():
        return place
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    found = _checkpoints(folder)
    if found:
        return found[-1]
    if any(folder.glob("step*")) or _NAME.match(place.name):
        cause = "an older version wrote none, so their content cannot be verified"
        raise CheckpointError(f"the checkpoints in {place} have no {MANIFEST} ({cause}); train again with --save-every")
    way = "name a run that was started with --save-every, or a folder of checkpoints"
    raise CheckpointError(f"there are no checkpoints in {place}; {way}")


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step")))


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, by its manifest; `CheckpointError` if the manifest is not one."""
    file = path / MANIFEST
    unreadable = CheckpointError(f"{file} is not the manifest of a checkpoint; name another one, or {_WITHOUT}")
    try:
        with _opened(file) as stream:
            text = stream.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise unreadable
        manifest = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise unreadable from None
    if not isinstance(manifest, dict) or not _is_whole(manifest):
        raise unreadable
    described = {key: value for key, value in manifest.items() if key not in _OWN}
    return Checkpoint(path, described, manifest["step"], manifest["world_size"], manifest["sha256"])


def _is_whole(manifest: dict[str, Any]) -> bool:
    numbers, sums = [manifest.get(name) for name in ("step", "world_size")], manifest.get("sha256")
    if not all(type(number) is int and number > 0 for number in numbers) or not isinstance(sums, dict) or not sums:
        return False
    return all(_FILE.fullmatch(name) and type(sha) is str and _SHA256.fullmatch(sha) for name, sha in sums.items())


def damage(checkpoint: Checkpoint) -> str | None:
    """One sentence about the first file that is missing or has changed, with the newest checkpoint beside it that is intact."""
    reason = _damaged(checkpoint)
    if reason is None:
        return None
    for path in reversed(_checkpoints(checkpoint.path.parent)):
        if path != checkpoint.path and _is_intact(path):
            return f"{reason}; the newest checkpoint that is intact: --resume {path}"
    return f"{reason}, and there is no other intact one in its folder; resume from another run, or {_WITHOUT}"


def _is_intact(path: Path) -> bool:
    try:
        return _damaged(read(path)) is None
    except CheckpointError:
        return False


def _damaged(checkpoint: Checkpoint) -> str | None:
    for name, expected in checkpoint.sha256.items():
        path = checkpoint.path / name
        try:
            if _checksum(path) != expected:
                return f"{path} has changed since it was written (its SHA-256 differs)"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
    return None


def _opened(path: Path) -> BinaryIO:
    """A regular file, opened for reading; `OSError` for a link, a pipe or a device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    return os.fdopen(os.open(path, flags), "rb")  # the flags hold if another took its place by now


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with _opened(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _other_identity(checkpoint: Checkpoint, spec: Request) -> str | None:
    """One sentence about the first thing in which the checkpoint differs from what the Spec trains."""
    for name, wanted in identity(spec).items():
        has = checkpoint.identity.get(name)
        if has != wanted or type(has) is not type(wanted):
            return _DIFFERENT.get(name, _other_option)(checkpoint, spec, name)
    return None


def _other_format(checkpoint: Checkpoint, spec: Request, name: str) -> str:
    has = checkpoint.identity.get(name)
    return f"{checkpoint.path} has the format {has!r}, and this version reads {FORMAT}; train again with this version"


def _other_layout(checkpoint: Checkpoint, spec: Request, name: str) -> str:
    has, mine = checkpoint.identity.get(name), LAYOUTS[spec.strategy_row.layout]
    writers = [row.name for row in STRATEGIES.values() if row.layout == has and "resume" not in row.lacks]
    if not writers:
        return f"{checkpoint.path} has the layout {has!r}, which no strategy reads; {_WITHOUT}"
    return (
        f"{checkpoint.path} holds {LAYOUTS[has]}, and {spec.strategy} reads {mine}; "
        f"resume with one of the strategies {', '.join(writers)}, or {_WITHOUT}"
    )


def _other_workload(checkpoint: Checkpoint, spec: Request, name: str) -> str:
    has = checkpoint.identity.get(name)
    way = f"use --workload {has}, or " if has in tuple(WORKLOADS) else ""
    return f"{checkpoint.path} is of the workload {has!r}, and this run trains {spec.workload}; {way}{_WITHOUT}"


def _other_stages(checkpoint: Checkpoint, spec: Request, name: str) -> str:
    return (
        f"{checkpoint.path} was written by {checkpoint.world_size} ranks that hold other pipeline stages than the "
        f"{spec.nproc} ranks of this run; use the same schedule and the same number of ranks, or {_WITHOUT}"
    )


def _other_option(checkpoint: Checkpoint, spec: Request, name: str) -> str:
    has = checkpoint.identity.get(name)
    choices = next(option.choices for option in spec.workload_row.options if option.name == name)
    way = f"use --option {name}={has}, or " if has in choices else ""
    wanted = f"this run trains {spec.workload} with {spec.options[name]!r}"
    return f"in {checkpoint.path} {name} is {has!r}, and {wanted}; {way}{_WITHOUT}"


_DIFFERENT = {
    "format": _other_format,
    "layout": _other_layout,
    "workload": _other_workload,
    "second_stages_from": _other_stages,
}


def _nothing_to_do(checkpoint: Checkpoint, spec: Request) -> str | None:
    if checkpoint.step < spec.total_steps:
        return None
    epochs = checkpoint.step // spec.steps_per_epoch + 1
    way = f"--steps {checkpoint.step + 1} or more" if spec.steps else f"--epochs {epochs} or more"
    reason = f"{checkpoint.path} is of step {checkpoint.step}, and the run ends at step {spec.total_steps}"
    return f"{reason}: there is nothing to do; use {way}"
