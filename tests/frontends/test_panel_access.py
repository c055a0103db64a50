"""Accessibility of the panel in a real browser: keyboard, names for a screen reader, contrast in both themes and
presentation mode."""

from __future__ import annotations

import re
import time

import pytest
from accessible import NAME, focused, tab_to, violations
from browser import HEADER, RUN_TIMEOUT, in_the_kernel, open_notebook, picture, see, set_theme, sync_api, wait_for_words
from conftest import processes_of, wait_until

pytestmark = pytest.mark.browser

NOTEBOOK = (
    HEADER
    + """from labkit import Lab
Lab(strategy="zero1", workload="mlp", nproc=1, device="cpu", batch_size=64, steps=3000)

# %%
Lab(recorded="last", presentation=True)
"""
)

# The tabs, and what each shows of a run that has trained.
TABS = {
    "Live": ".labkit-live .main-svg",
    "Script & diff": ".labkit-source pre",
    "Logs": ".labkit-log-line",
    "Timeline": ".labkit-timeline .main-svg",
    "Memory": ".labkit-memory .main-svg",
    "Compare": ".labkit-card button",
    "Open…": ".labkit-paths input",
}

NAMELESS = f"""panel => {{
  const name = {NAME};
  const all = panel.querySelectorAll(
    'input, select, textarea, button, [role="tab"], [role="progressbar"], [tabindex="0"]');
  return [...all].filter(one => one.tagName !== "OPTION" && !name(one)).map(one => one.outerHTML.slice(0, 160));
}}"""

# Counts how often a page begins to observe the size of a box.
OBSERVED = """() => {
  const observe = ResizeObserver.prototype.observe;
  window.observed = 0;
  ResizeObserver.prototype.observe = function (...given) {
    window.observed += 1;
    return observe.apply(this, given);
  };
}"""

# Text that is hard to read: its contrast with the background, by WCAG 2, is below 4.5.
FAINT = """panel => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const read = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => one / 255).map(
      (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const behind = [];
    for (let one = element; one; one = one.parentElement) behind.unshift(read(getComputedStyle(one).backgroundColor));
    return behind.reduce((below, above) => over(above, below), [255, 255, 255, 1]);
  };
  const found = {};
  const walker = document.createTreeWalker(panel, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    const box = element.getBoundingClientRect();
    if (!text || ["STYLE", "OPTION", "TITLE"].includes(element.tagName) || box.width < 2 || box.height < 2) continue;
    if (element.closest(":disabled, .modebar-container") || element.querySelector(":disabled")) continue;
    if (element.matches(".labkit-does")) continue; // on a shape: see tests/figures/test_machine_picture.py
    if (element.closest("label")?.control?.disabled) continue;
    const style = getComputedStyle(element);
    if (style.visibility === "hidden") continue;
    const below = ground(element);
    const letters = over(read(element instanceof SVGElement ? style.fill : style.color), below);
    const [high, low] = [light(letters), light(below)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const name = `${element.className.baseVal ?? element.className}: ${text.slice(0, 40)}`;
    if (ratio < 4.5) found[name] = Number(ratio.toFixed(2));
  }
  return found;
}"""


def nothing_hinders_at_first(page) -> None:
    """Neither what axe finds, nor work for charts of hidden tabs: each is observed once, and then the page rests."""
    assert violations(page, ".labkit") == []
    page.evaluate(OBSERVED)

    def rests() -> bool:
        page.evaluate("window.observed = 0")
        page.wait_for_timeout(500)
        return page.evaluate("window.observed") == 0

    wait_until(rests, 20)


