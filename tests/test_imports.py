"""The rooms' import rules (the table in the design), held against the code."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent
HEAVY = ("torch", "plotly", "ipywidgets", "IPython", "anywidget")
STANDARD = (
    "__main__.py",
    "setup/bootstrap.py",
    "setup/environment.py",
    "setup/progress.py",
    "cli/parser.py",
    "cli/flags.py",
    "cli/job_flags.py",
    "common/atomic.py",
    "common/text.py",
)

# Every room imports the ones before it, and none after it.
ROOMS = (
    *(
        "common",
        "setup",
        "training",
        "plan",
        "record",
        "probe",
        "analysis",
        "prediction",
        "figures",
        "engines",
        "launch",
        "runs",
        "course",
        "frontends",
    ),
    *("api", "benchmarks", "cli", "__main__"),
)

# files under labkit/: what else none of them may import, at whatever depth of the code
NEVER = {
    "common/*.py": HEAVY,
    "setup/*.py": HEAVY,
    "training/*.py": HEAVY,
    "training/strategies/__init__.py": HEAVY,
    "training/strategies/combinations.py": HEAVY,
    "training/strategies/pipelines.py": HEAVY,
    "training/strategies/rules.py": HEAVY,
    "training/strategies/shared.py": HEAVY,
    "training/workloads/models.py": HEAVY,
    "training/workloads/__init__.py": HEAVY,
    "training/faults/__init__.py": HEAVY,
    "plan/*.py": HEAVY,
    "record/**/*.py": HEAVY,
    "record/writer.py": ("numpy", "msgspec"),
    "analysis/**/*.py": HEAVY,
    "prediction/*.py": (*HEAVY, "labkit.launch", "labkit.frontends"),
    "prediction/scale/*.py": (*HEAVY, "labkit.launch", "labkit.frontends"),
    "prediction/tracing/*.py": ("plotly", "ipywidgets", "IPython", "anywidget", "labkit.launch", "labkit.frontends"),
    "figures/*.py": ("torch", "ipywidgets", "IPython", "anywidget"),
    "engines/*.py": (*HEAVY, "labkit.launch"),
    "launch/*.py": HEAVY,
    "runs/*.py": ("torch", "ipywidgets", "IPython", "anywidget"),
    "course/pictures/*.py": ("torch", "ipywidgets", "IPython", "labkit.launch"),
    "course/exercises/*.py": ("plotly", "ipywidgets", "IPython"),
    "course/build/*.py": ("torch", "plotly", "ipywidgets", "IPython"),
    "course/build/ranks/*.py": ("plotly", "ipywidgets", "IPython", "labkit.launch", "labkit.runs"),
    "course/claims/*.py": ("torch", "plotly", "ipywidgets", "anywidget"),
    "frontends/*.py": HEAVY,
    "frontends/terminal/*.py": HEAVY,
    "frontends/doctor/*.py": HEAVY,
    "frontends/panel/*.py": (
        "torch",
        "labkit.frontends.terminal",
        "labkit.frontends.handout",
        "labkit.frontends.magic",
    ),
    "frontends/magic/*.py": ("labkit.frontends.panel", "labkit.frontends.handout"),
    "frontends/magic/cell.py": (*HEAVY, "labkit.launch"),
    "frontends/magic/reporting.py": ("plotly", "ipywidgets", "IPython", "labkit.launch", "labkit.runs"),
    "frontends/handout/*.py": (
        "torch",
        "ipywidgets",
        "anywidget",
        "IPython",
        "labkit.frontends.panel",
        "labkit.frontends.magic",
    ),
    "api.py": ("torch", "ipywidgets"),
    "cli/*.py": HEAVY,
}


def imported(path: Path) -> set[str]:
    """Every module that a file imports while it runs, with the names taken from it; what stands under TYPE_CHECKING is
    not."""
    found = set()
    waiting = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        waiting += ast.iter_child_nodes(node)
    return found


def files(pattern: str) -> list[Path]:
    return sorted(ROOT.glob(pattern))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("room", NEVER)
def test_room_imports_nothing_that_it_must_not(room):
    assert files(room), f"no file is in the room {room}"
    broken = [
        f"{path.name} imports {module}"
        for path in files(room)
        for module in imported(path)
        if any(within(module, bad) for bad in NEVER[room])
    ]
    assert not broken


MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def own_imports(path: Path) -> set[str]:
    """The modules of labkit that a file imports in any way: also inside a function, and for type checkers alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & MODULES.keys()) | ({node.module} if whole - MODULES.keys() else set())
    return found & MODULES.keys()


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module of labkit imports."""
    return {name: own_imports(path) for name, path in MODULES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_import_cycle_of_modules():
    """Modules that import nothing that is left are taken away until none is left; in a cycle there is always one that
    is."""
    left = dict(imports())
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in an import cycle, or importing one: {sorted(left)}"


def test_rooms_import_one_way():
    assert {room_of(name) for name in MODULES} - {""} == set(ROOMS)
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if room_of(name)
        and (not room_of(other) or ROOMS.index(room_of(other)) > ROOMS.index(room_of(name)))
        and other != "labkit"
    ]
    assert not wrong


def test_each_room_says_what_it_holds_and_what_it_never_imports():
    for room in ROOMS:
        path = ROOT / room / "__init__.py"
        if path.parent.is_dir():
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert docstring and "import" in docstring.partition("\n")[2], f"{room} does not say what it never imports"
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "api.py"}


@pytest.mark.parametrize("name", STANDARD)
def test_what_runs_before_the_environment_needs_the_standard_library_alone(name):
    allowed = sys.stdlib_module_names
    tops = {module.partition(".")[0] for module in imported(ROOT / name)}
    assert tops <= {*allowed, "labkit"}
    # whatever it takes from labkit must itself need nothing more, but for what the commands do once the environment is
    # there
    ours = {module for module in imported(ROOT / name) if module in MODULES and MODULES[module].name != "__init__.py"}
    standard = {
        *STANDARD,
        "common/arguments.py",
        "common/units.py",
        "plan/fields.py",
        "plan/spec.py",
        "cli/commands.py",
        "prediction/devices.py",
    }
    assert {MODULES[module].relative_to(ROOT).as_posix() for module in ours} <= standard


def test_training_code_knows_only_its_siblings():
    modules = [
        path
        for path in (*files("training/strategies/*.py"), *files("training/workloads/*.py"))
        if path.relative_to(ROOT).as_posix() not in NEVER
    ]
    assert modules
    for path in modules:
        foreign = {module for module in imported(path) if within(module, "labkit")}
        assert all(
            within(module, "labkit.training.strategies") or within(module, "labkit.training.workloads")
            for module in foreign
        ), path


def test_writing_needs_the_standard_library_and_the_clock_alone():
    for name in ("record/writer.py", "record/clock.py", "record/stacks.py"):
        for module in imported(ROOT / name):
            ours = module in ("labkit", "labkit.record") or within(module, "labkit.record.clock")
            assert module.partition(".")[0] in sys.stdlib_module_names or ours, module


def test_probe_knows_events_and_torch_alone():
    probe = files("probe/*.py")
    assert probe
    for path in probe:
        for module in imported(path):
            assert module.partition(".")[0] in {
                *sys.stdlib_module_names,
                "torch",
                "numpy",
                "labkit",
            }, f"{path.name} imports {module}"
            parts = (
                "labkit.record.clock",
                "labkit.record.stacks",
                "labkit.record.writer",
                "labkit.probe",
            )
            ours = module in ("labkit", "labkit.record") or any(within(module, part) for part in parts)
            assert not within(module, "labkit") or ours, path


def test_labs_use_public_names_alone():
    for path in sorted((ROOT.parent / "labs").glob("*.py")):
        private = {module for module in imported(path) if within(module, "labkit")} - {"labkit"}
        assert private <= {f"labkit.{name}" for name in labkit.__all__}, path
