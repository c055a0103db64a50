"""Zips of untrusted sources: unpacked after everything in them was checked. Standard library only."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from zlib import error as ZlibError

from labkit.common.arguments import shown
from labkit.common.reading import open_regular
from labkit.common.units import counted, size

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
