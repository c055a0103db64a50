"""The panel outside of JupyterLab in Chromium: in Notebook 7, and in Firefox; and a script that names no kernel."""

from __future__ import annotations

import re

import nbformat
import pytest
from browser import ANSWERS, RUN_TIMEOUT, TOKEN, command, open_notebook, picture, see, sync_api, wait_for_words
from firefox import firefox
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.browser

PANEL = """from labkit import Lab
Lab(strategy="ddp", workload="mlp", nproc=2, device="cpu", batch_size=64, steps=60)
"""
PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}


def test_notebook_7_runs_the_panel(page, jupyter):
    pytest.importorskip("notebook", minversion="7")
    nbformat.write(new_notebook(cells=[new_code_cell(PANEL)], metadata=PYTHON), jupyter.work / "seven.ipynb")
    page.goto(f"{jupyter.url}/notebooks/{jupyter.work.name}/seven.ipynb?token={TOKEN}")
    page.locator(".jp-NotebookKernelStatus-fade", has_text=re.compile("^$")).wait_for(state="attached")
    page.locator(".jp-CodeCell .cm-content").click()
    page.keyboard.press("Control+Enter")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    panel.get_by_role("button", name="▶ Run").click()
    wait_for_words(panel, "finished")
    sync_api.expect(panel.locator(".labkit-film span")).to_contain_text("measured")
    sync_api.expect(panel.locator(".labkit-live .main-svg").first).to_be_visible()
    picture(page, "80-notebook-7")


def test_firefox_runs_the_panel(jupyter):
    (jupyter.work / "fire.py").write_text(f"# %%\n{PANEL}")
    with firefox() as page:
        page.goto(jupyter.file("fire.py"))
        page.wait_for(ANSWERS)
        page.value("window.jupyterapp.commands.execute('notebook:run-all-cells'); return null")
        page.wait_for("document.querySelector('.labkit .labkit-run:enabled') !== null")
        page.value("document.querySelector('.labkit').scrollIntoView({block: 'start'}); return null")
        page.click(".labkit .labkit-run")
        page.wait_for("document.querySelector('.labkit-state')?.textContent.startsWith('finished')")
        page.wait_for("document.querySelector('.labkit-film span')?.textContent.includes('measured')")
        page.wait_for("document.querySelector('.labkit-live .main-svg')?.checkVisibility()")
        page.picture("81-firefox")


def test_a_script_that_names_no_kernel_runs(page, jupyter):
    (jupyter.work / "plain.py").write_text("# %%\nprint(6 * 7)\n")
    open_notebook(page, jupyter, "plain.py")
    command(page, "notebook:run-all-cells")
    sync_api.expect(page.locator(".jp-OutputArea-output")).to_have_text("42")
