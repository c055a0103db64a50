"""Reading the files of an untrusted folder: opening them, and following logs while they are written.

Only regular files below that folder are opened, and only up to a size limit. Symbolic links below the folder are
refused, wherever they lead, and so are FIFOs, sockets and devices. The path of the folder itself is chosen by the user
and may contain links. Each component is opened relative to its parent, so replacing one by a link in the meantime has
no effect. If the system has no `openat` (Windows), components are compared before and after opening. A hard link cannot
be distinguished from the file; creating one requires write access to the same file system.

A rank may write a million lines of output at once. No function here holds a whole log in memory, and no call reads more
than its budget.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

# ---- opening

ENTRIES = 10_000  # names read from one directory
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO without a writer would block the open
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_JUNCTION = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1)  # a directory of Windows that leads elsewhere
_HAS_OPENAT = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


class NotPlain(OSError):
    """A path that is not a regular file, or leads through something that is not a directory; the message is one
    clause."""


def open_below(root: Path, path: Path) -> BinaryIO:
    """Opens the regular file `path`, which lies below `root`, for reading.

    Raises `FileNotFoundError` if there is no such file, `NotPlain` for a link, FIFO, device, socket or directory, and
    `OSError` as `open` does.
    """
    *parents, name = _parts(root, path)
    opened = _openat(root, parents, name) if _HAS_OPENAT else _compared(root, parents, name)
    try:
        _require_regular(os.fstat(opened), name)
    except BaseException:
        os.close(opened)
        raise
    return os.fdopen(opened, "rb")


def read_below(root: Path, path: Path, limit: int) -> bytes:
    """The content of a file, opened by `open_below`. Raises `NotPlain` if it has more than `limit` bytes."""
    with open_below(root, path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise NotPlain(f"{path.name} is larger than {limit:,} bytes")
    return content


def names_below(root: Path, path: Path) -> list[str]:
    """The sorted names in the directory `path`, at most `ENTRIES`; none if it is missing or not a directory."""
    try:
        with _directory(root, path) as place, os.scandir(place) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(ENTRIES)))
    except (OSError, ValueError):
        return []


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory or a regular file, not a link."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _parts(root: Path, path: Path) -> tuple[str, ...]:
    parts = path.relative_to(root).parts
    if not parts or ".." in parts or any("\0" in part for part in parts):
        raise NotPlain(f"{path} does not lie below {root}")
    return parts


def _require_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = (
            (stat.S_ISLNK, "symbolic link"),
            (stat.S_ISFIFO, "FIFO"),
            (stat.S_ISDIR, "directory"),
            (stat.S_ISSOCK, "socket"),
        )
        kind = next((words for is_kind, words in kinds if is_kind(status.st_mode)), "device")
        raise NotPlain(f"{name} is a {kind}, not a regular file")


def _openat(root: Path, parents: list[str], name: str) -> int:
    with _descended(root, parents) as place:
        return _step(place, name, _FILE)


@contextmanager
def _descended(root: Path, parts: list[str]) -> Iterator[int]:
    """A directory below `root`, each component opened relative to the one above."""
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | getattr(os, "O_CLOEXEC", 0))
    try:
        for part in parts:
            above, place = place, _step(place, part, _DIRECTORY)
            os.close(above)
        yield place
    finally:
        os.close(place)


def _step(place: int, name: str, flags: int) -> int:
    """Opens one component; errors caused by O_NOFOLLOW, O_DIRECTORY or a socket become a `NotPlain` that names the
    reason.
    """
    try:
        return os.open(name, flags, dir_fd=place)
    except FileNotFoundError:
        raise
    except OSError:
        mode = os.stat(name, dir_fd=place, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise NotPlain(f"{name} is a symbolic link, which is not followed") from None
        if stat.S_ISSOCK(mode) or (flags == _DIRECTORY and not stat.S_ISDIR(mode)):
            raise NotPlain(f"{name} is not a {'directory' if flags == _DIRECTORY else 'regular file'}") from None
        raise


def _compared(root: Path, parents: list[str], name: str) -> int:
    """Without `openat`: no component is a link before or after opening, and the opened file is the one that was
    checked.
    """
    path = root.joinpath(*parents, name)
    before = _look(root, parents, name)
    _require_regular(before[-1], name)  # before opening: a device may act on being opened
    opened = os.open(path, _FILE)
    after = [*_look(root, parents, name)[:-1], os.fstat(opened)]
    if any((status.st_dev, status.st_ino) != (other.st_dev, other.st_ino) for status, other in zip(before, after)):
        os.close(opened)
        raise NotPlain(f"{name} was replaced while it was opened")
    return opened


def _look(root: Path, parents: list[str], name: str) -> list[os.stat_result]:
    stats, path = [], root
    for part in (*parents, name):
        path = path / part
        stats.append(os.lstat(path))
        if stat.S_ISLNK(stats[-1].st_mode) or getattr(stats[-1], "st_reparse_tag", 0) == _JUNCTION:
            raise NotPlain(f"{part} is a symbolic link, which is not followed")
    return stats


@contextmanager
def _directory(root: Path, path: Path) -> Iterator[int | str]:
    """What `os.scandir` takes for the directory `path` below `root`, or `root` itself."""
    if path == root:
        yield str(root)
        return
    parts = list(_parts(root, path))
    if not _HAS_OPENAT or os.scandir not in os.supports_fd:
        _look(root, parts[:-1], parts[-1])
        yield str(path)
        return
    with _descended(root, parts) as opened:
        yield opened


# ---- logs: the newest lines, and the number of all lines

KEEP = 5_000  # newest lines that a tail stores
BUDGET = 16 << 20  # most bytes that one call reads
# bytes before the end that are always read as text; earlier ones are only counted if the reader is far behind
_NEAR = 1 << 20
_BLOCK = 1 << 18
_LINE = 1 << 14  # most bytes stored of one line; of a longer line, its end


class LogTail:
    """The newest lines of a growing file; `poll` continues where it stopped.

    `path` may be a function that returns None until there is a file. `count` is the number of complete lines so far,
    `lines` holds the newest `keep` of them, and `partial` is the line that is being written. `opened` opens the file;
    if it refuses a link or a FIFO, `partial` says so.
    """

    def __init__(
        self,
        path: Path | Callable[[], Path | None],
        keep: int = KEEP,
        budget: int = BUDGET,
        opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb"),
    ):
        self._find = path if callable(path) else lambda: path
        self._opened = opened
        self._path: Path | None = None
        self._budget = budget
        self._offset = 0
        self._rest = b""
        self.count = 0
        self.lines: deque[str] = deque(maxlen=keep)

    @property
    def partial(self) -> str:
        """The incomplete last line; for a progress bar, its current state."""
        return _text(self._rest)

    @property
    def dropped(self) -> int:
        """The number of counted lines that are no longer stored: the first of `lines` has this number, counting from
        0."""
        return self.count - len(self.lines)

    def since(self, number: int) -> tuple[int, list[str]]:
        """The number of the first stored line from `number` on (counting from 0), and the lines from there on."""
        first = min(max(number, self.dropped), self.count)
        return first, list(islice(self.lines, first - self.dropped, None))

    def poll(self) -> bool:
        """Reads new data up to the budget; True if there was any."""
        self._path = self._path or self._find()
        try:
            if self._path is None or (self._path.lstat().st_size <= self._offset and not self._next_attempt()):
                return False
            with self._opened(self._path) as file:
                return self._read(file, os.fstat(file.fileno()).st_size)
        except NotPlain as error:
            refused, self._rest = self._rest, f"(not shown: {error})".encode()
            return refused != self._rest
        except OSError:
            return False

    def _next_attempt(self) -> bool:
        """Switches to the file of a newer attempt, if there is one, with a separator line."""
        newer = self._find()
        if newer is None or newer == self._path:
            return False
        self._path, self._offset = newer, 0
        between = [self._rest, f"──── {_attempt(newer)} ────".encode()]
        self._rest = b""
        self._take(b"\n".join([*filter(None, between), b""]))
        return True

    def _read(self, file: BinaryIO, size: int) -> bool:
        budget = self._budget
        file.seek(self._offset)
        while budget > 0:
            block = file.read(min(_BLOCK, budget))
            if not block:
                break
            self._offset += len(block)
            budget -= len(block)
            if size - self._offset >= _NEAR:
                self._count(block)
            else:
                self._take(block)
        return budget < self._budget

    def _count(self, block: bytes) -> None:
        """Counts the lines of a block that is not stored; stored lines are older and are dropped."""
        self.count += block.count(b"\n")
        self.lines.clear()
        self._rest = (self._rest + block).rsplit(b"\n", 1)[-1][-_LINE:]

    def _take(self, block: bytes) -> None:
        *lines, rest = (self._rest + block).split(b"\n")
        self.count += len(lines)
        self.lines.extend(map(_text, lines[-(self.lines.maxlen or 0) :]))
        self._rest = rest[-_LINE:]


def whole(
    paths: Callable[[], Iterable[Path]],
    follow: Callable[[], bool] = lambda: False,
    opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb"),
) -> Iterator[bytes]:
    """The contents of the files that `paths` returns, in order, block by block: one rank's output of all attempts.

    A line that names the attempt separates one attempt from the next. While `follow()` is true, appended data and
    further attempts are read as well; an empty block means that there was nothing new.
    """
    number, offset, ended = 0, 0, True
    while True:
        more = follow()  # called first, so that everything written before it returns False is read below
        files = list(paths())
        while number < len(files):
            if offset == 0 and number:
                yield (b"" if ended else b"\n") + f"──── {_attempt(files[number])} ────\n".encode()
            for block in _blocks(opened(files[number]), offset):
                offset, ended = offset + len(block), block.endswith(b"\n")
                yield block
            if number == len(files) - 1:
                break
            number, offset = number + 1, 0
        if not more:
            return
        yield b""


def _blocks(file: BinaryIO, offset: int) -> Iterator[bytes]:
    with file:
        file.seek(offset)
        while block := file.read(_BLOCK):
            yield block


def _attempt(log: Path) -> str:
    """The attempt that a log belongs to: `attempt 1`."""
    return log.parent.parent.name.replace("_", " ")


def search(
    path: Path, text: str, limit: int = 1_000, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")
) -> list[tuple[int, str]]:
    """The first `limit` lines that contain `text`, as (number from 0, line); case-insensitive for A to Z. Reads block
    by block.
    """
    lines: list[tuple[int, str]] = []
    wanted, number, rest = text.encode().lower(), 0, b""
    if not wanted:
        return []
    with opened(path) as file:
        while len(lines) < limit:
            block = file.read(_BLOCK)
            whole, cut, rest = (rest + block).rpartition(b"\n") if block else (rest, b"", b"")
            if not cut and len(rest) > _NEAR:  # split an endless line, such as a progress bar, to bound memory
                whole, rest = rest, b""
            if wanted in whole.lower():
                matches = (
                    (number + index, line) for index, line in enumerate(whole.split(b"\n")) if wanted in line.lower()
                )
                lines += [(at, _text(line)) for at, line in matches]
            if not block:
                break
            number += whole.count(b"\n") + len(cut)
    return lines[:limit]


def _text(line: bytes) -> str:
    """A line as a terminal shows it: the part after the last carriage return, with � for bytes that are not UTF-8."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    cut = len(shown) > _LINE
    return ("…" if cut else "") + shown[-_LINE:].decode(errors="replace")
