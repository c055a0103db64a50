"""Recorded runs as zips: which files of a run are in one, and where one is unpacked when it is opened."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.files import user_cache
from labkit.common.reading import read_regular
from labkit.common.units import size
from labkit.common.zips import BadArchive, unpack
from labkit.record.files import is_plain

if TYPE_CHECKING:
    from labkit.record.folder import RunFolder

RECORDING = "recording"  # the folder of the run in the zip of a job
SHIPPED = Path(__file__).parents[2] / "labs" / "recordings"  # runs that come with the lab
MARK = "shipped:"  # in front of the name of such a run
_SUFFIX = ".zip"
_MOST_BYTES = 64 << 20  # of a zip
_LOG = 256 << 10  # bytes at the end of a log that are packed


def recording(run: RunFolder) -> dict[str, bytes]:
    """The files of a run that show it, by path in a zip: events, steps, documents, script, and the end of each log. The
    launch plan, checkpoints and tensors are left out."""
    place = f"{RECORDING}/{run.name}"
    documents = (run.spec, run.prediction, run.guess, run.status, run.summary, run.script, run.command, run.system)
    events = [path for path in sorted(run.events.iterdir()) if path.suffix in (".jsonl", ".steps")]
    logs = sorted(run.logs.rglob("*.log"))
    files = {}
    for path in filter(is_plain, (*documents, *events, *logs)):  # a folder from a stranger may have links
        with run.open(path) as file:
            if path in logs:
                file.seek(max(0, path.stat().st_size - _LOG))
            files[f"{place}/{path.relative_to(run.path).as_posix()}"] = file.read()
    return files


def is_packed(name: str) -> bool:
    """Whether a name is that of a zip, or of a run that is shipped."""
    return name.startswith(MARK) or (name.lower().endswith(_SUFFIX) and Path(name).is_file())


def shipped() -> list[str]:
    """The names of the runs that come with the lab, such as shipped:ddp-x2."""
    return [MARK + path.stem for path in sorted(SHIPPED.glob(f"*{_SUFFIX}"))] if SHIPPED.is_dir() else []


def shipped_like(strategy: str, ranks: int) -> str | None:
    """The run that comes with the lab for a strategy, with as many ranks as possible up to `ranks`, or else the fewest;
    None if there is none."""
    numbers = {int(name.rpartition("-x")[2]): name for name in shipped() if name.startswith(f"{MARK}{strategy}-x")}
    known = [number for number in numbers if number <= ranks] or sorted(numbers)[:1]
    return numbers[max(known)] if known else None


def opened(name: str) -> Path:
    """The run folder in a zip, unpacked to the user's cache; the same zip is unpacked once. Raises `LookupError`, one
    sentence, if there is none."""
    path = SHIPPED / f"{name.removeprefix(MARK)}{_SUFFIX}" if name.startswith(MARK) else Path(name)
    if name.startswith(MARK) and name not in shipped():
        raise LookupError(f"the lab comes with no run {name}; there are: {', '.join(shipped()) or 'none'}")
    place = None
    try:
        digest = hashlib.sha256(read_regular(path, _MOST_BYTES)).hexdigest()[:16]
        place = user_cache() / "labkit" / "recordings" / digest
        if not place.is_dir():
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unpack(path, place, mode=0o700)
    except (BadArchive, OSError) as error:
        if place is None or not place.is_dir():  # otherwise another process has just unpacked it
            why = str(error) if isinstance(error, BadArchive) else f"{path} cannot be opened: {error.strerror}"
            raise LookupError(why) from None
    found = [spec.parent for spec in sorted(place.glob(f"{RECORDING}/*/spec.json")) if spec.is_file()]
    if not found:
        raise LookupError(f"{path} ({size(path.stat().st_size)}) has no recorded run; labkit pack RUN writes one")
    return found[0]
