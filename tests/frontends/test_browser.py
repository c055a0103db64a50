"""JupyterLab in a real browser: the panel of lab 00, the whole lab with recorded runs, logs, a comparison, a fault."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import pytest
from browser import (
    CELLS,
    FIRST_STARTS_FAIL,
    HEADER,
    LAB,
    NOTEBOOK,
    PREDICT,
    ROOT,
    RUN_TIMEOUT,
    Jupyter,
    command,
    in_the_kernel,
    open_notebook,
    picture,
    points,
    see,
    set_theme,
    sync_api,
    wait_for_words,
)
from conftest import processes_of, wait_until
from fabricate import FakeRun

from labkit import Spec
from labkit.record.folder import RunFolder
from labkit.runs.handle import settle

pytestmark = pytest.mark.browser

LAB_00 = ROOT / "labs" / "00_start_here.py"

CHATTER = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
print("step\\n" * 3000 + "<b>hello</b> from rank", dist.get_rank(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
WATCHED = (
    HEADER
    + """from labkit import run, show
show(run("chatter.py", nproc=2, device="cpu"))
"""
)


def test_the_panel_of_lab_00(page, jupyter):
    """One run finishes, one is stopped; what stays in the notebook; saving does not change the .py file."""
    file, source = jupyter.work / "labs" / "panel.py", panel_of_lab_00()
    panel = opened_panel(page, jupyter, file.name, source)
    sync_api.expect(panel.locator(".labkit-batch")).to_contain_text("× 2 =")
    fits_the_projector(panel)
    panel.locator(".labkit-run").click()
    wait_for_words(panel, "finished")
    static_output_is_in_the_notebook(page, "finished")

    see(panel)
    panel.get_by_role("button", name="Settings").click()
    panel.get_by_label("Train for", exact=True).fill("100000")  # it trains until Stop is pressed
    panel.get_by_label("Train for", exact=True).press("Tab")
    page.keyboard.press("Escape")
    panel.locator(".labkit-run").click()
    wait_for_words(panel, "training")
    wait_until(lambda: points(panel, "loss") > 2, 120)
    before = points(panel, "loss")
    wait_until(lambda: points(panel, "loss") > before and points(panel, "memory") > 2, 120)
    picture(page, "1-live-light")
    set_theme(page, "Dark")
    see(panel)
    picture(page, "2-live-dark")
    set_theme(page, "Light")
    see(panel)
    script_and_diff(page, panel)
    panel.locator(".labkit-stop").click()
    wait_for_words(panel, "stopped")
    wait_until(lambda: not processes_of(str(jupyter.runs)), 10)
    picture(page, "5-stopped")
    static_output_is_in_the_notebook(page, "stopped")

    had = points(panel, "loss")
    command(page, "docmanager:save")
    wait_until(lambda: "stopped · " in file.with_suffix(".ipynb").read_text(encoding="utf-8"), 30)
    assert file.read_text(encoding="utf-8") == source
    page.reload()
    panel.wait_for(timeout=60_000)
    see(panel)
    wait_until(lambda: points(panel, "loss") >= had, 60)
    wait_for_words(panel, "stopped")
    see(panel)
    picture(page, "6-after-reload")
    static_output_is_in_the_notebook(page, "stopped")


def opened_panel(page: sync_api.Page, jupyter: Jupyter, name: str, source: str) -> sync_api.Locator:
    """The panel of a lab with this source, after all of its cells have run."""
    (jupyter.work / "labs" / name).write_text(source, encoding="utf-8")
    open_notebook(page, jupyter, f"labs/{name}")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    return panel


def panel_of_lab_00() -> str:
    """Lab 00 with only its import and its panel, which trains an MLP with a slow loader: it leaves the cores to the
    browser."""
    lab = jupytext.read(LAB_00)
    imports, *cells = [cell for cell in lab.cells if cell.cell_type == "code"]
    (panel,) = [cell for cell in cells if cell.source.startswith("Lab(")]
    panel.source = panel.source.replace("Lab(", 'Lab(workload="mlp", fault="slow_loader", ')
    lab.cells = [imports, panel]
    return jupytext.writes(lab, fmt="py:percent")


def test_lab_00_with_recorded_runs(page, jupyter, tmp_path):
    """All cells of a real lab without an error, and its figures; recorded runs stand in for new ones. The page is slow
    to start the widgets of the first."""
    page.add_init_script(FIRST_STARTS_FAIL)
    recorded = {record(tmp_path, settle(strategy, steps=20)).name for strategy in ("single", "ddp")}
    open_notebook(page, jupyter, "labs/00_start_here.py")
    in_the_kernel(page, f"from labkit.frontends.handout.execute import stand_in; stand_in({str(tmp_path)!r})")
    code = page.evaluate(f"{CELLS}.flatMap((one, number) => one.model.type === 'code' ? [number] : [])")
    for number in code:
        page.evaluate(PREDICT, number)
    command(page, "notebook:run-all-cells")
    executed = f"number => {CELLS}[number].model.executionCount !== null"
    page.wait_for_function(executed, arg=code[-1], timeout=RUN_TIMEOUT)
    assert {folder.name for folder in RunFolder.all(jupyter.runs)} == recorded
    panels = []
    for number in code:
        page.evaluate(f"number => {NOTEBOOK}.scrollToItem(number)", number)
        for panel in page.locator(f".jp-Cell[data-windowed-list-index='{number}'] .labkit:has(.labkit-charts)").all():
            sync_api.expect(panel.locator(".labkit-machine > svg")).to_be_visible()
            panels.append(panel)
    assert len(panels) == 3, "one run, the other, and the panel"
    for panel in panels[:2]:
        wait_for_words(panel, "finished")
        wait_until(lambda panel=panel: points(panel, "loss") == 20, 60)
    see(panels[1])
    picture(page, "9-lab-00-with-recorded-runs")
    outputs = page.evaluate(f"numbers => numbers.flatMap(number => {CELLS}[number].model.outputs.toJSON())", code)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


def record(root: Path, spec: Spec) -> RunFolder:
    """The folder of a run of `spec` that has finished."""
    run = FakeRun(root, nproc=spec.processes, steps=spec.steps)
    RunFolder.write_json(run.folder.spec, spec.to_json())
    run.start()
    run.step(spec.steps)
    run.end()
    run.close()
    return run.folder


def fits_the_projector(panel: sync_api.Locator) -> None:
    """All of the panel can be seen at once, beside JupyterLab's own bars."""
    box = panel.bounding_box()
    assert box["width"] <= 1280
    assert box["height"] <= 600
    assert panel.evaluate("element => element.scrollWidth <= element.clientWidth + 1")


