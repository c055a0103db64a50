"""The real thing: JupyterLab in a real browser, lab 00 opened by its file, Run and Stop pressed, the page loaded again."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import processes_of, wait_until

sync_api = pytest.importorskip("playwright.sync_api")
sync_api.expect.set_options(timeout=60_000)  # ms: a busy machine takes its time
pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "screenshots"
TOKEN = "for-this-test-only"
SECONDS = 120_000  # ms that a run may take to get somewhere on a busy machine
CHATTER = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
print("<b>hello</b> from rank", dist.get_rank(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
NOTEBOOK = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %%
from labkit import run, show
show(run("chatter.py", nproc=2, device="cpu"))
"""


@dataclass
class Jupyter:
    """A JupyterLab of the test's own; `work` is what it serves."""

    url: str
    work: Path

    def file(self, path: str) -> str:
        """The address that opens a file."""
        return f"{self.url}/lab/tree/{path}?token={TOKEN}"


def browser_path() -> str | None:
    """A Chromium of this machine."""
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@pytest.fixture
def jupyter(runs, tmp_path) -> Iterator[Jupyter]:
    """JupyterLab on a free loopback port, with nothing of the user's; it and its kernels are ended afterwards."""
    work = tmp_path / "a clone"
    shutil.copytree(ROOT / "labs", work / "labs", ignore=shutil.ignore_patterns("*.ipynb", ".ipynb_checkpoints"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
    environment |= {"HOME": str(home), "JUPYTER_CONFIG_PATH": str(ROOT / "labkit" / "jupyter"), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    argv += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={work}", "--expose-app-in-browser"]
    argv += ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    with open(tmp_path / "jupyter.log", "w") as log:
        server = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    started = Jupyter(f"http://127.0.0.1:{port}", work)
    try:
        wait_until(lambda: answers(f"{started.url}/api/status?token={TOKEN}"), 60)
        yield started
    finally:
        family = [server, *psutil.Process(server.pid).children(recursive=True)]
        server.terminate()
        _, left = psutil.wait_procs([psutil.Process(one.pid) for one in family if psutil.pid_exists(one.pid)], timeout=20)
        for process in left:
            process.kill()
        server.wait(10)


@pytest.fixture
def page(jupyter) -> Iterator[sync_api.Page]:
    """A page as wide as a projector; an error in it fails the test."""
    path = browser_path()
    if path is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    errors: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    assert not errors


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def open_notebook(page: sync_api.Page, jupyter: Jupyter, path: str) -> None:
    page.goto(jupyter.file(path))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000)


def command(page: sync_api.Page, name: str, **arguments: str) -> None:
    page.evaluate("([name, given]) => window.jupyterapp.commands.execute(name, given).then(() => null)", [name, arguments])


def see(panel: sync_api.Locator) -> None:
    panel.evaluate("element => element.scrollIntoView({block: 'start'})")


def picture(page: sync_api.Page, name: str) -> None:
    """A screenshot for a person to look at, with the pointer out of the way."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)
    page.screenshot(path=PICTURES / f"{name}.png")


def points(panel: sync_api.Locator, chart: str) -> int:
    """The most points that a trace of a chart has, as plotly holds it."""
    found = panel.locator(f'.labkit-chart[data-chart="{chart}"]')
    return found.evaluate("box => Math.max(0, ...(box.data ?? []).map(trace => trace.x.length))") if found.count() else 0


def wait_for_words(panel: sync_api.Locator, words: str) -> None:
    sync_api.expect(panel.locator(".labkit-state")).to_have_text(re.compile(words), timeout=SECONDS)


def test_lab_00_in_jupyterlab(page, jupyter, runs):
    open_notebook(page, jupyter, "labs/00_start_here.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=SECONDS)
    see(panel)
    sync_api.expect(panel.locator(".labkit-command code")).to_have_text(re.compile("torchrun --standalone --nproc-per-node=2"))
    fits_the_projector(panel)

    panel.locator(".labkit-run").click()
    wait_for_words(panel, "training")
    wait_until(lambda: points(panel, "loss") > 2, 120)
    before = points(panel, "loss")
    wait_until(lambda: points(panel, "loss") > before and points(panel, "memory") > 2, 120)
    picture(page, "1-live-light")
    command(page, "apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    see(panel)
    picture(page, "2-live-dark")
    command(page, "apputils:change-theme", theme="JupyterLab Light")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'true'")
    see(panel)
    script_and_diff(page, panel)
    wait_for_words(panel, "finished")
    keepsake_is_in_the_notebook(page, "finished")

    see(panel)
    panel.locator(".labkit-run").click()
    wait_for_words(panel, "training")
    wait_until(lambda: points(panel, "loss") > 2, 120)
    panel.locator(".labkit-stop").click()
    wait_for_words(panel, "stopped")
    wait_until(lambda: not processes_of(str(runs)), 10)
    picture(page, "5-stopped")
    keepsake_is_in_the_notebook(page, "stopped")

    had = points(panel, "loss")
    command(page, "docmanager:save")
    wait_until(lambda: "stopped · " in (jupyter.work / "labs" / "00_start_here.ipynb").read_text(encoding="utf-8"), 30)
    assert (jupyter.work / "labs" / "00_start_here.py").read_text() == (ROOT / "labs" / "00_start_here.py").read_text()
    page.reload()
    panel.wait_for(timeout=60_000)
    see(panel)
    wait_until(lambda: points(panel, "loss") >= had, 60)
    wait_for_words(panel, "stopped")
    see(panel)
    picture(page, "6-after-reload")
    keepsake_is_in_the_notebook(page, "stopped")


def fits_the_projector(panel: sync_api.Locator) -> None:
    """All of the panel can be seen at once, beside JupyterLab's own bars."""
    box = panel.bounding_box()
    assert box["width"] <= 1280
    assert box["height"] <= 600
    assert panel.evaluate("element => element.scrollWidth <= element.clientWidth + 1")


def script_and_diff(page: sync_api.Page, panel: sync_api.Locator) -> None:
    panel.get_by_role("tab", name="Script & diff").click()
    sync_api.expect(panel.locator(".labkit-source")).to_contain_text("DistributedDataParallel")
    picture(page, "3-script")
    panel.get_by_text("What changes from one device").click()
    sync_api.expect(panel.locator(".labkit-gi").first).to_be_visible()
    picture(page, "4-diff")
    panel.get_by_role("tab", name="Live").click()


def keepsake_is_in_the_notebook(page: sync_api.Page, state: str) -> None:
    """The plain figure and the table stand under the panel, one of each, outside of any widget."""
    last = page.locator(".jp-CodeCell", has=page.locator(".labkit-run"))
    figure = last.locator(".jp-RenderedPlotly")
    sync_api.expect(figure).to_have_count(1, timeout=60_000)
    figure.evaluate("element => element.scrollIntoView()")  # plotly draws what is in sight; of a saved one it shows the image first
    sync_api.expect(figure.locator(".main-svg, img").first).to_be_visible(timeout=60_000)
    sync_api.expect(last.locator(".jp-RenderedHTMLCommon table", has_text="ms per step")).to_have_count(1, timeout=60_000)
    picture(page, f"8-keepsake-{state}")
    sync_api.expect(last.get_by_text(re.compile(rf"{state} · \d+ steps"))).to_be_visible()


def test_logs_of_two_ranks_of_a_script_of_ones_own(page, jupyter):
    (jupyter.work / "chatter.py").write_text(CHATTER)
    (jupyter.work / "watch.py").write_text(NOTEBOOK)
    open_notebook(page, jupyter, "watch.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit")
    panel.wait_for(timeout=SECONDS)
    wait_for_words(panel, "finished")
    panel.get_by_role("tab", name="Logs").click()
    lines = panel.locator(".labkit-log-line")
    for rank in (0, 1):
        sync_api.expect(lines.filter(has_text=f"<b>hello</b> from rank {rank}")).to_have_count(1, timeout=30_000)
    assert panel.locator(".labkit-log-lines b").count() == 0, "the ranks' output is text, never markup"
    panel.get_by_label("Search the whole log").fill("FROM RANK 1")
    sync_api.expect(panel.locator("mark")).to_have_text(["from rank 1"], timeout=30_000)
    picture(page, "7-logs")


LAB = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %%
from labkit import Lab
Lab(strategy="ddp", workload="mlp", nproc=2, device="cpu", samples=1280, batch_size=64, epochs=1)
"""


def test_strategies_are_chosen_and_compared(page, jupyter):
    (jupyter.work / "labs" / "compare.py").write_text(LAB)
    open_notebook(page, jupyter, "labs/compare.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=SECONDS)
    see(panel)
    fits_the_projector(panel)
    panel.locator(".labkit-further select").select_option("PP × DDP")
    sync_api.expect(panel.locator(".labkit-explanation")).to_contain_text("the batch over the other (DDP)")
    panel.locator(".labkit-more").click()
    sync_api.expect(panel.get_by_text("micro_batches", exact=True)).to_be_visible()
    picture(page, "6-options-of-a-further-strategy")
    panel.locator(".labkit-more").click()
    panel.get_by_role("button", name="TP", exact=True).click()
    sync_api.expect(panel.locator(".labkit-explanation")).to_contain_text("a part of every split matrix")
    panel.get_by_role("tab", name="Compare").click()
    tab = panel.locator(".labkit-compare")
    sync_api.expect(tab.get_by_label("CP")).to_be_disabled()
    tab.get_by_label("FSDP2", exact=True).uncheck()
    tab.get_by_label("TP", exact=True).check()
    picture(page, "7-compare-chosen")
    tab.locator(".labkit-compare-run").click()
    sync_api.expect(tab.locator("tr", has_text="Single").first).to_contain_text("reference", timeout=SECONDS)
    for title in ("DDP", "TP"):
        sync_api.expect(tab.locator("tr", has_text=title).locator(".labkit-good")).to_have_text("equal", timeout=SECONDS)
    sync_api.expect(tab.locator(".labkit-compare-run")).to_be_enabled(timeout=SECONDS)
    picture(page, "8-compared")
    command(page, "apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    see(panel)
    picture(page, "9-compared-dark")


SLOW = LAB.replace("samples=1280, batch_size=64, epochs=1", "batch_size=64, steps=80")


def test_a_step_is_captured_and_a_fault_is_found(page, jupyter, runs):
    (jupyter.work / "labs" / "slow.py").write_text(SLOW)
    open_notebook(page, jupyter, "labs/slow.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=SECONDS)
    see(panel)
    panel.locator(".labkit-more").click()
    panel.get_by_label("goes wrong").select_option("One rank is slow")
    sync_api.expect(panel.locator(".labkit-popover")).to_contain_text("The others wait for it in backward.")
    picture(page, "10-a-fault-is-chosen")
    panel.locator(".labkit-more").click()
    panel.locator(".labkit-run").click()
    wait_for_words(panel, "training")
    panel.get_by_role("tab", name="Timeline").click()
    timeline = panel.locator(".labkit-timeline")
    wait_until(lambda: timeline.locator(".labkit-chart .bars path").count() > 4, 120)
    timeline.get_by_role("button", name="Capture a step").click()
    sync_api.expect(timeline).to_contain_text(re.compile(r"step \d+ was captured"), timeout=SECONDS)
    sync_api.expect(timeline.locator("td", has_text="all_reduce").first).to_be_visible()
    picture(page, "11-timeline")
    timeline.get_by_role("button", name="Save trace").click()
    sync_api.expect(timeline).to_contain_text("trace.json")
    assert list(runs.glob("*/trace.json"))
    panel.get_by_role("tab", name="Memory").click()
    memory = panel.locator(".labkit-memory")
    wait_until(lambda: memory.locator(".labkit-chart .main-svg").count() > 1, 60)
    picture(page, "12-memory")
    command(page, "apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    see(panel)
    picture(page, "13-memory-dark")
    panel.get_by_role("tab", name="Live").click()
    sync_api.expect(panel.locator(".labkit-finding").first).to_contain_text("rank 1 is slower than the other ranks", timeout=SECONDS)
    panel.get_by_role("button", name="Why?").click()
    sync_api.expect(panel.get_by_text("every collective waits for the last rank")).to_be_visible()
    sync_api.expect(panel.get_by_text("look at what this rank does between the phases")).to_be_visible()
    picture(page, "14-finding")
    wait_for_words(panel, "finished")
