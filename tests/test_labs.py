"""Every lab runs to its end where nobody watches, and leaves plain figures; labs use the public names only."""

from __future__ import annotations

import ast
from pathlib import Path

import jupytext
import nbclient
import pytest

import labkit

ROOT = Path(__file__).parents[1]
LABS = sorted((ROOT / "labs").glob("[0-9]*.py"))
PLOTLY = "application/vnd.plotly.v1+json"


def test_there_are_labs():
    assert LABS


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_uses_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("labkit.") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit"):
            assert node.module == "labkit"
            assert {alias.name for alias in node.names} <= set(labkit.__all__)


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_is_the_same_after_a_round_through_a_notebook(path):
    """So that saving it in JupyterLab leaves the checkout clean."""
    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(jupytext.writes(jupytext.reads(text, fmt="py:percent"), fmt="ipynb"), fmt="ipynb")
    assert jupytext.writes(notebook, fmt="py:percent") == text


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_runs_headless_and_leaves_plain_figures(path, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    bundles = [output["data"] for output in outputs if "data" in output]
    assert not [bundle for bundle in bundles if "application/vnd.jupyter.widget-view+json" in bundle]
    figures = [bundle for bundle in bundles if PLOTLY in bundle]
    assert len(figures) == len(list(runs.iterdir())) > 0
    for bundle in figures:
        assert bundle[PLOTLY]["data"]
        assert bundle["text/html"].count("<svg") == 7, "the four live charts, and the three of a sampled step"
        assert bundle["text/plain"].endswith("finished")
