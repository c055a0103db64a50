"""The public names, and what a process loads that imports labkit or runs a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent
HEAVY = ("torch", "plotly", "ipywidgets", "IPython", "anywidget")


def imported(module: str) -> list[str]:
    """The modules that a new process loads for this one."""
    code = (
        f"import sys, json; before = set(sys.modules); import {module}; print(json.dumps(sorted(set(sys.modules) -"
        " before)))"
    )
    return json.loads(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout
    )


def test_import_is_light():
    loaded = imported("labkit")
    assert "labkit" in loaded
    assert not {module.partition(".")[0] for module in loaded} & {*HEAVY, "numpy", "psutil", "rich", "jupyter_core"}
    assert [module for module in loaded if module.startswith("labkit")] == ["labkit"]


def test_a_supervisor_starts_torchrun_before_it_imports_anything_heavy():
    loaded = imported("labkit.launch.supervisor")
    assert not {module.partition(".")[0] for module in loaded} & {*HEAVY, "numpy", "pynvml"}


def test_public_names_are_exact():
    expected = [
        "Lab",
        "Run",
        "Spec",
        "SpecError",
        "advise",
        "atlas",
        "check",
        "classroom",
        "compare",
        "diff_scripts",
        "excerpt",
        "explain",
        "guess",
        "my_progress",
        "on_trial",
    ]
    expected += ["pictures", "place", "predict", "report", "run", "show", "starter", "write_script"]
    assert labkit.__all__ == expected
    code = (
        "import labkit; print([name for name in labkit.__all__ if getattr(labkit, name).__name__.split('.')[-1] !="
        " name])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout
        == "[]\n"
    )
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
