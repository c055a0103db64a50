"""Files that are a pickle of plain values or JSON, as torch writes its dumps and snapshots.

A reader of pickles that contain only plain values: dicts, lists, tuples, texts, numbers, booleans and None.

It is no unpickler with a filter: opcodes that import a name, call something or build an object do not exist here, so a
file cannot execute anything. Memory and time are proportional to the size of the file. The opcodes: `pickletools` of
the standard library.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from labkit.analysis.foreign import ForeignError

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
