"""The modules that a script is generated from, read as text: their definitions, their imports, and the names that each
definition uses. Nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

_SHORT = 2  # most assignments of a function that is written in place of its call


class Code(str):
    """The value of a constant as Python code, such as `torch.bfloat16`."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Import:
    """One imported name: a module, or a name from a module."""

    module: str
    name: str | None
    alias: str | None

    @property
    def binds(self) -> str:
        return self.alias or self.name or self.module.partition(".")[0]

    @property
    def renamed(self) -> str:
        return f" as {self.alias}" if self.alias else ""


@dataclass(frozen=True)
class Definition:
    """A top-level function, class or constant: its text with the comments above it, and the names that it uses."""

    name: str
    home: str
    line: int
    text: str
    uses: tuple[str, ...]
    value: tuple[int, int] | None  # of a constant: start and end of its value in `text`

    def set_to(self, value: Any) -> str:
        """The text with a different value."""
        if self.value is None:
            raise ValueError(f"{self.name} is not a constant")
        start, end = self.value
        literal = f"{value:_}" if type(value) is int and value >= 10_000 else repr(value)
        return self.text[:start] + literal + self.text[end:]


@dataclass(frozen=True)
class Source:
    """A parsed module: its definitions and imports, by the name that they bind."""

    module: str
    definitions: Mapping[str, Definition]
    imports: Mapping[str, Import]

    def has(self, name: str) -> bool:
        """Whether the module defines or imports a name."""
        return name in self.definitions or name in self.imports

    def lookup(self, name: str, among: Iterable[Source]) -> Definition | None:
        """The definition of `name` in this module: its own, or one imported from a module that is not in `among`."""
        if name in self.definitions:
            return self.definitions[name]
        found = self.imports.get(name)
        if (
            found is None
            or found.name is None
            or not _ours(found)
            or any(found.module == source.module for source in among)
        ):
            return None
        if of_a_workload(found.module) and not of_a_workload(self.module):
            return None  # a strategy uses the workload of the Spec, not the one that its module imports
        return read_module(found.module).lookup(found.name, among)


