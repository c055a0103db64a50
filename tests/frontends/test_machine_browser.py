"""The picture of the machine in a browser: it moves while a run trains, shows any moment that one points at, and moves
in a handout, too."""

from __future__ import annotations

import re

import pytest
from accessible import focused, tab_to, violations
from browser import HEADER, RUN_TIMEOUT, command, open_notebook, picture, see, set_theme, sync_api, wait_for_words
from conftest import PICTURES, wait_until
from folded import applied
from profiled_steps import MIB, memory_event, timeline_event

from labkit.figures.machine import film, stills
from labkit.frontends.handout.page import Page, Plots
from labkit.record.documents import SpecFields
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

pytestmark = pytest.mark.browser

TRAINS = """from labkit import Lab
Lab(strategy="ddp", workload="mlp", nproc=2, device="cpu", fault="slow_loader", steps=100000, sample_every=5)
"""
FLOWS = "machine => machine.querySelectorAll('.labkit-flow:not([stroke=none])').length"


@pytest.fixture
def machine(page, jupyter):
    """The picture in a panel whose run trains until it is stopped."""
    (jupyter.work / "labs" / "machine.py").write_text(HEADER + TRAINS)
    open_notebook(page, jupyter, "labs/machine.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    panel.locator(".labkit-run").click()
    sync_api.expect(panel.locator(".labkit-film span")).to_contain_text("measured", timeout=RUN_TIMEOUT)
    return panel.locator(".labkit-machine")


def moment(machine: sync_api.Locator) -> int:
    return int(machine.get_by_label("moment of the step").input_value())


def test_the_step_is_played_while_the_run_trains_and_any_moment_can_be_seen(page, machine):
    pause, slider = machine.locator("button"), machine.get_by_label("moment of the step")
    sync_api.expect(pause).to_have_accessible_name("pause the step")
    seen = {moment(machine)}
    wait_until(lambda: seen.add(moment(machine)) or len(seen) > 10, 60)
    wait_until(lambda: machine.evaluate(FLOWS), 60)
    picture(page, "70-machine-training")
    pause.click()
    sync_api.expect(pause).to_have_accessible_name("play the step")
    slider.fill("119")
    sync_api.expect(machine.locator(".labkit-film span")).to_contain_text(re.compile(r"^(\d+ ms|[\d.]+ s) of "))
    assert moment(machine) == 119
    slider.press("Home")
    assert moment(machine) == 0
    page.locator(".labkit-stop").click()
    wait_for_words(page.locator(".labkit"), "stopped")
    sync_api.expect(pause).to_have_accessible_name("play the step")
    set_theme(page, "Dark")
    see(page.locator(".labkit").first)
    picture(page, "71-machine-dark")
    pause.click()
    wait_until(lambda: moment(machine) > 0, 60)
    the_run_has_a_time_line(page)


def the_run_has_a_time_line(page) -> None:
    """Of the run that has just been stopped: any step can be seen again, and it plays from there."""
    panel = page.locator(".labkit").first
    line, where = panel.locator(".labkit-replay"), panel.locator(".labkit-replay-where")
    sync_api.expect(line.get_by_role("button", name="peak of memory")).to_be_visible(timeout=RUN_TIMEOUT)
    line.get_by_label("go to step").press_sequentially("2")
    line.get_by_label("go to step").press("Enter")
    sync_api.expect(where).to_contain_text("step 2 of")
    sync_api.expect(panel.locator(".labkit-advance")).to_contain_text("step 2/")
    wait_for_words(panel, "replay: training · paused")
    picture(page, "72-time-line-dark")
    assert violations(page, ".labkit") == []
    line.get_by_role("button", name="play the replay").click()
    sync_api.expect(where).not_to_contain_text("step 2 of", timeout=RUN_TIMEOUT)
    line.get_by_role("button", name="pause the replay").click()
    wait_for_words(panel, "replay: training · paused")
    line.get_by_role("button", name="stopped").click()
    wait_for_words(panel, "^stopped")
    set_theme(page, "Light")
    see(panel)
    picture(page, "73-time-line")
    assert violations(page, ".labkit") == []
    a_run_is_read_by_keyboard_alone(page, panel)


def a_run_is_read_by_keyboard_alone(page, panel) -> None:
    """What was found in it, and any moment of it."""
    panel.evaluate("panel => panel.focus()")
    tab_to(page, panel, "Why?")
    page.keyboard.press("Enter")
    sync_api.expect(panel.get_by_role("button", name="Why?")).to_have_attribute("aria-expanded", "true")
    sync_api.expect(panel.locator(".labkit-diagnoses")).to_contain_text("Fix")
    page.keyboard.press("Escape")
    assert focused(page) == "Why?"
    tab_to(page, panel, "moment of the run")
    page.keyboard.press("Home")
    wait_for_words(panel, "replay: .* · paused")
    tab_to(page, panel, "play the replay")


def test_nothing_moves_by_itself_for_a_reader_who_does_not_want_it(page, jupyter, request):
    page.emulate_media(reduced_motion="reduce")
    machine = request.getfixturevalue("machine")
    stays = moment(machine)
    sync_api.expect(machine.locator("button")).to_have_accessible_name("play the step")
    page.wait_for_timeout(1000)
    assert moment(machine) == stays
    style = "machine => getComputedStyle(machine.querySelector('.labkit-flow')).animationName"
    assert machine.evaluate(style) == "none"
    a_panel_whose_kernel_was_restarted_says_so(page, jupyter)


def a_panel_whose_kernel_was_restarted_says_so(page, jupyter) -> None:
    """It shows nothing that seems to be alive, and the run that it had started has ended."""
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    panel = page.locator(".labkit").first
    sync_api.expect(panel.locator(".labkit-stop")).to_be_hidden(timeout=RUN_TIMEOUT)
    said = panel.evaluate("panel => getComputedStyle(panel, '::before').content")
    assert "no longer connected" in said
    picture(page, "74-kernel-restarted")
    (folder,) = RunFolder.all(jupyter.runs)
    wait_until(lambda: folder.read_status().state == "stopped", 60)


@pytest.fixture
def handout(chromium, tmp_path):
    """A page with one machine, opened without a network."""
    state = RunState()
    state.spec = SpecFields(nproc=2)
    owners = {"parameters": [4 * MIB] * 3, "activations": [0, 4 * MIB, 0]}
    for event in (timeline_event(0), timeline_event(1), memory_event(0, owners), memory_event(1, owners)):
        state.apply(applied(event))
    plots = Plots()
    file = Page("A run", "of two ranks", plots.machine(state), plots=plots).write(tmp_path / "page.html")
    context = chromium.new_context(viewport={"width": 900, "height": 700}, offline=True)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(file.as_uri())
    yield page, state
    context.close()
    assert not errors


def test_a_handout_moves_and_is_printed_as_key_frames(handout):
    page, state = handout
    machine = page.locator(".labkit-machine")
    sync_api.expect(machine.locator("svg")).to_be_visible()
    sync_api.expect(page.locator(".stills")).to_be_hidden()
    assert moment(machine) == film(state).peak
    machine.locator("button").click()
    seen = {moment(machine)}
    wait_until(lambda: seen.add(moment(machine)) or len(seen) > 10, 60)
    wait_until(lambda: machine.evaluate(FLOWS) == 2, 60)
    page.screenshot(path=PICTURES / "72-machine-in-a-handout.png")
    assert violations(page) == []
    page.emulate_media(media="print")
    sync_api.expect(machine).to_be_hidden()
    sync_api.expect(page.locator(".stills figure")).to_have_count(stills(state).count("<figure>"))
    sync_api.expect(page.locator(".stills svg").first).to_be_visible()
