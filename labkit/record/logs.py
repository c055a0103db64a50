"""Reading a rank's output while it is written: the newest lines, and the number of all lines, at bounded cost.

A rank may write a million lines at once. No function here holds a whole file in memory, and no call reads more than its
budget.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from labkit.record.files import NotPlain

KEEP = 5_000  # newest lines that a tail stores
BUDGET = 16 << 20  # most bytes that one call reads
_NEAR = (
    1 << 20
)  # bytes before the end that are always read as text; earlier ones are only counted if the reader is far behind
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
    found: list[tuple[int, str]] = []
    wanted, number, rest = text.encode().lower(), 0, b""
    if not wanted:
        return []
    with opened(path) as file:
        while len(found) < limit:
            block = file.read(_BLOCK)
            whole, cut, rest = (rest + block).rpartition(b"\n") if block else (rest, b"", b"")
            if not cut and len(rest) > _NEAR:  # split an endless line, such as a progress bar, to bound memory
                whole, rest = rest, b""
            if wanted in whole.lower():
                matches = (
                    (number + index, line) for index, line in enumerate(whole.split(b"\n")) if wanted in line.lower()
                )
                found += [(at, _text(line)) for at, line in matches]
            if not block:
                break
            number += whole.count(b"\n") + len(cut)
    return found[:limit]


def _text(line: bytes) -> str:
    """A line as a terminal shows it: the part after the last carriage return, with � for bytes that are not UTF-8."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    cut = len(shown) > _LINE
    return ("…" if cut else "") + shown[-_LINE:].decode(errors="replace")