def script_and_diff(page: sync_api.Page, panel: sync_api.Locator) -> None:
    panel.get_by_role("tab", name="Script & diff").click()
    sync_api.expect(panel.locator(".labkit-source")).to_contain_text("DistributedDataParallel")
    starts = panel.locator(".labkit-bar .labkit-command code")
    sync_api.expect(starts).to_have_text(re.compile("torchrun --standalone --nproc-per-node=2"))
    sync_api.expect(starts).to_have_css("font-size", "11px")  # not the theme's
    picture(page, "3-script")
    panel.get_by_text("Diff to one device").click()
    sync_api.expect(panel.locator(".labkit-gi").first).to_be_visible()
    picture(page, "4-diff")
    panel.get_by_text("Several nodes").click()
    sync_api.expect(panel.locator(".labkit-nodes code")).to_contain_text(
        [f"--node-rank {rank} --rdzv-endpoint node0:29500" for rank in (0, 1)]
    )
    picture(page, "4-nodes")
    fits_the_projector(panel)
    panel.get_by_role("tab", name="Live").click()


def static_output_is_in_the_notebook(page: sync_api.Page, state: str) -> None:
    """The plain figure and the table are in the notebook, one of each, outside of any widget. They are hidden below a
    panel that is alive, and seen where there is none."""
    last = page.locator(".jp-CodeCell", has=page.locator(".labkit-run"))
    figure = last.locator(".jp-RenderedPlotly")
    table = last.locator(".labkit-static table", has_text="ms per step")
    for left in (figure, table):
        sync_api.expect(left).to_have_count(1, timeout=60_000)
        sync_api.expect(left).to_be_hidden()
    panel = last.locator(".labkit", has=page.locator(".labkit-run"))
    panel.evaluate("element => element.classList.remove('labkit')")
    figure = page.locator(".jp-CodeCell .jp-RenderedPlotly")
    figure.evaluate(
        "element => element.scrollIntoView()"
    )  # plotly draws what is in sight; of a saved one it shows the image first
    sync_api.expect(figure.locator(".main-svg, img").first).to_be_visible(timeout=60_000)
    picture(page, f"8-static-output-{state}")
    sync_api.expect(page.locator(".jp-CodeCell").get_by_text(re.compile(rf"{state} · \d+ steps"))).to_be_visible()
    again = "document.querySelector('.labkit-run').closest('.widget-vbox:has(> .labkit-tabs)').classList.add('labkit')"
    page.evaluate(again)


def test_logs_of_two_ranks_of_a_script_of_ones_own(page, jupyter):
    (jupyter.work / "chatter.py").write_text(CHATTER)
    (jupyter.work / "watch.py").write_text(WATCHED)
    open_notebook(page, jupyter, "watch.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit")
    panel.wait_for(timeout=RUN_TIMEOUT)
    wait_for_words(panel, "finished")
    panel.get_by_role("tab", name="Logs").click()
    lines = panel.locator(".labkit-log-line")
    for rank in (0, 1):
        sync_api.expect(lines.filter(has_text=f"<b>hello</b> from rank {rank}")).to_have_count(1, timeout=30_000)
    assert panel.locator(".labkit-log-lines b").count() == 0, "the ranks' output is text, never markup"
    which = [panel.get_by_label(name, exact=True) for name in ("Rank", "Stream")]
    for choice, value in zip(which, ("0", "stdout")):
        choice.select_option(value)
    sync_api.expect(lines).to_have_count(1000, timeout=30_000)  # of 3,001: the page has the newest
    for choice in which:
        choice.select_option("")
    panel.get_by_label("Search the whole log").fill("FROM RANK 1")
    sync_api.expect(panel.locator("mark")).to_have_text(["from rank 1"], timeout=30_000)
    picture(page, "7-logs")


