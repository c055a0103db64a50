"""Spec to script: assembles one standalone file from real functions, and computes the diff of two scripts."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

from ruff.__main__ import find_ruff_bin

from labkit.common.arguments import check_type, shown
from labkit.common.units import counted
from labkit.plan import checkpoints
from labkit.plan.spec import Spec, SpecError
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES

# ---- reading the modules


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


def source_of(module: str) -> str:
    """The text of a module, located by its name, but not imported."""
    found_at = importlib.util.find_spec(module)
    if found_at is None or found_at.origin is None:
        raise ModuleNotFoundError(f"no module {module}")
    return Path(found_at.origin).read_text(encoding="utf-8")


@cache
def read_module(module: str, fault: str | None = None) -> Source:
    """A module, parsed but not imported. Of blocks such as `if FAULT == "slow_rank":` it has
    those of `fault`."""
    text = source_of(module)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.If) and _is_constant(node.test, {"FAULT": fault}):
            text = _with_branch(text.splitlines(), node, _is_true(node.test, {"FAULT": fault}))
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
        imports |= {imported.binds: imported for imported in found}
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


def resolved(definition: Definition, values: Mapping[str, Any]) -> Definition:
    """The definition with every condition resolved that depends only on `values`: an `if` without a taken branch is
    removed, and so is what follows a `return` that is always reached. A dict of arguments that one call takes is then
    written as its arguments."""
    text = definition.text
    while (simpler := _simpler(text, values)) is not None:
        text = simpler
    if text != definition.text:
        text = _without_unreachable(text)
    text = _with_arguments_in_calls(text)
    return definition if text == definition.text else replace(definition, text=text, uses=_names(text))


def _simpler(text: str, values: Mapping[str, Any]) -> str | None:
    """The text with one condition less; None if no other one depends only on `values`."""
    for node in _conditionals(text):
        test = node.test
        operands = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        constant = [operand for operand in operands if _is_constant(operand, values)]
        if not constant:
            continue
        taken = all(_is_true(operand, values) for operand in constant)
        if taken and len(constant) < len(operands):  # `if SETTING and condition`
            return _replaced(text, test, _joined(text, [operand for operand in operands if operand not in constant]))
        if isinstance(node, ast.IfExp):
            return _replaced(text, node, _segment_of(text, node.body if taken else node.orelse))
        return _with_branch(text.splitlines(), node, taken)
    return None


def _joined(text: str, operands: list[ast.expr]) -> str:
    """The operands of an `and`."""
    parts = [_segment_of(text, operand) for operand in operands]
    if len(parts) == 1:
        return parts[0]
    return " and ".join(
        f"({part})" if isinstance(operand, ast.BoolOp) else part for operand, part in zip(operands, parts)
    )


def _segment_of(text: str, node: ast.expr) -> str:
    return ast.get_source_segment(text, node) or ""


def _replaced(text: str, node: ast.expr, by: str) -> str:
    """The text with other source in place of an expression."""
    lines = text.encode().splitlines()  # columns count bytes
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    return b"\n".join([*lines[:first], before + by.encode() + after, *lines[last + 1 :]]).decode()


def _without_unreachable(text: str) -> str:
    """The text without the statements of a block that are never reached."""
    for node in ast.walk(_parsed(text)):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            for end in block[:-1]:
                if _leaves(end):
                    lines = text.splitlines()
                    return _without_unreachable("\n".join([*lines[: end.end_lineno], *lines[block[-1].end_lineno :]]))
    return text


def _leaves(statement: ast.stmt) -> bool:
    """Whether what follows a statement in its block is never reached."""
    if isinstance(statement, ast.With):
        return _leaves(statement.body[-1])
    return isinstance(statement, ast.Return | ast.Continue | ast.Break | ast.Raise)


@lru_cache(maxsize=4096)  # scripts have most of their definitions in common
def _parsed(text: str) -> ast.stmt:
    """The syntax tree of one definition; it is shared, and nothing changes it."""
    return ast.parse(text).body[0]


@lru_cache(maxsize=4096)
def _conditionals(text: str) -> tuple[ast.If | ast.IfExp, ...]:
    return tuple(node for node in ast.walk(_parsed(text)) if isinstance(node, ast.If | ast.IfExp))


def _is_constant(test: ast.expr, values: Mapping[str, Any]) -> bool:
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    return (
        bool(names)
        and all(name in values for name in names)
        and not any(isinstance(node, ast.Call) for node in ast.walk(test))
    )


def _is_true(test: ast.expr, values: Mapping[str, Any]) -> bool:
    return bool(eval(compile(ast.Expression(test), "settings", "eval"), {"__builtins__": {}}, dict(values)))


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


@lru_cache(maxsize=4096)
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
        before, after = line[: used.col_offset - len("**")], line[used.end_col_offset :]
        lines[used.lineno - 1] = (before + arguments if arguments else before.removesuffix(", ")) + after
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in removed)


@lru_cache(maxsize=4096)
def in_place(callee: Definition, caller: Definition) -> Definition | None:
    """The function `caller` with the body of `callee` in place of its only call. None unless `callee` is a function of
    at most two assignments and a `return`, and what is passed has the names of the parameters. Assignments can only
    precede a call whose result is assigned or iterated."""
    function, calling = _parsed(callee.text), _parsed(caller.text)
    if not isinstance(function, ast.FunctionDef) or not isinstance(calling, ast.FunctionDef):
        return None
    docstring, *assignments, last = function.body
    short = len(assignments) <= _SHORT and all(isinstance(node, ast.Assign) for node in assignments)
    parameters = [argument.arg for argument in function.args.args]
    if not short or not isinstance(last, ast.Return) or last.value is None:
        return None
    if isinstance(last.value, ast.Name) and (assignments or last.value.id not in parameters):
        return None
    lines, call = caller.text.splitlines(), f"{callee.name}({', '.join(parameters)})"
    at = next((number for number, line in enumerate(lines) if call in line), None)
    if at is None:
        return None
    names, bound = _all_names(calling), {name for node in assignments for name in _all_names(node, ast.Store)}
    if names.count(callee.name) > 1 or bound & {*names}:
        return None
    if not lines[at].endswith((f" = {call}", f" in {call}:")) and (assignments or not isinstance(last.value, ast.Call)):
        return None
    indent = " " * (len(lines[at]) - len(lines[at].lstrip()) - last.col_offset)
    body = [indent + line for line in callee.text.splitlines()[docstring.end_lineno : last.lineno - 1]]
    lines[at : at + 1] = [*body, lines[at].replace(call, ast.get_source_segment(callee.text, last.value) or "")]
    text = "\n".join(lines)
    return replace(caller, text=text, uses=_names(text))


def _all_names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> list[str]:
    """Every name in a piece of code, as often as it occurs."""
    names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, context))
    return [name.id for name in names]


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


def _ours(imported: Import) -> bool:
    return imported.module.partition(".")[0] == __name__.partition(".")[0]


# ---- collecting the definitions that a script needs, and ordering them


class Assembly:
    """The definitions that the script needs, collected by following the names that they use."""

    def __init__(self, order: list[Source], values: Mapping[str, Any]):
        self.order = order
        self.values = values
        self.found: dict[str, Definition] = {}
        self.imported: dict[str, Import] = {}

    def follow(self, name: str, home: Source) -> None:
        """Adds the definition that `name` refers to in module `home`, and everything that it uses in turn."""
        if name in self.found:
            return
        for source in (*self.order, home):
            definition = source.lookup(name, self.order)
            if definition is not None:
                self.found[name] = definition = resolved(definition, self.values)
                for used in definition.uses:
                    self.follow(used, read_module(definition.home))
                return
        if name in home.imports:
            known = self.imported.setdefault(name, home.imports[name])
            if known != home.imports[name]:
                raise ValueError(
                    f"{home.module} imports {name} as {home.imports[name]}, and another module imports it as {known}"
                )

    def write_short_in_place(self) -> None:
        """Replaces the only call of a short function by its body (`in_place`). What a strategy or a fault defines stays
        a function: it is what the script is about."""
        common = [
            definition
            for definition in self.found.values()
            if definition.home == self.order[-1].module or of_a_workload(definition.home)
        ]
        for definition in common:
            callers = [other for other in self.found.values() if definition.name in other.uses]
            if len(callers) == 1 and (merged := in_place(self.found[definition.name], *callers)):
                self.found[merged.name] = merged
                del self.found[definition.name]

    def imports(self) -> str:
        """The imports, sorted as ruff sorts them: the standard library, then the rest."""
        from_module: dict[str, list[Import]] = {}
        lines: dict[bool, list[str]] = {True: [], False: []}
        used = {name for definition in self.found.values() for name in definition.uses}
        for imported in sorted(
            (self.imported[name] for name in used & {*self.imported}), key=lambda imported: imported.module
        ):
            if imported.name is None:
                lines[_standard(imported.module)].append(f"import {imported.module}{imported.renamed}")
            else:
                from_module.setdefault(imported.module, []).append(imported)
        for module, imported_names in from_module.items():
            names = ", ".join(f"{imported.name}{imported.renamed}" for imported in sorted(imported_names, key=_by_kind))
            lines[_standard(module)].append(f"from {module} import {names}")
        return "\n\n".join("\n".join(group) for group in lines.values() if group)

    def constants(self, notes: Mapping[str, str]) -> str:
        """The settings, the ones of the base first, each with its value and comment."""
        lines = []
        for definition in self._in_order(constants=True):
            text = (
                definition.set_to(self.values[definition.name]) if definition.name in self.values else definition.text
            )
            lines.append(f"{text}  # {notes[definition.name]}" if definition.name in notes else text)
        return "\n".join(lines)

    def program(self) -> list[str]:
        """Data, model, then the functions in the order of the base; a strategy's helpers precede the functions that use
        them."""
        return [definition.text for definition in self._in_order(constants=False)]

    def _in_order(self, constants: bool) -> list[Definition]:
        waiting = {
            definition.name: definition
            for definition in sorted(self.found.values(), key=self._position)
            if bool(definition.value) == constants
        }
        ordered = []

        def take(definition: Definition) -> None:
            for used in definition.uses:
                if used in waiting:
                    take(waiting.pop(used))
            ordered.append(definition)

        while waiting:
            take(waiting.pop(next(iter(waiting))))
        return ordered

    def _position(self, definition: Definition) -> tuple[int, int]:
        """The sort key of a definition: settings, data, model, program, then the strategy's own definitions."""
        *_, workload, _, base = self.order
        if definition.name in base.definitions:
            return (0 if definition.value else 3, base.definitions[definition.name].line)
        return (
            2 if definition.home == workload.module else 1 if of_a_workload(definition.home) else 4,
            definition.line,
        )


