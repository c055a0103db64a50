"""Spec → script: assembles one standalone file from real functions, and computes the diff of two scripts.

The functions are copied as text, with their comments, from the modules of fault, strategy, workload, data set and base,
in this order: the first module that defines a name wins. An `if` whose condition depends only on settings of the Spec
is resolved at generation time: only the branch that is taken is written. Starting from `main`, the generator follows
every name that is used, so the script contains no unused code; constants get the values of the Spec. No training code
is imported here.
"""

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
from pathlib import Path
from typing import Any

from ruff.__main__ import find_ruff_bin

from labkit.common.arguments import check_type, shown
from labkit.plan import checkpoints
from labkit.plan.spec import Spec, SpecError
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES

BASE = "labkit.training.strategies.base"
_INJECTIONS = {"INJECT_DATA": "fault_data", "INJECT_MODEL": "fault_model", "INJECT_STEP": "fault_step"}
_START = '\n\nif __name__ == "__main__":\n    main()\n'


def write_script(spec: Spec) -> str:
    """The training script of a Spec, formatted by ruff. It needs torch and does not import labkit.

    Raises `SpecError` if the number of ranks is not set (`Spec.on` sets it), or if the Spec names a user's script.
    """
    check_type("spec", spec, Spec, "a Spec such as Spec('ddp', nproc=2)")
    if spec.script is not None:
        raise SpecError(
            "script", f"{spec.script} is your own script, and only strategies have a generated one; name a strategy"
        )
    if spec.nproc is None:
        raise SpecError("nproc", "the script depends on the number of ranks, which is not set; add --nproc")
    modules = (*_fault_module(spec), spec.strategy_row.module, spec.workload_row.module, spec.data_row.module, BASE)
    assembly = _Assembly([_read(module) for module in modules], settings(spec))
    assembly.follow("main", _read(BASE))
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
        "EPOCHS": spec.epochs or math.ceil(spec.steps / spec.steps_per_epoch),
        "MAX_STEPS": spec.steps,
        "BATCH_PER_RANK": spec.batch_per_rank,
        "SAMPLES": spec.train_samples,
        "SAVE_EVERY": spec.save_every or 0,
        "RESUME": spec.resume,
        "MANIFEST": checkpoints.identity(spec),
        "FAULT": spec.fault,
        "FAULT_RANK": spec.processes - 1,
        **{setting: name in _fault_definitions(spec) for setting, name in _INJECTIONS.items()},
        "PRECISION": spec.precision or "fp32",
        "DEVICE": "cuda" if spec.device == "cuda" else "cpu",
        "RANKS": spec.nproc,
        "DATA_RANKS": spec.data_ranks,
    }
    if spec.data_dir is not None:
        values["DATA_DIR"] = spec.data_dir
    values |= {name.upper(): value for name, value in spec.options.items()}
    return values | spec.workload_row.constants(spec.options) | spec.strategy_row.constants(spec)


def _fault_module(spec: Spec) -> tuple[str, ...]:
    module = FAULTS[spec.fault].module if spec.fault else None
    return () if module is None else (module,)


def _fault_definitions(spec: Spec) -> set[str]:
    return {name for module in _fault_module(spec) for name in _read(module).definitions}


def _notes(spec: Spec) -> dict[str, str]:
    """Comments that explain a constant by the Spec's arithmetic."""
    steps = f"{spec.train_samples:,} samples: {spec.steps_per_epoch:,} steps per epoch"
    return {"BATCH_PER_RANK": f"× {spec.data_ranks} = {spec.global_batch} global; {steps}"}


def _docstring(spec: Spec) -> str:
    row, model, precision = spec.strategy_row, spec.workload_row.title.partition(":")[0], spec.precision or "fp32"
    entries = [("Splits", row.splits), ("Sends", row.sends), ("Note", row.note(spec.device))]
    if spec.fault:
        entries.append(("Fault", f"{FAULTS[spec.fault].title} (injected). {FAULTS[spec.fault].shows}"))
    lines = [
        textwrap.fill(text, 88, initial_indent=f"{name:7}", subsequent_indent=" " * 7) for name, text in entries if text
    ]
    return "\n".join([f'"""{model} on {spec.data}, {row.title}, {precision}: {command(spec)}\n', *lines, '"""'])


@lru_cache(maxsize=64)
def _formatted(source: str) -> str:
    argv = [find_ruff_bin(), "format", "--isolated", "--stdin-filename", "train.py", "-"]
    return subprocess.run(argv, input=source, capture_output=True, check=True, encoding="utf-8").stdout


# ---- reading a module


@dataclass(frozen=True)
class _Import:
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
class _Definition:
    """A top-level function, class or constant: its text with the comments above it, and the names that it uses."""

    name: str
    home: str
    line: int
    text: str
    uses: tuple[str, ...]
    value: tuple[int, int] | None  # of a constant: start and end of its value in `text`

    def set_to(self, value: Any) -> str:
        """The text with a different value."""
        start, end = self.value
        literal = f"{value:_}" if type(value) is int and value >= 10_000 else repr(value)
        return self.text[:start] + literal + self.text[end:]


@dataclass(frozen=True)
class _Source:
    """A parsed module: its definitions and imports, by the name that they bind."""

    module: str
    definitions: Mapping[str, _Definition]
    imports: Mapping[str, _Import]

    def lookup(self, name: str, among: Iterable[_Source]) -> _Definition | None:
        """The definition of `name` in this module: its own, or one imported from a module that is not in `among`."""
        if name in self.definitions:
            return self.definitions[name]
        found = self.imports.get(name)
        if found is None or not _ours(found) or any(found.module == source.module for source in among):
            return None
        if _of_a_workload(found.module) and not _of_a_workload(self.module):
            return None  # a strategy uses the workload of the Spec, not the one that its module imports
        return _read(found.module).lookup(found.name, among)