def test_strategies_are_chosen_and_compared(page, jupyter):
    panel = opened_panel(page, jupyter, "compare.py", LAB)
    fits_the_projector(panel)
    panel.locator(".labkit-further select").select_option("PP × DDP")
    sync_api.expect(panel.locator(".labkit-explanation")).to_contain_text("the batch over the other (DDP)")
    panel.locator(".labkit-more").click()
    sync_api.expect(panel.get_by_text("micro_batches", exact=True)).to_be_visible()
    picture(page, "6-options-of-a-further-strategy")
    panel.locator(".labkit-more").click()
    panel.get_by_role("button", name="TP", exact=True).click()
    sync_api.expect(panel.locator(".labkit-explanation")).to_contain_text("a shard of each split matrix per rank")
    panel.get_by_role("tab", name="Compare").click()
    tab = panel.locator(".labkit-compare")
    sync_api.expect(tab.locator(".labkit-card:visible")).to_have_count(3)
    picture(page, "7-questions")
    sync_api.expect(tab.locator(".labkit-boxes")).to_be_hidden()
    tab.get_by_role("button", name="Choose yourself").click()
    sync_api.expect(tab.get_by_label("CP", exact=True)).to_be_disabled()
    tab.get_by_label("FSDP2", exact=True).uncheck()
    tab.get_by_label("TP", exact=True).check()
    picture(page, "7-compare-chosen")
    tab.locator(".labkit-compare-run").click()
    sync_api.expect(tab.locator("tr", has_text="Single").first).to_contain_text("reference", timeout=RUN_TIMEOUT)
    for title in ("DDP", "TP"):
        sync_api.expect(tab.locator("tr", has_text=title).locator(".labkit-good")).to_have_text(
            "equal", timeout=RUN_TIMEOUT
        )
    sync_api.expect(tab.locator(".labkit-compare-run")).to_be_enabled(timeout=RUN_TIMEOUT)
    picture(page, "8-compared")
    assert tab.locator(".labkit-comparison").evaluate("element => element.scrollWidth <= element.clientWidth")
    set_theme(page, "Dark")
    see(panel)
    picture(page, "9-compared-dark")


SLOW = LAB.replace("samples=1280, batch_size=64, epochs=1", "batch_size=64, steps=100_000")  # until Stop is pressed


def test_a_step_is_captured_and_a_fault_is_found(page, jupyter):
    panel = opened_panel(page, jupyter, "slow.py", SLOW)
    panel.locator(".labkit-more").click()
    panel.get_by_label("Inject fault").select_option("One rank is slow")
    sync_api.expect(panel.locator(".labkit-popover")).to_contain_text("The other ranks wait for it in backward.")
    picture(page, "10-a-fault-is-chosen")
    panel.locator(".labkit-more").click()
    panel.locator(".labkit-run").click()
    wait_for_words(panel, "training")
    panel.get_by_role("tab", name="Timeline").click()
    timeline = panel.locator(".labkit-timeline")
    wait_until(lambda: timeline.locator(".labkit-chart .bars path").count() > 4, 120)
    timeline.get_by_role("button", name="Profile a step").click()
    sync_api.expect(timeline).to_contain_text(re.compile(r"profiled step \d+"), timeout=RUN_TIMEOUT)
    sync_api.expect(timeline.locator("td", has_text="all_reduce").first).to_be_visible()
    picture(page, "11-timeline")
    timeline.get_by_role("button", name="Save trace").click()
    sync_api.expect(timeline).to_contain_text("trace.json")
    assert list(jupyter.runs.glob("*/trace.json"))
    panel.get_by_role("tab", name="Memory").click()
    memory = panel.locator(".labkit-memory")
    wait_until(lambda: memory.locator(".labkit-chart .main-svg").count() > 1, 60)
    picture(page, "12-memory")
    set_theme(page, "Dark")
    see(panel)
    picture(page, "13-memory-dark")
    panel.get_by_role("tab", name="Live").click()
    sync_api.expect(panel.locator(".labkit-finding").first).to_contain_text(
        "rank 1 is slower than the other ranks", timeout=RUN_TIMEOUT
    )
    panel.get_by_role("button", name="Why?").click()
    sync_api.expect(panel.get_by_text("every collective waits for the slowest rank")).to_be_visible()
    sync_api.expect(panel.get_by_text("move work off this rank that it does between the phases")).to_be_visible()
    picture(page, "14-finding")
    panel.locator(".labkit-stop").click()
    wait_for_words(panel, "stopped")
