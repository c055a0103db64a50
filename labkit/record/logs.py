"""Reading a rank's output while it is written: what is newest, with every line counted, at a bounded price.

A rank may write a million lines in one burst. Nothing here ever holds a whole file, and no call reads more than its budget.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from labkit.record.files import NotPlain

KEEP = 5_000  # newest lines that a tail holds
BUDGET = 16 << 20  # bytes that one call reads at most
_NEAR = 1 << 20  # bytes before the end that are always read as text; what lies before, when far behind, is only counted
_BLOCK = 1 << 18
_LINE = 1 << 14  # bytes of one line that are kept: its end, where it is longer


class LogTail:
    """The newest lines of a growing file; `poll` reads on where it stopped.

    `path` may be a function that gives None while there is no file yet. `count` is the number of lines that have ended so
    far, `lines` holds the newest `keep` of them, and `partial` the one that is being written. `opened` opens the file; where it refuses a
    link or a FIFO, the one line says so.
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
        """The line that has not ended yet; of a progress bar, what it shows now."""
        return _text(self._rest)

    @property
    def dropped(self) -> int:
        """Lines that were counted and are not held: the first of `lines` has this number, counting from 0."""
        return self.count - len(self.lines)

    def since(self, number: int) -> tuple[int, list[str]]:
        """The lines from `number` on (from 0) that are still held, and the number of the first of them."""
        first = min(max(number, self.dropped), self.count)
        return first, list(islice(self.lines, first - self.dropped, None))

    def poll(self) -> bool:
        """Reads what is new, as far as the budget goes; True where there was anything."""
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
        """Turns to the file of a newer attempt, where there is one, with a line between the two."""
        newer = self._find()
        if newer is None or newer == self._path:
            return False
        self._path, self._offset = newer, 0
        between = [self._rest, f"──── {_attempt(newer)} ────".encode()]
        self._rest = b""
        self._take(b"\n".join([*filter(None, between), b""]))
        return True

    def _read(self, file, size: int) -> bool:
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
        """Counts the lines of a block that will not be seen; what was held is older and goes."""
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
    """Everything in the files that `paths` gives, in order, block by block: one rank's output of all attempts.

    From one attempt to the next comes a line that names it. While `follow()` is true it is asked again for what was appended and for
    further attempts; an empty block says that there was nothing new.
    """
    number, offset, ended = 0, 0, True
    while True:
        more = follow()  # first: what is written before the answer is False is read below
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
    """The first `limit` lines that contain `text`, as (number from 0, line); A to Z count like a to z. Reads block by block."""
    wanted, found, number, rest = text.encode().lower(), [], 0, b""
    if not wanted:
        return []
    with opened(path) as file:
        while len(found) < limit:
            block = file.read(_BLOCK)
            whole, cut, rest = (rest + block).rpartition(b"\n") if block else (rest, b"", b"")
            if not cut and len(rest) > _NEAR:  # one line without end, as of a progress bar: in pieces, so that it is never held whole
                whole, rest = rest, b""
            if wanted in whole.lower():
                matches = ((number + index, line) for index, line in enumerate(whole.split(b"\n")) if wanted in line.lower())
                found += [(at, _text(line)) for at, line in matches]
            if not block:
                break
            number += whole.count(b"\n") + len(cut)
    return found[:limit]


def _text(line: bytes) -> str:
    """A line as a terminal would show it: what follows the last carriage return, with � for bytes that are not UTF-8."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    cut = len(shown) > _LINE
    return ("…" if cut else "") + shown[-_LINE:].decode(errors="replace")
