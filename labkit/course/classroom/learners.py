"""One learner of a class: what a runs folder, or a zip of one, says about exercises, guesses and runs."""

from __future__ import annotations

import calendar
import io
import os
import stat
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from zlib import error as ZlibError

from msgspec import Struct

from labkit.analysis.diagnose import NAMES
from labkit.analysis.diagnose.finding import shorter
from labkit.analysis.guess import FIGURES
from labkit.common.files import MARK, open_regular, require_replaceable, write_atomically
from labkit.common.units import counted, size
from labkit.course.exercises import LABS, Noted, exercises
from labkit.record.documents import Guesses, SpecFields, Status, Summary, Unreadable, decoded
from labkit.record.events import parse
from labkit.record.files import NotPlain, is_plain, names_below, read_below
from labkit.record.folder import RunFolder
from labkit.record.follow import current_status
from labkit.record.state import OVER
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

BOOK = "exercises.json"
DOCUMENTS: Mapping[str, type[Struct]] = {
    "spec.json": SpecFields,
    "status.json": Status,
    "guess.json": Guesses,
    "summary.json": Summary,
}
RUNS = 2_000  # newest runs of a learner that are read
_SAMPLES = "system.jsonl"  # written five times per second while a run is under way
_MOST = 1 << 20  # bytes of a document
_MOST_ZIP = 16 << 20  # bytes of a zip
_ENTRIES = 50_000  # of a zip
_LONGEST_NAME = 120  # characters of the name of a zip that is uploaded
_NOT_IN_NAMES = '/\\:*?"<>|'  # on any system
_RUNS_AT_ONCE, _BYTES_AT_ONCE = 200, 16 << 20  # that one refresh reads of one learner; the bytes also of a zip
AHEAD = 60.0  # seconds by which the clock of another machine may be ahead
_TITLE = 200  # characters of what happened, or of its fix
_NO_YEAR = 1980  # of a file in a zip that has no date
OWN_SCRIPT = "own script"


# ---- where the files are: a folder, or a zip


class Damaged(Exception):
    """Something cannot be read: one clause, in words of the lab only, because what a file says may be anything."""


class Files(Protocol):
    """The files of a runs folder, by their path in it."""

    def runs(self) -> Sequence[str]:
        """The names of what may be run folders, oldest first."""

    def read(self, path: str) -> bytes:
        """The content of a file. Raises `FileNotFoundError` if there is none, and `Damaged`."""

    def changed(self, path: str) -> float | None:
        """When a file was written, in Unix seconds; None if there is no such file."""

    def state(self, run: str, status: Status) -> Status:
        """The status of a run that has not ended by what its files say."""


class InFolder:
    """The runs folder `place`, below the folder `root` of the class. Links are not followed anywhere below `root`."""

    def __init__(self, root: Path, place: Path):
        self._root, self._place = root, place

    def runs(self) -> list[str]:
        return [name for name in names_below(self._root, self._place) if not name.startswith(".") and name != BOOK]

    def read(self, path: str) -> bytes:
        try:
            return read_below(self._root, self._place / path, _MOST)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(path) from None
        except NotPlain:
            if not is_plain(self._place / PurePosixPath(path).parts[0]):
                raise FileNotFoundError(path) from None  # a link is no run
            raise Damaged(f"{PurePosixPath(path).name} is no plain file, or too large") from None
        except OSError:
            raise Damaged(f"{PurePosixPath(path).name} cannot be read") from None

    def changed(self, path: str) -> float | None:
        try:
            return os.lstat(self._place / path).st_mtime
        except OSError:
            return None

    def state(self, run: str, status: Status) -> Status:
        try:
            return current_status(RunFolder(self._place / run))
        except (Unreadable, OSError):
            return status


