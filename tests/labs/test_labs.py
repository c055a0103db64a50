"""Every lab runs headless without errors or warnings, leaves static figures and no widgets, and is written as a lab."""

from __future__ import annotations

import ast
import re

import jupytext
import pytest
from places import ROOT

import labkit
from labkit import Run
from labkit.analysis.guess import FIGURES
from labkit.course.exercises import LABS as LABS_WITH_EXERCISES
from labkit.frontends.handout import executed
from labkit.frontends.handout.page import STUDENT, page_of
from labkit.record.folder import RunFolder

LABS = sorted((ROOT / "labs").glob("[0-9]*.py"))
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_MINUTES = 6  # of computing that a lab may take


def test_every_topic_of_exercises_has_a_lab():
    assert LABS
    assert {path.stem for path in LABS} == set(LABS_WITH_EXERCISES.values())


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_uses_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("labkit.") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit"):
            assert node.module == "labkit"
            assert {alias.name for alias in node.names} <= set(labkit.__all__)


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_says_near_its_top_how_long_it_computes(path):
    text = " ".join(jupytext.read(path).cells[0].source.split())
    minutes = re.search(r"cells (?:of this lab )?compute for about (\d+) minutes? on two cores", text)
    assert minutes and 1 <= int(minutes[1]) <= MOST_MINUTES


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_leaves_predictions_to_the_learner(path):
    """The value of each figure is three dots."""
    calls = re.findall(r'guess\("(\w+)", (\S+)', path.read_text(encoding="utf-8"))
    assert not [value for name, value in calls if name not in FIGURES or not value.startswith("...)")]


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_survives_the_round_trip_through_a_notebook(path):
    """So that saving it in JupyterLab does not change the checkout."""
    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(jupytext.writes(jupytext.reads(text, fmt="py:percent"), fmt="ipynb"), fmt="ipynb")
    assert jupytext.writes(notebook, fmt="py:percent") == text


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_is_suitable_for_live_coding(path):
    """Short cells, prose between them, and a question before the first code."""
    cells = jupytext.read(path).cells
    first = next(index for index, cell in enumerate(cells) if cell.cell_type == "code")
    assert "?" in "".join(cell.source for cell in cells[: first + 3])
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert max(source.count("\n") + 1 for source in code) <= 24
    assert sum(source.count("\n") + 1 <= 12 for source in code) >= 0.8 * len(code)
    assert sum(cell.cell_type == "markdown" for cell in cells) >= 0.7 * len(code)


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_runs_headless_and_leaves_static_figures(path, runs, warm_server, pytestconfig):
    warm_server()
    notebook = executed(path, skip=() if pytestconfig.getoption("--all") else ("long",))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    bundles = [output for output in outputs if "data" in output]
    assert not [bundle for bundle in bundles if WIDGET in bundle["data"]]
    figures = [bundle["data"][PLOTLY] for bundle in bundles if PLOTLY in bundle["data"]]
    assert figures and all(figure["data"] or figure["layout"].get("shapes") for figure in figures)
    verdicts = [
        bundle["metadata"]["labkit"]["state"]
        for bundle in bundles
        if "exercise" in bundle.get("metadata", {}).get("labkit", {})
    ]
    assert verdicts and set(verdicts) == {"empty"}
    recorded = [Run.attach(folder.path) for folder in RunFolder.all(runs)]
    assert recorded
    cold = [run.folder.read_launch().cold_because for run in recorded]
    assert not [reason for reason in cold if "differs" in reason], "the warm server of the tests serves its kernel"
    for run in recorded:
        assert run.state.over
        deliberate = run.state.spec.fault or run.state.spec.script
        assert run.state.status.state == "finished" or deliberate, f"{run.name}: {run.words}"
    assert len(page_of(notebook, path, runs).html().encode()) <= 3_000_000
    for_students = page_of(notebook, path, runs, audience=STUDENT).html()
    assert 'class="answer"' not in for_students and 'class="labkit-verdict' not in for_students