def _standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _by_kind(imported: Import) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions."""
    name = imported.name or ""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


# ---- assembling the script


BASE = "labkit.training.strategies.base"
_FAULTS = "labkit.training.faults.code"
_INJECTIONS = {"INJECT_DATA": "fault_data", "INJECT_MODEL": "fault_model", "INJECT_STEP": "fault_step"}
_DTYPES = {"bf16": Code("torch.bfloat16"), "fp16": Code("torch.float16")}  # the types of mixed precision
_PRINTED, _PRINT_EVERY = 5, 20  # a script prints at least so many losses, and one at least every so many steps
_START = '\n\nif __name__ == "__main__":\n    main()\n'


def write_script(spec: Spec, in_place: bool = True) -> str:
    """The training script of a Spec, formatted by ruff. It needs torch and does not import labkit. Short functions are
    written in place of their only call, unless `in_place` is False.

    Raises `SpecError` if the number of ranks is not set (`Spec.on` sets it), or if the Spec names a user's script.
    """
    check_type("spec", spec, Spec, "a Spec such as Spec('ddp', nproc=2)")
    if spec.script is not None:
        raise SpecError(
            "script", f"{spec.script} is your own script, and only strategies have a generated one; name a strategy"
        )
    if spec.nproc is None:
        raise SpecError("nproc", "the script depends on the number of ranks, which is not set; add --nproc")
    modules = (spec.strategy_row.module, spec.workload_row.module, spec.data_row.module, BASE)
    assembly = Assembly([read_module(_FAULTS, spec.fault), *map(read_module, modules)], settings(spec))
    assembly.follow("main", read_module(BASE))
    if in_place:
        assembly.write_short_in_place()
    parts = [_docstring(spec), assembly.imports(), assembly.constants(_notes(spec)), *assembly.program()]
    return _formatted("\n\n".join(parts) + _START)


def diff_scripts(a: Spec, b: Spec) -> str:
    """The unified diff of the scripts of two Specs; empty if the scripts are equal."""
    for name, spec in (("a", a), ("b", b)):
        check_type(name, spec, Spec, "a Spec such as Spec('ddp', nproc=2)")
    old, new = write_script(a).splitlines(), write_script(b).splitlines()
    lines = difflib.unified_diff(old, new, f"{a.name}/train.py", f"{b.name}/train.py", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def excerpt(spec: Spec, *names: str) -> str:
    """The source of functions, classes or constants of a Spec's script, in the order of `names`.

    Raises `SpecError` as `write_script` does, and `LookupError` for a name that the script does not define.
    """
    if not names:
        raise LookupError(
            "excerpt needs the name of at least one function, class or constant, such as excerpt(spec, 'train_step')"
        )
    source = write_script(spec)
    parts = {
        name: part for node in ast.parse(source).body for name in _defined(node) for part in [_segment(source, node)]
    }
    unknown = [name for name in names if not isinstance(name, str) or name not in parts]
    if unknown:
        raise LookupError(f"the script of {spec.name} defines no {shown(unknown[0])}; it defines {', '.join(parts)}")
    return "\n\n".join(parts[name] for name in names) + "\n"


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    return [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]


def _segment(source: str, node: ast.stmt) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def command(spec: Spec) -> str:
    """The command that runs the script by hand on one machine."""
    ranks = 1 if spec.nproc is None else spec.processes
    what = ["train.py"] if spec.script is None else [*(["-m"] if spec.as_module else []), spec.script, *spec.args]
    return shlex.join(["torchrun", "--standalone", f"--nproc-per-node={ranks}", *what])


def settings(spec: Spec) -> dict[str, Any]:
    """The constants that a Spec sets, by name; a script contains the ones that it uses."""
    # Options of other strategies keep their default, so that conditions on them are resolved and removed.
    values = {option.name.upper(): option.default for row in STRATEGIES.values() for option in row.options}
    values |= {
        "SEED": spec.seed,
        "EPOCHS": spec.epochs or math.ceil(spec.total_steps / spec.steps_per_epoch),
        "MAX_STEPS": spec.steps,
        "BATCH_PER_RANK": spec.batch_per_rank,
        "SAMPLES": spec.train_samples,
        "SAVE_EVERY": spec.save_every or 0,
        "CHECKPOINT_ASYNC": spec.checkpoint_async,
        "RESUME": spec.resume,
        "READS": spec.strategy_row.reads,
        "MANIFEST": checkpoints.identity(spec),
        "FAULT": spec.fault,
        "FAULT_RANK": spec.processes - 1,
        **{setting: read_module(_FAULTS, spec.fault).has(name) for setting, name in _INJECTIONS.items()},
        "REPORTS": read_module(spec.workload_row.module).has("report"),
        "STAGE_DATA": read_module(spec.strategy_row.module).has("stage_data"),
        "DISTRIBUTED": spec.strategy_row.process_group,
        "TF32": spec.precision == "tf32",
        "AUTOCAST": spec.strategy_row.autocast,
        "MIXED_PRECISION": spec.precision in _DTYPES,
        "DTYPE": _DTYPES.get(spec.precision),
        "LOSS_SCALING": spec.precision == "fp16",
        "PRINT_EVERY": min(max(spec.total_steps // _PRINTED, 1), _PRINT_EVERY),
        "DEVICE": "cuda" if spec.device == "cuda" else "cpu",
        "RANKS": spec.nproc,
        "DATA_RANKS": spec.data_ranks,
    }
    if spec.data_dir is not None:
        values["DATA_DIR"] = spec.data_dir
    values |= {name.upper(): value for name, value in spec.options.items()}
    values |= spec.data_row.constants
    return values | spec.workload_row.constants(spec.options) | spec.strategy_row.constants(spec)


def _notes(spec: Spec) -> dict[str, str]:
    """Comments that explain a constant by the Spec's arithmetic."""
    steps = f"{counted(spec.train_samples, 'sample')}: {counted(spec.steps_per_epoch, 'step')} per epoch"
    return {"BATCH_PER_RANK": f"× {spec.data_ranks} = {spec.global_batch} global; {steps}"}


def _docstring(spec: Spec) -> str:
    row, model, precision = spec.strategy_row, spec.workload_row.title.partition(":")[0], spec.precision or "fp32"
    entries = [("Splits", row.splits), ("Sends", row.sends), ("Note", row.note(spec.device))]
    if spec.fault:
        entries.append(("Fault", f"{FAULTS[spec.fault].title} (injected). {FAULTS[spec.fault].shows}"))
    lines = [
        textwrap.fill(text, 92, initial_indent=f"{name:7}", subsequent_indent=" " * 7) for name, text in entries if text
    ]
    return "\n".join([f'"""{model} on {spec.data}, {row.title}, {precision}: {command(spec)}\n', *lines, '"""'])


@lru_cache(maxsize=64)
def _formatted(source: str) -> str:
    argv = [find_ruff_bin(), "format", "--isolated", "--stdin-filename", "train.py", "-"]
    return subprocess.run(argv, input=source, capture_output=True, check=True, encoding="utf-8").stdout
