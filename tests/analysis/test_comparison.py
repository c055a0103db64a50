"""Comparing strategies: the plan, the rows and the front ends; test_comparison_runs.py has real comparisons."""

from __future__ import annotations

import io

import pytest
from conftest import wait_until
from fabricate import finished_folder
from rich.console import Console

from labkit import SpecError
from labkit.analysis.comparison import (
    HEADS,
    RECORDED,
    RECORDED_NOTE,
    Badge,
    Row,
    alike,
    cells,
    newest,
    recorded,
    sentences,
)
from labkit.figures import comparison as pictures
from labkit.frontends import terminal
from labkit.frontends.panel.compare import CompareTab, comparison_html
from labkit.runs.comparing import Comparing, plan
from labkit.training.strategies import STRATEGIES

# ---- the plan


def test_the_baseline_is_added_first_and_all_have_the_same_global_batch():
    specs, left_out = plan(["fsdp2", "ddp", "ddp"], workload="mlp", nproc=2, device="cpu", batch_size=64)
    assert [spec.name for spec in specs] == ["single-x1", "fsdp2-x2", "ddp-x2"]
    assert {spec.global_batch for spec in specs} == {64}
    assert all(spec.tensors for spec in specs)
    assert not left_out


def test_all_leaves_out_what_cannot_run_and_says_why():
    specs, left_out = plan("all", workload="mlp", nproc=2, device="cpu", batch_size=64)
    assert {spec.strategy for spec in specs} | set(left_out) == set(STRATEGIES)
    assert "mlp has none; use --workload gpt" in left_out["cp"]


def test_an_option_goes_to_those_that_have_it():
    specs, _ = plan(
        ["ddp", "pp"], workload="mlp", nproc=2, device="cpu", batch_size=64, options={"bucket_mb": 3, "clip_norm": 1.0}
    )
    options = {spec.strategy: dict(spec.options) for spec in specs}
    assert options["ddp"]["bucket_mb"] == 3
    assert "bucket_mb" not in options["pp"]
    assert {one["clip_norm"] for one in options.values()} == {1.0}


