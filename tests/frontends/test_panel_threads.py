"""The panel's threads: the one that follows a run, the kernel's, and those that answer pages, on the same state."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fabricate import FakeRun, finished_folder

from labkit.analysis import comparison
from labkit.analysis.comparison import Badge
from labkit.frontends.panel import charts, compare, view
from labkit.frontends.panel.charts import LIVE, Charts
from labkit.frontends.panel.compare import CompareTab
from labkit.frontends.panel.view import RunView
from labkit.runs.comparing import Comparing
from labkit.runs.handle import Run

STEPS = 300


@pytest.fixture
def busy(monkeypatch):
    """Threads take turns as often as possible, and the view reads and draws without a pause."""
    monkeypatch.setattr(view, "_READ", 0.0)
    monkeypatch.setattr(view, "_REDRAW", 0.0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Repeated:
    """Threads that repeat an action each until the end of a `with` block; `errors` has what they raised."""

    def __init__(self, *actions: Callable[[], object]):
        self.errors: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(action,), daemon=True) for action in actions]

    def _repeat(self, action: Callable[[], object]) -> None:
        try:
            while not self._over.is_set():
                action()
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Repeated:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def lines_on_the_page(messages: list[dict]) -> dict[str, list[list[float]]]:
    """The steps at the points of each line of each chart, as a page has them after these messages."""
    lines: dict[str, list[list[float]]] = {}
    for update in itertools.chain.from_iterable(message["charts"] for message in messages):
        if "whole" in update:
            data = update["whole"]["data"]
            lines[update["name"]] = [line.get("x", []) for line in data if line["type"] == "scatter"]
        else:
            for index, xs, ys, *_ in update["more"]["points"]:
                assert len(xs) == len(ys)
                lines[update["name"]][index] = lines[update["name"]][index] + xs
    return lines


def steady(compute: Callable, torn: list[str], position: int = 0) -> Callable:
    """The same function, which notes in `torn` if the state that it reads (an argument) changes until it returns."""

    def checked(*arguments, **settings):
        before = arguments[position].revision
        result = compute(*arguments, **settings)
        time.sleep(0.002)
        if arguments[position].revision != before:
            torn.append(getattr(compute, "__name__", str(compute)))
        return result

    return checked


def test_what_is_shown_is_whole_whichever_threads_read_it(runs, busy, monkeypatch):
    """A page is loaded again and again, and buttons are pressed, while events arrive: nothing is drawn from a state
    that changes meanwhile, and no point is lost or doubled."""
    run, torn, messages = FakeRun(runs, steps=STEPS), [], []
    monkeypatch.setattr(view, "findings", steady(view.findings, torn))
    monkeypatch.setattr(charts, "write_trace", steady(charts.write_trace, torn))
    monkeypatch.setattr(charts, "ask", steady(charts.ask, torn, position=1))
    monkeypatch.setattr(charts, "timeline", steady(charts.timeline, torn))
    monkeypatch.setattr(
        view, "Charts", lambda **settings: Charts({n: steady(c, torn) for n, c in LIVE.items()}, **settings)
    )
    run.start()
    shown = RunView()
    monkeypatch.setattr(shown.charts.page, "send", lambda message: messages.append(json.loads(json.dumps(message))))
    shown.timeline.charts._send_all()  # its page is there
    shown.follow(SimpleNamespace(folder=run.folder))
    actions = (
        shown.charts._send_all,
        shown.timeline.charts.redraw,
        lambda: setattr(shown._why, "value", not shown._why.value),
        shown.timeline._ask,
        shown.timeline._save,
    )
    with Repeated(*actions) as threads:
        for number in range(STEPS):
            run.step()
            run.writers[number % 2].write("metric", step=number, name=f"metric {number}", value=1.0)
            time.sleep(0.002)
        run.end()
        shown.wait(120)
    run.close()
    assert not threads.errors and "this view failed" not in shown.finding.value
    assert not torn
    assert not shown.busy and shown.state.over and shown.state.broken == 0
    assert [len(rank.steps) for rank in shown.state.ranks.values()] == [STEPS, STEPS]
    lines = lines_on_the_page(messages)
    assert set(lines) == {"loss", "throughput", "memory", "phases"}
    for line in lines["loss"]:
        assert all(before < after for before, after in itertools.pairwise(line)), "no point is there twice"
        assert line[-1] == STEPS


def test_a_badge_is_computed_once_whichever_threads_ask(runs, busy, monkeypatch):
    folders = [finished_folder(runs, "single", 1, 0.05), finished_folder(runs, "ddp", 2, 0.05)]
    asked, together = [], threading.Barrier(4)

    def judged(folder, *_) -> Badge:
        asked.append(folder.name)
        time.sleep(0.05)  # time for the others to ask, too
        return Badge("equal", "")

    monkeypatch.setattr(comparison, "badge", judged)
    comparing = Comparing([])
    comparing._runs = [Run.attach(folder.path) for folder in folders]
    found = []

    def ask() -> None:
        together.wait(30)
        found.append(comparing.rows)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert asked == [folders[1].name]
    assert len(found) == 4 and len(set(map(repr, found))) == 1


def test_of_several_choices_of_recorded_runs_the_newest_is_shown(runs, monkeypatch):
    """The runs of the first choice take longer to read than those of the second."""
    slow, fast = (finished_folder(runs, name, 1, 0.05, workload="mlp") for name in ("single", "ddp"))
    read, threads = threading.Event(), []

    def recorded(folders) -> tuple:
        if folders[0].path == slow.path:
            assert read.wait(30)
        return comparison.recorded(folders)

    start = compare.widgets.in_thread
    monkeypatch.setattr(compare, "recorded", recorded)
    monkeypatch.setattr(compare.widgets, "in_thread", lambda *work: threads.append(start(*work)))
    tab = CompareTab(dict, lambda: False)
    for folder in (slow, fast):
        tab._list.options = [(folder.name, str(folder.path))]
        tab._list.value = [str(folder.path)]
        tab._show_chosen()
    threads[1].join(30)
    read.set()
    threads[0].join(30)
    assert "DDP" in tab._view.widget.value and "Single" not in tab._view.widget.value
