"""`python -m cuda_stand_in MACHINE tests/cuda_stand_in/covered.py [--data=FILE] ARGUMENTS…`: runs Python on the
stand-in, and prints which of the lab's statements that only CUDA reaches were executed, in all processes. `labkit test
--cuda-stand-in --coverage` runs the tests this way.

A statement of a function counts if it names CUDA, NCCL, NVML or a GPU, or if the function, its class or a condition
around it does, and if no process without a GPU executed it: those are processes of `test_without_driver.py`. FILE
receives what was executed, and what it has from earlier counts, too: from the usual tests, if this module, with `site/`
on the path, ran them without the stand-in. Folders in `_NOT_OF_CUDA` do not count.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage

from labkit.setup.environment import CLONE

_NAMES = re.compile("cuda|nccl|nvml|gpu", re.IGNORECASE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_GPU = "none"
# None of their lines needs CUDA: the first runs as the scripts generated from it, the second traces on the CPU, and the
# others are the commands that start these tests.
_NOT_OF_CUDA = ("training/strategies/", "prediction/tracing/", "__main__.py", "cli/project.py")
_DATA = "--data="
# Ranks are forked, and end with os._exit. The context is the kind of GPU that a process has.
_SETTINGS = """
[run]
source = {source}
data_file = {file}
parallel = true
patch = fork, _exit
context = ${{CUDA_STAND_IN_GPU-none}}
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
"""


def main(*arguments: str) -> int:
    """Runs Python with the arguments, prints the table, and returns the exit code of what ran."""
    with tempfile.TemporaryDirectory() as folder:
        file, settings = Path(folder, "coverage"), Path(folder, "settings")
        if arguments[0].startswith(_DATA):
            file, arguments = Path(arguments[0].removeprefix(_DATA)).absolute(), arguments[1:]
        settings.write_text(_SETTINGS.format(source=CLONE / "labkit", file=file), encoding="utf-8")
        code = subprocess.call([sys.executable, *arguments], env=os.environ | {"COVERAGE_PROCESS_START": str(settings)})
        measured = Coverage(config_file=str(settings))
        if file.exists():
            measured.load()
        measured.combine()
        measured.save()
        print("\n".join(table(measured)))
    return code


def table(measured: Coverage) -> Iterator[str]:
    """A line of each module with such statements: executed, all, and the lines of those that were not executed; then
    the sum."""
    data = measured.get_data()
    executed = total = 0
    for path in sorted(path for path in data.measured_files() if path.endswith(".py")):  # templates run, too
        data.set_query_context(_NO_GPU)
        elsewhere = _executed(measured, path)
        data.set_query_contexts([f"^(?!{_NO_GPU}$)"])
        here = _executed(measured, path)
        named = Path(path).relative_to(CLONE)
        if str(named.relative_to("labkit")).startswith(_NOT_OF_CUDA):
            continue
        lines = set(_of_cuda(ast.parse(Path(path).read_text(encoding="utf-8")).body)) - elsewhere
        left = sorted(lines - here)
        executed, total = executed + len(lines) - len(left), total + len(lines)
        if lines:
            yield f"{len(lines) - len(left):4} / {len(lines):3}  {named}  {', '.join(map(str, left))}"
    yield f"{executed:4} / {total:3}  {executed / max(total, 1):.1%}"


def _executed(measured: Coverage, path: str) -> set[int]:
    _, statements, _, missing, _ = measured.analysis2(path)
    return set(statements) - set(missing)


def _of_cuda(body: list[ast.stmt], within: bool = False, in_function: bool = False) -> Iterator[int]:
    """The first lines of the statements of functions that are, or are `within`, what names CUDA."""
    for statement in body:
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            inside = in_function or isinstance(statement, _FUNCTIONS)
            yield from _of_cuda(statement.body, within or bool(_NAMES.search(statement.name)), inside)
            continue
        blocks = [value for _, value in ast.iter_fields(statement) if _is_block(value)]
        header = [node for node in ast.iter_child_nodes(statement) if not any(node in block for block in blocks)]
        names = any(_says_cuda(node) for node in header)
        is_documentation = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if in_function and (within or names) and not is_documentation:
            yield statement.lineno
        for block in blocks:
            chosen = names and isinstance(statement, ast.If) and block is _branch_of_cuda(statement)
            parts = [part.body for part in block] if isinstance(block[0], ast.ExceptHandler) else [block]
            for part in parts:
                yield from _of_cuda(part, within or chosen, in_function)


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (ast.stmt, ast.ExceptHandler))


def _branch_of_cuda(statement: ast.If) -> list[ast.stmt]:
    is_negated = isinstance(statement.test, ast.UnaryOp) and isinstance(statement.test.op, ast.Not)
    return statement.orelse if is_negated else statement.body


def _says_cuda(header: ast.AST) -> bool:
    """Whether a name or text of an expression does."""
    said = (value for node in ast.walk(header) for _, value in ast.iter_fields(node) if isinstance(value, str))
    return any(_NAMES.search(text) for text in said)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
