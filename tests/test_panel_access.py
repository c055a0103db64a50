"""Accessibility of the panel in a real browser: keyboard, names for a screen reader, contrast in both themes and
presentation mode.
"""

from __future__ import annotations

import re

import pytest
from conftest import processes_of, wait_until
from test_browser import PICTURES, SECONDS, command, jupyter, open_notebook, page, picture, see, wait_for_words  # noqa: F401

sync_api = pytest.importorskip("playwright.sync_api")
sync_api.expect.set_options(timeout=60_000)  # ms: a busy machine takes its time
pytestmark = pytest.mark.browser

NOTEBOOK = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %%
from labkit import Lab
Lab(strategy="zero1", workload="mlp", nproc=1, device="cpu", batch_size=64, steps=3000)

# %%
Lab(recorded="last", presentation=True)
"""

# The accessible name of an element of the panel.
NAME = """element => (element.ariaLabel || [...(element.labels ?? [])].map(one => one.textContent).join(" ")
    || element.textContent || element.title || "").trim()"""

NAMELESS = f"""panel => {{
  const name = {NAME};
  const all = panel.querySelectorAll('input, select, textarea, button, [role="tab"], [role="progressbar"], [tabindex="0"]');
  return [...all].filter(one => one.tagName !== "OPTION" && !name(one)).map(one => one.outerHTML.slice(0, 160));
}}"""

SHOWS_FOCUS = """() => {
  const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
  return outlineStyle !== "none" && outlineWidth !== "0px";
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
    const [r, g, b] = colour.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
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
    if (element.closest("label")?.control?.disabled) continue;
    const style = getComputedStyle(element);
    if (style.visibility === "hidden") continue;
    const below = ground(element);
    const letters = over(read(element instanceof SVGElement ? style.fill : style.color), below);
    const [high, low] = [light(letters), light(below)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found[`${element.className.baseVal ?? element.className}: ${text.slice(0, 40)}`] = Number(ratio.toFixed(2));
  }
  return found;
}"""


def focused(page: sync_api.Page) -> str:  # noqa: F811
    """The name of the focused element."""
    return page.evaluate(f"({NAME})(document.activeElement)")


def tab_to(page: sync_api.Page, panel: sync_api.Locator, name: str) -> None:  # noqa: F811
    """Presses Tab until `name` has the focus; every focused element of the panel must have a visible focus and a name.
    """
    for _ in range(80):
        page.keyboard.press("Tab")
        if not panel.evaluate("panel => panel !== document.activeElement && panel.contains(document.activeElement)"):
            continue
        assert page.evaluate(SHOWS_FOCUS), f"nothing shows that {focused(page)!r} has the focus"
        assert focused(page)
        if focused(page) == name:
            return
    raise AssertionError(f"{name!r} is not reached by the Tab key")


def test_the_panel_by_keyboard_alone(page, jupyter, runs):  # noqa: F811
    (jupyter.work / "keys.py").write_text(NOTEBOOK)
    open_notebook(page, jupyter, "keys.py")
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Control+Enter")
    panel = page.locator(".labkit", has=page.locator(".labkit-run")).first
    sync_api.expect(panel.locator(".labkit-present")).to_be_visible(timeout=SECONDS)
    see(panel)
    page.keyboard.press("Escape")

    tab_to(page, panel, "DDP")
    page.keyboard.press("Enter")
    sync_api.expect(panel.get_by_role("button", name="DDP", exact=True)).to_have_attribute("aria-pressed", "true")
    sync_api.expect(panel.locator(".labkit-explanation")).to_contain_text("one all-reduce per bucket")
    tab_to(page, panel, "CPU ranks")
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    page.keyboard.press("Tab")
    sync_api.expect(panel.locator(".labkit-command code")).to_have_text(re.compile("nproc-per-node=2"))
    tab_to(page, panel, "Options")
    page.keyboard.press("Enter")
    sync_api.expect(panel.get_by_label("bucket_mb")).to_be_visible()
    sync_api.expect(panel.get_by_role("button", name="Options")).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    sync_api.expect(panel.get_by_label("bucket_mb")).to_be_hidden()
    assert focused(page) == "Options"

    tab_to(page, panel, "▶ Run")
    page.keyboard.press("Enter")
    wait_for_words(panel, "training")
    assert panel.evaluate("panel => panel.contains(document.activeElement)"), "a button that becomes disabled keeps the focus in the panel"
    page.keyboard.press("3")
    sync_api.expect(panel.get_by_role("tab", name="Logs")).to_have_attribute("aria-selected", "true")
    sync_api.expect(panel.get_by_role("log")).to_contain_text("loss", timeout=SECONDS)
    page.keyboard.press("s")
    sync_api.expect(panel).to_have_class(re.compile("labkit-presentation"))
    box = panel.bounding_box()
    assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 1280, 720)
    picture(page, "20-presentation-logs")
    page.keyboard.press("1")
    sync_api.expect(panel.get_by_role("img", name=re.compile(r"Loss, loss: rank 0 [\d.]+ at \d+; rank 1"))).to_be_visible()
    picture(page, "21-presentation-live")
    page.keyboard.press("r")
    wait_for_words(panel, "stopped")
    wait_until(lambda: not processes_of(str(runs)), 10)
    page.keyboard.press("Escape")
    sync_api.expect(panel).not_to_have_class(re.compile("labkit-presentation"))
    kinds = page.evaluate("window.jupyterapp.shell.currentWidget.content.widgets.map(one => one.model.type)")
    assert kinds == ["code", "code"], "no key of the panel reached the notebook, where r makes a cell raw"

    tab_to(page, panel, "CPU ranks")
    page.keyboard.press("r")
    page.keyboard.press("s")
    page.wait_for_timeout(500)
    sync_api.expect(panel.locator(".labkit-state")).to_have_text("stopped")
    sync_api.expect(panel).not_to_have_class(re.compile("labkit-presentation"))
    a_recorded_run_plays_in_presentation_mode(page)
    everything_is_readable(page, panel)


def a_recorded_run_plays_in_presentation_mode(page: sync_api.Page) -> None:  # noqa: F811
    page.locator(".jp-CodeCell .cm-content").nth(1).click()
    page.keyboard.press("Control+Enter")
    panel = page.locator(".labkit", has=page.locator(".labkit-run")).nth(1)
    wait_for_words(panel, "recorded: ready to play")
    sync_api.expect(panel).to_have_class(re.compile("labkit-presentation"), timeout=SECONDS)
    sync_api.expect(panel.locator(".labkit-recording")).to_contain_text(
        re.compile(r"DDP: MLP on digits, 2 ranks.*recorded on \d+ \w+ \d{4}, .* on 2 CPU ranks")
    )
    panel.get_by_label("Speed", exact=True).select_option("4×")
    panel.get_by_role("button", name="▶ Play").click()
    wait_for_words(panel, "recorded: (training|stopped)")
    picture(page, "22-presentation-recorded")
    page.keyboard.press("r")
    wait_for_words(panel, "recorded: (training · paused|stopped)")
    page.keyboard.press("3")
    sync_api.expect(panel.locator(".labkit-logs")).to_contain_text("complete log: log lines have no timestamps")
    sync_api.expect(panel.get_by_role("log")).to_contain_text("loss")
    page.keyboard.press("Escape")
    panel.get_by_role("button", name="✕ Close").click()
    sync_api.expect(panel.get_by_role("button", name="▶ Run")).to_be_visible()


def everything_is_readable(page: sync_api.Page, panel: sync_api.Locator) -> None:  # noqa: F811
    """Every tab in both themes, with and without presentation mode: every control has a name, and all text has enough
    contrast.
    """
    faint = {}
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        command(page, "apputils:change-theme", theme=theme)
        page.wait_for_function(f"document.body.dataset.jpThemeLight === '{'true' if 'Light' in theme else 'false'}'")
        for presentation in (False, True):
            panel.evaluate("panel => panel.focus()")
            if presentation:
                page.keyboard.press("s")
            for number in range(1, 7):
                see(panel)
                page.keyboard.press(str(number))
                page.wait_for_timeout(400)
                assert panel.evaluate(NAMELESS) == []
                mode = "-presentation" if presentation else ""
                faint |= {f"{theme}{mode} tab {number} {what}": ratio for what, ratio in panel.evaluate(FAINT).items()}
                page.screenshot(path=PICTURES / f"23-{theme[11:].lower()}{mode}-{number}.png")
            if presentation:
                page.keyboard.press("Escape")
    assert not faint, "\n".join(f"{ratio} {what}" for what, ratio in faint.items())
