"""RunFolder: the paths of a run, and the only code that creates, finds, reads and writes its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from labkit.common.arguments import shown
from labkit.common.files import write_atomically
from labkit.common.text import visible_line
from labkit.record import packed
from labkit.record.documents import (
    Guesses,
    Imported,
    LaunchPlan,
    Plan,
    SpecFields,
    Status,
    Summary,
    Unreadable,
    plain,
    read_document,
)
from labkit.record.events import RANKS, Recorded
from labkit.record.files import KEEP, LogTail, NotPlain, is_plain, names_below, open_below, read_below, search
from labkit.record.writer import steps_path

if TYPE_CHECKING:
    from labkit.record.reader import Reader

STREAMS = ("stdout", "stderr")
_TEXT = 4 << 20  # bytes of a script or a command
_TAIL = 1 << 18  # bytes at the end of a log that are read for its last lines
_SECOND = len("20261128-114000")


def runs_root() -> Path:
    """The folder of all run folders: LABKIT_RUNS, or else `runs/` in the working directory."""
    return Path(os.environ.get("LABKIT_RUNS") or "runs").absolute()


class _Below:
    """A path below a run folder."""

    def __init__(self, relative: str):
        self._relative = relative

    def __get__(self, folder: RunFolder, owner: type[RunFolder] | None = None) -> Path:
        return folder.path / self._relative


class RunFolder:
    """The folder of one run, existing or not. It can be moved, sent and opened elsewhere: no path in it is absolute.

    It may come from an untrusted source, so everything is read through this class: only below the folder, only plain
    files, up to a size limit, and with values that are checked once. `Unreadable` says what is wrong with a folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @classmethod
    def create(cls, name: str, root: Path | None = None) -> RunFolder:
        """A new folder `<date>-<time>-<name>` under `root`, the user's own (mode 0700)."""
        root = root or runs_root()
        root.mkdir(parents=True, exist_ok=True)
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
        for number in range(1, 1000):
            path = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            folder = cls(path)
            for inner in (folder.events, folder.logs):
                inner.mkdir(mode=0o700)
            return folder
        raise FileExistsError(f"{root / stem}: a thousand runs were created within one second")

    @classmethod
    def all(cls, root: Path | None = None) -> list[RunFolder]:
        """All runs under `root`, oldest first, including unreadable ones."""
        root = root or runs_root()
        if not root.is_dir():
            return []
        written: dict[Path, int] = {}
        for path in root.iterdir():
            with suppress(OSError):
                written[path] = (path / "spec.json").lstat().st_mtime_ns
        # a name begins with the second in which it was made
        return [cls(path) for path in sorted(written, key=lambda path: (path.name[:_SECOND], written[path], path.name))]

    @classmethod
    def readable(cls, folders: Iterable[RunFolder]) -> tuple[list[RunFolder], dict[str, str]]:
        """The readable ones of `folders`, and by name the reason why each of the others is unreadable."""
        reasons = {folder: folder.trouble() for folder in folders}
        return [run for run, why in reasons.items() if not why], {run.name: why for run, why in reasons.items() if why}

    @classmethod
    def find(cls, name: str, root: Path | None = None) -> RunFolder:
        """The run called `name`: a path, the name of a folder, its beginning or end, or `last`; the path of a zip that
        `labkit pack` has written, or `shipped:` and the name of a run that comes with the lab.

        Raises `LookupError`, one sentence that lists the newest runs.
        """
        if not name:
            raise LookupError("the name of the run is empty; give the name of a run, its path, or last")
        if "\0" not in name and os.path.lexists(Path(name) / "spec.json"):
            return cls(name)
        if "\0" not in name and packed.is_packed(name):
            return cls(packed.opened(name))
        runs = cls.all(root)
        if name == "last" and runs:
            return runs[-1]
        matches = [run for run in runs if run.name == name] or [
            run for run in runs if run.name.startswith(name) or run.name.endswith(name)
        ]
        if len(matches) == 1:
            return matches[0]
        if matches:
            several = ", ".join(visible_line(run.name) for run in matches[-5:])
            raise LookupError(f"{shown(name)} is ambiguous: {several}; give more of the name")
        there = ", ".join(visible_line(run.name) for run in runs[-5:]) or "none yet"
        raise LookupError(f"there is no run {shown(name)} under {root or runs_root()}; the newest are: {there}")

    @property
    def is_run(self) -> bool:
        """Whether this is the folder of a run, and not one that has a file of the same name as a Spec."""
        return is_plain(self.events)

    @property
    def is_gone(self) -> bool:
        """Whether the folder no longer exists: it was deleted or moved."""
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass  # inconclusive: the folder cannot be inspected now
        return False

    # ---- paths; no other code joins strings into paths

    spec = _Below("spec.json")
    script = _Below("train.py")  # the generated one; a user's own script stays where it is
    command = _Below("command.txt")  # the exact command that runs the script without labkit
    launch = _Below("launch.json")  # the launch plan: argv, additional environment variables, working directory
    batch = _Below("job.sbatch")  # the batch file, if a scheduler runs the job
    prediction = _Below("plan.json")  # the memory and traffic that were predicted before the run
    guess = _Below("guess.json")  # what the learner predicted before the run
    imported = _Below("imported.json")  # which files the run was made from, if it was not launched here
    status = _Below("status.json")  # state, pids, exit codes, restarts: written only by the supervisor
    capture = _Below("capture.json")  # a request to the ranks to profile a step
    trace = _Below("trace.json")  # the profiled steps for Perfetto, if requested
    tensors = _Below("tensors")  # gradients and parameters of every rank, if LABKIT_TENSORS=1 is set
    summary = _Below("summary.json")  # the figures of the finished run
    system = _Below("system.jsonl")  # device and process samples, taken by the supervisor
    events = _Below("events")  # the folder of the ranks' events
    checkpoints = _Below("checkpoints")  # their folder, next to the script that writes them
    save_request = _Below("save")  # next to the script, asks it for a checkpoint; the script removes it
    rendezvous = _Below("rendezvous")  # through which the ranks of one machine meet, instead of an open port
    reserve = _Below(".reserve")  # disk space for the final status and the summary, reserved while the run lasts
    logs = _Below("logs")  # the folder of the ranks' output
    launcher_log = _Below("logs/torchrun.log")  # the output of torchrun itself
    pods_log = _Below("logs/pods.log")  # what the pods of a TrainJob printed, as `kubectl logs --prefix` shows it
    supervisor_log = _Below("logs/supervisor.log")  # the output of the supervisor; empty if all went well

    @property
    def name(self) -> str:
        return self.path.name

    def reserves_of_ranks(self) -> list[Path]:
        """The disk space that ranks have reserved for their last events."""
        return list(self.events.glob(".rank*.reserve"))

    def events_of(self, rank: int) -> Path:
        return self.events / f"rank{rank}.jsonl"

    def position_of(self, rank: int) -> Path:
        """The last known line of one rank's script; see probe/threads.py."""
        return self.path / "stacks" / f"rank{rank}.position.json"

    def crash_of(self, rank: int) -> Path:
        return self.path / "stacks" / f"rank{rank}.crash.txt"

    def ras(self, suffix: str) -> Path:
        """The last answer of NCCL's RAS service while ranks waited, `.json` or `.txt`."""
        return self.path / f"nccl_ras{suffix}"

    def event_files(self) -> dict[int, Path]:
        files = {}
        for name in names_below(self.path, self.events):
            number = re.fullmatch(r"rank(\d{1,6})\.jsonl", name, re.ASCII)
            if number and int(number[1]) < RANKS:
                files[int(number[1])] = self.events / name
        return dict(sorted(files.items()))

    def log_of(self, rank: int, stream: str = "stdout") -> Path | None:
        """The output of one rank in its newest attempt; None if there is none yet."""
        paths = {number: place / str(rank) / f"{stream}.log" for number, place in self._attempts()}
        there = [number for number, path in paths.items() if os.path.lexists(path)]
        return paths[max(there)] if there else None

    def log_files(self, stream: str = "stdout") -> dict[tuple[int, int], Path]:
        files = {}
        for number, place in self._attempts():
            for rank in names_below(self.path, place):
                path = place / rank / f"{stream}.log"
                if re.fullmatch(r"\d{1,6}", rank, re.ASCII) and os.path.lexists(path):
                    files[number, int(rank)] = path
        return dict(sorted(files.items()))

    def _attempts(self) -> Iterator[tuple[int, Path]]:
        """The folders with the output of each attempt, in torchrun's layout: `<id>/attempt_<n>/<rank>/<stream>.log`."""
        for place in (self.logs / name for name in names_below(self.path, self.logs)):
            for name in names_below(self.path, place):
                if re.fullmatch(r"attempt_\d{1,6}", name, re.ASCII):
                    yield int(name.removeprefix("attempt_")), place / name

    # ---- reading

    def open(self, path: Path) -> BinaryIO:
        """Opens a file of this folder for reading. Raises `OSError`, which is `NotPlain` for a link, a FIFO, a device
        or a directory."""
        return open_below(self.path, path)

    def text(self, path: Path) -> str:
        """A script or a command as text, with � for bytes that are not UTF-8. Raises `OSError` as `open` does, or if it
        is too large.
        """
        return read_below(self.path, path, _TEXT).decode(errors="replace")

    def end_of(self, path: Path, most: int = _TAIL) -> str:
        """The last `most` bytes of a text file; empty if there is none."""
        try:
            with self.open(path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
                return file.read(most).decode(errors="replace")
        except OSError:
            return ""

    def tail(self, path: Path, keep: int = KEEP) -> LogTail:
        """The newest lines of a file below `logs`, as it grows."""
        return LogTail(path, keep, opened=self.open)

    def log_tail(self, rank: int, stream: str, keep: int = KEEP) -> LogTail:
        """The newest lines of one rank's output, if any, in this and later attempts."""
        return LogTail(lambda: self.log_of(rank, stream), keep, opened=self.open)

    def search_log(self, rank: int, stream: str, text: str, limit: int) -> list[tuple[int, str]]:
        """The first `limit` lines of a rank's newest output that contain `text`, with their numbers from 0."""
        path = self.log_of(rank, stream)
        try:
            return search(path, text, limit, opened=self.open) if path else []
        except OSError:
            return []

    def reader(self, path: Path) -> Reader:
        """A reader of an event file. Reading raises `Unreadable` if it is not a plain file."""
        from labkit.record.reader import Reader  # numpy, which a supervisor needs only when torchrun has started

        return Reader(path, opened=self._events_file)

    def _events_file(self, path: Path) -> BinaryIO:
        try:
            return self.open(path)
        except NotPlain as error:
            raise Unreadable(self.name, str(error)) from None

    def read_spec(self) -> SpecFields:
        """The fields of the Spec; all None if `spec.json` is missing. Raises `Unreadable`."""
        return read_document(self.spec, SpecFields) or SpecFields()

    def read_status(self) -> Status:
        """The status as written by the supervisor; `ready` if there is none yet. Raises `Unreadable`."""
        return read_document(self.status, Status) or Status("ready")

    def read_launch(self) -> LaunchPlan:
        """The launch plan; empty if there is none yet. Raises `Unreadable`."""
        return read_document(self.launch, LaunchPlan) or LaunchPlan()

    def read_prediction(self) -> Plan | None:
        """What the lab predicted before the run, if it did. Raises `Unreadable`."""
        return read_document(self.prediction, Plan)

    def read_guess(self) -> Guesses | None:
        """What the learner predicted before the run, if they did. Raises `Unreadable`."""
        return read_document(self.guess, Guesses)

    def read_imported(self) -> Imported | None:
        """Which files the run was made from; None for a run that was launched. Raises `Unreadable`."""
        return read_document(self.imported, Imported)

    def read_summary(self) -> Summary | None:
        """The figures as written at the end of the run, if they are. Raises `Unreadable`."""
        return read_document(self.summary, Summary)

    def require_readable(self) -> None:
        """Raises `Unreadable` if the Spec, the status, the learner's prediction or the origin of an imported run is
        invalid, or if events or logs are not plain files."""
        self.read_spec()
        self.read_status()
        self.read_guess()
        self.read_imported()
        ranks = self.event_files().values()
        for path in (self.events, self.logs, self.system, *ranks, *map(steps_path, ranks)):
            if os.path.lexists(path) and not is_plain(path):
                raise Unreadable(self.name, f"{path.relative_to(self.path).as_posix()} is a link or no plain file")

    def trouble(self) -> str:
        """The reason why this folder is unreadable, as one clause; empty if it is readable."""
        try:
            self.require_readable()
        except Unreadable as error:
            return error.reason
        return ""

    def copy(self, path: Path) -> RunFolder:
        """Copies the plain files of this folder to a new one at `path`; links, FIFOs and devices are left out."""

        def copied(source: str, target: str) -> None:
            with self.open(Path(source)) as file, open(target, "xb") as made:
                shutil.copyfileobj(file, made)

        def left_out(place: str, names: list[str]) -> list[str]:
            return [name for name in names if not is_plain(Path(place, name))]

        shutil.copytree(self.path, path, ignore=left_out, copy_function=copied)
        return RunFolder(path)

    def delete(self) -> None:
        """Deletes the folder; if it is a symbolic link, only the link."""
        if self.path.is_symlink():
            self.path.unlink()
        else:
            shutil.rmtree(self.path)

    def delete_recreated(self) -> None:
        """Deletes what a process that was just starting has created again at the path of a folder that was deleted or
        moved. If there is anything else, someone else has put it there, and everything stays."""
        with suppress(OSError):
            written = (self.events, self.logs, self.position_of(0).parent, self.rendezvous, self.status, self.system)
            ours = {path.name for path in written}
            if {path.name for path in self.path.iterdir()} <= ours:
                self.delete()

    # ---- writing

    @contextmanager
    def closing(self) -> Iterator[None]:
        """A lock for a process that ends a run in place of its supervisor, so that only one final status is written.

        A deleted folder is not locked.
        """
        with ExitStack() as held:
            with suppress(ImportError, OSError):  # the folder was deleted, or the system has no such locks
                import fcntl

                folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield

    @staticmethod
    def write_json(path: Path, value: Recorded | dict[str, Any]) -> None:
        """Writes a document atomically: a reader sees either the old or the new file."""
        RunFolder.write_text(path, json.dumps(plain(value), indent=2) + "\n")

    @staticmethod
    def write_text(path: Path, text: str) -> None:
        """Writes `text` atomically, readable only by its owner."""
        write_atomically(path, text, private=True)
