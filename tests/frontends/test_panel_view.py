"""The panel's view of a run without a browser: the state in words, and the messages sent to a page."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from conftest import wait_until
from fabricate import FakeRun
from folded import applied
from panels import lines_of, sent_by, started_run
from profiled_steps import state_of, step_event, timeline_event

from labkit.figures.tables import ranks_html
from labkit.frontends.panel.charts import CAP, LIVE, WHOLE, Charts, Feed, MachinePicture
from labkit.frontends.panel.view import Logs, RunView
from labkit.frontends.panel.widgets import finding_html, progress_html, state_html, what_html
from labkit.record.documents import Status
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower


@pytest.fixture
def fake(runs):
    yield from started_run(runs)


@pytest.mark.parametrize(("seconds", "words"), [(6.2, "0:06"), (725, "12:05"), (29914, "8:18:34")])
def test_a_time_has_hours_if_it_is_longer_than_one(seconds, words):
    state = SimpleNamespace(step=5, total_steps=5, over=True, seconds=seconds)
    assert f"<span>{words} in total</span>" in progress_html(state)


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
    view = RunView(lambda name, state: ended.append((name, state.status.state)))
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


def test_a_run_that_is_being_started_can_be_stopped(fake):
    view = RunView()
    view.await_run("writing the script")
    assert "writing the script" in view.words.value
    view.stop_button.click()
    assert view.stop_button.disabled and "stopping" in view.words.value
    view.follow(FakeJob(fake))
    view.wait(30)
    assert "stopped" in view.words.value and view.stop_button.disabled


def test_a_run_that_cannot_be_started_leaves_nothing_to_stop():
    view = RunView()
    view.await_run("writing the script")
    view.not_started("no port <is> free")
    assert view.stop_button.disabled and "failed to start" in view.words.value
    assert "no port &lt;is&gt; free" in view.finding.value


def test_the_view_names_the_run_on_screen(fake):
    view = RunView()
    assert view._what.value == ""
    view.follow(FakeJob(fake))
    wait_until(lambda: view._what.value == what_html(view.state))
    assert f"{view.state.world_size} ranks" in view._what.value
    view.stop()
    view.wait(30)


def test_a_stop_that_comes_after_the_end_leaves_its_words(fake):
    """A click in the page may be under way while the run ends."""
    view = RunView()
    view.follow(FakeJob(fake))
    fake.step(20)
    fake.end()
    view.wait(30)
    view.stop()
    assert "finished" in view.words.value
    assert view.stop_button.disabled


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


@pytest.mark.thorough
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


def test_a_run_that_is_over_is_drawn_whole(fake, monkeypatch):
    """While it trains, a chart receives one or two points per update, however many steps there were."""
    follower = Follower(fake.folder)
    charts = Charts()
    messages = sent_by(charts.page, monkeypatch)
    charts._heard(charts.page, {"kind": "ready"}, [])
    wait_until(lambda: messages)
    for _ in range(14):
        fake.step(20)
        follower.poll()
        charts.draw(follower.state)
    fake.end()
    follower.poll()
    charts.draw(follower.state, final=True)
    (loss,) = [update for update in messages[-1]["charts"] if update["name"] == "loss"]
    assert len(loss["whole"]["data"][0]["x"]) == 280


def test_films_are_sent_at_a_pace_words_at_once_and_the_last_film_always(monkeypatch):
    monkeypatch.setattr("labkit.frontends.panel.charts._PACE", 1e-3)
    steps = (step_event(rank, step) for rank in range(2) for step in range(9))
    state = state_of(*steps, timeline_of(0, 8), timeline_of(1, 8))
    machine = MachinePicture()
    messages = sent_by(machine.page, monkeypatch)
    machine.restart(state)
    machine._heard(machine.page, {"kind": "ready"}, [])
    wait_until(lambda: messages)
    assert messages[0]["what"] == "step 8, measured" and len(messages[0]["frames"]) == 120
    for event in (timeline_of(0, 16), timeline_of(1, 16), *(slower(0, step) for step in range(9, 30))):
        state.apply(applied(event))
    machine.draw(state)
    assert messages[1]["kind"] == "shapes" and messages[1]["shapes"]["speed0-0"]["text"] == "400 ms/step"
    machine.draw(state)
    assert len(messages) == 2, "nothing has changed"
    state.apply(Status("finished"))
    machine.draw(state, final=True)
    assert messages[2]["what"] == "step 16, measured"


def timeline_of(rank: int, step: int) -> dict:
    return timeline_event(rank, step=step)


def slower(rank: int, step: int) -> dict:
    event = step_event(rank, step)
    return event | {"seconds": event["seconds"] | {"step": 0.4}}


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
    charts._heard(charts.page, {"kind": "pong"}, [])
    wait_until(lambda: charts.plain.layout.display == "none")


def test_charts_replace_the_svg_when_plotly_arrives_late(fake, monkeypatch):
    fake.step(10)
    follower = Follower(fake.folder)
    follower.poll()
    charts = Charts()
    messages = sent_by(charts.page, monkeypatch)
    charts.shown()
    charts.restart(follower.state)
    charts._heard(charts.page, {"kind": "failed"}, [])
    wait_until(lambda: charts.plain.layout.display == "" and "<svg" in charts.plain.value)
    charts._heard(charts.page, {"kind": "ready"}, [])
    wait_until(lambda: messages)
    assert charts.plain.layout.display == "none"
    assert not charts.is_plain


# ---- logs


def test_new_log_lines_are_sent_with_rank_and_stream(fake, monkeypatch):
    logs = Logs()
    messages = sent_by(logs.page, monkeypatch)
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
    messages = sent_by(logs.page, monkeypatch)
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
    messages = sent_by(logs.page, monkeypatch)
    logs.restart(fake.folder, 2)
    fake.say(1, "Needle\n" + "hay\n" * 20_000)
    logs._show({"query": "needle"})
    assert messages[-1]["lines"] == [[1, "stdout", "Needle", 1]]
    assert messages[-1]["note"] == "1 line found"
    fake.say(1, "more\n")
    logs.draw()
    assert len(messages) == 1, "the matches stay until the search is cleared"
    logs._show({"kind": "ready"})
    assert messages[1] == messages[0], "another view shows the same matches"
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
    before = {*threading.enumerate()}
    view = RunView()
    view.follow(FakeJob(fake))
    fake.end()
    view.wait(30)
    left = {*threading.enumerate()} - before
    assert not [thread for thread in left if thread.name.startswith("labkit view")]
