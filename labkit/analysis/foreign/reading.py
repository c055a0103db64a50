"""How files of other jobs are read, whatever they hold: the content of a file in chunks, decompressed, and a pickle of
plain values or JSON, as torch writes its dumps and snapshots.

The reader of pickles knows dicts, lists, tuples, texts, numbers, booleans and None only. It is no unpickler with a
filter: opcodes that import a name, call something or build an object do not exist here, so a file cannot execute
anything. Memory and time are proportional to the size of the file. The opcodes: `pickletools` of the standard library.
"""

from __future__ import annotations

import gzip
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from labkit.analysis.foreign import ForeignError
from labkit.common.files import open_regular
from labkit.common.units import size

# ---- the content of a file, in chunks

_GZIP = b"\x1f\x8b"
_CHUNK = 4 << 20  # bytes
_LARGEST_FILE = 16 << 30  # bytes, decompressed


_watcher: ContextVar[Callable[[Path, float], None]] = ContextVar("watcher", default=lambda path, share: None)


@contextmanager
def watched(watcher: Callable[[Path, float], None]) -> Iterator[None]:
    """Within it, `watcher` is called with the path of a file and the share that has been read of it, for each chunk."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Content:
    """The decompressed content of an open file. `cut` says why it ends early, and is empty if it does not."""

    def __init__(self, file: BinaryIO, path: Path):
        self._path, self._read, self.cut = path, 0, ""
        self._raw, self._size = file, max(1, os.fstat(file.fileno()).st_size)
        compressed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        self._file: Any = gzip.GzipFile(fileobj=file) if compressed else file

    def read(self, most: int = 0) -> bytes:
        """Further bytes, a chunk or at most `most`; empty at the end. Raises `ForeignError` for a file that is too
        large."""
        data, missing = bytearray(), most or _CHUNK
        try:
            while missing > 0 and (some := self._file.read1(missing)):
                data += some
                missing -= len(some)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.cut = f"its compressed data is damaged ({error})"
        self._read += len(data)
        _watcher.get()(self._path, self._raw.tell() / self._size)
        if self._read > _LARGEST_FILE:
            raise ForeignError(
                f"{self._path} has more than {size(_LARGEST_FILE)} of events; profile fewer steps:"
                " torch.profiler.schedule(active=3)"
            )
        return bytes(data)


def whole_content(path: Path, most: int, fix: str) -> bytes:
    """The decompressed content of a file of at most `most` bytes. Raises `ForeignError` with the `fix` for a larger
    one, and `OSError` as `open_regular`."""
    with open_regular(path) as file:
        data = Content(file, path).read(most + 1)
    if len(data) > most:
        raise ForeignError(f"{path} has more than {size(most)}{fix}")
    return data


_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)


def rank_in_name(path: Path) -> int | None:
    """The rank that the name of a file says, such as `trace_rank_3.json.gz`; None if it says none."""
    named = _RANK_IN_NAME.search(path.name)
    return int(named[1]) if named else None


# ---- a pickle of plain values, or JSON

_LONGEST_INTEGER = 32  # bytes


def plain_value(data: bytes, path: Path, what: str) -> Any:
    """The value of a file that is a plain pickle or JSON. Raises `ForeignError`; `what` is its name in words."""
    if data.startswith(b"\x80"):
        try:
            return plain_pickle(data)
        except NoPlainPickle as error:
            raise ForeignError(f"{path} is not opened: {error}; copy {what} again") from None
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ForeignError(f"{path} is not JSON: {error}; copy {what} again") from None


def as_dict(value: Any) -> dict[Any, Any]:
    """A dict; an empty one for a value of another type."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """A list; an empty one for a value of another type."""
    return value if isinstance(value, list) else []


def as_number(value: Any) -> int:
    """An integer of at most 64 bits; -1 for any other value."""
    return value if type(value) is int and abs(value) < 1 << 63 else -1


class NoPlainPickle(ValueError):
    """What is wrong with a pickle, as one clause."""


_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {opcode: struct.Struct(form) for opcode, form in ((77, "<H"), (74, "<i"), (71, ">d"))}
_TEXTS = {opcode: struct.Struct(form) for opcode, form in ((140, "<B"), (88, "<I"), (141, "<Q"))}
_LONG = struct.Struct("<I")
_SKIPPED = {0x80: 1, 149: 8}  # protocol, frame: bytes that follow
_SHORT_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_KEYS = {str, int, float, bool, type(None)}
_CALLS = {ord(code) for code in "cRiobP"} | {0x81, 0x92, 0x93, ord("Q"), 0x82, 0x83, 0x84}


def plain_pickle(data: bytes) -> Any:
    """The value of a pickle of protocol 2 or later. Raises `NoPlainPickle`."""
    try:
        return _value(data)
    except (IndexError, KeyError, struct.error):
        raise NoPlainPickle("it is damaged, or not complete") from None
    except UnicodeDecodeError:
        raise NoPlainPickle("it has a text that is not UTF-8") from None


def _value(data: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 one branch for each opcode
    at = 0
    memo: dict[int, Any] = {}
    stack: list[Any] = []
    marks: list[int] = []  # the lengths of the stack at which collections begin
    push = stack.append
    while True:
        opcode = data[at]
        at += 1
        if opcode == 104:  # BINGET
            push(memo[data[at]])
            at += 1
        elif opcode == 40:  # MARK
            marks.append(len(stack))
        elif opcode == 113:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif opcode == 114:  # LONG_BINPUT
            memo[_LONG.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif opcode == 75:  # BININT1
            push(data[at])
            at += 1
        elif opcode == 93:  # EMPTY_LIST
            push([])
        elif opcode == 101:  # APPENDS
            items = _since(marks, stack)
            _of(list, stack[-1]).extend(items)
        elif opcode == 106:  # LONG_BINGET
            push(memo[_LONG.unpack_from(data, at)[0]])
            at += 4
        elif opcode in _NUMBERS:
            push(_NUMBERS[opcode].unpack_from(data, at)[0])
            at += _NUMBERS[opcode].size
        elif opcode in _TEXTS:
            (length,) = _TEXTS[opcode].unpack_from(data, at)
            at += _TEXTS[opcode].size
            if at + length > len(data):
                raise IndexError
            push(data[at : at + length].decode("utf-8", "surrogatepass"))
            at += length
        elif opcode == 125:  # EMPTY_DICT
            push({})
        elif opcode == 41:  # EMPTY_TUPLE
            push(())
        elif opcode == 117:  # SETITEMS
            items = _since(marks, stack)
            _set(stack[-1], items)
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _SHORT_TUPLES:
            count = _SHORT_TUPLES[opcode]
            items = stack[len(stack) - count :]
            if len(items) < count:
                raise IndexError
            stack[len(stack) - count :] = [tuple(items)]
        elif opcode == 138:  # LONG1
            length = data[at]
            at += 1
            if length > _LONGEST_INTEGER:
                raise NoPlainPickle(f"it has an integer of {length} bytes")
            push(int.from_bytes(data[at : at + length], "little", signed=True))
            at += length
        elif opcode == 148:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif opcode == 116:  # TUPLE
            push(tuple(_since(marks, stack)))
        elif opcode == 97:  # APPEND
            item = stack.pop()
            _of(list, stack[-1]).append(item)
        elif opcode == 115:  # SETITEM
            item, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, item])
        elif opcode in _SKIPPED:
            at += _SKIPPED[opcode]
        elif opcode == 46:  # STOP
            if len(stack) != 1:
                raise IndexError
            return stack[0]
        elif opcode in _CALLS:
            raise NoPlainPickle("it would import or call something when it is unpickled, which no dump of torch does")
        else:
            raise NoPlainPickle(f"it has the unknown opcode {opcode} at byte {at - 1:,}")


def _since(marks: list[int], stack: list[Any]) -> list[Any]:
    """Takes the items since the last mark from the stack."""
    at = marks.pop()
    items = stack[at:]
    del stack[at:]
    return items


def _set(target: Any, items: list[Any]) -> None:
    found, keys = _of(dict, target), items[::2]
    if len(items) % 2 or not _KEYS.issuperset(map(type, keys)):
        raise NoPlainPickle("it has a dict whose keys are no texts or numbers")
    found.update(zip(keys, items[1::2]))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise IndexError
    return value
