"""The panel in JupyterLab with strategies that have more to choose or to show: schedules of a pipeline, and experts."""

from __future__ import annotations

import re

import pytest
from browser import (
    LAB,
    RUN_TIMEOUT,
    command,
    nothing_is_cut_off,
    open_notebook,
    picture,
    see,
    set_theme,
    sync_api,
    wait_for_words,
)
from conftest import wait_until

pytestmark = pytest.mark.browser

DDP = 'strategy="ddp", workload="mlp", nproc=2, device="cpu", samples=1280, batch_size=64, epochs=1'
PIPELINE = LAB.replace(DDP, 'strategy="pp", workload="gpt", nproc=2, device="cpu", samples=64, batch_size=8, steps=12')
EXPERTS = LAB.replace(DDP, 'strategy="ep", workload="moe", nproc=2, device="cpu", samples=64, batch_size=4, steps=21')

# What is chosen immediately before Run is what runs, however long the kernel takes to show it.
CHOOSE_AND_RUN = """panel => {
    const words = one => one.textContent.trim().replace(/\\s/g, " ");
    const named = (selector, text) => [...panel.querySelectorAll(selector)].find(one => words(one) === text);
    named("button", "DDP").click();
    const option = named("option", "MLP · digits");
    option.selected = true;
    option.parentElement.dispatchEvent(new Event("change", {bubbles: true}));
    panel.querySelector(".labkit-run").click();
}"""

# Nothing is laid out while the panel is hidden, so that no observer of sizes sees that it was.
HIDE_FOR_A_FRAME = """async panel => {
    panel.style.display = "none";
    document.body.dataset.jpThemeName += "";
    await null;
    requestAnimationFrame(() => (panel.style.display = ""));
    panel.style.setProperty("--labkit-ink", "rgb(1, 2, 3)");
}"""
INK = """panel => [...panel.querySelectorAll(".labkit-live .labkit-chart")].map(box => box.layout.font.color)"""


def opened(page, jupyter, source: str) -> sync_api.Locator:
    """The panel of a lab with this source, after its cell has run."""
    (jupyter.work / "labs" / "panel.py").write_text(source)
    open_notebook(page, jupyter, "labs/panel.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    return panel


def test_v_shaped_schedules_are_chosen_and_run(page, jupyter):
    panel = opened(page, jupyter, PIPELINE)
    before, script = panel.locator(".labkit-before"), panel.locator(".labkit-source")
    sync_api.expect(before).to_contain_text("send 1.0 MiB")
    for number, schedule in enumerate(("ZBVZeroBubble", "DualPipeV")):
        panel.get_by_role("tab", name="Live").click()
        panel.locator(".labkit-more").click()
        panel.get_by_label("schedule").select_option(schedule)
        picture(page, f"4{number}-{schedule}-options")
        nothing_is_cut_off(panel)
        page.keyboard.press("Escape")
        sync_api.expect(before).to_contain_text("send 2.0 MiB")
        picture(page, f"4{number}-{schedule}-before-run")
        nothing_is_cut_off(panel)
        panel.get_by_role("tab", name="Script").click()
        sync_api.expect(script).to_contain_text(f"Schedule{schedule}(")
        panel.get_by_role("tab", name="Live").click()
        panel.locator(".labkit-run").click()
        wait_for_words(panel, "training")
        wait_for_words(panel, "finished")
        sync_api.expect(panel.get_by_role("figure", name=re.compile(r"^Loss.*rank 0 [\d.]+ at 12"))).to_be_visible()
        picture(page, f"4{number}-{schedule}-finished")
        nothing_is_cut_off(panel)
        panel.get_by_role("tab", name="Timeline").click()
        sync_api.expect(panel.locator(".labkit-timeline .labkit-comparison tr", has_text="send")).to_contain_text("2.0")
        picture(page, f"4{number}-{schedule}-timeline")
        nothing_is_cut_off(panel)


def test_the_load_of_experts_is_shown_while_they_train(page, jupyter):
    panel = opened(page, jupyter, EXPERTS)
    charts = panel.locator(".labkit-live .labkit-chart")
    sync_api.expect(panel.locator(".labkit-machine > svg")).to_be_visible()
    panel.locator(".labkit-run").click()
    wait_for_words(panel, "training")
    load = panel.get_by_role("figure", name=re.compile("Choices per expert.*rank 0 0 .*rank 1 0 .*even load"))
    sync_api.expect(load).to_be_visible(timeout=RUN_TIMEOUT)
    sync_api.expect(panel.locator(".labkit-state")).to_have_text(re.compile("training"))
    picture(page, "42-experts-training")
    nothing_is_cut_off(panel)
    wait_for_words(panel, "finished")
    sync_api.expect(load).to_be_visible()
    for theme in ("Dark", "Light"):
        set_theme(page, theme)
        see(panel)
        picture(page, f"42-experts-{theme.lower()}")
        nothing_is_cut_off(panel)
    panel.evaluate(HIDE_FOR_A_FRAME)
    wait_until(lambda: set(panel.evaluate(INK)) == {"rgb(1, 2, 3)"}, 20)
    panel.evaluate("panel => panel.style.removeProperty('--labkit-ink')")
    panel.locator(".labkit-present").click()
    picture(page, "42-experts-presentation")
    nothing_is_cut_off(panel)
    panel.locator(".labkit-present").click()
    panel.evaluate(CHOOSE_AND_RUN)
    sync_api.expect(charts).to_have_count(4)
    wait_for_words(panel, "finished")
