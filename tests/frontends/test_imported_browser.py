"""Runs made from the files of another job, in the panel: kept from the tab Open…, replayed, and compared."""

from __future__ import annotations

import re

import pytest
from browser import (
    HEADER,
    RUN_TIMEOUT,
    command,
    nothing_is_cut_off,
    open_notebook,
    picture,
    see,
    set_theme,
    sync_api,
)
from chrome_traces import job

pytestmark = pytest.mark.browser


def test_files_of_another_job_become_runs_that_are_replayed_and_compared(page, jupyter):
    labs = jupyter.work / "labs"
    job(labs / "before")
    job(labs / "after", (500, 800))
    (labs / "imported.py").write_text(HEADER + "from labkit import Lab\nLab()\n")
    open_notebook(page, jupyter, "labs/imported.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    for name in ("before", "after"):
        panel.get_by_role("tab", name="Open…").click()
        tab = panel.locator(".labkit-opened")
        tab.get_by_label("Keep as a run").check()
        tab.get_by_role("combobox").fill(f"{name}/")
        tab.get_by_role("button", name="Open").click()
        sync_api.expect(tab).to_contain_text(re.compile(rf"kept as the run [\d-]+{name}"), timeout=RUN_TIMEOUT)
        sync_api.expect(panel.locator(".labkit-recording")).to_contain_text(name, timeout=RUN_TIMEOUT)
    sync_api.expect(panel.locator(".labkit-explanation").last).to_contain_text(
        "Imported from 2 files, not launched here"
    )
    picture(page, "90-imported-open")
    nothing_is_cut_off(panel)

    panel.get_by_role("tab", name="Live").click()
    sync_api.expect(panel.locator(".labkit-actions")).to_contain_text("imported")
    sync_api.expect(panel.locator(".labkit-film span")).to_contain_text("step 5, measured")
    picture(page, "91-imported-live")
    nothing_is_cut_off(panel)
    panel.get_by_role("tab", name="Timeline").click()
    sync_api.expect(panel.locator(".labkit-timeline")).to_contain_text("all_reduce")
    picture(page, "92-imported-timeline")
    nothing_is_cut_off(panel)
    set_theme(page, "Dark")
    picture(page, "93-imported-timeline-dark")

    panel.get_by_role("tab", name="Compare").click()
    tab = panel.locator(".labkit-compare")
    tab.locator(".labkit-compare-more", has_text="Recorded").click()
    runs = tab.locator(".labkit-runs select")
    sync_api.expect(runs.locator("option")).to_have_count(2)
    runs.select_option(index=[0, 1])
    tab.get_by_role("button", name="Compare selected").click()
    changes = tab.locator(".labkit-changes")
    sync_api.expect(changes).to_contain_text("Most of it is compute")
    sync_api.expect(changes.locator("tr", has_text="rank 1")).to_contain_text("compute")
    picture(page, "94-imported-compared-dark")
    set_theme(page, "Light")
    picture(page, "95-imported-compared")
    nothing_is_cut_off(panel)
