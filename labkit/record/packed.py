"""Recorded runs as zips: which files of a run are in one, and where one is unpacked when it is opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import zipfile
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO
from zlib import error as ZlibError

from labkit.common.arguments import shown
from labkit.common.files import open_regular, read_regular, user_cache
from labkit.common.units import counted, size
from labkit.record.documents import SpecFields, Status, decoded
from labkit.record.files import is_plain

if TYPE_CHECKING:
    from labkit.record.folder import RunFolder

# ---- zips of untrusted sources: unpacked after everything in them was checked
#
# Standard library only.


_MOST_FILES = 1_000
_MOST_BYTES = 64 << 20  # of the zip, and of all its files
_BLOCK = 1 << 16


class BadArchive(ValueError):
    """A zip cannot be unpacked; the message is one sentence that names the file and the reason."""


def unpack(path: Path, folder: Path, mode: int = 0o755) -> list[str]:
    """Unpacks a zip from an untrusted source to a new `folder` of this `mode`, and returns the paths of its files.

    Everything is checked before the folder appears: paths stay below it, entries are plain files, and sizes are counted
    while they are read. Raises `BadArchive`, or `OSError` if a file cannot be read or written.
    """
    if os.path.lexists(folder):
        raise BadArchive(f"{folder} exists; name a new folder with -o")
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise BadArchive(f"{path} is larger than {size(_MOST_BYTES)}, which no packed job is")
        return _unpack(file, path, folder, mode)


def _unpack(file: BinaryIO, path: Path, folder: Path, mode: int) -> list[str]:
    waiting = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    try:
        with zipfile.ZipFile(file) as archive:
            names = _extract(archive, path, waiting)
        waiting.chmod(mode)
        waiting.rename(folder)
    except (zipfile.BadZipFile, ZlibError, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadArchive(f"{path} cannot be unpacked: it is damaged, encrypted or no zip ({error})") from None
    finally:
        shutil.rmtree(waiting, ignore_errors=True)
    return names


def _extract(archive: zipfile.ZipFile, path: Path, folder: Path) -> list[str]:
    entries = archive.infolist()
    if len(entries) > _MOST_FILES:
        raise BadArchive(f"{path} has {len(entries)} entries, more than the maximum of {_MOST_FILES}")
    seen: set[str] = set()
    for entry in entries:
        if why := _refusal(entry, seen):
            raise BadArchive(f"{path} is refused: {shown(entry.filename)} {why}")
        seen.add(entry.filename.casefold())
    left = _MOST_BYTES
    for entry in entries:
        target = folder.joinpath(*PurePosixPath(entry.filename).parts)
        if entry.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, open(target, "xb") as made:
            while block := source.read(_BLOCK):
                left -= len(block)
                if left < 0:
                    raise BadArchive(
                        f"{path} is refused: its {counted(len(entries), 'file')} exceed {size(_MOST_BYTES)}"
                    )
                made.write(block)
    return [entry.filename for entry in entries if not entry.is_dir()]


def _refusal(entry: zipfile.ZipInfo, seen: set[str]) -> str:
    """Why an entry must not be unpacked; empty if it may."""
    name, mode = entry.filename, entry.external_attr >> 16
    parts = name.rstrip("/").split("/")
    if "\\" in entry.orig_filename or ":" in name or any(part in ("", ".", "..") for part in parts):
        return "leaves the folder, or would on another system"
    if any(ord(character) < 32 or ord(character) == 127 for character in entry.orig_filename):
        return "has control characters in its name"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a special file"
    if name.casefold() in seen:
        return "occurs twice"
    return ""


# ---- recorded runs as zips


RECORDING = "recording"  # the folder of the run in the zip of a job
SHIPPED = Path(__file__).parents[2] / "labs" / "recordings"  # runs that come with the lab
MARK = "shipped:"  # in front of the name of such a run
_SUFFIX = ".zip"
_MOST_ZIP = 64 << 20  # of a zip
_LOG = 256 << 10  # bytes at the end of a log that are packed


def recording(run: RunFolder) -> dict[str, bytes]:
    """The files of a run that show it, by path in a zip: events, steps, documents, script, and the end of each log. The
    launch plan, checkpoints and tensors are left out."""
    place = f"{RECORDING}/{run.name}"
    documents = [run.spec, run.prediction, run.guess, run.imported, run.status, run.summary, run.script, run.command]
    events = [path for path in sorted(run.events.iterdir()) if path.suffix in (".jsonl", ".steps")]
    logs = sorted(run.logs.rglob("*.log"))
    files = {}
    for path in filter(is_plain, (*documents, run.system, *events, *logs)):  # a folder from a stranger may have links
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


@cache
def shipped_documents(name: str) -> tuple[SpecFields, Status]:
    """The fields of the Spec and the status of a run that comes with the lab, without unpacking it."""
    with zipfile.ZipFile(_shipped_zip(name)) as archive:
        texts = {Path(member).name: archive.read(member) for member in archive.namelist() if member.endswith(".json")}
    return decoded(json.loads(texts["spec.json"]), SpecFields), decoded(json.loads(texts["status.json"]), Status)


def _shipped_zip(name: str) -> Path:
    return SHIPPED / f"{name.removeprefix(MARK)}{_SUFFIX}"


def shipped_like(strategy: str, ranks: int) -> str | None:
    """The run that comes with the lab for a strategy, with as many ranks as possible up to `ranks`, or else the fewest;
    None if there is none."""
    numbers = {int(name.rpartition("-x")[2]): name for name in shipped() if name.startswith(f"{MARK}{strategy}-x")}
    known = [number for number in numbers if number <= ranks] or sorted(numbers)[:1]
    return numbers[max(known)] if known else None


def opened(name: str) -> Path:
    """The run folder in a zip, unpacked to the user's cache; the same zip is unpacked once. Raises `LookupError`, one
    sentence, if there is none."""
    path = _shipped_zip(name) if name.startswith(MARK) else Path(name)
    if name.startswith(MARK) and name not in shipped():
        raise LookupError(f"the lab comes with no run {name}; there are: {', '.join(shipped()) or 'none'}")
    place = None
    try:
        digest = hashlib.sha256(read_regular(path, _MOST_ZIP)).hexdigest()[:16]
        place = user_cache() / "labkit" / "recordings" / digest
        if not place.is_dir():
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unpack(path, place, mode=0o700)
    except (BadArchive, OSError) as error:
        if place is None or not place.is_dir():  # otherwise another process has just unpacked it
            why = str(error) if isinstance(error, BadArchive) else f"{path} cannot be opened: {error.strerror}"
            raise LookupError(why) from None
    runs = [spec.parent for spec in sorted(place.glob(f"{RECORDING}/*/spec.json")) if spec.is_file()]
    if not runs:
        raise LookupError(f"{path} ({size(path.stat().st_size)}) has no recorded run; labkit pack RUN writes one")
    return runs[0]