def test_the_panel_by_keyboard_alone(page, jupyter):
    (jupyter.work / "keys.py").write_text(NOTEBOOK)
    open_notebook(page, jupyter, "keys.py")
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Control+Enter")
    panel = page.locator(".labkit", has=page.locator(".labkit-run")).first
    sync_api.expect(panel.locator(".labkit-present")).to_be_visible(timeout=RUN_TIMEOUT)
    see(panel)
    nothing_hinders_at_first(page)
    says = panel.get_by_role("status").filter(has=page.locator(".labkit-state"))
    says.evaluate("element => (element.wasThere = true)")
    page.keyboard.press("Escape")

    tab_to(page, panel, "DDP")
    page.keyboard.press("Enter")
    sync_api.expect(panel.get_by_role("button", name="DDP", exact=True)).to_have_attribute("aria-pressed", "true")
    sync_api.expect(panel.locator(".labkit-explanation")).to_contain_text("one all-reduce per bucket")
    tab_to(page, panel, "CPU ranks")
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    page.keyboard.press("Tab")
    sync_api.expect(panel.locator(".labkit-batch")).to_contain_text("× 2 =")
    tab_to(page, panel, "Settings")
    page.keyboard.press("Enter")
    sync_api.expect(panel.get_by_label("bucket_mb")).to_be_visible()
    sync_api.expect(panel.get_by_role("button", name="Settings")).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    sync_api.expect(panel.get_by_label("bucket_mb")).to_be_hidden()
    assert focused(page) == "Settings"

    tab_to(page, panel, "Predict")
    page.keyboard.press("Shift+Tab")
    assert focused(page) == "▶ Run"
    page.keyboard.press("Enter")
    wait_for_words(panel, "training")
    assert says.evaluate("element => element.wasThere"), "a screen reader reads changes of what was there before"
    assert panel.evaluate("panel => panel.contains(document.activeElement)"), (
        "a button that becomes disabled keeps the focus in the panel"
    )
    page.keyboard.press("3")
    sync_api.expect(panel.get_by_role("tab", name="Logs")).to_have_attribute("aria-selected", "true")
    sync_api.expect(panel.get_by_role("log")).to_contain_text("loss", timeout=RUN_TIMEOUT)
    page.keyboard.press("s")
    sync_api.expect(panel).to_have_class(re.compile("labkit-presentation"))
    box = panel.bounding_box()
    assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 1280, 720)
    picture(page, "20-presentation-logs")
    page.keyboard.press("1")
    sync_api.expect(
        panel.get_by_role("figure", name=re.compile(r"Loss, loss: rank 0 [\d.]+ at \d+; rank 1"))
    ).to_be_visible()
    picture(page, "21-presentation-live")
    page.keyboard.press("r")
    wait_for_words(panel, "stopped")
    wait_until(lambda: not processes_of(str(jupyter.runs)), 10)
    page.keyboard.press("Escape")
    sync_api.expect(panel).not_to_have_class(re.compile("labkit-presentation"))
    kinds = page.evaluate("window.jupyterapp.shell.currentWidget.content.widgets.map(one => one.model.type)")
    assert kinds == ["code", "code"], "no key of the panel reached the notebook, where r makes a cell raw"

    tab_to(page, panel, "CPU ranks")
    page.keyboard.press("r")
    page.keyboard.press("s")
    in_the_kernel(page, "pass")
    sync_api.expect(panel.locator(".labkit-state")).to_have_text("stopped")
    sync_api.expect(panel).not_to_have_class(re.compile("labkit-presentation"))
    a_recorded_run_plays_in_presentation_mode(page)
    everybody_can_read_it(page, panel)


def a_recorded_run_plays_in_presentation_mode(page: sync_api.Page) -> None:
    page.locator(".jp-CodeCell .cm-content").nth(1).click()
    page.keyboard.press("Control+Enter")
    panel = page.locator(".labkit", has=page.locator(".labkit-run")).nth(1)
    wait_for_words(panel, "recorded: .+ · paused")
    sync_api.expect(panel).to_have_class(re.compile("labkit-presentation"), timeout=RUN_TIMEOUT)
    sync_api.expect(panel.locator(".labkit-recording")).to_contain_text(
        re.compile(r"DDP: MLP on digits, 2 ranks.*recorded on \d+ \w+ \d{4}, .* on 2 CPU ranks")
    )
    panel.get_by_label("speed of the replay").select_option("4×")
    panel.get_by_role("button", name="play the replay").click()
    wait_for_words(panel, "recorded: (training|stopped)")
    picture(page, "22-presentation-recorded")
    assert violations(page, ".labkit") == []
    page.keyboard.press("r")
    wait_for_words(panel, "recorded: (.+ · paused|stopped)")
    page.keyboard.press("3")
    sync_api.expect(panel.locator(".labkit-logs")).to_contain_text("complete log: log lines have no timestamps")
    sync_api.expect(panel.get_by_role("log")).to_contain_text("loss")
    page.keyboard.press("Escape")
    sync_api.expect(panel).not_to_have_class(re.compile("labkit-presentation"))
    panel.get_by_role("button", name="✕ Close").click()
    sync_api.expect(panel.get_by_role("button", name="▶ Run")).to_be_visible()


def everybody_can_read_it(page: sync_api.Page, panel: sync_api.Locator) -> None:
    """Every tab in both themes, with and without presentation mode: every control has a name, all text has enough
    contrast, and axe finds nothing serious."""
    faint = {}
    for theme in ("Light", "Dark"):
        set_theme(page, theme)
        for presentation in (False, True):
            panel.evaluate("panel => panel.focus()")
            if presentation:
                page.keyboard.press("s")
                sync_api.expect(panel).to_have_class(re.compile("labkit-presentation"))
            for number, (tab, content) in enumerate(TABS.items(), 1):
                see(panel)
                page.keyboard.press(str(number))
                sync_api.expect(panel.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")
                sync_api.expect(panel.locator(content).first).to_be_visible()
                place = f"23-{theme.lower()}{'-presentation' if presentation else ''}-{number}"
                picture(page, place)
                assert panel.evaluate(NAMELESS) == []
                assert violations(page, ".labkit") == []
                faint |= {f"{place}: {what}": ratio for what, ratio in faint_letters(panel).items()}
            if presentation:
                page.keyboard.press("Escape")
    assert not faint, "\n".join(f"{ratio} {what}" for what, ratio in faint.items())


def faint_letters(panel: sync_api.Locator, seconds: float = 10.0) -> dict[str, float]:
    """The contrast of letters that are too faint, by their text; a change of the theme has `seconds` to be drawn."""
    end = time.monotonic() + seconds
    while (found := panel.evaluate(FAINT)) and time.monotonic() < end:
        time.sleep(0.1)
    return found
