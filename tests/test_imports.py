"""The rooms' import rules (the table in the design), held against the code, and the public surface."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent
HEAVY = ("torch", "plotly", "ipywidgets", "IPython", "anywidget")
FACES = ("labkit.panel", "labkit.terminal", "labkit.handout", "labkit.magic")
STANDARD = ("__main__.py", "bootstrap.py", "environment.py", "progress.py", "cli.py", "text.py")

# room (files under labkit/): what none of them may import, at whatever depth of the code
NEVER = {
    "spec.py": (*HEAVY, "labkit.launch", "labkit.script", "labkit.probe", "labkit.figures", "labkit.api", *FACES),
    "checkpoints.py": (*HEAVY, "labkit.spec", "labkit.launch", "labkit.script", "labkit.api", *FACES),
    "strategies/__init__.py": ("torch",),
    "strategies/rules.py": ("torch",),
    "workloads/__init__.py": ("torch",),
    "script.py": ("torch", "labkit.launch", *FACES),
    "stepfile.py": (*HEAVY, "numpy", "labkit.launch", "labkit.probe", "labkit.state", *FACES),
    "appender.py": (*HEAVY, "labkit"),
    "events.py": (*HEAVY, "labkit.launch", "labkit.probe", "labkit.state", *FACES),
    "clock.py": (*HEAVY, "labkit"),
    "stacks.py": (*HEAVY, "labkit"),
    "failures.py": (*HEAVY, "labkit.launch", "labkit.state", *FACES),
    "state.py": (*HEAVY, "labkit.launch"),
    "columns.py": (*HEAVY, "labkit.launch", *FACES),
    "sources.py": (*HEAVY, "labkit.launch", *FACES),
    "startup.py": (*HEAVY, "labkit.launch", *FACES),
    "steps.py": (*HEAVY, "labkit.launch", "labkit.state", *FACES),
    "sampled.py": (*HEAVY, "labkit.launch", *FACES),
    "arguments.py": (*HEAVY, "labkit"),
    "units.py": (*HEAVY, "labkit"),
    "text.py": (*HEAVY, "labkit"),
    "record/*.py": (*HEAVY, "labkit.launch", "labkit.api", "labkit.state", *FACES),
    "faults/__init__.py": ("torch",),
    "diagnose/*.py": (*HEAVY, "labkit.launch", *FACES),
    "machine.py": ("torch",),
    "launch/*.py": (*HEAVY, *FACES),
    "figures/*.py": ("ipywidgets", "labkit.launch", *FACES),
    "panel/*.py": ("torch",),
    "terminal.py": (*HEAVY, "labkit.panel"),
    "replay.py": (*HEAVY, *FACES),
    "commands/*.py": HEAVY,
    "doctor.py": HEAVY,
    "equivalence.py": (*HEAVY, *FACES),
    "comparison.py": (*HEAVY, *FACES),
    "ledger.py": (*HEAVY, "labkit.launch", *FACES),
    "theory/*.py": (*HEAVY, "labkit.launch", *FACES),
    "summary.py": (*HEAVY, "labkit.launch", *FACES),
    "tables.py": (*HEAVY, "labkit.launch", *FACES),
    "magic/cell.py": (*HEAVY, "labkit.launch"),
    "magic/reporting.py": ("plotly", "ipywidgets", "IPython", "labkit.launch", "labkit.api"),
    "pictures/*.py": ("torch", "ipywidgets", "IPython", "labkit.launch", *FACES),
    "exercises/*.py": ("plotly", "ipywidgets", "IPython", *FACES),
    "claims/*.py": ("torch", "plotly", "ipywidgets", "anywidget", *FACES),
    "handout/*.py": ("torch", "ipywidgets", "anywidget", "IPython", "labkit.panel", "labkit.terminal", "labkit.magic"),
    "api.py": ("torch", "ipywidgets"),
}


def imported(path: Path) -> set[str]:
    """Every module that a file imports while it runs, with the names taken from it; what stands under TYPE_CHECKING is not."""
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


@pytest.mark.parametrize("name", STANDARD)
def test_what_runs_before_the_environment_needs_the_standard_library_alone(name):
    allowed = sys.stdlib_module_names
    tops = {module.partition(".")[0] for module in imported(ROOT / name)}
    assert tops <= {*allowed, "labkit"}
    # whatever it takes from labkit must itself need nothing more, but for what the commands do once the environment is there
    ours = {module for module in imported(ROOT / name) if module.startswith("labkit.")}
    light = {"environment", "bootstrap", "progress", "cli", "spec", "strategies", "workloads", "options", "faults", "text", "arguments"}
    assert {module.split(".")[1] for module in ours} <= light


def test_training_code_knows_only_its_siblings():
    modules = [path for path in (*files("strategies/*.py"), *files("workloads/*.py")) if path.name != "__init__.py"]
    assert modules
    for path in modules:
        foreign = {module for module in imported(path) if within(module, "labkit")}
        assert all(within(module, "labkit.strategies") or within(module, "labkit.workloads") for module in foreign), path


def test_events_need_the_standard_library_and_their_own_files_alone():
    own = ("labkit.appender", "labkit.clock", "labkit.stepfile")
    for name in ("events.py", "stepfile.py"):
        for module in imported(ROOT / name):
            ours = module == "labkit" or any(within(module, part) for part in own)
            assert module.partition(".")[0] in sys.stdlib_module_names or ours, module


def test_probe_knows_events_and_torch_alone():
    probe = files("probe/*.py")
    assert probe
    for path in probe:
        for module in imported(path):
            assert module.partition(".")[0] in {*sys.stdlib_module_names, "torch", "numpy", "labkit"}, f"{path.name} imports {module}"
            rooms = ("labkit.appender", "labkit.clock", "labkit.events", "labkit.stacks", "labkit.probe")
            assert not within(module, "labkit") or module == "labkit" or any(within(module, room) for room in rooms), path


def test_nothing_imports_a_face_but_what_people_call():
    allowed = {"faces.py", "fuzz.py", "api.py", "__init__.py"}  # the first two measure faces, and feed them
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        for module in imported(path):
            face = next((face for face in FACES if within(module, face)), None)
            at_home = face == f"labkit.{room.removesuffix('.py')}"
            assert face is None or path.name in allowed or room == "commands" or at_home, f"{path} imports {module}"


def test_labs_use_public_names_alone():
    for path in sorted((ROOT.parent / "labs").glob("*.py")):
        private = {module for module in imported(path) if within(module, "labkit")} - {"labkit"}
        assert private <= {f"labkit.{name}" for name in labkit.__all__}, path


def test_import_is_light():
    code = "import sys, json; before = set(sys.modules); import labkit; print(json.dumps(sorted(set(sys.modules) - before)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout)
    assert "labkit" in loaded
    assert not {module.partition(".")[0] for module in loaded} & {*HEAVY, "numpy", "psutil", "rich", "jupyter_core"}
    assert [module for module in loaded if module.startswith("labkit")] == ["labkit"]


def test_public_names_are_exact():
    expected = ["Lab", "Run", "Spec", "SpecError", "check", "compare", "diff_scripts", "excerpt", "my_progress", "on_trial"]
    expected += ["pictures", "place", "report", "run", "show", "write_script"]
    assert labkit.__all__ == expected
    code = "import labkit; print([name for name in labkit.__all__ if getattr(labkit, name).__name__.split('.')[-1] != name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'Laboratory'"):
        _ = labkit.Laboratory


@pytest.mark.parametrize("command", [["runs"], ["runs", "--json"], ["script", "ddp", "--nproc", "2"], ["--help"]])
def test_commands_that_train_nothing_load_no_torch(command):
    code = (
        "import sys; from labkit.__main__ import main\n"
        f"try: main({command!r})\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'plotly', 'ipywidgets') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stderr.splitlines()[-1] == "[]"
