"""The panel in JupyterLab, from before a run to a comparison: never blank, and no text is cut off at 1280 px."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import (
    LAB,
    NOTEBOOK,
    RUN_TIMEOUT,
    Jupyter,
    command,
    in_the_kernel,
    nothing_is_cut_off,
    open_notebook,
    picture,
    points,
    see,
    sync_api,
    wait_for_words,
)

pytestmark = pytest.mark.browser

COMPARE = """
# %%
from labkit import compare
compare(["ddp"], workload="mlp", nproc=2, device="cpu", samples=640, batch_size=64, steps=5)
"""
HELD = """
import pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
WATCH = """
# %%
from labkit import run, show
show(run("held.py", nproc=2, device="cpu"))
"""
LOG = """[rank0]: step 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 88, in step
[rank1]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 5x3)
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 90, in step
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:20697
"""
LESSON = LAB.replace("epochs=1", "steps=60") + WATCH + COMPARE


def test_the_panel_is_never_blank(page, jupyter):
    (jupyter.work / "labs" / "before.py").write_text(LESSON)
    open_notebook(page, jupyter, "labs/before.py")
    predictions_are_kept_in(page, jupyter.work)
    run_cell(page, 0)
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    before = panel.locator(".labkit-before")
    sync_api.expect(before).to_contain_text("What each rank will hold and send (by formula)")
    sync_api.expect(before.locator("tbody tr")).to_have_count(2)
    sync_api.expect(before).to_contain_text("all_reduce 5.1 MiB")
    machine = panel.get_by_role(
        "img", name=re.compile(r"^2 ranks: rank 0 cpu, up to 10\.2 MiB, sends 2\.6 MiB.step; rank 1")
    )
    sync_api.expect(machine).to_be_visible()
    assert panel.locator(".labkit-live .labkit-chart").count() == 0, "axes without data say nothing"
    picture(page, "20-before-run")
    nothing_is_cut_off(panel)
    choices_are_followed(page, panel, before)
    escape_closes_the_options(page, panel)
    the_next_run_is_predicted(page, panel, before)
    the_learner_predicts_too(page, panel)

    panel.locator(".labkit-run").click()
    wait_for_words(panel, "finished")
    sync_api.expect(before).to_contain_text(re.compile(r"Peak memory: you predicted 2 MiB per rank; it was [\d.]+ MiB"))
    sync_api.expect(before).to_contain_text("Step time: you predicted 500 ms per rank; it was")
    sync_api.expect(panel.locator(".labkit-guesses")).to_be_hidden()
    sync_api.expect(
        panel.get_by_role("figure", name=re.compile("your guess rank 0( simulated)? 500 ms"))
    ).to_be_visible()
    assert points(panel, "loss") > 2
    picture(page, "22-finished")
    nothing_is_cut_off(panel)
    panel.get_by_role("tab", name="Timeline").click()
    traffic = panel.locator(".labkit-timeline .labkit-comparison")
    sync_api.expect(traffic.locator("td").last).to_be_visible()
    assert traffic.evaluate("element => element.scrollWidth <= element.clientWidth")
    picture(page, "23-timeline")
    nothing_is_cut_off(panel)
    the_prediction_stands_beside_the_measurement(page, panel)
    recorded_runs_are_compared(page, panel)
    logs_of_another_job_are_opened(page, panel, jupyter)
    the_start_of_ranks_is_followed(page, jupyter)
    run_cell(page, 2)
    last = page.locator(".jp-CodeCell").last
    sync_api.expect(last.locator(".labkit-comparison tr", has_text="DDP")).to_be_visible(timeout=RUN_TIMEOUT)
    picture(page, "26-bare-compare-live")
    sync_api.expect(last.locator(".labkit-comparison tr", has_text="DDP")).to_contain_text("equal", timeout=RUN_TIMEOUT)
    left = last.locator(".jp-RenderedHTMLCommon tr", has_text="DDP")
    sync_api.expect(left).to_contain_text(
        "equal", timeout=RUN_TIMEOUT
    )  # for a page without the widget, and hidden in this one
    sync_api.expect(left).to_be_hidden()
    last.evaluate("element => element.scrollIntoView()")
    picture(page, "27-bare-compare")


