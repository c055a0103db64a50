"""JupyterLab in a real browser: one server and one Chromium per session, and what the browser tests share.

The fixtures `jupyterlab`, `jupyter`, `chromium` and `page` in `conftest.py` use it. Importing this module
without Playwright skips the tests that need it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from conftest import PICTURES, end_processes_of, wait_until
from places import ROOT

from labkit.cli.project import kernel_of_this_python
from labkit.record.folder import RunFolder
from labkit.setup.environment import BROWSERS, RENDERER, RENDERER_VARIABLE

sync_api = pytest.importorskip("playwright.sync_api")
sync_api.expect.set_options(timeout=60_000)  # ms, for a busy machine

TOKEN = "for-these-tests-only"
RUN_TIMEOUT = 120_000  # ms that a run may need to reach a state on a busy machine
NOTEBOOK = "window.jupyterapp.shell.currentWidget.content"  # in the page: the notebook that is open, and its cells
CELLS = f"{NOTEBOOK}.widgets"
# in the cell with this number a prediction that is still three dots becomes 1
PREDICT = (
    f"number => {{ const cell = {CELLS}[number].model.sharedModel;"
    """ cell.setSource(cell.getSource().replace(/(guess\\("\\w+", )\\.\\.\\./g, "$11")) }"""
)
HEADER = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %%
"""
LAB = (
    HEADER
    + """from labkit import Lab
Lab(strategy="ddp", workload="mlp", nproc=2, device="cpu", samples=1280, batch_size=64, epochs=1)
"""
)

# In the page: anywidget gives up on a widget that has not started after two seconds, here on the first six at once.
FIRST_STARTS_FAIL = """
const timeout = AbortSignal.timeout.bind(AbortSignal);
let starts = 0;
AbortSignal.timeout = (ms) => timeout(ms === 2000 && starts++ < 6 ? 0 : ms);
"""

# Text that its box hides. The line of a finding may be longer than the panel is wide: "Why?" shows all of it.
CLIPPED = """(element) => [...element.querySelectorAll("*")].filter((one) => {
  const style = getComputedStyle(one);
  if (!(one instanceof HTMLElement) || !one.checkVisibility() || style.clipPath !== "none") return false;
  if (["INPUT", "SELECT", "CODE"].includes(one.tagName) || one.matches(".labkit-finding")) return false;
  if (!["hidden", "clip"].includes(style.overflowX) || !one.textContent.trim()) return false;
  const end = one.getBoundingClientRect().right - parseFloat(style.paddingRight);
  const ends = [...one.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => {
    const text = document.createRange();
    text.selectNode(node);
    return text.getBoundingClientRect().right;
  });
  return one.scrollWidth > one.clientWidth + 1 || Math.max(...ends) > end + 1;
}).map((one) => `${one.className}: ${one.textContent.trim()}`)"""
TITLES = """(element) => [...element.querySelectorAll(".labkit-chart")]
  .filter((one) => one.checkVisibility()).map((chart) => {
  const box = (one) => one?.getBoundingClientRect();
  const [title, legend, axis] = [".gtitle", ".legendtext", ".ytitle"].map((name) => box(chart.querySelector(name)));
  if (!title) return "a chart that has no title yet";
  const besides = legend && legend.left < title.right && legend.top < title.bottom - 2;
  const meets = besides || (axis && axis.top < title.bottom);
  return title.right > box(chart).right || meets ? chart.querySelector(".gtitle").textContent : "";
}).filter(Boolean)"""


# ---- the server and the browser


@dataclass(frozen=True)
class Jupyter:
    """One test's part of the server: `work` is a folder that it serves, `runs` has the run folders of its kernels."""

    url: str
    work: Path
    runs: Path

    def file(self, path: str) -> str:
        """The address that opens a file of `work`."""
        return f"{self.url}/lab/tree/{quote(f'{self.work.name}/{path}')}?token={TOKEN}"


@dataclass(frozen=True)
class Server:
    """A JupyterLab that serves one test after another; everything that it reads and writes is in `home`."""

    url: str
    home: Path
    numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def clone(self) -> Iterator[Jupyter]:
        """A copy of the labs for one test, whose kernels and runs end with it. Settings and workspaces are reset."""
        for name in ("settings", "workspaces"):
            shutil.rmtree(self.home / name, ignore_errors=True)
        work, runs = self.home / "root" / f"clone {next(self.numbers)}", self.home / "runs"
        shutil.copytree(ROOT / "labs", work / "labs", ignore=shutil.ignore_patterns("*.ipynb", ".ipynb_checkpoints"))
        runs.mkdir()
        try:
            yield Jupyter(self.url, work, runs)
        finally:
            for kind in ("sessions", "kernels"):
                for one in self.ask(kind):
                    self.ask(f"{kind}/{one['id']}", "DELETE")
            left = end_processes_of(runs, 30)
            plans = [folder.read_launch() for folder in RunFolder.all(runs)]
            differing = [plan for plan in plans if "differs" in plan.cold_because]
            shutil.rmtree(runs)
            shutil.rmtree(work)
            assert not left, f"runs outlived their kernel: {left}"
            assert not differing, f"runs of a kernel cannot start warm: {differing}"

    def ask(self, what: str, method: str = "GET") -> Any:
        """The answer of Jupyter's REST API."""
        headers = {"Authorization": f"token {TOKEN}"}
        request = urllib.request.Request(f"{self.url}/api/{what}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")


