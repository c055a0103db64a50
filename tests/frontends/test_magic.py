"""`%%torchrun`: its options, the generated script, and the output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fabricate import FakeRun

from labkit import report
from labkit.frontends.magic import MOST
from labkit.frontends.magic.cell import Cell, CellError, RankOutput, Shown, script_bundle, value_text
from labkit.record.follow import Follower
from labkit.setup.machine import Gpu, Machine

CPU = Machine(gpus=(), cores=2, memory=8 << 30)
T4S = Machine(gpus=tuple(Gpu(index, "Tesla T4", 15 << 30, (7, 5)) for index in range(2)), cores=4, memory=31 << 30)


# ---- what is asked for


def test_a_cell_takes_gpus_where_there_are_enough_and_cpu_ranks_else():
    asked = {line: Cell.read(line, "pass", T4S).spec for line in ("2", "4", "2 --device cpu", "1 --device cuda")}
    assert {line: (spec.nproc, spec.device) for line, spec in asked.items()} == {
        "2": (2, "cuda"),
        "4": (4, "cpu"),
        "2 --device cpu": (2, "cpu"),
        "1 --device cuda": (1, "cuda"),
    }
    assert Cell.read("2 --as times", "pass", CPU).name == "times"
    assert Cell.read("2", "pass", CPU).name is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the number of ranks is missing"),
        ("four", "got 'four'"),
        ("0", "got 0"),
        ("-1", "got -1"),
        ("9", "this machine has at most 8 CPU ranks (2 cores), got 9 ranks; write %%torchrun 8"),
        ("2 --fast", "unknown option '--fast'; the options are --keep, --device cpu"),
        ("2 --as", "--as needs a value"),
        ("2 --as 3x", "--as must be a variable name, got '3x'"),
        ("2 --device tpu", "--device must be cpu or cuda, got 'tpu'"),
        ("2 --device cuda", "this machine has no GPU"),
        ("2 'a", "cannot parse"),
    ],
)
def test_an_invalid_first_line_is_refused_in_one_sentence(line, words):
    with pytest.raises(CellError, match=re.escape(words)) as refused:
        Cell.read(line, "pass", CPU)
    assert "\n" not in str(refused.value)


def test_more_gpus_than_there_are():
    with pytest.raises(CellError, match="this machine has 2 GPUs, got 3 ranks"):
        Cell.read("3 --device cuda", "pass", T4S)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = (", "line 2: '(' was never closed"),
        ("x = 1\n\nif x:\nprint(x)", "line 5: "),
        ("x = 1\nif x:", "line 3: "),
        ("return 1", "line 2: "),
        ("!ls", "line 2: "),
        ("x = '\0'", "does not parse"),
        ("  \n", "the cell is empty"),
    ],
)
def test_a_syntax_error_names_its_line(body, words):
    with pytest.raises(CellError, match=re.escape(words)):
        Cell.read("2", body, CPU)


# ---- the script


def test_the_script_is_what_a_learner_would_write_around_the_cell():
    script = Cell.read("2", "print(rank)", CPU).script
    assert (
        script.index('init_process_group("gloo")') < script.index("print(rank)") < script.index("destroy_process_group")
    )
    assert "torchrun --standalone --nproc-per-node=2" in script.splitlines()[0]
    on_gpus = Cell.read("2", "print(rank)", T4S).script
    assert 'init_process_group("nccl", device_id=device)' in on_gpus
    compile(on_gpus, "train.py", "exec")


def test_lines_of_the_script_are_named_as_those_of_the_cell():
    cell, path = Cell.read("2", "x = 1\n\nraise ValueError(x)", CPU), Path("/runs/a (1)/train.py")
    lines = cell.script.splitlines()
    third, meets = lines.index("raise ValueError(x)") + 1, lines.index('dist.init_process_group("gloo")') + 1
    assert cell.in_cell(f'File "{path}", line {third}, in <module>', path) == "Cell, line 4, in <module>"
    assert cell.in_cell(f"{path}:{third}: UserWarning", path) == "Cell, line 4: UserWarning"
    assert cell.in_cell(f"it stands at train.py:{third} in <module>", path) == "it stands at Cell, line 4 in <module>"
    for other in (
        f'File "{path}", line {meets}, in <module>',
        f'File "/other/train.py", line {third}',
        'File "x.py", line 3',
        "train.py:999",
    ):
        assert cell.in_cell(other, path) == other


# ---- reports


def test_a_report_where_no_run_collects_it_is_printed(capsys):
    report(total=6, name="x")
    assert capsys.readouterr().out == "total = 6, name = x\n"


def test_a_report_of_a_tensor_is_its_numbers(capsys):
    import torch

    report(a=torch.tensor([1.5, 2.0]), b=torch.tensor(3), c=(torch.ones(1), None, True))
    assert capsys.readouterr().out == "a = [1.5, 2.0], b = 3, c = [[1.0], None, True]\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [(range(3), "got range"), ({"a": 1}, "got dict"), ([object()], "got object"), ([0] * (MOST + 1), "got 1,001")],
)
def test_a_report_that_fits_into_no_table(value, words):
    with pytest.raises(ValueError, match=words):
        report(x=value)


def test_a_report_of_a_large_tensor_is_refused():
    import torch

    with pytest.raises(ValueError, match="must have at most 1,000 numbers, got 1,000,000"):
        report(x=torch.zeros(1000, 1000))


def test_reports_are_folded_by_rank_and_the_newest_counts(runs):
    run = FakeRun(runs)
    run.start()
    for rank, writer in enumerate(run.writers):
        writer.write("report", values={"a": rank, "b": 1})
    run.writers[1].write("report", values={"b": [2, "x"]})
    run.writers[1].write("report", values=3)
    follower = Follower(run.folder)
    follower.poll()
    assert follower.state.reports == {0: {"a": 0, "b": 1}, 1: {"a": 1, "b": [2, "x"]}}
    assert follower.state.broken == 1
    run.close()


# ---- what is shown


def test_nothing_that_ranks_write_or_report_becomes_markup():
    hostile = "<script>alert(1)</script>"
    ranks = [RankOutput(0, hostile, hostile), RankOutput(1, "", hostile, aside=True, fate=hostile)]
    shown = Shown(hostile, "bad", ranks, {0: {hostile: hostile}, 1: {}}, hint=hostile)
    assert "<script" not in shown.html() + script_bundle(hostile)["text/html"]
    assert shown.html().count("&lt;script&gt;") == 8
    assert hostile in shown.text()


def test_each_rank_has_a_block_of_its_own_with_its_colour():
    page = Shown("running", "busy", [RankOutput(0, "\x1b[31mred\x1b[0m"), RankOutput(1, "", passed=7)]).html()
    assert re.findall(r'aria-label="(rank \d)"', page) == ["rank 0", "rank 1"]
    assert "#0072B2" in page and "#E69F00" in page
    assert "red" in page and "\x1b" not in page
    assert "7 earlier lines" in page and "<table" not in page


def test_ranks_that_only_report_have_a_table_and_no_empty_blocks():
    shown = Shown("finished", "good", [RankOutput(0, ""), RankOutput(1, "")], {1: {"total": 6.0, "x": [0.123456789]}})
    assert "labkit-cell-rank" not in shown.html()
    assert shown.text().splitlines()[-3:] == [
        "rank  total           x",
        "   0      –           –",
        "   1      6  [0.123457]",
    ]


def test_values_are_short_in_the_table():
    assert [value_text(value) for value in (None, True, 3, 2 / 3, "a", [1.0, [None]])] == [
        "–",
        "True",
        "3",
        "0.666667",
        "a",
        "[1, [–]]",
    ]