@cache
def _read(module: str) -> _Source:
    """A module, located by its name and parsed, but not imported."""
    text = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    definitions: dict[str, _Definition] = {}
    imports: dict[str, _Import] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found = [_Import(alias.name, None, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [_Import(node.module, alias.name, alias.asname) for alias in node.names]
        else:
            found = []
            definitions |= {definition.name: definition for definition in _definitions(node, module, text.splitlines())}
        imports |= {one.binds: one for one in found}
    return _Source(module, definitions, imports)


def _definitions(node: ast.stmt, module: str, lines: list[str]) -> Iterator[_Definition]:
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
    yield _Definition(name, module, node.lineno, text, _names(node), _position_of_value(node, lines, text))


def _resolved(one: _Definition, values: Mapping[str, Any]) -> _Definition:
    """The definition with every `if` resolved whose condition depends only on `values`; one without a taken branch is
    removed."""
    text = one.text
    while True:
        tree = ast.parse(text)
        conditional = next(
            (node for node in ast.walk(tree) if isinstance(node, ast.If) and _is_constant(node.test, values)), None
        )
        if conditional is None:
            return one if text == one.text else replace(one, text=text, uses=_names(tree.body[0]))
        taken = eval(compile(ast.Expression(conditional.test), one.home, "eval"), {"__builtins__": {}}, dict(values))
        text = _with_branch(text.splitlines(), conditional, bool(taken))


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
    orelse = lines[body_end:last]  # `else:` or `elif …:`, with its body
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


def _dedented(lines: list[str], columns: int) -> list[str]:
    return [line[columns:] if line[:columns].isspace() else line for line in lines]


def _names(node: ast.stmt) -> tuple[str, ...]:
    """The names that a definition reads and does not bind itself, in order."""
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    bound |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    return tuple(dict.fromkeys(name.id for name in names if name.id not in bound))


def _position_of_value(node: ast.stmt, lines: list[str], text: str) -> tuple[int, int] | None:
    """Start and end of a constant's value in `text`; a setting occupies one line."""
    if not isinstance(node, ast.Assign):
        return None
    before = len(text) - len(lines[node.end_lineno - 1])  # the comment above
    return before + node.value.col_offset, before + node.value.end_col_offset


def _ours(found: _Import) -> bool:
    return found.module.partition(".")[0] == __name__.partition(".")[0]


def _of_a_workload(module: str) -> bool:
    return module.startswith("labkit.training.workloads.")


# ---- assembling the script


class _Assembly:
    """The definitions that the script needs, collected by following the names that they use."""

    def __init__(self, order: list[_Source], values: Mapping[str, Any]):
        self.order = order
        self.values = values
        self.found: dict[str, _Definition] = {}
        self.imported: dict[str, _Import] = {}

    def follow(self, name: str, home: _Source) -> None:
        """Adds the definition that `name` refers to in module `home`, and everything that it uses in turn."""
        if name in self.found:
            return
        for source in (*self.order, home):
            definition = source.lookup(name, self.order)
            if definition is not None:
                self.found[name] = definition = _resolved(definition, self.values)
                for used in definition.uses:
                    self.follow(used, _read(definition.home))
                return
        if name in home.imports:
            known = self.imported.setdefault(name, home.imports[name])
            if known != home.imports[name]:
                raise ValueError(
                    f"{home.module} imports {name} as {home.imports[name]}, and another module imports it as {known}"
                )

    def imports(self) -> str:
        """The imports, sorted as ruff sorts them: the standard library, then the rest."""
        from_module: dict[str, list[_Import]] = {}
        lines = {True: [], False: []}
        for one in sorted(self.imported.values(), key=lambda one: one.module):
            if one.name is None:
                lines[_standard(one.module)].append(f"import {one.module}{one.renamed}")
            else:
                from_module.setdefault(one.module, []).append(one)
        for module, those in from_module.items():
            names = ", ".join(one.name + one.renamed for one in sorted(those, key=_by_kind))
            lines[_standard(module)].append(f"from {module} import {names}")
        return "\n\n".join("\n".join(group) for group in lines.values() if group)

    def constants(self, notes: Mapping[str, str]) -> str:
        """The settings, the ones of the base first, each with its value and comment."""
        lines = []
        for one in self._in_order(constants=True):
            text = one.set_to(self.values[one.name]) if one.name in self.values else one.text
            lines.append(f"{text}  # {notes[one.name]}" if one.name in notes else text)
        return "\n".join(lines)

    def program(self) -> list[str]:
        """Data, model, then the functions in the order of the base; a strategy's helpers precede the functions that use
        them."""
        return [one.text for one in self._in_order(constants=False)]

    def _in_order(self, constants: bool) -> list[_Definition]:
        waiting = {
            one.name: one for one in sorted(self.found.values(), key=self._position) if bool(one.value) == constants
        }
        ordered = []

        def take(one: _Definition) -> None:
            for used in one.uses:
                if used in waiting:
                    take(waiting.pop(used))
            ordered.append(one)

        while waiting:
            take(waiting.pop(next(iter(waiting))))
        return ordered

    def _position(self, one: _Definition) -> tuple[int, int]:
        """The sort key of a definition: settings, data, model, program, then the strategy's own definitions."""
        *_, workload, data, base = self.order
        if one.name in base.definitions:
            return (0 if one.value else 3, base.definitions[one.name].line)
        return ({data.module: 1, workload.module: 2}.get(one.home, 4), one.line)


def _standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _by_kind(one: _Import) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions."""
    return (0 if one.name.isupper() else 1 if one.name[0].isupper() else 2, one.name)