@contextmanager
def jupyterlab() -> Iterator[Server]:
    """A JupyterLab on a free loopback port, with nothing of the user's; its kernels end with it.

    Its environment is that of this process, but for Jupyter's own variables: so the tests' warm server starts the
    ranks.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        home = Path(place)
        root = home / "root"
        root.mkdir()
        own = {
            "IPYTHONDIR": "ipython",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "LABKIT_RUNS": "runs",
        }  # not HOME: packages in the home folder are one of the facts by which a run may start warm
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
        environment |= {name: str(home / folder) for name, folder in own.items()}
        environment["JUPYTER_PATH"] = str(kernel_of_this_python(home))
        environment["JUPYTER_CONFIG_PATH"] = str(ROOT / "labkit" / "setup" / "jupyter")
        environment[RENDERER_VARIABLE] = RENDERER
        argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
        argv += ["--ServerApp.port_retries=0"]
        argv += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={root}", "--expose-app-in-browser"]
        argv += ["--ServerApp.min_open_files_limit=0"]  # the limits of a process are another such fact
        argv += ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
        with open(home / "jupyter.log", "w") as log:
            process = subprocess.Popen(argv, env=environment, cwd=root, stdout=log, stderr=log)
        server = Server(f"http://127.0.0.1:{port}", home)
        try:
            wait_until(lambda: answers(server), 120)
            yield server
        finally:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.terminate()
            _, left = psutil.wait_procs(family, timeout=20)
            for one in left:
                one.kill()
            process.wait(10)


def answers(server: Server) -> bool:
    try:
        return "version" in server.ask("")
    except OSError:
        return False


@contextmanager
def chromium() -> Iterator[sync_api.Browser]:
    """The Chromium of this machine; without one, the test is skipped."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


# ---- what a test does with a page


# The first requests of a page are sometimes lost between JupyterLab and its server: it would never know the state of
# the kernel, which connecting again tells it, and a cell would wait for ever. True once the kernel has answered.
ANSWERS = """(() => {
    const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
    const late = kernel && performance.now() - (window.asked ??= performance.now()) > 10000;
    if (late && window.answered !== true) {
        [window.asked, window.answered] = [performance.now(), undefined];
        kernel.reconnect();
    } else if (kernel?.status === "idle" && window.answered === undefined) {
        window.answered = false;
        kernel.requestExecute({ code: "", silent: true }).done.then(() => (window.answered = true));
    }
    return window.answered === true;
})()"""
# JavaScript has no time limit of its own.
_EXECUTE = """([name, given, limit]) => Promise.race([
    window.jupyterapp.commands.execute(name, given).then(() => null),
    new Promise((_, fail) => setTimeout(() => fail(new Error(`${name} has not ended`)), limit)),
])"""


def open_notebook(page: sync_api.Page, jupyter: Jupyter, path: str) -> None:
    page.goto(jupyter.file(path))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    wait_until(lambda: page.evaluate(ANSWERS), 120)


def command(page: sync_api.Page, name: str, **arguments: str) -> None:
    page.evaluate(_EXECUTE, [name, arguments, 5 * RUN_TIMEOUT])


def in_the_kernel(page: sync_api.Page, code: str) -> None:
    """Executes code outside of any cell; what the page asked of the kernel before has been done by then."""
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    execute = f"code => {kernel}.requestExecute({{ code }}).done.then(reply => reply.content.status)"
    assert page.evaluate(execute, code) == "ok"


def set_theme(page: sync_api.Page, name: str) -> None:
    """`name` is Light or Dark."""
    command(page, "apputils:change-theme", theme=f"JupyterLab {name}")
    page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=str(name == "Light").lower())
    page.wait_for_selector("#jupyterlab-splash", state="detached")  # it fades over the page


def see(panel: sync_api.Locator) -> None:
    panel.evaluate("element => element.scrollIntoView({block: 'start'})")


def picture(page: sync_api.Page, name: str) -> None:
    """A screenshot for a person to look at, after the next frames of the page and without the pointer."""
    page.mouse.move(0, 0)
    drawn(page)
    page.screenshot(path=PICTURES / f"{name}.png")


def drawn(page: sync_api.Page) -> None:
    """Waits for two frames of the page: what a change asks for is drawn in the first, and laid out by the second."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def points(panel: sync_api.Locator, chart: str) -> int:
    """The most points that a trace of a chart has, as plotly holds it."""
    found = panel.locator(f'.labkit-chart[data-chart="{chart}"]')
    most = "box => Math.max(0, ...(box.data ?? []).map(trace => trace.x.length))"
    return found.evaluate(most) if found.count() else 0


def wait_for_words(panel: sync_api.Locator, words: str) -> None:
    sync_api.expect(panel.locator(".labkit-state")).to_have_text(re.compile(words), timeout=RUN_TIMEOUT)


def nothing_is_cut_off(panel: sync_api.Locator) -> None:
    """Neither text in a box that hides what is too wide for it, nor the title of a chart.

    Charts are drawn again in a frame after a change of the layout, so that they may be cut off until then.
    """
    for script in (CLIPPED, TITLES):
        end = time.monotonic() + 10
        while (cut := panel.evaluate(script)) and time.monotonic() < end:
            time.sleep(0.2)
        assert not cut, cut
    assert panel.evaluate("element => element.scrollWidth <= element.clientWidth + 1"), "the panel is too wide"