@cache
def read_module(module: str) -> Source:
    """A module, located by its name and parsed, but not imported."""
    found_at = importlib.util.find_spec(module)
    if found_at is None or found_at.origin is None:
        raise ModuleNotFoundError(f"no module {module}")
    text = Path(found_at.origin).read_text(encoding="utf-8")
    definitions: dict[str, Definition] = {}
    imports: dict[str, Import] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found = [Import(alias.name, None, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [Import(node.module, alias.name, alias.asname) for alias in node.names]
        else:
            found = []
            definitions |= {definition.name: definition for definition in _definitions(node, module, text.splitlines())}
        imports |= {one.binds: one for one in found}
    return Source(module, definitions, imports)


def of_a_workload(module: str) -> bool:
    """Whether a module belongs to a workload: its model, or its data."""
    return module.startswith("labkit.training.workloads.")


def _definitions(node: ast.stmt, module: str, lines: list[str]) -> Iterator[Definition]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        name = node.name
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        first, name = node.lineno, node.targets[0].id
    else:
        return
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    text = "\n".join(lines[first - 1 : node.end_lineno])
    yield Definition(name, module, node.lineno, text, _names(text), _position_of_value(node, lines, text))


def resolved(one: Definition, values: Mapping[str, Any]) -> Definition:
    """The definition with every `if` resolved whose condition depends only on `values`; one without a taken branch is
    removed. A dict of arguments that one call takes is then written as its arguments."""
    text = one.text
    while True:
        conditional = next((node for node in _conditionals(text) if _is_constant(node.test, values)), None)
        if conditional is None:
            text = _with_arguments_in_calls(text)
            return one if text == one.text else replace(one, text=text, uses=_names(text))
        taken = eval(compile(ast.Expression(conditional.test), one.home, "eval"), {"__builtins__": {}}, dict(values))
        text = _with_branch(text.splitlines(), conditional, bool(taken))


@lru_cache(maxsize=4096)  # scripts have most of their definitions in common
def _parsed(text: str) -> ast.stmt:
    """The syntax tree of one definition; it is shared, and nothing changes it."""
    return ast.parse(text).body[0]


@lru_cache(maxsize=4096)
def _conditionals(text: str) -> tuple[ast.If, ...]:
    return tuple(node for node in ast.walk(_parsed(text)) if isinstance(node, ast.If))


def _is_constant(test: ast.expr, values: Mapping[str, Any]) -> bool:
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    return (
        bool(names)
        and all(name in values for name in names)
        and not any(isinstance(node, ast.Call) for node in ast.walk(test))
    )


def _with_branch(lines: list[str], conditional: ast.If, taken: bool) -> str:
    """The lines with the whole `if` statement replaced by the branch that is taken, dedented to the level of the
    `if`."""
    first, last = conditional.lineno - 1, conditional.end_lineno
    body_end = conditional.body[-1].end_lineno
    # `else:` or `elif …:`, with its body, without the empty lines that may follow a function
    orelse = [*dropwhile(lambda line: not line.strip(), lines[body_end:last])]
    if taken:
        kept = _dedented(
            lines[conditional.test.end_lineno : body_end], conditional.body[0].col_offset - conditional.col_offset
        )
    elif not orelse:
        kept = []
    elif orelse[0].lstrip().startswith("elif"):
        kept = [orelse[0].replace("elif", "if", 1), *orelse[1:]]
    else:
        kept = _dedented(orelse[1:], conditional.orelse[0].col_offset - conditional.col_offset)
    if taken and lines[first].lstrip().startswith("elif"):  # the first condition of the chain is not constant
        raise ValueError(f"line {lines[first]!r} depends on settings only, but follows an `if` that does not")
    return "\n".join([*lines[:first], *kept, *lines[last:]])


def _with_arguments_in_calls(text: str) -> str:
    """A function in which `f(**settings)` is `f(mesh=mesh)`, if `settings = {"mesh": mesh}` is before it: a dict that
    is used for one call, or has one entry; another is written in one statement. Lines with a comment are kept."""
    function = _parsed(text)
    if not isinstance(function, ast.FunctionDef):
        return text
    lines = text.splitlines()
    for block in [node.body for node in ast.walk(function) if isinstance(node, ast.FunctionDef)]:
        for statement in block:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict()):
                    if (written := _with_arguments_of(name, function, block, lines)) is not None:
                        return _with_arguments_in_calls(written)
    return text


def _with_arguments_of(name: str, function: ast.FunctionDef, block: list[ast.stmt], lines: list[str]) -> str | None:
    """The function with the entries of the dict `name` in its calls; None if the dict is used in another way."""
    text = "\n".join(lines)
    entries: dict[str, str] = {}
    settings: list[ast.stmt] = []  # the statements that fill the dict
    for statement in block:
        pairs: list[tuple[ast.expr | None, ast.expr]]
        match statement:
            case ast.Assign([ast.Name(target)], ast.Dict(keys, values)):
                pairs = list(zip(keys, values))
            case ast.Assign([ast.Subscript(ast.Name(target), key)], value):
                pairs = [(key, value)]
            case _:
                continue
        if target != name:
            continue
        settings.append(statement)
        for argument, given in pairs:
            if not isinstance(argument, ast.Constant):
                return None
            entries[str(argument.value)] = ast.get_source_segment(text, given) or ""
    unpacked = [
        keyword.value
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == name
    ]
    is_used_otherwise = _all_names(function).count(name) != len(settings) + len(unpacked)
    is_repeated = len(unpacked) > 1 and len(entries) > 1
    if is_used_otherwise or not unpacked or (is_repeated and len(settings) == 1):
        return None
    removed = {line for statement in settings for line in range(statement.lineno, (statement.end_lineno or 0) + 1)}
    if any("#" in lines[line - 1] for line in removed):
        return None
    if is_repeated:  # one dict instead of one that is filled line by line
        last = settings[-1].lineno
        items = ", ".join(f'"{key}": {value}' for key, value in entries.items())
        lines[last - 1] = f"{' ' * settings[-1].col_offset}{name} = {{{items}}}"
        return "\n".join(line for number, line in enumerate(lines, 1) if number not in removed - {last})
    arguments = ", ".join(f"{key}={value}" for key, value in entries.items())
    for used in sorted(unpacked, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line = lines[used.lineno - 1]
        lines[used.lineno - 1] = line[: used.col_offset - len("**")] + arguments + line[used.end_col_offset :]
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in removed)


def in_place(one: Definition, caller: Definition) -> Definition | None:
    """The function `caller` with the body of `one` in place of its only call. None unless `one` is a function of at
    most two assignments and a `return`, and what is passed has the names of the parameters. Assignments can only
    precede a call whose result is assigned or iterated."""
    function, calling = _parsed(one.text), _parsed(caller.text)
    if not isinstance(function, ast.FunctionDef) or not isinstance(calling, ast.FunctionDef):
        return None
    docstring, *assignments, last = function.body
    short = len(assignments) <= _SHORT and all(isinstance(node, ast.Assign) for node in assignments)
    parameters = [argument.arg for argument in function.args.args]
    if not short or not isinstance(last, ast.Return) or last.value is None:
        return None
    if isinstance(last.value, ast.Name) and (assignments or last.value.id not in parameters):
        return None
    lines, call = caller.text.splitlines(), f"{one.name}({', '.join(parameters)})"
    at = next((number for number, line in enumerate(lines) if call in line), None)
    if at is None:
        return None
    names, bound = _all_names(calling), {name for node in assignments for name in _all_names(node, ast.Store)}
    if names.count(one.name) > 1 or bound & {*names}:
        return None
    if not lines[at].endswith((f" = {call}", f" in {call}:")) and (assignments or not isinstance(last.value, ast.Call)):
        return None
    indent = " " * (len(lines[at]) - len(lines[at].lstrip()) - last.col_offset)
    body = [indent + line for line in one.text.splitlines()[docstring.end_lineno : last.lineno - 1]]
    lines[at : at + 1] = [*body, lines[at].replace(call, ast.get_source_segment(one.text, last.value) or "")]
    text = "\n".join(lines)
    return replace(caller, text=text, uses=_names(text))


def _all_names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> list[str]:
    """Every name in a piece of code, as often as it occurs."""
    found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, context))
    return [name.id for name in found]


def _dedented(lines: list[str], columns: int) -> list[str]:
    return [line[columns:] if line[:columns].isspace() else line for line in lines]


@lru_cache(maxsize=4096)
def _names(text: str) -> tuple[str, ...]:
    """The names that a definition reads and does not bind itself, in order."""
    node = _parsed(text)
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    bound |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    return tuple(dict.fromkeys(name.id for name in names if name.id not in bound))


def _position_of_value(node: ast.stmt, lines: list[str], text: str) -> tuple[int, int] | None:
    """Start and end of a constant's value in `text`; a setting occupies one line."""
    if not isinstance(node, ast.Assign):
        return None
    before = len(text) - len(lines[(node.end_lineno or node.lineno) - 1])  # the comment above
    return before + node.value.col_offset, before + (node.value.end_col_offset or 0)


def _ours(found: Import) -> bool:
    return found.module.partition(".")[0] == __name__.partition(".")[0]
