"""The panel without a browser: recorded runs, and presentation mode."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from conftest import wait_until
from fabricate import FakeRun
from panels import lines_of, sent_by, started_run

from labkit import SpecError
from labkit.frontends.panel import Lab
from labkit.frontends.panel.presentation import Presentation
from labkit.record.folder import RunFolder
from labkit.record.follow import recorded_words


@pytest.fixture
def fake(runs):
    yield from started_run(runs)


@pytest.fixture
def recorded(fake):
    """A recorded run of 20 steps, which are 50 ms apart."""
    fake.step(20)
    fake.say(0, "hello\n")
    fake.status("finished", started=fake.began, ended=fake.began + 3)
    return fake.folder


def played(lab: Lab, monkeypatch, clock: list[float]) -> Lab:
    """The panel with its recorded run open, and a clock controlled by the test."""
    times = SimpleNamespace(monotonic=lambda: clock[0], strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr("labkit.record.follow.time", times)
    wait_until(lambda: "ready to play" in lab._view.words.value)
    return lab


def test_a_recorded_run_plays_in_the_panel_at_its_own_speed(recorded, monkeypatch):
    clock = [100.0]
    lab = played(Lab(recorded="last"), monkeypatch, clock)
    assert "DDP: CNN on digits, 2 ranks" in lab._recorded.widgets[0].value
    assert "recorded on" in lab._recorded.widgets[0].value
    assert "2 CPU ranks of here" in lab._recorded.widgets[0].value
    assert lab._run_button.description == "▶ Play"
    lab._run_button.click()
    wait_until(lambda: not lab._view.stop_button.disabled)
    clock[0] += 1 + 10 * 0.05 + 0.01
    wait_until(lambda: lab._view.state.step == 10 and "recorded: training" in lab._view.words.value)
    assert lab._view.timeline._capture.disabled, "a step of a recording cannot be profiled"
    lab._view.stop_button.click()
    lab._view.wait(30)
    assert "recorded: training · paused" in lab._view.words.value
    clock[0] += 1000  # a pause, which does not count
    lab._recorded.speed.value = 4.0
    lab._run_button.click()
    wait_until(lambda: lab._view.busy and not lab._view.stop_button.disabled)
    clock[0] += 5 * 0.05 / 4
    wait_until(lambda: lab._view.state.step == 15)
    clock[0] += 1000
    lab._view.wait(30)
    assert "recorded: finished" in lab._view.words.value
    assert lab._view.state.step == 20
    lab._run_button.click()
    wait_until(lambda: lab._view.state.step == 0)
    lab._view.stop_button.click()
    lab._view.wait(30)


def test_a_paused_recording_says_so_also_if_it_stops_at_once(recorded, monkeypatch):
    lab = played(Lab(recorded="last"), monkeypatch, [100.0])
    view, say = lab._view, lab._view.say
    lab._run_button.click()
    wait_until(lambda: "recorded: " in view.words.value and not view.stop_button.disabled)

    def say_late(words: str, tone: str = "waiting") -> None:
        if words == "stopping" and view._stopping:
            view.wait(30)
        say(words, tone)

    monkeypatch.setattr(view, "say", say_late)
    view.stop_button.click()
    view.wait(30)
    assert " · paused" in view.words.value


def test_logs_of_a_recording_say_that_they_are_whole(recorded, monkeypatch):
    lab = played(Lab(recorded=recorded.path), monkeypatch, [1.0])
    messages = sent_by(lab._view.logs.page, monkeypatch)
    lab._view.logs._show({})
    assert lines_of(messages) == [(0, "stdout", "hello")]
    assert messages[-1]["note"] == "1 line · complete log: log lines have no timestamps"


def test_a_recorded_run_is_chosen_and_closed(recorded):
    lab = Lab(strategy="single")
    assert [path for _, path in lab._recorded.which.options] == ["", str(recorded.path)]
    lab._recorded.which.value = str(recorded.path)
    wait_until(lambda: lab._head.children == lab._recorded.widgets)
    lab._recorded.refresh()
    assert lab._recording is not None, "a new list keeps the selection"
    lab._recorded.close_button.click()
    assert (lab._head.children, lab._run_button.description) == (lab._own, "▶ Run")
    assert "--nproc-per-node=1" in lab._command.text
    assert not lab._view.recorded


def test_a_recorded_user_script_shows_its_command(recorded, monkeypatch):
    RunFolder.write_json(recorded.spec, {"script": "mine/<train>.py", "nproc": 2})
    RunFolder.write_text(recorded.command, "torchrun mine/train.py\n")
    lab = played(Lab(recorded="last"), monkeypatch, [1.0])
    assert "&lt;train&gt;.py, 2 ranks" in lab._recorded.widgets[0].value
    assert lab._command.text == "torchrun mine/train.py"
    assert "train.py is missing from the folder" in lab._script.value
    assert lab._batch.value == ""


def test_only_a_run_that_is_over_can_be_opened(fake):
    with pytest.raises(SpecError, match="is still running"):
        Lab(recorded="last")
    with pytest.raises(SpecError, match="there is no run 'nowhere'"):
        Lab(recorded="nowhere")
    assert [path for _, path in Lab()._recorded.which.options] == [""]


def test_a_recording_that_cannot_be_read_is_one_sentence(recorded, monkeypatch):
    def broken(folder, speed):
        raise OSError("<b>gone</b>")

    monkeypatch.setattr("labkit.frontends.panel.recorded.Recording", broken)
    lab = Lab(recorded="last")
    wait_until(lambda: "cannot be replayed" in lab._view.finding.value)
    assert "<b>gone" not in lab._view.finding.value
    assert not lab._run_button.disabled


def test_recorded_runs_are_compared_without_running_any(recorded):
    lab = Lab()
    lab._compare.show_recorded()
    told = lab._compare._view.widget.value
    assert "Recorded runs; nothing is running now." in told
    assert "recorded on" in told
    assert "<td>DDP</td>" in told


def test_nothing_to_compare_is_one_sentence(runs):
    lab = Lab()
    lab._compare.show_recorded()
    assert "no recorded run" in lab._compare._said.value


def test_when_and_where_a_run_was_recorded(runs):
    gpus = FakeRun(runs, nproc=2, device="cuda")
    gpus.start()
    gpus.status("finished", started=1_700_000_000)
    for rank, writer in enumerate(gpus.writers):
        writer.write("start", device=f"cuda:{rank}", device_name="Tesla T4", host="a<b", attempt=1)
    gpus.close()
    when = time.strftime("%H:%M", time.localtime(1_700_000_000))
    assert recorded_words(gpus.folder).endswith(f"November 2023, {when}, on 2 × GPU of here")
    nothing = RunFolder.create("nothing", runs)
    RunFolder.write_json(nothing.spec, {"nproc": 1})
    assert recorded_words(nothing) == "recorded on an unknown day, on 1 CPU rank"


def test_presentation_mode_is_set_in_the_page(runs):
    children = [child for box in Lab(presentation=True)._widget.children for child in getattr(box, "children", ())]
    inner = [each for child in children for each in getattr(child, "children", ())]
    assert [one.on for one in inner if isinstance(one, Presentation)] == [True]
