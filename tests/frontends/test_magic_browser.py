"""`%%torchrun` in JupyterLab: separate output of each rank, Stop, and the output that stays after a page reload; and
ranks that stay across cells."""

from __future__ import annotations

import re

import pytest
from browser import RUN_TIMEOUT, command, open_notebook, picture, see, set_theme, sync_api
from conftest import processes_of, wait_until

pytestmark = pytest.mark.browser

HEAD = """# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %%
# %load_ext labkit
"""
NOTEBOOK = f"""{HEAD}
# %%
# %%torchrun 4 --device cpu
x = torch.full((2,), float(rank))
dist.all_reduce(x)
print("<b>I am</b> rank", rank, "and have", x.tolist())
report(total=x, rank=rank)

# %%
# %%torchrun 2 --device cpu
print("rank", rank, "waits", flush=True)
time.sleep(600)
"""


def test_a_cell_on_four_ranks_and_one_that_is_stopped(page, jupyter):
    (jupyter.work / "cells.py").write_text(NOTEBOOK)
    open_notebook(page, jupyter, "cells.py")
    command(page, "notebook:run-all-cells")
    sums, held = page.locator(".jp-CodeCell").nth(1), page.locator(".jp-CodeCell").nth(2)
    sync_api.expect(held.locator(".labkit-cell-state")).to_have_text(
        re.compile("waiting for the previous cell"), timeout=RUN_TIMEOUT
    )
    sync_api.expect(sums.locator(".labkit-cell-state")).to_have_text(
        re.compile("finished on 4 CPU ranks"), timeout=RUN_TIMEOUT
    )
    for rank in range(4):
        block = sums.get_by_role("group", name=f"rank {rank}", exact=True)
        sync_api.expect(block).to_contain_text(f"<b>I am</b> rank {rank} and have [6.0, 6.0]")
    assert sums.locator(".labkit-cell-rank b", has_text="I am").count() == 0, "the ranks' output is text, never markup"
    sync_api.expect(sums.locator(".labkit-cell-reports tr")).to_have_count(5)
    sync_api.expect(sums.get_by_role("button", name="Stop")).to_have_count(0)

    sync_api.expect(held.locator(".labkit-cell-rank", has_text="rank 1 waits")).to_be_visible(timeout=RUN_TIMEOUT)
    see(sums)
    picture(page, "20-torchrun-cells")
    held.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    sync_api.expect(held.locator(".labkit-cell-state")).to_have_text(re.compile("stopped after"), timeout=RUN_TIMEOUT)
    wait_until(lambda: not processes_of(str(jupyter.runs)), 10)
    sync_api.expect(held.get_by_role("button", name="Stop")).to_have_count(0)
    sums.locator(".labkit-cell-script summary").click()
    sync_api.expect(sums.get_by_text("init_process_group")).to_be_visible()
    set_theme(page, "Dark")
    see(sums)
    picture(page, "21-torchrun-dark")

    command(page, "docmanager:save")
    wait_until(lambda: "stopped after" in (jupyter.work / "cells.ipynb").read_text(encoding="utf-8"), 30)
    page.reload()
    sync_api.expect(held.locator(".labkit-cell-state")).to_have_text(re.compile("stopped after"), timeout=60_000)
    sync_api.expect(sums.locator(".labkit-cell-reports tr")).to_have_count(5)


KEPT = f"""{HEAD}
# %%
# %%torchrun 4 --keep --device cpu
model = torch.nn.Linear(1000, 1000)
x = torch.full((2, 3), float(rank))
dist.all_reduce(x)
print("every rank prints this")
x

# %%
# %%ranks
share = x[0] * (rank + 1)
share

# %%
# %ranks

# %%
# %%ranks
if rank == 2:
    raise ValueError("<b>no</b> data on this rank")
dist.all_reduce(share)

# %%
print("not reached")
"""


