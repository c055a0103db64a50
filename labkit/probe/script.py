"""Finds the code of a script or module as python does, and cleans the exceptions that it raises."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).parent) + os.sep


class NoScript(SystemExit):
    """The script cannot be read; the cause is the reason."""


def code_of(main: types.ModuleType, arguments: list[str]) -> types.CodeType:
    """The code of a script, or of `-m MODULE`, after setting everything in `main` and `sys` that python sets. Raises
    `NoScript`.
    """
    return _module_code(main, arguments[1:]) if arguments[0] == "-m" else _script_code(main, arguments)


def _module_code(main: types.ModuleType, arguments: list[str]) -> types.CodeType:
    """A module's code, after setting everything that `python -m` sets; sys.path[0] is already the working folder."""
    name = arguments[0]
    sys.argv[:] = ["-m", *arguments[1:]]  # as its parent packages see it
    try:
        spec = importlib.util.find_spec(name)  # imports its parent packages
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None
    except (ModuleNotFoundError, ValueError) as error:  # a parent package is missing, or is a module
        if isinstance(error, ModuleNotFoundError) and error.name and not f"{name}.".startswith(f"{error.name}."):
            raise  # the package exists, but one of its imports does not
        code = None
    if code is None:
        sys.stderr.write(f"{sys.executable}: No module named {name}\n")
        raise NoScript(1) from ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.argv[0] = spec.origin
    main.__file__, main.__cached__, main.__loader__ = spec.origin, spec.cached, spec.loader
    main.__package__, main.__spec__ = spec.parent, spec
    return code


def _script_code(main: types.ModuleType, arguments: list[str]) -> types.CodeType:
    """A script's code, after setting everything that `python SCRIPT` sets."""
    path = os.path.join(os.getcwd(), arguments[0])  # noqa: PTH109, PTH118 - as python joins them: `./` stays
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(path).resolve().parent)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise NoScript(2) from error
    return compile(source, path, "exec", dont_inherit=True)


def exit_code(stop: SystemExit) -> int:
    """The exit code that python would use; prints the message that the script exits with, if it is one."""
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def clean(error: BaseException) -> Any:
    """Removes the probe's frames from an exception's traceback, and from those of its causes; returns the exception."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_probe(one.__traceback__)
        rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return error


def _without_probe(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = [
        (t.tb_frame, t.tb_lasti, t.tb_lineno)
        for t in _chain(trace)
        if not t.tb_frame.f_code.co_filename.startswith(_HERE)
    ]
    clean = None
    for frame, last, line in reversed(kept):
        clean = types.TracebackType(clean, frame, last, line)
    return clean


def _chain(trace: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found
