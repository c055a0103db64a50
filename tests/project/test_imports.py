"""Who imports what: the contracts in pyproject.toml, and what import-linter cannot say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

import labkit
from labkit.setup.environment import CLONE

# Modules that run before an environment exists, or in ranks whose environment belongs to the user.
STANDARD_LIBRARY_ONLY = (
    "labkit.__main__",
    "labkit.cli.parser",
    "labkit.common.files",
    "labkit.common.text",
    "labkit.record.writer",
    "labkit.setup.environment",
    "labkit.setup.progress",
)


def test_contracts_of_imports():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    environment = os.environ | {"PYTHONPATH": str(CLONE), "COLUMNS": "120"}
    done = subprocess.run(
        [*command, "--no-cache"], cwd=CLONE, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_the_standard_library_is_enough(module):
    """Python without site-packages imports it."""
    code = f"import sys; sys.path.insert(0, {str(CLONE)!r}); import {module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_package_defines_a_name_that_one_of_its_modules_has():
    """Importing the module would replace what the package has under this name."""
    for path in (CLONE / "labkit").rglob("__init__.py"):
        modules = {module.stem for module in path.parent.glob("*.py")} | {
            folder.name for folder in path.parent.iterdir() if (folder / "__init__.py").exists()
        }
        body = ast.parse(path.read_text(encoding="utf-8")).body
        defined = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert not defined & modules, path


def test_labs_use_public_names_only():
    public = {"labkit", *(f"labkit.{name}" for name in labkit.__all__)}
    for path in sorted((CLONE / "labs").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        assert {module for module in modules if module.split(".")[0] == "labkit"} <= public, path
