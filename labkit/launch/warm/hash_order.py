"""Whether a script could depend on the seed of `hash(str)`, which all ranks of a warm run share: the server draws it
when it starts, and an interpreter cannot change it. torchrun's ranks each have their own, so that sets of strings have
a different order on each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from labkit.setup.environment import CLONE

_LABKIT = CLONE / "labkit"
_VARIABLE = "PYTHONHASHSEED"
_BUILDERS = ("set", "frozenset")
_WITHOUT_ORDER = ("all", "any", "bool", "isinstance", "len", "max", "min", "sorted")  # what they return has none
_METHODS = ("add", "clear", "discard", "isdisjoint", "issubset", "issuperset", "remove", "update")
_COMPARISONS = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
_VIEWS = ("keys", "items")  # of a dict: operators make sets of them
_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)


def dependence(scripts: Sequence[Path], folders: Sequence[str], environment: Mapping[str, str]) -> str:
    """The first place where a script, or a module of these folders that it imports, could depend on the seed, as a
    clause with file and line; empty if there is none, or if the environment gives all ranks the same seed.

    Places are expressions that make a set whose order could matter, and calls of `hash`. It cannot matter where only
    members are looked for, or all are counted or sorted. Sets of numbers have the same order everywhere. Files that
    cannot be read or parsed have no such place; installed packages are not searched.
    """
    if environment.get(_VARIABLE, "random") not in ("", "random"):
        return ""
    waiting, seen = list(scripts), set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.resolve().is_relative_to(_LABKIT):
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for line, what in _places(tree):
            return f"line {line} of {path.name} uses {what}, in which warm ranks agree and torchrun's may not"
        waiting += (file for name in _imports(tree) for file in module_files(name, [str(path.parent), *folders]))
    return ""


def _places(tree: ast.AST) -> Iterator[tuple[int, str]]:
    unordered = {id(node) for parent in ast.walk(tree) for node in _used_without_order(parent)}
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    named = [id(value) for scope in (tree, *functions) for value in _named_without_order(scope, unordered)]
    unordered.update(named)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash":
            yield node.lineno, "hash()"
        elif _is_set(node) and id(node) not in unordered:
            yield node.lineno, "the order of a set"


def _named_without_order(scope: ast.AST, unordered: Container[int]) -> Iterator[ast.expr]:
    """The values of names that nothing in a module or function reads for their order."""
    names = {node.id for node in ast.walk(scope) if _is_read(node) and id(node) not in unordered}
    for node in ast.walk(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, ast.Name) and target.id not in names for target in targets):
                yield node.value


def _is_read(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _used_without_order(parent: ast.AST) -> list[ast.expr]:
    """The operands whose order does not matter to an expression or a statement."""
    if isinstance(parent, ast.Compare) and all(isinstance(operator, _COMPARISONS) for operator in parent.ops):
        return [parent.left, *parent.comparators]
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in _WITHOUT_ORDER:
        return parent.args
    if isinstance(parent, ast.Attribute) and parent.attr in _METHODS:
        return [parent.value]
    if isinstance(parent, (ast.If, ast.While)):
        return [parent.test]
    return []


def _is_set(node: ast.AST) -> bool:
    if isinstance(node, ast.Set):
        return not all(isinstance(item, ast.Constant) and isinstance(item.value, (int, float)) for item in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        return any(_is_view(operand) for operand in (node.left, node.right))
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return isinstance(node, ast.SetComp) or (is_call and node.func.id in _BUILDERS)


def _is_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS


def _imports(tree: ast.AST) -> Iterator[str]:
    """The dotted names of modules that may be imported, without the dots of relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [node.module] if node.module else []
            yield from package
            yield from (".".join([*package, alias.name]) for alias in node.names)


def module_files(name: str, folders: Sequence[str]) -> Iterator[Path]:
    """The files that `python -m name` executes, and `import name` too, if the module is in one of these folders."""
    parts = name.split(".")
    for folder in folders:
        for length in range(1, len(parts) + 1):
            place = Path(folder, *parts[:length])
            files = place.with_name(f"{place.name}.py"), place / "__init__.py", place / "__main__.py"
            yield from (file for file in files if file.is_file())