class InZip:
    """The documents of a zip (its path, or its content), which are read up to a limit when it is opened; nothing is
    unpacked. `Damaged` if it is none."""

    def __init__(self, source: Path | bytes):
        self._files: dict[str, bytes] = {}
        self._times: dict[str, float] = {}
        try:
            with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
                if file.seek(0, os.SEEK_END) > _MOST_ZIP:
                    raise Damaged(f"the zip is larger than {size(_MOST_ZIP)}; labkit progress --zip writes a small one")
                with zipfile.ZipFile(file) as archive:
                    self._read(archive)
        except (zipfile.BadZipFile, ZlibError, EOFError, NotImplementedError, RuntimeError, ValueError):
            raise Damaged("the zip is damaged or encrypted, or is none") from None
        except OSError:
            raise Damaged("the zip cannot be read") from None

    def _read(self, archive: zipfile.ZipFile) -> None:
        if len(archive.infolist()) > _ENTRIES:
            raise Damaged(f"the zip has more than {_ENTRIES:,} files; labkit progress --zip writes fewer")
        entries = {PurePosixPath(entry.filename): entry for entry in archive.infolist() if not entry.is_dir()}
        books = [path for path in entries if path.name == BOOK]
        runs = [path for path in entries if path.name == "status.json" and len(path.parts) > 1]
        tops = [path.parent for path in books] or [path.parent.parent for path in runs]
        if not tops:
            raise Damaged("the zip has no runs folder; labkit progress --zip writes one")
        top = min(tops, key=lambda path: (len(path.parts), path))
        names = sorted(path.parent.name for path in runs if path.parent.parent == top)[-RUNS:]
        wanted = [top / BOOK, *(top / name / document for name in reversed(names) for document in DOCUMENTS)]
        left = _BYTES_AT_ONCE
        for path in wanted:
            if path not in entries or left <= 0:
                continue
            if entries[path].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Damaged("the zip is compressed in another way than deflate")
            with archive.open(entries[path]) as file:
                content = file.read(_MOST + 1)
            left -= len(content)
            name = path.relative_to(top).as_posix()
            when = _time_of(entries[path], utc=MARK.encode() in archive.comment)
            self._files[name] = content
            if when is not None:
                self._times[name] = when

    def runs(self) -> list[str]:
        return sorted({path.split("/")[0] for path in self._files if "/" in path})

    def read(self, path: str) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(path)
        if len(self._files[path]) > _MOST:
            raise Damaged(f"{PurePosixPath(path).name} is larger than {size(_MOST)}")
        return self._files[path]

    def changed(self, path: str) -> float | None:
        return self._times.get(path)

    def state(self, run: str, status: Status) -> Status:
        return status  # how it ended is not in the zip


def _time_of(entry: zipfile.ZipInfo, utc: bool) -> float | None:
    """When a file in a zip was written: in UTC as `jobs.zipped` has it, or else in the time zone of this machine, as
    most programs write it. None if its date is none."""
    date = (*entry.date_time, 0, 0, -1)
    try:
        return None if entry.date_time[0] <= _NO_YEAR else calendar.timegm(date) if utc else time.mktime(date)
    except (ValueError, OverflowError):
        return None


# ---- what is known about a run and a learner


@dataclass(frozen=True)
class Failure:
    """Why a run failed: the name of the finding if the lab knows it, otherwise empty; the other texts may have anything
    in them."""

    name: str
    title: str
    fix: str


@dataclass(frozen=True)
class GuessMade:
    """A guess that was measured, of the rank with the largest error; `error` is that of `Guessable.error`."""

    lab: str
    figure: str
    guessed: float
    measured: float
    error: float | None