def test_ranks_that_stay_across_cells(page, jupyter):
    (jupyter.work / "kept.py").write_text(KEPT)
    open_notebook(page, jupyter, "kept.py")
    command(page, "notebook:run-all-cells")
    first, second, table, failed, last = (page.locator(".jp-CodeCell").nth(number) for number in range(1, 6))
    sync_api.expect(failed.locator(".labkit-cell-state")).to_contain_text(
        "rank 2 failed at line 3: ValueError: <b>no</b> data", timeout=RUN_TIMEOUT
    )
    sync_api.expect(failed.locator(".labkit-cell-state")).to_contain_text(
        "ranks 0–1, 3 waited in all_reduce #2 at line 4; rank 2 raised an exception. So the process group was",
        timeout=RUN_TIMEOUT,
    )
    common = first.get_by_role("group", name="ranks 0–3", exact=True)
    sync_api.expect(common).to_contain_text("every rank prints this")
    sync_api.expect(common.locator(".labkit-cell-value")).to_contain_text("tensor([[6., 6., 6.],")
    for rank in range(4):
        block = second.get_by_role("group", name=f"rank {rank}", exact=True)
        sync_api.expect(block.locator(".labkit-cell-value")).to_contain_text(f"tensor([{6 * (rank + 1)}., ")
    sync_api.expect(table.locator(".labkit-ranks")).to_contain_text("1,001,000 parameters")
    sync_api.expect(last.locator(".jp-OutputArea-output")).to_have_count(0)
    see(second)
    picture(page, "22-kept-ranks")
    set_theme(page, "Dark")
    see(failed)
    picture(page, "23-kept-ranks-dark")


WIDGETS = f"""{HEAD}
# %%
# %%torchrun 2 --keep --device cpu
import ipywidgets
slider, label = ipywidgets.IntSlider(value=3), ipywidgets.Label("not moved")

def moved(change):
    label.value = f"rank {{rank}} has {{change.new}}"

slider.observe(moved, "value")

# %%
# %%ranks 1
ipywidgets.VBox([slider, label])
"""


def test_a_widget_of_a_rank_calls_functions_there(page, jupyter):
    (jupyter.work / "widgets.py").write_text(WIDGETS)
    open_notebook(page, jupyter, "widgets.py")
    command(page, "notebook:run-all-cells")
    cell = page.locator(".jp-CodeCell").nth(2)
    sync_api.expect(cell.locator(".widget-label").last).to_have_text("not moved", timeout=RUN_TIMEOUT)
    cell.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(cell.locator(".widget-label").last).to_have_text("rank 1 has 4")
    see(cell)
    picture(page, "24-widget-of-a-rank")


STOPS = f"""{HEAD}
# %%
# %%torchrun 2 --keep --device cpu
total = 0
for number in range(3):
    if rank == 1 and number == 1:
        breakpoint()
    total += number
x = torch.full((1,), float(total))
dist.all_reduce(x)
x
"""


def test_a_rank_is_stepped_in_the_notebook_while_the_other_waits(page, jupyter):
    (jupyter.work / "stops.py").write_text(STOPS)
    open_notebook(page, jupyter, "stops.py")
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")  # a command would wait until the cell is over
    cell = page.locator(".jp-CodeCell").nth(1)
    for number, text in enumerate(("p number", "!total = 40", "n", "c")):
        prompts = cell.locator(".jp-Stdin-prompt", has_text="rank 1: (Pdb)")
        sync_api.expect(prompts).to_have_count(number + 1, timeout=RUN_TIMEOUT)
        if number == 3:
            sync_api.expect(cell.locator(".labkit-cell-state")).to_contain_text("rank 1 asks")
            see(cell)
            picture(page, "25-debugger-of-a-rank")
        cell.locator(".jp-Stdin-input").last.fill(text)
        page.keyboard.press("Enter")
    sync_api.expect(cell.locator(".labkit-cell-state")).to_contain_text("ran on ranks 0–1", timeout=RUN_TIMEOUT)
    sync_api.expect(cell.locator(".labkit-cell-value").first).to_contain_text("tensor([46.])")
