"""The panel without a browser: the configuration and its effects, and the messages sent to a page."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from conftest import wait_until
from fabricate import FakeRun

from labkit import SpecError
from labkit.figures.tables import ranks_html
from labkit.frontends.panel import Lab
from labkit.frontends.panel.charts import LIVE, Charts
from labkit.frontends.panel.choices import Choices
from labkit.frontends.panel.feed import CAP, WHOLE, Feed
from labkit.frontends.panel.logs import Logs
from labkit.frontends.panel.presentation import Presentation
from labkit.frontends.panel.view import RunView
from labkit.frontends.panel.words import finding_html, state_html
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.replay import recorded_words
from labkit.setup import preflight
from labkit.setup.machine import Gpu, Machine
from labkit.training.options import COMMON
from labkit.training.strategies import STRATEGIES

CPU = Machine(gpus=(), cores=2, memory=8 << 30)
T4S = Machine(gpus=tuple(Gpu(index, "Tesla T4", 15 << 30, (7, 5)) for index in range(2)), cores=4, memory=31 << 30)


@pytest.fixture
def fake(runs):
    """A fabricated run of two ranks that has just started."""
    run = FakeRun(runs)
    run.start()
    yield run
    run.close()


def choices_of(machine: Machine, **defaults) -> Choices:
    return Choices(machine, defaults, lambda: None)


def sent_by(page, monkeypatch) -> list[dict]:
    """Collects the messages sent to a page."""
    messages: list[dict] = []
    monkeypatch.setattr(
        page,
        "send",
        lambda message, buffers=None: messages.append(json.loads(json.dumps(message)) | {"buffers": buffers}),
    )
    return messages


# ---- the choices


def test_choices_start_as_given_and_make_the_spec():
    spec = choices_of(CPU, strategy="ddp", nproc=2, steps=60, seed=3).spec()
    assert (spec.strategy, spec.nproc, spec.steps, spec.epochs, spec.seed, spec.device) == (
        "ddp",
        2,
        60,
        None,
        3,
        "cpu",
    )


def test_invalid_defaults_are_refused():
    with pytest.raises(SpecError, match="must be one of"):
        choices_of(CPU, strategy="dpp")
    with pytest.raises(SpecError, match="2 GPUs"):
        choices_of(T4S, strategy="ddp", nproc=4)


def test_ranks_follow_the_strategy_and_come_back():
    choices = choices_of(CPU, strategy="ddp", nproc=3)
    choices.strategy.value = "single"
    assert (choices.nproc.value, choices.nproc.disabled) == (1, True)
    choices.strategy.value = "fsdp2"
    assert (choices.nproc.value, choices.nproc.disabled) == (3, False)


def test_a_machine_with_t4s_offers_gpus_and_no_bf16():
    choices = choices_of(T4S)
    assert (choices.device.value, choices.nproc.description, choices.nproc.max) == ("cuda", "GPUs", 2)
    assert choices.precision.options == ("fp32", "fp16")
    choices.device.value = "cpu"
    assert (choices.nproc.description, choices.nproc.max) == ("CPU ranks", T4S.max_cpu_ranks)
    assert choices.precision.options == ("fp32", "bf16")


def test_scaling_keeps_the_global_batch():
    choices = choices_of(CPU, strategy="ddp", nproc=2, batch_size=128)
    choices.scaling.value = "strong"
    assert (choices.batch.value, choices.spec().global_batch) == (256, 256)
    choices.scaling.value = "weak"
    assert choices.batch.value == 128


def test_the_workload_brings_its_batch_and_options():
    choices = choices_of(CPU, strategy="ddp", nproc=2)
    choices.workload.value = ("gpt", "text")
    assert choices.batch.value == 16
    assert [
        widget.description
        for widget in choices._options.popover.children
        if hasattr(widget, "description") and widget.description
    ] == [
        *(option.name for option in STRATEGIES["ddp"].options),
        *(option.name for option in COMMON),
        "size",
        "context",
        "Inject fault",
    ]
    choices.strategy.value = "single"
    options = choices.spec().options
    assert "bucket_mb" not in options
    assert options["size"] == "1M"


# ---- the panel


def test_a_choice_shows_batch_command_script_and_diff_before_run():
    lab = Lab(strategy="ddp", nproc=2, steps=20)
    assert "128 per rank × 2 = 256 global" in lab._batch.value
    assert lab._command.text == "torchrun --standalone --nproc-per-node=2 train.py"
    assert "DistributedDataParallel" in lab._script.value
    assert "labkit-gi" in lab._diff.value
    lab._choices.strategy.value = "single"
    assert "--nproc-per-node=1" in lab._command.text
    assert "DistributedDataParallel" not in lab._script.value
    assert "labkit-empty" in lab._diff.value


def test_what_cannot_run_is_one_sentence_and_no_run():
    lab = Lab(strategy="ddp", nproc=2, steps=20)
    lab._choices.scaling.value = "strong"
    lab._choices.batch.value = 255
    assert "is not divisible by 2 ranks" in lab._batch.value
    assert lab._run_button.disabled
    lab._choices.batch.value = 256
    assert not lab._run_button.disabled


def test_run_in_the_panel_to_its_end_without_torch_in_this_process(runs):
    import subprocess
    import sys

    code = """
