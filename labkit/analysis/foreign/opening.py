"""From paths to pages: finds out by its content what a file is, and explains the files of one kind together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.analysis.diagnose.finding import shorter
from labkit.analysis.foreign import (
    ForeignError,
    Page,
    debug_server,
    flight_recorder,
    log_lines,
    logs,
    memory_events,
    memory_snapshot,
    profiles,
    ras,
)
from labkit.analysis.foreign.reading import Content
from labkit.analysis.foreign.trace import read_profile
from labkit.common.files import is_folder, open_regular
from labkit.record.stacks import uncollected

_PICKLE = b"\x80"  # of protocol 2 or later
_HEAD = 1 << 16  # bytes in which a file says what it is
_MOST_FILES = 16_384
_MOST_NOTES = 8  # on damaged files
_DEEPEST = 6  # folders within a folder: torchrun writes <run>/attempt_0/<local rank>/stderr.log


@dataclass(frozen=True)
class Kind:
    """One kind of files: a pattern that its files begin with, a key that their JSON or pickle has near its beginning,
    how to read one, and how to explain all of them. Text that is of no other kind is a log."""

    name: str
    magic: bytes
    key: bytes
    read: Callable[[Path], Any]
    explain: Callable[[Sequence[Any]], Page]


FLIGHT_RECORDER = Kind(
    "dumps of the flight recorder",
    b"",
    rb"entries|pg_config|pg_status|comm_lib_version|nccl_version",
    flight_recorder.read_dump,
    flight_recorder.explain,
)
KINDS = (
    Kind(
        "reports of NCCL's RAS",
        rb"(?:(?:SERVER PROTOCOL|OK|ERROR)[^\n]{0,80}\n){0,4}NCCL version \S{1,40} compiled with",
        rb'nccl_version"\s*:\s*"[^"]{0,40}"\s*,\s*"cuda_runtime_version',
        ras.read_report,
        ras.explain,
    ),
    Kind(
        "dumps of torch's debug server",
        rb"(?:PARTIAL DATA: [^\n]{0,80}\n(?:  Rank [^\n]{0,500}\n)*\n)?=== Rank \d{1,6}: \S{1,300} ===\r?\n",
        b"",
        debug_server.read_dump,
        debug_server.explain,
    ),
    Kind(
        "traces of torch.profiler",
        rb'\{"traceEvents"',
        rb"traceEvents|deviceProperties|distributedInfo|schemaVersion",
        read_profile,
        profiles.explain,
    ),
    FLIGHT_RECORDER,
    Kind(
        "memory snapshots",
        b"",
        rb"segments|device_traces|segment_type|segment_pool_id|total_size",
        memory_events.read_snapshot,
        memory_snapshot.explain,
    ),
)
LOGS = Kind("logs", b"", b"", log_lines.read_log, logs.explain)


def explain(paths: Iterable[Path]) -> list[Page]:
    """One page for the files of each kind, in the order of `KINDS`; a folder stands for the files in it that are of a
    known kind. A damaged file is left out, and the page says so, if there is another one of its kind.

    Raises `ForeignError` with one sentence if there is no such file or all of a kind cannot be read.
    """
    by_kind: dict[str, dict[Path, Any]] = {}
    damaged: dict[str, list[ForeignError]] = {}
    for path in _files(paths):
        kind = _kind(path)
        try:
            with uncollected():  # it would look at the million objects of a file again and again
                by_kind.setdefault(kind.name, {})[path] = _opened(path, kind.read)
        except ForeignError as error:
            damaged.setdefault(kind.name, []).append(error)
    pages = []
    for kind in (*KINDS, LOGS):
        files, errors = by_kind.get(kind.name), damaged.get(kind.name, [])
        if errors and not files:
            raise errors[0]
        if files:
            page = kind.explain([*files.values()])
            notes = [*page.notes, *(f"Left out: {error}." for error in errors[:_MOST_NOTES])]
            if len(errors) > _MOST_NOTES:
                notes.append(f"{len(errors) - _MOST_NOTES:,} more damaged files are left out.")
            pages.append(replace(page, files=[*files], notes=notes))
    return pages


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not is_folder(path):
            files.append(path)
            continue
        if _is_run(path):
            raise ForeignError(f"{path} is a run of the lab; show it with: labkit show {path}")
        within = [file for file in _opened(path, _within) if _is_known(file)]
        if not within:
            raise ForeignError(f"{path} has no file that can be explained; it reads {_known()}")
        files += within
    if len(files) > _MOST_FILES:
        raise ForeignError(f"{len(files):,} files are more than {_MOST_FILES:,}; name those of one job")
    return list(dict.fromkeys(files))


def _within(folder: Path, depth: int = 0) -> list[Path]:
    """The files of a folder and of the folders in it, in order. Links to folders are not followed, hidden folders and
    runs of the lab left out."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if depth < _DEEPEST and not path.name.startswith(".") and not _is_run(path):
                files += _within(path, depth + 1)
        else:
            files.append(path)
        if len(files) > _MOST_FILES:
            raise ForeignError(f"{folder} has more than {_MOST_FILES:,} files; name the folder of one job")
    return files


def _is_run(folder: Path) -> bool:
    return os.path.lexists(folder / "spec.json") and (folder / "events").is_dir()


def _is_known(path: Path) -> bool:
    """Whether a file in a folder can be explained: a text only if its name or its content says that it is a log."""
    try:
        kind = _kind(path)
        return kind is not LOGS or log_lines.is_of_job(path, _opened(path, _head))
    except ForeignError:
        return False


def _kind(path: Path) -> Kind:
    """What a file is. Raises `ForeignError` if it is nothing that is known."""
    head = _opened(path, _head)
    if head.startswith(b"PK\x03\x04") or head[257:262] == b"ustar":
        raise ForeignError(f"{path} is an archive; unpack it, and name the files or their folder")
    if not head:
        raise ForeignError(f"{path} is empty, so nothing can be explained; name {_known()}")
    pickled = head.startswith(_PICKLE)
    before, after = (rb"(?:\x8c.|X.\0\0\0)", rb"") if pickled else (rb'"', rb'"\s*:')  # opcodes of a short text
    keys: list[tuple[int, Kind]] = []
    for kind in KINDS:
        if kind.magic and re.match(kind.magic, head):
            return kind
        key = kind.key and re.search(before + rb"(?:" + kind.key + rb")" + after, head, re.DOTALL)
        if key and (pickled or head.lstrip().startswith(b"{")):
            keys.append((key.start(), kind))
    if keys:
        return min(keys, key=lambda pair: pair[0])[1]
    if pickled:
        return FLIGHT_RECORDER
    if log_lines.looks_like_log(path, head):
        return LOGS
    raise ForeignError(f"{path} is nothing that can be explained; name {_known()}")


def _head(path: Path) -> bytes:
    with open_regular(path) as file:
        content = Content(file, path)
        head = content.read(_HEAD)
    if content.cut and not head:
        raise ForeignError(f"{path} cannot be read: {content.cut}; copy it again")
    return head


def _opened(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ForeignError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ForeignError(f"{shorter(str(path))} cannot be read: {reason}") from None


def _known() -> str:
    *names, last = (kind.name for kind in (*KINDS, LOGS))
    return f"{', '.join(names)} or {last}"