@pytest.mark.parametrize(
    ("strategies", "fields", "says"),
    [
        (["dpp"], {}, "strategy must be one of single, dp, ddp, .*, or all, got 'dpp'"),
        ([], {}, "strategies must not be empty"),
        (["ddp", "cp"], {}, "cp cannot be compared: cp splits the sequence dimension, and mlp has none"),
        (
            ["ddp"],
            {"batch_size": 7},
            "ddp cannot be compared: a global batch of 7 is not divisible by 2 ranks; use --batch-size 6 or 8",
        ),
        (["ddp"], {"options": {"buckets": 1}}, "has no option 'buckets'"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(runs, strategies, fields, says):
    with pytest.raises(SpecError, match=says):
        plan(strategies, **{"workload": "mlp", "nproc": 2, "device": "cpu"} | fields)
    assert not runs.exists()


# ---- the rows


def test_rows_tell_times_speed_ups_and_what_bounds_a_step(runs):
    folders = [finished_folder(runs, "ddp", 2, 0.05), finished_folder(runs, "single", 1, 0.08)]
    single, ddp = recorded(folders)
    assert (single.strategy, single.devices, ddp.devices) == ("single", 1, 2)
    assert single.seconds == pytest.approx(9 * 0.08)
    assert ddp.epoch_seconds == pytest.approx(10 * 0.05), "an epoch has ten steps"
    assert ddp.speedup == pytest.approx(0.08 / 0.05)
    assert single.speedup == 1
    assert sum(ddp.phases.values()) == pytest.approx(1)
    assert ddp.bound.startswith("backward 5")
    assert single.badge.verdict == "reference"
    assert ddp.badge.verdict == "not compared"
    assert "only 0 of 2 ranks" in ddp.badge.sentence


def test_a_run_without_a_baseline_has_no_speed_up(runs):
    (row,) = recorded([finished_folder(runs, "ddp", 2, 0.05)])
    assert (row.speedup, row.badge) == (None, None)
    assert cells(row)[5] == "–"


def test_the_newest_runs_of_one_training_are_found(runs):
    old, other, new, single = (
        finished_folder(runs, "ddp", 2, 0.05),
        finished_folder(runs, "ddp", 2, 0.05, seed=1),
        finished_folder(runs, "ddp", 2, 0.05),
        finished_folder(runs, "single", 1, 0.05),
    )
    assert [folder.name for folder in alike([old, other, new, single])] == [single.name, new.name]
    assert alike([]) == []


def test_the_recorded_result_is_what_was_reported_and_says_where_from():
    told = {(row.strategy, row.devices, row.seconds, row.accuracy, cells(row)[5]) for row in RECORDED}
    assert told == {
        ("single", 1, 44.69, 0.9924, "1.00×"),
        ("ddp", 2, 34.69, 0.9905, "1.29×"),
        ("fsdp", 2, 34.63, 0.9920, "1.29×"),
    }
    assert RECORDED_NOTE.startswith("Recorded elsewhere, not measured here")


# ---- the front ends

NASTY = Row("ddp", "<b>DDP</b>", "cnn", run="r", devices=2, words="failed (rank 1: <i>)", over=True, failed=True)
FOUND = (
    Row(
        "single",
        "Single",
        "cnn",
        run="s",
        devices=1,
        over=True,
        words="finished",
        seconds=2.0,
        speedup=1.0,
        memory=3 << 20,
        phases={"forward": 1.0},
    ),
    NASTY,
    Row("pp", "PP", "cnn", devices=2),
)


def test_terminal_table_shows_rows_the_recorded_result_and_what_is_waiting():
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(terminal.comparison(FOUND, {"cp": "no sequence"}))
    text = console.export_text()
    for word in (
        *HEADS,
        "44.69",
        "recorded elsewhere",
        "waiting",
        "3.0 MiB",
        "CP is left out: no sequence.",
        "failed (rank 1",
    ):
        assert word in text


def test_html_escapes_every_text_and_marks_the_badge():
    badge = Badge("differs", 'a "sentence" <script>')
    html = comparison_html((*FOUND, Row("tp", "TP", "cnn", run="t", over=True, badge=badge)), {})
    assert "<b>DDP" not in html
    assert "<script>" not in html
    assert "&lt;b&gt;DDP" in html
    assert 'labkit-bad" title="a &quot;sentence&quot;' in html


def test_a_chart_without_data_is_left_out():
    measured = [chart.name for chart in pictures.charts(FOUND)]
    assert measured == ["speedup", "phases", "memory"], "no row has sent anything"
    alone = Row("fsdp2", "FSDP2", "mlp", run="f", over=True, memory=3 << 20, sent=5 << 20)
    assert [chart.name for chart in pictures.charts((alone,))] == ["memory", "sent"], "there is nothing to compare with"
    waiting = Row("pp", "PP", "mlp", devices=2)
    assert "<svg" not in comparison_html((waiting,), {})
    assert not pictures.figure((waiting,)).data


def test_charts_have_a_bar_for_each_and_set_the_recorded_result_apart():
    speedup, phases, *_ = pictures.charts(FOUND, RECORDED)
    assert speedup.x.categories == ("Single ×1", "<b>DDP</b> ×2", "PP ×2", "Single ×1*", "DDP ×2*", "FSDP1 ×2*")
    here, elsewhere = speedup.bars
    assert here.values == (1.0, 0, 0, 0, 0, 0)
    assert elsewhere.values[-1] == pytest.approx(1.29, abs=0.005)
    assert "recorded on another machine" in speedup.note
    assert phases.bars[1].values[0] == 100
    figure = pictures.figure(FOUND, RECORDED)
    assert len(figure.data) == 2 + 5 + 1
    assert pictures.charts((FOUND[0], FOUND[0]))[2].x.categories == (
        "Single ×1 (1)",
        "Single ×1 (2)",
    ), "bars of one name would be stacked"


def test_sentences_name_failures_badges_and_notes():
    said = sentences((FOUND[0], NASTY), {"cp": "no sequence"})
    assert said == [
        "<b>DDP</b>: failed (rank 1: <i>).",
        "Single: forward 100% of each step, the longest phase.",
        "CP is left out: no sequence.",
        RECORDED_NOTE,
    ]


def test_tab_greys_out_what_cannot_run_and_refuses_while_a_run_is_under_way():
    fields = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 64}
    busy = [True]
    tab = CompareTab(lambda: fields, lambda: busy[0])
    tab.refresh()
    boxes = {box.description: box for box in tab._boxes.values()}
    assert boxes["CP"].disabled
    assert "mlp has none" in boxes["CP"].tooltip
    assert boxes["Single"].disabled, "the baseline is always run"
    assert not boxes["DDP"].disabled
    tab.start()
    assert "a run is under way" in tab._said.value
    assert tab.comparing is None


def tab_of(fields: dict | None = None) -> CompareTab:
    return CompareTab(
        lambda: fields or {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 64}, lambda: False
    )


def test_three_questions_are_ready_that_the_settings_can_answer(monkeypatch):
    started = []
    monkeypatch.setattr(Comparing, "start", lambda self: started.append([spec.strategy for spec in self.specs]) or self)
    tab = tab_of()
    tab.refresh()
    questions = [card.question for card in tab._cards]
    assert len({question.title for question in questions}) == 3
    refused = {name for name, box in tab._boxes.items() if box.disabled and name != "single"}
    assert refused and not any(refused & {*question.strategies} for question in questions)
    card = tab._cards[1]
    card.button.click()
    assert started == [["single", *card.question.strategies]]
    assert {name for name, box in tab._boxes.items() if box.value} == {*started[0]}


def test_without_a_question_that_can_be_answered_the_tab_says_why():
    tab = tab_of({"workload": "mlp", "nproc": 3, "device": "cpu", "batch_size": 64})
    tab.refresh()
    assert [card.widget.layout.display for card in tab._cards] == ["none"] * 3
    assert "No ready comparison can run with these settings: " in tab._view.widget.value
    assert "64" in tab._view.widget.value, "the batch cannot be split over three ranks"


def test_a_question_about_several_ranks_is_not_asked_of_one(monkeypatch):
    monkeypatch.setattr(Comparing, "start", lambda self: self)
    tab = tab_of({"workload": "mlp", "nproc": 1, "device": "cpu", "batch_size": 64})
    tab.refresh()
    tab._cards[0].button.click()
    assert [spec.nproc for spec in tab.comparing.specs] == [1, 2]


def test_the_newest_comparison_is_known_by_its_tensors(runs):
    single, ddp = (
        finished_folder(runs, "single", 1, 0.05, tensors=True),
        finished_folder(runs, "ddp", 2, 0.05, tensors=True),
    )
    alone = finished_folder(runs, "tp", 2, 0.05, seed=3)
    assert newest([single, ddp, alone]) == [single, ddp]
    assert newest([single, alone]) == [], "one run is no comparison"


def test_the_tab_shows_the_newest_comparison_or_what_it_will_do(runs):
    tab = tab_of()
    tab.opened()
    assert "trains the same model with each of these strategies" in tab._view.widget.value
    finished_folder(runs, "single", 1, 0.08, tensors=True)
    finished_folder(runs, "ddp", 2, 0.05, tensors=True)
    tab = tab_of()
    tab.opened()
    wait_until(lambda: "Newest comparison in this runs folder." in tab._view.widget.value)
    assert "<td>1.60×</td>" in tab._view.widget.value


def test_chosen_recorded_runs_are_compared_and_unreadable_ones_refused(runs):
    single, ddp, other = (
        finished_folder(runs, "single", 1, 0.08),
        finished_folder(runs, "ddp", 2, 0.05),
        finished_folder(runs, "fsdp2", 2, 0.05, seed=7),
    )
    tab = tab_of()
    tab._recorded_button.value = True
    wait_until(lambda: not tab._list.disabled)
    assert [path for _, path in tab._list.options] == [str(folder.path) for folder in (other, ddp, single)]
    tab._list.value = [str(single.path), str(ddp.path), str(other.path)]
    tab._chosen_button.click()
    assert tab._popover.layout.display == "none"
    wait_until(lambda: "<table" in tab._view.widget.value)
    before = tab._view.widget.value
    assert before.count("<td>1.60×</td>") == 1, "what trained something else has no speed-up"
    ddp.status.write_text('{"state": 5}')
    tab._chosen_button.click()
    assert f"{ddp.name} cannot be read: status.json" in tab._said.value
    assert tab._view.widget.value == before


def test_a_bare_comparison_is_shown_once_in_a_cell(monkeypatch):
    shown, number = [], 1
    monkeypatch.setattr("labkit.runs.comparing.cell", lambda: number)
    comparing = Comparing(plan(["ddp"], workload="mlp", nproc=2, device="cpu", batch_size=64)[0], show=shown.append)
    assert repr(comparing) == "<Comparing Single, DDP: 0 of 2 over>"
    with pytest.raises(NotImplementedError):
        comparing._ipython_display_()  # no notebook: IPython shows the repr
    monkeypatch.setattr("labkit.runs.comparing.in_notebook", lambda: True)
    comparing._ipython_display_()
    assert shown == [comparing]
    comparing.shown_in = number  # as `show` notes it
    comparing._ipython_display_()
    assert shown == [comparing], "show(compare(...)) is not shown twice"
    number = 2
    comparing._ipython_display_()
    assert shown == [comparing, comparing]
