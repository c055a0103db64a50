"""Checkpoints before a launch: which one a Spec resumes from, and whether it can be loaded.

A checkpoint is a folder such as `step00000030`. Besides the state files it contains a manifest, which the training
script writes last: what was trained (`identity`), the step, the number of ranks that wrote it, and the SHA-256 of every
file. The script verifies the manifest again before it loads anything, so it rejects the same checkpoints when it is run
by hand. This module uses the standard library only and unpickles nothing.
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
    from labkit.plan.spec import Spec

FORMAT = 3
MANIFEST = "manifest.json"
LAYOUTS = {
    "whole": "the whole state in one file",
    "shards": "shards of the whole model's parameters",
    "engine": "the state of DeepSpeed's engine",
}
ASYNCHRONOUS = {"shards"}  # the layouts that torch.distributed.checkpoint can write in a thread
_OWN = {"step", "world_size", "sha256"}  # of one checkpoint; every other key of a manifest belongs to the identity
_LARGEST = 1 << 22  # maximum size of a manifest in bytes
_NAME = re.compile(r"step\d+")
_FILE = re.compile(r"(?!\.+$)[\w.-]+")  # a plain name: no folder, and not . or ..
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WITHOUT = "run without --resume"


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from: one sentence that names it, the reason and the fix."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as described by its manifest; `sha256` maps each file name to its digest."""

    path: Path
    identity: Mapping[str, Any]
    step: int
    world_size: int
    sha256: Mapping[str, str]


def identity(spec: Spec) -> dict[str, Any]:
    """The identity that the checkpoints of a Spec carry: a checkpoint with the same identity can be loaded."""
    row = spec.strategy_row
    model = {option.name: spec.options[option.name] for option in spec.workload_row.options}
    return {"format": FORMAT, "layout": row.layout, "workload": spec.workload, **model, **row.layout_details(spec)}


def asynchronous_limit(spec: Spec) -> str | None:
    """One sentence if checkpoints were to be written while training continues, and cannot be."""
    if not spec.checkpoint_async:
        return None
    if spec.save_every is None:
        return "checkpoint-async has no effect without checkpoints; add --save-every N, or leave it out"
    layout = spec.strategy_row.layout
    if layout not in ASYNCHRONOUS:
        able = [row.name for row in STRATEGIES.values() if row.layout in ASYNCHRONOUS]
        return (
            f"{spec.strategy} cannot write checkpoints while training continues: it saves {LAYOUTS[layout]} in one"
            f" call; leave checkpoint-async out, or use one of the strategies {', '.join(able)}"
        )
    return None


def resumable(spec: Spec) -> Path:
    """The folder of the checkpoint that a resolved Spec resumes from; `CheckpointError` if it cannot resume."""
    assert spec.resume is not None
    path = newest(Path(spec.resume))
    checkpoint = read(path)
    for difference in (_other_identity(checkpoint, spec), _nothing_to_do(checkpoint, spec), damage(checkpoint)):
        if difference:
            raise CheckpointError(difference)
    return path


