"""How fast the panel answers in a page: its first picture, a choice while ranks train, the frames of the machine."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench.notebook import opened, served
from bench.results import Result
from labkit.cli.project import lab_environment
from labkit.setup.environment import BROWSERS

if TYPE_CHECKING:
    from playwright.sync_api import Page

_RANKS, _PICTURED = 8, 16
_TIMES, _CHOICES = 5, 20
_FILMED = 10.0  # seconds
_CELL = f"""from labkit import Lab
lab = Lab(strategy="ddp", workload="mlp", nproc={_RANKS}, device="cpu", steps=1_000_000)
lab"""

_NOTEBOOK = "window.jupyterapp.shell.currentWidget"
_SELECT = f"{_NOTEBOOK}.content.select({_NOTEBOOK}.content.widgets[0])"
_KERNEL = f"{_NOTEBOOK}.sessionContext.session.kernel"
_RESTART = f"""{_KERNEL}.restart()
    .then(() => {_KERNEL}.requestExecute({{ code: "", silent: true }}).done).then(() => {_SELECT})"""
# In the page, so that nothing but the page and the kernel is measured: milliseconds from an action to the first frame
# in which something is there.
_UNTIL = """([act, there, limit]) => new Promise((done, fail) => {
    const isThere = new Function(`return ${there}`);
    const began = performance.now();
    new Function(act)();
    const look = () => {
        const passed = performance.now() - began;
        if (isThere()) done(passed);
        else if (passed > limit) fail(new Error(`${there}: not within ${limit} ms`));
        else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
})"""
_LIMIT = 30_000  # ms
_PICTURE = "document.querySelector('.labkit-machine > svg')?.checkVisibility()"


def panel() -> list[Result]:
    """Milliseconds to the first picture of a panel, to its answer while 8 ranks train, and of the page's thread per
    frame with 16 ranks; in a JupyterLab that Chromium shows."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not (browser and find_spec("playwright") and find_spec("jupyterlab")):
        return []
    with (
        tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as place,
        served(_CELL, Path(place), _environment() | {"LABKIT_RUNS": f"{place}/runs"}) as address,
        opened(browser, address) as page,
    ):
        pictures = [_first_picture(page) for _ in range(_TIMES)]
        page.locator(".labkit-run").click()
        page.wait_for_selector(".labkit-busy")
        page.wait_for_selector(".labkit-live .labkit-chart")
        answers = [_answer(page, name) for _ in range(_CHOICES // 2) for name in ("ZeRO-1", "DDP")]
        page.locator(".labkit-stop").click()
        page.wait_for_selector(".labkit-run:enabled")
        frame, frames = _frame(page)
    return [
        _median("panel: first picture after the cell", pictures, "≤ 1,000 ms", "a new kernel each time"),
        _median(
            f"panel: answer to a choice while {_RANKS} CPU ranks train",
            answers,
            "≤ 100 ms",
            f"most {max(answers):.0f} ms",
        ),
        Result(
            f"panel: the page's thread per frame, {_PICTURED} ranks",
            frame,
            "ms",
            "≤ 16 ms",
            (frame,),
            f"{frames} frames of a predicted step",
        ),
    ]


def _environment() -> dict[str, str]:
    """The environment that `labkit lab` gives JupyterLab; modules are compiled once, as for users."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | lab_environment()


def _median(name: str, each: list[float], aim: str, note: str) -> Result:
    return Result(name, statistics.median(each), "ms", aim, tuple(each), f"{len(each)} times; {note}")


def _first_picture(page: Page) -> float:
    page.evaluate(_RESTART)
    page.wait_for_function(f"!({_PICTURE})")
    return page.evaluate(_UNTIL, ["window.jupyterapp.commands.execute('notebook:run-cell')", _PICTURE, _LIMIT])


def _answer(page: Page, name: str) -> float:
    """The description of the strategy has changed."""
    buttons = "[...document.querySelectorAll('.labkit-strategy button')]"
    said = "document.querySelector('.labkit-explanation').textContent"
    page.evaluate(f"window.saidBefore = {said}")
    return page.evaluate(
        _UNTIL,
        [f"{buttons}.find((one) => one.textContent === '{name}').click()", f"{said} !== window.saidBefore", _LIMIT],
    )


def _frame(page: Page) -> tuple[float, int]:
    """How long the page's thread works for a frame while the picture moves, in milliseconds, and the number of
    frames."""
    page.evaluate("window.frames_ = 0; (function count() { window.frames_++; requestAnimationFrame(count); })()")
    ranks = page.get_by_label("CPU ranks", exact=True)
    ranks.fill(str(_PICTURED))
    ranks.press("Tab")
    page.get_by_role("button", name="Predict", exact=True).click()
    page.get_by_role("button", name="play the step").click()
    page.get_by_role("button", name="pause the step").wait_for()
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.enable")
    busy, frames = _work(page, tools)
    page.wait_for_timeout(_FILMED * 1000)
    later, last = _work(page, tools)
    return 1000 * (later - busy) / max(1, last - frames), last - frames


def _work(page: Page, tools: object) -> tuple[float, int]:
    metrics = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
    return metrics["TaskDuration"], page.evaluate("window.frames_")
