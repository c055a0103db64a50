"""Makes a run of what files of a job say that ran elsewhere, so that it is shown, compared and exported like any other.

The folder has the ordinary events and documents. Its `imported.json` says which files it was made from, and its state
is `imported`. What the files do not have is not written, so that it is unknown and never zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from labkit.analysis.foreign import ForeignError, Page
from labkit.analysis.summary import summarise
from labkit.common.arguments import shown
from labkit.common.text import visible_line
from labkit.record import events
from labkit.record.documents import IMPORTED, Imported, SpecFields, Status
from labkit.record.events import RANKS, OfRank, Start
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.writer import PHASES, Writer

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


def keep(pages: Sequence[Page], name: str, root: Path | None = None) -> RunFolder:
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
    folder = RunFolder.create(check_name(name), root)
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