def run_cell(page: sync_api.Page, number: int) -> None:
    page.evaluate(f"number => {{ {NOTEBOOK}.activeCellIndex = number; }}", number)
    command(page, "notebook:run-cell")


def the_start_of_ranks_is_followed(page: sync_api.Page, jupyter: Jupyter) -> None:
    """Of a script that waits before its first step."""
    (jupyter.work / "labs" / "held.py").write_text(HELD)
    run_cell(page, 1)
    panel = page.locator(".jp-CodeCell").nth(1).locator(".labkit")
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    before = panel.locator(".labkit-before")
    sync_api.expect(before).to_contain_text(
        re.compile(r"torch imported.*group formed.*first step"), timeout=RUN_TIMEOUT
    )
    for row in before.locator("tbody tr").all():
        sync_api.expect(row).to_contain_text(re.compile(r"(\d+\.\d s.*){4}…"), timeout=RUN_TIMEOUT)
    picture(page, "21-ranks-start")
    nothing_is_cut_off(panel)
    (jupyter.work / "labs" / "go").touch()
    wait_for_words(panel, "finished")
    sync_api.expect(before).to_be_hidden()


def choices_are_followed(page: sync_api.Page, panel: sync_api.Locator, before: sync_api.Locator) -> None:
    panel.get_by_role("button", name="ZeRO-1", exact=True).click()
    sync_api.expect(before).to_contain_text("broadcast")
    for title in ("Single", "DP", "DDP", "FSDP2", "TP", "PP"):
        panel.get_by_role("button", name=title, exact=True).click()
        sync_api.expect(before).to_contain_text(f"What each rank will hold and send (by formula) {title} ·")
        nothing_is_cut_off(panel)
    panel.locator(".labkit-further select").select_option("DeepSpeed")
    sync_api.expect(before).to_contain_text("There is no memory formula for DeepSpeed")
    nothing_is_cut_off(panel)
    panel.get_by_role("button", name="FSDP2", exact=True).click()
    sync_api.expect(before).to_contain_text("What each rank will hold and send (by formula) FSDP2 ·")
    panel.locator(".labkit-present").click()
    picture(page, "20-before-run-presentation")
    nothing_is_cut_off(panel)
    panel.locator(".labkit-present").click()


def predictions_are_kept_in(page: sync_api.Page, folder: Path) -> None:
    """So that none is found that another test, or another day, has made."""
    code = "from pathlib import Path; from labkit.prediction import predict; of = predict.cache_folder; "
    in_the_kernel(
        page, f"{code}predict.cache_folder = lambda spec: Path({str(folder)!r}) / 'predictions' / of(spec).name"
    )


def the_next_run_is_predicted(page: sync_api.Page, panel: sync_api.Locator, before: sync_api.Locator) -> None:
    button = panel.locator(".labkit-predict")
    button.click()
    sync_api.expect(button).to_have_text("Predicting…")
    sync_api.expect(button).to_be_disabled()
    sync_api.expect(before).to_contain_text("Predicting: the script is traced without data")
    picture(page, "28-predicting")
    nothing_is_cut_off(panel)
    sync_api.expect(before).to_contain_text(
        "What each rank will hold and send (predicted) FSDP2 ·", timeout=RUN_TIMEOUT
    )
    sync_api.expect(before.locator("tbody tr")).to_have_text(re.compile("0–1.*MiB"))
    sync_api.expect(button).to_have_text("Predict")
    picture(page, "28-predicted")
    nothing_is_cut_off(panel)
    panel.get_by_role("tab", name="Memory").click()
    sync_api.expect(memory_by_owner(panel, r"rank 0 predicted [\d.]+ MiB")).to_be_visible()
    picture(page, "29-predicted-memory")
    nothing_is_cut_off(panel)
    panel.get_by_role("tab", name="Live").click()


