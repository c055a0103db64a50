"""The source code of an answer: a function or class of the notebook, and everything in the notebook that it uses."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
import sys
import textwrap
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from labkit.course.exercises import Wrong

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def source_of(answer: Any) -> str:
    """A Python text that defines `answer` under its own name.

    Definitions from the same notebook or module are copied; modules, and names imported from them, are imported.
    Raises `Wrong` if the answer uses a value that cannot be written down, such as a tensor of the notebook.
    """
    pieces: dict[str, str] = {}
    _add(answer.__name__, answer, answer.__module__, pieces)
    return "\n\n".join(pieces.values()) + "\n"


def _add(name: str, value: Any, home: str, pieces: dict[str, str]) -> None:
    """Adds what defines `name`, after everything that it uses."""
    if name in pieces:
        return
    if isinstance(value, ModuleType):
        pieces[name] = f"import {value.__name__} as {name}"
    elif _is_plain(value):
        pieces[name] = f"{name} = {value!r}"
    elif isinstance(value, (FunctionType, type)) and value.__module__ == home:
        text = _definition(value)
        pieces[name] = ""  # reserves the name: a function may call itself
        names = vars(sys.modules[home])
        for used in sorted(_global_names(compile(text, "answer", "exec", dont_inherit=True)) & names.keys()):
            if not hasattr(builtins, used):
                _add(used, names[used], home, pieces)
        del pieces[name]
        pieces[name] = text if value.__name__ == name else f"{text}\n\n\n{name} = {value.__name__}"
    elif _is_importable(value):
        pieces[name] = f"from {value.__module__} import {value.__name__} as {name}"
    else:
        raise Wrong(f"the answer uses {name}, a {type(value).__name__} of the notebook; create it inside the answer")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and getattr(module, getattr(value, "__name__", ""), None) is value


def _definition(value: Any) -> str:
    """The newest statement that defines a function or class, in the cell or file that it comes from."""
    lines = linecache.getlines(_code(value).co_filename)
    text = "".join(lines)
    try:
        found = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == value.__name__]
    except SyntaxError:  # a cell with magics, which IPython replaces before it compiles
        found = []
    found = [node for node in found if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if not found:
        raise Wrong(f"the source code of {value.__name__} was not found; define it with def or class in a cell")
    node = found[-1]
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()


def _code(value: Any) -> CodeType:
    """The code of a function, or of any function of a class."""
    if isinstance(value, FunctionType):
        return inspect.unwrap(value).__code__
    for each in vars(value).values():
        function = getattr(each, "__func__", each)
        if isinstance(function, FunctionType):
            return inspect.unwrap(function).__code__
    raise Wrong(f"the class {value.__name__} has no function; define its functions in the class itself")


def _global_names(code: CodeType) -> set[str]:
    """The names that a piece of code, or a function in it, looks up outside of itself."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_global_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def solution(module: str, *names: str) -> str:
    """The reference solution for teachers (markdown): these definitions of `solutions/<module>.py`, after the imports
    and constants that they use."""
    text = (Path(__file__).parent / "solutions" / f"{module}.py").read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    chosen = [node for node in nodes if getattr(node, "name", None) in names]
    used = {each.id for node in chosen for each in ast.walk(node) if isinstance(each, ast.Name)}
    before = [node for node in nodes if _bound(node) & used]
    pieces = ["\n".join(ast.unparse(node) for node in before)]
    pieces += [ast.get_source_segment(text, node) or "" for node in chosen]
    return "```python\n" + "\n\n\n".join(filter(None, pieces)) + "\n```"


def _bound(node: ast.AST) -> set[str]:
    """The names that an import or an assignment defines."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return {target.id for target in targets if isinstance(target, ast.Name)}