@dataclass(frozen=True)
class Ran:
    """A run in words of the lab: `what` it trains, its state, when it began and ended in Unix seconds."""

    what: str
    state: str
    began: float | None
    ended: float | None
    lab: str = ""
    guesses: tuple[GuessMade, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class Record:
    """A learner: the exercises tried, by name, when the newest answer was checked, the runs, oldest first, and `notes`
    about what cannot be read. `damaged` if nothing can."""

    exercises: Mapping[str, Noted] = field(default_factory=dict)
    answered: float | None = None
    runs: tuple[Ran, ...] = ()
    notes: tuple[str, ...] = ()
    damaged: str = ""


class Learner:
    """A learner of the class in `root`: the folder or zip called `name`. `refresh` reads what has changed, and
    `complete` is whether it has read everything."""

    def __init__(self, root: Path, name: str):
        self._root, self._path = root, root / name
        self.complete = False
        self.record = Record()
        self._stamp: tuple[Path, int, int] | None = None  # of the zip that was read
        self._files: Files | None = None
        self._book: tuple[float | None, Mapping[str, Noted], str] = (None, {}, "")
        self._runs: dict[str, tuple[tuple[float | None, ...], Ran | None, str]] = {}  # by name: times, run, trouble

    def refresh(self) -> None:
        """Reads what has changed. Never raises because of the files."""
        try:
            self._find()
            self._read()
        except (Damaged, OSError) as error:
            why = str(error) if isinstance(error, Damaged) else "it cannot be read, or has just been removed"
            self.record, self.complete, self._stamp = Record(damaged=why), True, None
            self._runs.clear()

    def _find(self) -> None:
        """Sets where the files are: in the zip, in the first folder that looks like one of runs, or in the newest zip
        of the folder."""
        if not is_plain(self._path):
            raise Damaged("it is a link or a special file, which is not read")
        if not os.access(self._path, os.R_OK):
            raise Damaged("you may not read it: run folders are private, labkit progress --zip publishes them")
        archive: Path | None = self._path
        if self._path.is_dir():
            place = next((place for place in _places(self._root, self._path) if _has_runs(place)), None)
            if place:
                self._files, self._stamp = InFolder(self._root, place), None
                return
            archive = _newest_zip(self._root, self._path)
        if archive is None:
            raise Damaged("nothing of the lab is here yet")
        status = archive.lstat()
        stamp = archive, status.st_mtime_ns, status.st_size
        if stamp != self._stamp:
            self._files, self._stamp = InZip(archive), stamp
            self._runs.clear()
            self._book = (None, {}, "")

    def _read(self) -> None:
        files = self._files
        assert files is not None
        names = files.runs()
        left_out = len(names) - len(names[-RUNS:])
        names = names[-RUNS:]
        self._runs = {name: self._runs[name] for name in names if name in self._runs}
        self._read_book(files)
        runs, self.complete, spent = 0, True, _Spent(files)
        for name in reversed(names):
            times = tuple(files.changed(f"{name}/{document}") for document in ("status.json", "summary.json"))
            known = self._runs.get(name)
            if known and known[0] == times and (known[1] is None or known[1].state in OVER):
                continue
            if runs >= _RUNS_AT_ONCE or spent.bytes >= _BYTES_AT_ONCE:
                self.complete = False
                break
            runs += 1
            try:
                self._runs[name] = times, _ran(spent, name), ""
            except Damaged as damage:
                self._runs[name] = times, None, str(damage)
        known_runs = [self._runs[name] for name in names if name in self._runs]
        damaged = [trouble for _, _, trouble in known_runs if trouble]
        notes = [self._book[2]] if self._book[2] else []
        notes += [f"{counted(len(damaged), 'run')} cannot be read, the newest because {damaged[-1]}"] if damaged else []
        notes += [f"of the runs, the newest {RUNS:,} are read"] if left_out else []
        runs_read = tuple(run for _, run, _ in known_runs if run is not None)
        self.record = Record(self._book[1], self._book[0] if self._book[1] else None, runs_read, tuple(notes))

    def _read_book(self, files: Files) -> None:
        changed = files.changed(BOOK)
        if changed == self._book[0] and changed is not None:
            return
        try:
            noted = _document(files, BOOK, dict[str, Noted]) or {}
        except Damaged as damage:
            self._book = changed, {}, str(damage)
        else:
            names = known_exercises()
            self._book = changed, {name: noted[name] for name in noted if name in names}, ""


class _Spent:
    """Files whose bytes are counted."""

    def __init__(self, files: Files):
        self._files, self.bytes = files, 0
        self.runs, self.changed, self.state = files.runs, files.changed, files.state

    def read(self, path: str) -> bytes:
        content = self._files.read(path)
        self.bytes += len(content)
        return content


def _places(root: Path, path: Path) -> list[Path]:
    """Where the runs of a learner may be: in their folder, in `runs` below it, or in the `runs` of a clone there."""
    clones = [path / name / "runs" for name in names_below(root, path) if is_plain(path / name)]
    return [path, *filter(is_plain, (path / "runs", *clones))]


def _has_runs(place: Path) -> bool:
    if os.path.lexists(place / BOOK):
        return True
    return any(os.path.lexists(place / name / "status.json") for name in names_below(place, place)[:RUNS])


def _newest_zip(root: Path, path: Path) -> Path | None:
    """The newest zip directly in a folder, as an LMS puts what was handed in; None if there is none."""
    zips = []
    for name in names_below(root, path):
        if name.lower().endswith(".zip"):
            status = os.lstat(path / name)
            if stat.S_ISREG(status.st_mode):
                zips.append((status.st_mtime, path / name))
    return max(zips)[1] if zips else None


# ---- reading the documents of a run


@cache
def known_exercises() -> Mapping[str, tuple[str, str]]:
    """By name of an exercise: its lab and its title."""
    return {name: (lab, exercise.title) for topic, lab in LABS.items() for name, exercise in exercises(topic).items()}


def _document(files: Files, path: str, kind: Any) -> Any:
    """A document; None if there is none. Raises `Damaged`."""
    try:
        return decoded(parse(files.read(path)), kind)
    except FileNotFoundError:
        return None
    except ValueError:
        raise Damaged(f"{PurePosixPath(path).name} is damaged") from None


def _ran(files: Files, name: str) -> Ran | None:
    """The run in the folder `name`; None if it is no run, or has not started. Raises `Damaged`."""
    status = _document(files, f"{name}/status.json", Status)
    if status is None:
        return None
    spec = _document(files, f"{name}/spec.json", SpecFields) or SpecFields()
    if status.state not in OVER:
        status = files.state(name, status)
    try:
        summary = _document(files, f"{name}/summary.json", Summary) if status.state in OVER else None
    except Damaged:
        summary = None  # as an earlier version has written it, or none
    guess = _document(files, f"{name}/guess.json", Guesses)
    lab = guess.notebook if guess and guess.notebook in LABS.values() else ""
    run = Ran(_what(spec), status.state, status.started, _end(files, name, status), lab)
    if summary and guess:
        run = replace(run, guesses=_guesses(lab, summary))
    if status.state in ("failed", "lost"):
        run = replace(run, failure=_failure(status, summary))
    return run


def _what(spec: SpecFields) -> str:
    """`DDP · mlp · 2 ranks`, in words of the lab only."""
    strategy = STRATEGIES.get(spec.strategy or "")
    parts = [strategy.title if strategy else OWN_SCRIPT, spec.workload if spec.workload in WORKLOADS else ""]
    ranks = counted(spec.nproc, "rank") if spec.nproc else ""
    return " · ".join(filter(None, (*parts, ranks)))


def _end(files: Files, name: str, status: Status) -> float | None:
    """When a run ended. Without a time, or with one of a clock that is ahead, it is when the last file was written."""
    if status.state not in OVER:
        return None
    if status.ended is not None and status.ended <= time.time() + AHEAD:
        return status.ended
    times = [files.changed(f"{name}/{document}") for document in ("status.json", _SAMPLES)]
    return max((when for when in times if when is not None), default=None)


def _failure(status: Status, summary: Summary | None) -> Failure:
    if summary and summary.findings:
        worst = summary.findings[0]
        return Failure(
            worst.name if worst.name in NAMES else "", shorter(worst.title, _TITLE), shorter(worst.fix, _TITLE)
        )
    if summary and summary.failure:
        return Failure("", shorter(f"{summary.failure.type}: {summary.failure.message}", _TITLE), "")
    return Failure("", shorter(status.message, _TITLE) or "it left no reason", "")


def _guesses(lab: str, summary: Summary) -> tuple[GuessMade, ...]:
    """The guesses of a run that were measured, each with its largest error."""
    worst: dict[str, GuessMade] = {}
    for outcome in summary.guess:
        figure = FIGURES.get(outcome.figure)
        if figure is None or figure.compared or outcome.measured is None:
            continue
        error = figure.error(outcome.guessed, outcome.measured)
        made = GuessMade(lab, figure.name, outcome.guessed, outcome.measured, error)
        before = worst.get(figure.name)
        if before is None or far(error) > far(before.error):
            worst[figure.name] = made
    return tuple(worst.values())


def far(error: float | None) -> float:
    """The size of an error; infinite if nothing was expected to be measured."""
    return float("inf") if error is None else abs(error)


def take_in(folder: Path, name: str, content: bytes) -> None:
    """Puts a zip that was uploaded into the folder of a class, where only its owner can read it. Of what has this name
    already, only a zip that the lab has written is replaced, and a link is not followed. `name` and `content` may be
    hostile.

    Raises `Damaged` if it is no zip of a learner, or cannot be written.
    """
    forbidden = any(not letter.isprintable() or letter in _NOT_IN_NAMES for letter in name)
    if forbidden or name.startswith((".", "_")) or not name.lower().endswith(".zip") or len(name) > _LONGEST_NAME:
        raise Damaged("its name is not that of a learner with .zip after it")
    InZip(content)
    try:
        require_replaceable(folder / name)
        write_atomically(folder / name, content, private=True)
    except OSError as error:
        raise Damaged(f"it cannot be written: {error.strerror}") from None


# ---- what a learner hands in


def handed_in(place: Path) -> tuple[dict[str, bytes], float | None]:
    """The files that a class is read from, by their path in a zip, and when an exercise was checked last: the record of
    the exercises, and the documents of the newest runs, up to 16 MiB. Files that cannot be read are left out."""
    files, contents = _Spent(InFolder(place, place)), {}
    paths = [BOOK]
    for name in reversed(files.runs()[-RUNS:]):
        if files.changed(f"{name}/status.json") is not None:
            paths += [f"{name}/{document}" for document in DOCUMENTS]
    for path in paths:
        if files.bytes >= _BYTES_AT_ONCE - _MOST:
            break
        with suppress(FileNotFoundError, Damaged):
            contents[path] = files.read(path)
    return contents, files.changed(BOOK)