def newest(path: Path) -> Path:
    """The checkpoint at `path`: the folder itself, or the newest one in a folder of checkpoints or in a run folder."""
    path = path.absolute()
    if (path / MANIFEST).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = _checkpoints(folder)
    if found:
        return found[-1]
    if any(folder.glob("step*")) or _NAME.match(path.name):
        cause = "an older version wrote them, and they cannot be verified"
        raise CheckpointError(f"the checkpoints in {path} have no {MANIFEST} ({cause}); train again with --save-every")
    fix = "name a run that was started with --save-every, or a folder of checkpoints"
    raise CheckpointError(f"there are no checkpoints in {path}; {fix}")


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    folders = [path for path in folder.glob("step*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step")))


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, read from its manifest; `CheckpointError` if the manifest is invalid."""
    file = path / MANIFEST
    unreadable = CheckpointError(f"{file} is not a valid checkpoint manifest; name another checkpoint, or {_WITHOUT}")
    try:
        with _opened(file) as stream:
            text = stream.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise unreadable
        manifest = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise unreadable from None
    if not isinstance(manifest, dict) or not _is_complete(manifest):
        raise unreadable
    described = {key: value for key, value in manifest.items() if key not in _OWN}
    return Checkpoint(path, described, manifest["step"], manifest["world_size"], manifest["sha256"])


def _is_complete(manifest: dict[str, Any]) -> bool:
    numbers, sums = [manifest.get(name) for name in ("step", "world_size")], manifest.get("sha256")
    if not all(type(number) is int and number > 0 for number in numbers) or not isinstance(sums, dict) or not sums:
        return False
    return all(_FILE.fullmatch(name) and type(sha) is str and _SHA256.fullmatch(sha) for name, sha in sums.items())


def damage(checkpoint: Checkpoint) -> str | None:
    """One sentence about the first file that is missing or has changed, with the newest intact checkpoint of the same
    folder."""
    reason = _damaged(checkpoint)
    if reason is None:
        return None
    for path in reversed(_checkpoints(checkpoint.path.parent)):
        if path != checkpoint.path and _is_intact(path):
            return f"{reason}; resume from the newest intact checkpoint with --resume {path}"
    return f"{reason}, and its folder contains no other intact checkpoint; resume from another run, or {_WITHOUT}"


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
        raise OSError(errno.EINVAL, "not a regular file")
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    return os.fdopen(os.open(path, flags), "rb")  # the flags protect against a replaced file


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with _opened(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _other_identity(checkpoint: Checkpoint, spec: Spec) -> str | None:
    """One sentence about the first property in which the checkpoint differs from what the Spec trains."""
    for name, expected in identity(spec).items():
        found = checkpoint.identity.get(name)
        if name == "layout" and found in spec.strategy_row.reads:
            continue
        if found != expected or type(found) is not type(expected):
            return _DIFFERENT.get(name, _other_option)(checkpoint, spec, name)
    return None


def _other_format(checkpoint: Checkpoint, spec: Spec, name: str) -> str:
    found = checkpoint.identity.get(name)
    return (
        f"{checkpoint.path} has format {found!r}, and this version reads format {FORMAT}; train again with this version"
    )


def _other_layout(checkpoint: Checkpoint, spec: Spec, name: str) -> str:
    found, expected = checkpoint.identity.get(name), " or ".join(LAYOUTS[layout] for layout in spec.strategy_row.reads)
    readers = [row.name for row in STRATEGIES.values() if found in row.reads and "resume" not in row.lacks]
    if not readers:
        return f"{checkpoint.path} has the layout {found!r}, which no strategy can load; {_WITHOUT}"
    which = readers[0] if len(readers) == 1 else f"one of the strategies {', '.join(readers)}"
    return (
        f"{checkpoint.path} contains {LAYOUTS[str(found)]}, and {spec.strategy} loads {expected}; "
        f"resume with {which}, or {_WITHOUT}"
    )


def _other_workload(checkpoint: Checkpoint, spec: Spec, name: str) -> str:
    found = checkpoint.identity.get(name)
    fix = f"use --workload {found}, or " if found in tuple(WORKLOADS) else ""
    return f"{checkpoint.path} belongs to the workload {found!r}, and this run trains {spec.workload}; {fix}{_WITHOUT}"


def _other_engine(checkpoint: Checkpoint, spec: Spec, name: str) -> str:
    found, expected = checkpoint.identity.get(name), identity(spec)[name]
    was = _words(found) if isinstance(found, dict) and found.keys() == expected.keys() else repr(found)
    return (
        f"{checkpoint.path} was written with {was}, and this run has {_words(expected)}; each rank of the engine loads "
        f"what the same rank wrote, so use the same settings, or {_WITHOUT}"
    )


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _other_option(checkpoint: Checkpoint, spec: Spec, name: str) -> str:
    found = checkpoint.identity.get(name)
    choices = next(option.choices for option in spec.workload_row.options if option.name == name)
    fix = f"use --option {name}={found}, or " if found in choices else ""
    return f"{checkpoint.path} has {name}={found!r}, and this run has {name}={spec.options[name]!r}; {fix}{_WITHOUT}"


_DIFFERENT = {"format": _other_format, "layout": _other_layout, "workload": _other_workload, "engine": _other_engine}


def _nothing_to_do(checkpoint: Checkpoint, spec: Spec) -> str | None:
    if checkpoint.step < spec.total_steps:
        return None
    epochs = checkpoint.step // spec.steps_per_epoch + 1
    fix = f"--steps {checkpoint.step + 1} or more" if spec.steps else f"--epochs {epochs} or more"
    reason = f"{checkpoint.path} was written at step {checkpoint.step}, and the run ends at step {spec.total_steps}"
    return f"{reason}, so nothing is left to train; use {fix}"
