"""The tables of strategies, workloads, data sets and faults: they hold every fact, so that no code depends on a name,
and they read nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

ROOT = Path(labkit.__file__).parent
NAMES = STRATEGIES.keys() | WORKLOADS.keys()
TABLES = ("training/strategies/__init__.py", "training/workloads/__init__.py")
# Files that may depend on a name, and why.
EXCEPTIONS = {
    "setup/environment.py": "names of packages, one of which is called like its strategy",
    "course/claims": "a claim is about certain strategies: their runs, by name, and the figures that are claimed",
    "course/exercises": "an exercise asks for a run of a certain strategy, and checks that the answer is one",
    "course/pictures/clusters.py": "names of the axes of a mesh, some of which are called like a strategy",
    "figures/atlas.py": "names of the axes of a layout",
    "prediction/scale": "names of the axes of a layout, some of which are called like a strategy",
    "course/pictures/pipeline.py": "draws the measured steps of this strategy, and refuses other runs",
}


def dependences(tree: ast.Module) -> Iterator[int]:
    """The lines that compare something with a name of the tables, directly or in a collection or a constant of the
    module that is one: by an operator, as a key of a dict, or in a match."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        values: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            values = [constants.get(ast.unparse(value), value) for value in (node.left, *node.comparators)]
            values += [one for value in values for one in getattr(value, "elts", ())]
        elif isinstance(node, ast.Dict):
            values = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            values = [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.fromkeys":
            values = [one for value in node.args[:1] for one in getattr(value, "elts", ())]
        if any(isinstance(value, ast.Constant) and value.value in NAMES for value in values):
            yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "spec.strategy == NAME",
        "NAME not in spec.strategy",
        "row.workload in ('another', NAME)",
        "{NAME: 1}[spec.workload]",
        "match name:\n    case NAME: pass",
        "dict.fromkeys((NAME, 'another'), 1)",
        "FIRST = NAME, 'another'\nspec.strategy in FIRST",
    ],
)
def test_a_dependence_is_found(code):
    assert all(list(dependences(ast.parse(code.replace("NAME", repr(name))))) for name in NAMES)
    assert not list(dependences(ast.parse(code.replace("NAME", "'yet another'"))))


def test_no_code_outside_the_tables_depends_on_a_name():
    found, used = [], set()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        lines = [] if name in TABLES else list(dependences(ast.parse(path.read_text(encoding="utf-8"))))
        excused = next((one for one in EXCEPTIONS if lines and name.startswith(one)), None)
        used.add(excused)
        found += [] if excused else [f"{name}:{line}" for line in lines]
    assert not found, "move the fact into the row of the table"
    assert used - {None} == EXCEPTIONS.keys(), "an exception that nothing needs"


def test_a_fault_changes_the_script():
    """It has a block of its own, or an `if` in the base; and no block is of a fault that is not in the table."""
    code = "".join((ROOT / "training" / path).read_text() for path in ("faults/code.py", "strategies/base.py"))
    conditions = re.findall(r"if FAULT (.+?)(?: and .+)?:", code)
    assert {name for condition in conditions for name in re.findall(r'"(\w+)"', condition)} == {*FAULTS}


_USE = """
import sys
events = []
def note(event, args):
    path = str(args[0]) if args else ""
    touches = event in ("open", "os.listdir", "os.scandir", "subprocess.Popen") or event.startswith("socket.")
    if touches and not path.endswith((".py", ".pyc")):
        events.append((event, path))
sys.addaudithook(note)
from labkit.plan.spec import Spec, SpecError
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES
from labkit.training.strategies.rules import departures
from labkit.training.workloads import WORKLOADS
events = [event for event in events if event[0] != "os.listdir"]  # how Python finds modules
for strategy in STRATEGIES.values():
    strategy.note("cpu"), strategy.all_options
    for workload in WORKLOADS.values():
        for fault in (None, *FAULTS.values()):
            try:
                spec = Spec(strategy.name, workload.name, nproc=strategy.default_nproc or 2, fault=fault and fault.name)
            except SpecError:
                continue
            strategy.constants(spec), strategy.layout_details(spec), departures(spec), spec.total_steps
            workload.parameters(spec.options), workload.outputs(spec.options), workload.visited(spec.options)
            spec.data_row.sample_bytes(spec.options)
print(events)
"""


def test_tables_open_no_file_and_no_connection():
    """Neither when they are imported, nor when the facts of the rows are used and Specs are created."""
    done = subprocess.run([sys.executable, "-c", _USE], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout == "[]\n"
