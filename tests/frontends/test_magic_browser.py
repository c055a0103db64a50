"""`%%torchrun` in JupyterLab: separate output of each rank, Stop, and the output that stays after a page reload."""

from __future__ import annotations

import re

import pytest
from browser import RUN_TIMEOUT, command, open_notebook, picture, see, set_theme, sync_api
from conftest import processes_of, wait_until

pytestmark = pytest.mark.browser

NOTEBOOK = """# ---
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