def the_learner_predicts_too(page: sync_api.Page, panel: sync_api.Locator) -> None:
    for name, value in (("peak memory per rank", "2"), ("step time per rank", "500")):
        panel.get_by_label(name).fill(value)
    picture(page, "28-own-prediction")
    nothing_is_cut_off(panel)
    panel.locator(".labkit-present").click()
    picture(page, "28-own-prediction-presentation")
    nothing_is_cut_off(panel)
    panel.locator(".labkit-present").click()


def the_prediction_stands_beside_the_measurement(page: sync_api.Page, panel: sync_api.Locator) -> None:
    panel.get_by_role("tab", name="Memory").click()
    both = r"rank 0 predicted [\d.]+ MiB, rank 0 measured [\d.]+ MiB, rank 1 predicted"
    both += r".*your guess rank 0 predicted 2.0 MiB"
    sync_api.expect(memory_by_owner(panel, both)).to_be_visible()
    sync_api.expect(panel.locator(".labkit-outcome")).to_contain_text("you predicted 2 MiB per rank")
    sync_api.expect(panel.locator(".labkit-outcome")).to_contain_text("Peak memory was predicted by tracing the script")
    picture(page, "30-predicted-and-measured")
    nothing_is_cut_off(panel)


def memory_by_owner(panel: sync_api.Locator, bars: str) -> sync_api.Locator:
    return panel.get_by_role("figure", name=re.compile(f"Peak memory of a step, by owner.*{bars}"))


def escape_closes_the_options(page: sync_api.Page, panel: sync_api.Locator) -> None:
    more, popover = panel.locator(".labkit-more"), panel.locator(".labkit-popover")
    first, blur = popover.locator("select").first, "document.activeElement.blur()"
    for then in (first.focus, popover.locator(".labkit-help").first.click, lambda: page.evaluate(blur), lambda: None):
        more.click()
        sync_api.expect(popover).to_be_visible()
        then()
        page.keyboard.press("Escape")
        sync_api.expect(popover).to_be_hidden()
        sync_api.expect(more).to_be_focused()


def logs_of_another_job_are_opened(page: sync_api.Page, panel: sync_api.Locator, jupyter: Jupyter) -> None:
    (jupyter.work / "labs" / "job-7.out").write_text(LOG)
    panel.get_by_role("tab", name="Open…").click()
    tab = panel.locator(".labkit-opened")
    sync_api.expect(tab).to_contain_text("of a job that ran anywhere")
    picture(page, "43-open")
    tab.get_by_role("combobox").fill("job-8.out")
    page.keyboard.press("Enter")
    sync_api.expect(tab.get_by_role("alert")).to_contain_text("job-8.out cannot be read: No such file or directory")
    tab.get_by_role("combobox").fill("job-*.out")
    tab.get_by_role("button", name="Open").click()
    sync_api.expect(tab).to_contain_text("rank 1 failed first: RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    sync_api.expect(tab.locator("tr", has_text="rank 0").last).to_be_visible()
    sync_api.expect(tab.get_by_role("alert")).to_have_count(0)
    picture(page, "44-opened")
    nothing_is_cut_off(panel)


def recorded_runs_are_compared(page: sync_api.Page, panel: sync_api.Locator) -> None:
    panel.get_by_role("tab", name="Compare").click()
    tab = panel.locator(".labkit-compare")
    sync_api.expect(tab).to_contain_text("trains the same model with each of these strategies")
    tab.locator(".labkit-compare-more", has_text="Recorded").click()
    runs = tab.locator(".labkit-runs select")
    sync_api.expect(runs.locator("option")).to_have_count(1)
    picture(page, "24-recorded-runs")
    nothing_is_cut_off(panel)
    page.keyboard.press("Escape")
    sync_api.expect(runs).to_be_hidden()
    tab.locator(".labkit-compare-more", has_text="Recorded").click()
    runs.select_option(index=0)
    tab.get_by_role("button", name="Compare selected").click()
    sync_api.expect(tab).to_contain_text("Recorded runs; nothing is running now.")
    sync_api.expect(tab.locator("tr", has_text="FSDP2").first).to_be_visible()
    picture(page, "25-recorded-compared")
    nothing_is_cut_off(panel)