import sys, labkit
lab = labkit.Lab(strategy="ddp", nproc=2, steps=4, samples=600, workload="mlp", device="cpu")
lab._run_button.click()
assert lab._run_button.disabled
import time
while lab.run is None: time.sleep(0.05)
lab._view.wait(120)
assert "finished" in lab._view.words.value, (lab._view.words.value, lab._view.finding.value)
assert not lab._run_button.disabled and lab._view.stop_button.disabled
assert lab._view.state.step == 4
print([name for name in ("torch", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "[]", done.stderr


# ---- following a run


@dataclass
class FakeJob:
    """A job that ends its fabricated run when it is stopped."""

    run: FakeRun

    @property
    def folder(self) -> RunFolder:
        return self.run.folder

    def stop(self) -> None:
        self.run.end("stopped")


def test_a_view_follows_a_run_and_stops_it(fake):
    ended = []
    view = RunView(lambda name, state: ended.append((name, state.status["state"])))
    view.follow(FakeJob(fake))
    fake.step(50)
    wait_until(lambda: "step 50/200" in view.progress.value)
    assert "training" in view.words.value
    assert not view.stop_button.disabled
    view.stop_button.click()
    assert view.stop_button.disabled
    view.wait(30)
    assert "stopped" in view.words.value
    assert ended == [(fake.folder.name, "stopped")]
    assert not view.busy


def test_a_stop_that_fails_says_so(fake):
    class Stubborn(FakeJob):
        def stop(self) -> None:
            raise RuntimeError("run x runs on another host; <b>stop</b> it there")

    view = RunView()
    view.follow(Stubborn(fake))
    wait_until(lambda: not view.stop_button.disabled)
    fake_finding = []
    view.finding.observe(lambda change: fake_finding.append(change["new"]), "value")
    view.stop()
    wait_until(lambda: any("another host" in value for value in fake_finding))
    assert "<b>stop</b>" not in "".join(fake_finding)
    fake.end()
    view.wait(30)


def test_a_run_whose_folder_is_deleted_is_shown_as_ended(fake):
    view = RunView()
    view.follow(FakeJob(fake))
    fake.step(20)
    wait_until(lambda: "step 20/200" in view.progress.value)
    shutil.rmtree(fake.folder.path)
    view.wait(30)
    assert not view.busy and view.stop_button.disabled
    assert "the run folder was deleted or moved while the run was under way" in view.words.value
    assert "step 20/200" in view.progress.value, "what was read stays"


def test_a_run_that_failed_shows_who_and_why(fake):
    fake.writers[1].write("error", type="ValueError", message="<img src=x>", traceback="")
    fake.end("failed", exit_code=1)
    view = RunView()
    view.follow(FakeJob(fake))
    view.wait(30)
    assert "rank 1 failed first" in view.finding.value
    assert "failed (rank 1: ValueError" in view.words.value
    assert "<img" not in view.finding.value + view.words.value


# ---- what a page is told


def test_a_feed_sends_everything_once_and_then_only_new_points(fake):
    follower, feed = Follower(fake.folder), Feed(LIVE)
    fake.step(20)
    follower.poll()
    whole = feed.message(follower.state)
    assert [piece["name"] for piece in whole["charts"]] == ["loss", "throughput", "memory", "phases"]
    assert all("whole" in piece for piece in whole["charts"])
    assert feed.message(follower.state) is None
    fake.step(25)
    follower.poll()
    more = {piece["name"]: piece["more"] for piece in feed.message(follower.state)["charts"]}
    assert [len(xs) for _, xs, *_ in more["loss"]["points"]] == [
        2,
        2,
        2,
    ], "one redraw has the minimum and the maximum of its steps"
    assert [len(xs) for _, xs, *_ in more["throughput"]["points"]] == [1]
    assert len(json.dumps(more)) < 2_000


def test_a_page_holds_a_bounded_number_of_points(fake):
    follower, feed = Follower(fake.folder), Feed(LIVE)
    held, wholes, least = {}, 0, 0
    for _ in range(CAP):
        fake.step(2)
        follower.poll()
        for piece in (feed.message(follower.state) or {"charts": []})["charts"]:
            if piece["name"] == "loss" and "whole" in piece:
                wholes += 1
                held = {index: len(trace["x"]) for index, trace in enumerate(piece["whole"]["data"])}
                least = max(held.values())
            elif piece["name"] == "loss":
                for index, xs, *_ in piece["more"]["points"]:
                    held[index] += len(xs)
        assert max(held.values()) <= CAP + 3
    assert 2 <= wholes <= 6
    assert least <= WHOLE


def test_axes_of_a_page_only_grow(fake):
    follower, feed = Follower(fake.folder), Feed(LIVE)
    ends = []
    for _ in range(30):
        fake.step(3)
        follower.poll()
        for piece in (feed.message(follower.state) or {"charts": []})["charts"]:
            if piece["name"] == "phases":
                ends.append(
                    piece["whole"]["layout"]["yaxis"]["range"][1]
                    if "whole" in piece
                    else (piece["more"]["y"] or [0, ends[-1]])[1]
                )
    assert ends == sorted(ends)
    assert len(set(ends)) <= 3


def test_a_new_page_receives_everything(fake, monkeypatch):
    fake.step(10)
    follower = Follower(fake.folder)
    follower.poll()
    charts = Charts()
    messages = sent_by(charts.page, monkeypatch)
    charts.restart(follower.state)
    assert messages == [], "no page is connected yet"
    charts._heard(charts.page, {"kind": "ready"}, [])
    wait_until(lambda: messages)
    charts._heard(charts.page, {"kind": "ready"}, [])  # the page was loaded again
    wait_until(lambda: len(messages) == 2)
    assert messages[0] == messages[1]
    charts._heard(charts.page, {"kind": "plotly"}, [])
    packed = wait_until(lambda: next((message["buffers"] for message in messages if message["kind"] == "plotly"), None))
    assert len(packed[0]) < 2_000_000


def test_a_front_end_without_widgets_gets_svg(fake, monkeypatch):
    monkeypatch.setattr("labkit.frontends.panel.charts._PATIENCE", 0.05)
    fake.step(10)
    follower = Follower(fake.folder)
    follower.poll()
    charts = Charts()
    charts.shown()
    charts.restart(follower.state)
    assert charts.plain.value == ""
    wait_until(lambda: charts.plain.value.count("<svg") == 4)
    charts._heard(charts.page, {"kind": "here"}, [])
    wait_until(lambda: charts.plain.layout.display == "none")


# ---- logs


def lines_of(messages: list[dict]) -> list[tuple[int, str, str]]:
    return [tuple(line[:3]) for message in messages for line in message["lines"]]


def test_new_log_lines_are_sent_with_rank_and_stream(fake, monkeypatch):
    logs = Logs()
    messages = sent_by(logs.widget, monkeypatch)
    logs.restart(fake.folder, 2)
    fake.say(0, "hello\nhalf")
    fake.say(1, "<b>careful</b>\n", "stderr")
    logs.draw()
    assert messages == [], "no page is connected yet"
    logs._show({"rank": "", "stream": "", "query": ""})
    assert lines_of(messages) == [(0, "stdout", "hello"), (1, "stderr", "<b>careful</b>")]
    assert messages[0]["ranks"] == [0, 1]
    messages.clear()
    fake.say(0, " a line\n")
    logs.draw()
    assert lines_of(messages) == [(0, "stdout", "half a line")]
    messages.clear()
    logs._show({"rank": "1", "stream": "stderr", "query": ""})
    assert lines_of(messages) == [(1, "stderr", "<b>careful</b>")]


def test_a_burst_of_lines_is_bounded_and_ends_with_the_newest(fake, monkeypatch):
    logs = Logs()
    messages = sent_by(logs.widget, monkeypatch)
    logs.restart(fake.folder, 2)
    logs._show({})
    messages.clear()
    fake.say(0, "".join(f"line {number}\n" for number in range(50_000)))
    logs.draw()
    told = lines_of(messages)
    assert len(told) <= 201
    assert told[-1] == (0, "stdout", "line 49999")
    assert "not shown" in told[0][2]
    assert messages[-1]["note"] == "50,000 lines"


def test_search_looks_through_the_whole_file(fake, monkeypatch):
    logs = Logs()
    messages = sent_by(logs.widget, monkeypatch)
    logs.restart(fake.folder, 2)
    fake.say(1, "Needle\n" + "hay\n" * 20_000)
    logs._show({"query": "needle"})
    assert messages[-1]["lines"] == [[1, "stdout", "Needle", 1]]
    assert messages[-1]["note"] == "1 line found"
    fake.say(1, "more\n")
    logs.draw()
    assert len(messages) == 1, "the matches stay until the search is cleared"
    logs._show({"query": ""})
    assert lines_of(messages[-1:])[-1] == (1, "stdout", "more")


# ---- words


def test_words_are_escaped():
    assert "<script>" not in state_html("failed (<script>)", "bad")


def test_a_table_has_a_row_a_rank(fake):
    fake.step(5)
    follower = Follower(fake.folder)
    follower.poll()
    assert ranks_html("a <run>", follower.state).count("<tr>") == 3
    assert finding_html(follower.state) == ""


def test_no_thread_is_left(fake):
    view = RunView()
    view.follow(FakeJob(fake))
    fake.end()
    view.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("labkit view")]


# ---- strategies behind "more", and the Compare tab


def test_further_strategies_are_in_the_list_more_and_one_is_selected_at_a_time():
    choices = choices_of(CPU, strategy="ddp", nproc=2)
    choices.further.value = "fsdp"
    assert (choices.chosen, choices.strategy.value) == ("fsdp", None)
    assert "mod-active" in choices.further._dom_classes
    assert choices.spec().strategy == "fsdp"
    choices.further.value = ""
    assert (choices.chosen, choices.further.value) == ("fsdp", "fsdp"), "'more' is not a strategy"
    choices.strategy.value = "tp"
    assert (choices.chosen, choices.further.value) == ("tp", "")
    assert "mod-active" not in choices.further._dom_classes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_chosen_and_says_what_is_wrong(strategy):
    lab = Lab(strategy="ddp", nproc=2)
    choices = lab._choices
    (choices.further if STRATEGIES[strategy].further else choices.strategy).value = strategy
    assert choices.chosen == strategy
    assert STRATEGIES[strategy].splits.partition(":")[0] in choices.explanation.value
    assert "labkit-batch" in lab._batch.value or "labkit-finding" in lab._batch.value
    assert lab._run_button.disabled == ("labkit-finding" in lab._batch.value)


def test_fp16_is_no_choice_where_a_strategy_lacks_it():
    choices = choices_of(T4S, strategy="ddp", nproc=2)
    assert (choices.precision.value, choices.precision.options) == ("fp16", ("fp32", "fp16"))
    choices.strategy.value = "tp"
    assert (choices.precision.value, choices.precision.options) == ("fp32", ("fp32",))


def test_comparison_takes_the_present_choices():
    lab = Lab(strategy="ddp", nproc=2, workload="mlp", steps=5)
    fields = lab._choices.comparable()
    assert (fields["workload"], fields["steps"], fields["batch_size"], fields["scaling"]) == ("mlp", 5, 256, "strong")


# ---- data that must be looked for


def test_the_panel_does_not_wait_while_data_are_looked_for(monkeypatch):
    looked, answer = [], threading.Event()

    def available(name, needs, folder):
        looked.append(threading.current_thread())
        answer.wait(60)

    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    monkeypatch.setattr(preflight, "available", available)
    lab = Lab(strategy="ddp", nproc=2, data="mnist")
    assert lab._run_button.disabled and "looking for mnist" in lab._batch.value and not answer.is_set()
    lab._start()
    assert lab.run is None and not lab._starting and not lab._recorded.which.disabled
    with pytest.raises(SpecError, match="mnist is still being looked for"):
        lab._comparable()
    lab._choices.batch.value = 64
    assert "64 per rank" in lab._batch.value
    answer.set()
    wait_until(lambda: not lab._run_button.disabled)
    assert "looking" not in lab._batch.value and lab._comparable()["data"] == "mnist"
    assert threading.main_thread() not in looked and len(set(looked)) == 1, "asked once, and not by the kernel"


def test_data_that_are_not_available_are_refused_until_they_are(monkeypatch):
    refusals = ["mnist is nowhere; use --data digits"]
    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    monkeypatch.setattr(preflight, "available", lambda name, needs, folder: refusals[0] if refusals else None)
    lab = Lab(strategy="ddp", nproc=2, data="mnist")
    wait_until(lambda: "mnist is nowhere; use --data digits" in lab._batch.value)
    assert lab._run_button.disabled
    refusals.clear()
    lab._choices.batch.value = 64  # asks again
    wait_until(lambda: not lab._run_button.disabled)
    refusals.append("mnist is nowhere; use --data digits")
    lab._choices.workload.value = ("cnn", "digits")
    assert not lab._run_button.disabled, "nothing must be looked for"


# ---- recorded runs, and presentation mode


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
    monkeypatch.setattr("labkit.record.replay.time", times)
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


def test_logs_of_a_recording_say_that_they_are_whole(recorded, monkeypatch):
    lab = played(Lab(recorded=recorded.path), monkeypatch, [1.0])
    messages = sent_by(lab._view.logs.widget, monkeypatch)
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
    boxes = [child for child in children if isinstance(child, Presentation)]
    assert [box.on for box in boxes] == [True]
