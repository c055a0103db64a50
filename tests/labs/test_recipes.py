"""Every recipe runs headless without errors or warnings, and shows what it says."""

from __future__ import annotations

import re

import jupytext
import pytest
from places import ROOT

from labkit.frontends.handout import executed

RECIPES = ROOT / "labs" / "recipes"
SHOWS = {  # a regular expression that the output must match
    "asynchronous_checkpoints": r"step3.*step6.*True.*True",
    "exact_metrics": r"0\.75 +0\.8 +0\.8",
    "from_device_map": r"2\.01 MiB.*1\.0 MiB",
    "kaggle_and_colab": r"finished.* · 2 ranks",
    "learning_rate": r"192.*1\.4e-03",
    "rank_0_downloads": r"downloaded.*found",
    "resumable_data": r"5.*3.*True",
    "windows": r"'nproc': 2",
}


@pytest.mark.parametrize("name", SHOWS)
def test_a_recipe_runs_and_shows_what_it_says(name, runs, warm_server):
    warm_server()
    notebook = executed(RECIPES / f"{name}.py")
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    said = " ".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert re.search(SHOWS[name], said, re.DOTALL), said


def test_every_recipe_is_tested_and_listed():
    assert {path.stem for path in RECIPES.glob("*.py")} == set(SHOWS)
    listed = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.py)" in listed for name in SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_a_recipe_survives_the_round_trip_through_a_notebook(name):
    text = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
    notebook = jupytext.reads(jupytext.writes(jupytext.reads(text, fmt="py:percent"), fmt="ipynb"), fmt="ipynb")
    assert jupytext.writes(notebook, fmt="py:percent") == text
