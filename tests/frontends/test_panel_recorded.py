"""The panel without a browser: recorded runs, and presentation mode."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
from conftest import wait_until
from fabricate import FakeRun, finished_folder
from panels import lines_of, reading, sent_by, started_run

from labkit import SpecError
from labkit.frontends.panel.lab import Lab
from labkit.frontends.panel.recorded import under_way
from labkit.frontends.panel.widgets import Presentation
from labkit.record.folder import RunFolder
from labkit.record.follow import recorded_words
from labkit.record.packed import shipped


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


def opened(lab: Lab) -> Lab:
    """The panel with its recorded run open."""
    wait_until(lambda: lab._open is not None and not lab._starting)
    return lab


def test_a_recorded_run_plays_in_the_panel_at_its_own_speed(recorded, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(
        "labkit.frontends.panel.recorded.time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock[0]})
    )
    lab = opened(Lab(recorded="last"))
    view, replay = lab._view, lab._view.replay
    assert "DDP: CNN on digits, 2 ranks" in lab._recorded.title.value
    assert "recorded on" in lab._recorded.title.value
    assert "2 CPU ranks of here" in lab._recorded.title.value
    assert view.state.step == 0 and "recorded: " in view.words.value
    assert lab._own.layout.display == "none", "it has a time line instead"
    replay.play()
    wait_until(lambda: "paused" not in view.words.value)
    clock[0] += 1 + 10 * 0.05 + 0.01
    wait_until(lambda: view.state.step == 10 and "recorded: training" in view.words.value)
    assert view.timeline._capture.disabled, "a step of a recording cannot be profiled"
    replay.play(False)
    wait_until(lambda: "recorded: training · paused" in view.words.value)
    clock[0] += 1000  # a pause, which does not count
    replay.set_speed(4.0)
    replay.play()
    wait_until(lambda: "paused" not in view.words.value)
    assert view.state.step == 10
    clock[0] += 5 * 0.05 / 4
    wait_until(lambda: view.state.step == 15)
    clock[0] += 1000
    wait_until(lambda: "recorded: finished" in view.words.value)
    assert view.state.step == 20 and not replay.playing
    replay.play()
    wait_until(lambda: view.state.step == 0)


def test_a_run_that_is_over_can_be_seen_at_any_moment(recorded):
    lab = opened(Lab(recorded="last"))
    view, replay = lab._view, lab._view.replay
    replay.to_step(12)
    wait_until(lambda: view.state.step == 12)
    replay.to_step(3)
    wait_until(lambda: view.state.step == 3 and "training · paused" in view.words.value)
    replay.seek(1e9)
    wait_until(lambda: view.state.over and view.state.step == 20)
    replay.seek(-1.0)
    wait_until(lambda: view.state.step == 0 and not view.state.over)


def test_the_moments_of_a_run_are_sent_to_a_page(recorded, monkeypatch):
    lab = opened(Lab(recorded="last"))
    messages = sent_by(lab._view.replay.page, monkeypatch)
    lab._view.replay._send_all()
    course, place = messages
    assert course["course"]["seconds"] == pytest.approx(3.0)
    assert course["course"]["steps"] == 20
    moments = {moment["kind"]: moment for moment in course["course"]["moments"]}
    assert moments["start"]["position"] == pytest.approx(1.05)
    assert (moments["end"]["what"], moments["end"]["position"]) == ("finished", pytest.approx(3.0))
    assert (place["position"], place["playing"]) == (0.0, False)
    lab._recorded.choose("")
    assert messages[-1] == {"kind": "course", "course": None, "buffers": None}, "the configuration has no time line"


def test_a_new_panel_says_what_is_under_way(fake):
    assert under_way().startswith(f"{fake.folder.name} is under way")
    fake.end()
    assert under_way() == ""


def test_a_run_that_comes_with_the_lab_is_opened(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lab = Lab()
    lines = {path: line for line, path in lab._recorded.which.options}
    line, _, where = lines["shipped:ddp-x2"].rpartition(" · ")
    assert where == "comes with the lab"
    assert re.fullmatch(r"\d\d \w+ \d\d:\d\d · DDP · CNN, 30 steps · 2 ranks · finished", line)
    lab._recorded.which.value = "shipped:ddp-x2"
    opened(lab)
    assert "DDP: CNN on digits, 2 ranks" in lab._recorded.title.value
    lab._view.replay.to_step(20)
    wait_until(lambda: lab._view.state.step == 20)


def test_a_run_that_failed_has_a_recorded_one_instead(runs, monkeypatch):
    lab = Lab(strategy="fsdp2", workload="mlp", nproc=3, steps=5, device="cpu")
    assert lab._instead.button.layout.display == "none"
    monkeypatch.setattr("labkit.frontends.panel.lab.start", failing)
    lab._run_button.click()
    wait_until(lambda: not lab._instead.button.layout.display)
    assert lab._instead.button.description == "Open a recorded FSDP2 run"
    lab._instead.button.click()
    opened(lab)
    assert "FSDP2: " in lab._recorded.title.value and "2 ranks" in lab._recorded.title.value
    assert lab._instead.button.layout.display == "none"


def failing(*arguments, **named):
    raise OSError("no space left on device")


def test_runs_with_the_same_line_are_told_apart(runs):
    for _ in range(2):
        finished_folder(runs, "ddp", 2, step_seconds=0.1)
    lines = [line for line, path in Lab()._recorded.which.options if path and path not in shipped()]
    assert len(set(lines)) == 2 and all("10 steps" in line for line in lines)


def test_two_runs_are_replayed_in_step(recorded, runs):
    """The second one takes twice as long for a step."""
    slow = finished_folder(runs, "fsdp2", 2, step_seconds=0.1)
    lab = opened(Lab(recorded=[recorded.path, slow.path]))
    view = lab._view
    view.replay.to_step(7)
    wait_until(lambda: view.state.step == 7)
    wait_until(lambda: "step 7" in view._beside.names[1].value)
    assert "FSDP2" in view._beside.names[1].value and "DDP" in view._beside.names[0].value
    assert view._beside.machine.widget in view.live.children
    lab._recorded.beside.value = ""
    wait_until(lambda: view._beside.machine.widget not in view.live.children and not lab._starting)
    with pytest.raises(SpecError, match="a run or a pair of runs"):
        Lab(recorded=["last"] * 3)


def test_logs_of_a_recording_say_that_they_are_whole(recorded, monkeypatch):
    lab = opened(Lab(recorded=recorded.path))
    messages = sent_by(lab._view.logs.page, monkeypatch)
    lab._view.logs._show({})
    assert lines_of(messages) == [(0, "stdout", "hello")]
    assert messages[-1]["note"] == "1 line · complete log: log lines have no timestamps"


def test_a_recorded_run_is_chosen_and_closed(recorded):
    lab = reading(Lab(strategy="single"))
    assert [path for _, path in lab._recorded.which.options][:2] == ["", str(recorded.path)]
    lab._recorded.which.value = str(recorded.path)
    wait_until(lambda: not lab._recorded.widget.layout.display)
    lab._recorded.refresh()
    assert lab._open is not None, "a new list keeps the selection"
    lab._recorded.close_button.click()
    assert (lab._own.layout.display, lab._recorded.widget.layout.display) == ("", "none")
    assert "--nproc-per-node=1" in lab._sources().command.text
    assert not lab._view.recorded


def test_a_recorded_user_script_shows_its_command(recorded):
    RunFolder.write_json(recorded.spec, {"script": "mine/<train>.py", "nproc": 2})
    RunFolder.write_text(recorded.command, "torchrun mine/train.py\n")
    lab = opened(Lab(recorded="last"))
    assert "&lt;train&gt;.py, 2 ranks" in lab._recorded.title.value
    assert reading(lab)._sources().command.text == "torchrun mine/train.py"
    assert "train.py is missing from the folder" in lab._sources().script.value
    assert lab._batch.value == ""


def test_only_a_run_that_is_over_can_be_opened(fake):
    with pytest.raises(SpecError, match="is still running"):
        Lab(recorded="last")
    with pytest.raises(SpecError, match="there is no run 'nowhere'"):
        Lab(recorded="nowhere")
    assert all(path in ("", *shipped()) for _, path in Lab()._recorded.which.options)


def test_a_recording_that_cannot_be_read_is_one_sentence(recorded, monkeypatch):
    def broken(folder):
        raise OSError("<b>gone</b>")

    monkeypatch.setattr("labkit.frontends.panel.recorded.Recording", broken)
    lab = Lab(recorded="last")
    wait_until(lambda: "cannot be replayed" in lab._view.finding.value)
    assert "<b>gone" not in lab._view.finding.value
    assert not lab._run_button.disabled


def test_recorded_runs_are_compared_without_running_any(recorded):
    lab = Lab()
    lab._compare().show_recorded()
    told = lab._compare()._view.widget.value
    assert "Recorded runs; nothing is running now." in told
    assert "recorded on" in told
    assert "<td>DDP</td>" in told


def test_nothing_to_compare_is_one_sentence(runs):
    lab = Lab()
    lab._compare().show_recorded()
    assert "no recorded run" in lab._compare()._said.value


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
