"""Files of jobs that ran anywhere, without the lab: what they are, what they say, and what follows from it.

`opening.py` recognises a file by its content and joins the files of the ranks. `reading.py` reads content in chunks,
and pickles without executing them. `trace.py` reads a trace of torch's profiler as a stream, and says where the time of
the rank went, and what a step would take without a part of it; `profiles.py` says what the ranks of a job have in
common, and writes the steps as events of a run. `flight_recorder.py` reads the dumps that torch writes after a
timeout, and says which rank is missing in which collective; `debug_server.py` reads the stacks of torch's debug server,
and `ras.py` reports of NCCL's RAS service. `memory_events.py` reads snapshots of CUDA memory and follows their events
to the peak, and `memory_snapshot.py` says what holds the memory, what grows and how fragmented it is. `log_lines.py`
reads what ranks, torchrun, Slurm, Kubernetes and the kernel wrote, `logs.py` says who failed first and why, and
`nccl.py` what the lines of NCCL among it say. Each of them returns a `Page`: findings, tables and sentences,
for every front end, and events, from which `runs/gathering.py` makes a run.

Every file is untrusted: readers have limits, execute nothing, and raise `ForeignError` with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.analysis.diagnose.finding import Finding
from labkit.record.events import RANKS, OfRank, Start


class ForeignError(ValueError):
    """Files that cannot be explained: one sentence with the file, what is wrong with it, and the fix."""


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names something, the other columns are figures, except those in `words`."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """What some files of one kind say. `title` says what they are, `notes` are sentences about what cannot be told, and
    `figures` are the numbers of the tables as plain values: times in seconds, sizes in bytes. `events` returns what is
    said of each rank as events of a run, or raises `ForeignError`; a time of 0 is not known. `world_size` is the number
    of ranks of the job, if the files say it. `files` are the files."""

    title: str
    findings: Sequence[Finding]
    tables: Sequence[Table]
    notes: Sequence[str]
    figures: dict[str, Any] = field(default_factory=dict)
    events: Callable[[], Iterable[OfRank]] = tuple
    world_size: int | None = None
    files: Sequence[Path] = ()


def present(ranks: Sequence[int], device: str = "") -> Iterator[Start]:
    """The starts of ranks of which nothing else is known."""
    for rank in numbered(ranks, [f"a file of rank {rank}" for rank in ranks]):
        yield Start(t=0.0, rank=rank, device=device, steady=True)


def numbered(ranks: Sequence[int | None], names: Sequence[str]) -> list[int]:
    """The ranks of files as a run has them: those that they name, or 0, 1 and so on if none names one.

    Raises `ForeignError` if two files name the same rank, if only some name one, or for a rank that no run can have.
    """
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return [*range(len(ranks))]
    first: dict[int | None, str] = {}
    for rank, name in zip(ranks, names):
        if rank is None:
            raise ForeignError(f"{name} does not say its rank, and others do; keep it as a run of its own")
        if rank >= RANKS:
            raise ForeignError(f"{name} is of rank {rank:,}, and a run has at most {RANKS:,} ranks; keep lower ranks")
        if rank in first:
            raise ForeignError(f"{first[rank]} and {name} are both of rank {rank}; keep the files of one job as a run")
        first[rank] = name
    return known
