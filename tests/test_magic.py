"""`%%torchrun`: its options, the generated script, the output, and real cells in real kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jupyter_client
import nbclient
import nbformat
import pytest
from conftest import processes_of, wait_until
from fabricate import FakeRun

from labkit import report
from labkit.analysis.diagnose import Finding
from labkit.frontends.magic import following
from labkit.frontends.magic.cell import Cell, CellError
from labkit.frontends.magic.following import CellRun, Reports
from labkit.frontends.magic.output import RankOutput, Shown, script_html, value_text
from labkit.frontends.magic.reporting import MOST
from labkit.record.follow import Follower
from labkit.setup.machine import Gpu, Machine

ROOT = Path(__file__).parents[1]
SECONDS = 240  # timeout of a run on a busy machine
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
        ("2 --fast", "unknown option '--fast'; the options are --device cpu"),
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
    assert "<script" not in shown.html() + script_html(hostile)
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


# ---- real cells


def test_a_hanging_run_is_stopped_if_headless(runs, monkeypatch):
    hang = Finding("hang", "wrong", "rank 0 waited", "for rank 1", "", "")
    shown: list[Shown] = []
    run = CellRun(Cell.read("1", "print('here')\ntime.sleep(600)", CPU), shown.append)
    monkeypatch.setattr(following, "findings", lambda state: [hang] if run._tails[0, "stdout"].count else [])
    run.go(patient=False)
    assert shown[-1].title.startswith("stopped after") and shown[-1].hint == "rank 0 waited: for rank 1"
    assert run.over and not processes_of(str(runs))


def test_a_cell_that_is_stopped_before_it_begins_never_does(runs):
    shown: list[Shown] = []
    first = CellRun(Cell.read("1", "pass", CPU), shown.append)
    second = CellRun(Cell.read("1", "pass", CPU), shown.append, first)
    second.stop()
    second.go()
    assert shown[-1].title == "stopped before it started"
    with pytest.raises(LookupError, match="stopped before it started"):
        Reports(second)["x"]
    assert not runs.exists()


def test_a_cell_that_cannot_be_started_says_so(runs):
    runs.write_text("a file where the folder should be")
    shown: list[Shown] = []
    run = CellRun(Cell.read("1", "pass", CPU), shown.append)
    run.go()
    assert shown[-1].tone == "bad" and "runs" in shown[-1].title
    assert run.over


@pytest.fixture
def kernel_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


CELLS = (
    "%load_ext labkit",
    (
        "%%torchrun 2 --as sums --device cpu\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nprint('<b>I am',"
        " rank)\nreport(total=x, rank=rank)"
    ),
    "print(sums['total'], sums.names, sums.run.words)\nsums",
    "sums['nothing']",
    "%%torchrun 2 --device cpu\n\ndef f():\n    raise ValueError('no <i>')\nif rank == 1:\n    f()\ndist.barrier()",
    "%%torchrun 99\npass",
    "%%torchrun 2\nx = (",
)


def test_cells_in_a_headless_notebook(runs, tmp_path, kernel_environment):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    nbclient.NotebookClient(notebook, timeout=SECONDS, allow_errors=True).execute()
    _, sums, later, missing, failed, many, broken = notebook.cells

    page, fold = (output["data"] for output in sums.outputs)
    assert page["text/plain"].startswith("finished on 2 CPU ranks after ")
    assert "── rank 0\n<b>I am 0\n── rank 1\n<b>I am 1" in page["text/plain"]
    assert page["text/plain"].endswith("rank   total  rank\n   0  [1, 1]     0\n   1  [1, 1]     1")
    assert "<b>I am" not in page["text/html"]
    assert "<details" in fold["text/html"] and "all_reduce(x)" in fold["text/html"]

    assert later.outputs[0]["text"] == "[[1.0, 1.0], [1.0, 1.0]] ['total', 'rank'] finished\n"
    assert "<table" in later.outputs[1]["data"]["text/html"]
    assert missing.outputs[0]["evalue"] == "no rank reported 'nothing'; reported: total, rank"

    told = failed.outputs[0]["data"]["text/plain"]
    assert told.startswith("rank 1 failed at line 4 of the cell: ValueError: no <i>\n── rank 1 · failed first")
    assert "Cell, line 6, in <module>" in told and "Cell, line 4, in f" in told and "train.py" not in told
    assert "── rank 0 · terminated because rank 1 failed" in told

    assert many.outputs[0]["text"].startswith("UsageError: %%torchrun: this machine has ")
    assert (
        broken.outputs[0]["text"].strip()
        == "UsageError: %%torchrun: the cell does not parse, line 2: '(' was never closed; nothing was started"
    )
    assert len(list(runs.iterdir())) == 2, "a refused cell starts nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ipython",
        "runs",
    ], "no files are left next to the run folders"


class Front:
    """An interactive notebook client: it accepts input requests, stores displayed output, and can interrupt."""

    def __init__(self, manager: jupyter_client.KernelManager, client: jupyter_client.BlockingKernelClient):
        self.manager, self.client = manager, client
        self.shown: dict[str, str] = {}

    def do(self, code: str) -> str:
        """Executes code and returns its printed output."""
        printed = []

        def hear(message) -> None:
            self.take(message)
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        self.client.execute_interactive(code, allow_stdin=True, timeout=SECONDS, output_hook=hear)
        return "".join(printed)

    def take(self, message) -> None:
        """Stores displayed output by its display id."""
        place = message["content"].get("transient", {}).get("display_id")
        if place:
            self.shown[place] = message["content"]["data"].get("text/plain", "")

    def sees(self, words: str) -> bool:
        """Whether `words` are displayed, after reading all pending messages."""
        while self.client.iopub_channel.msg_ready():
            self.take(self.client.get_iopub_msg())
        return any(words in text for text in self.shown.values())


@pytest.fixture
def front(kernel_environment, tmp_path) -> Iterator[Front]:
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        front = Front(manager, client)
        front.do("%load_ext labkit")
        yield front
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.skipif(sys.platform == "win32", reason="a kernel is interrupted by a signal here")
def test_in_an_interactive_notebook_the_kernel_is_free_and_an_interrupt_stops_the_run(front, runs):
    front.do("%%torchrun 2 --device cpu\nprint('I am', rank, flush=True)\ntime.sleep(600)")
    wait_until(lambda: front.sees("── rank 0\nI am 0") and front.sees("── rank 1\nI am 1"), SECONDS)
    wait_until(lambda: front.sees("running on 2 CPU ranks") and front.sees("Stop"), SECONDS)
    assert front.do("print(1 + 1)") == "2\n", "the kernel responds while the ranks sleep"

    front.do("%%torchrun 1 --as later --device cpu\nreport(x=3)")
    wait_until(lambda: front.sees("waiting for the previous cell to finish"), SECONDS)
    front.do("%xdel nothing")  # the handler stays installed after other cells
    front.manager.interrupt_kernel()
    wait_until(lambda: front.sees("stopped after") and front.sees("stopped before it started"), SECONDS)
    wait_until(lambda: not processes_of(str(runs)), 10)
    assert not front.sees("Button")

    front.do("%%torchrun 1 --as later --device cpu\nreport(x=3)")
    assert front.do("print(later['x'])") == "[3]\n", "reading it waits for the end"
    wait_until(lambda: front.sees("finished on 1 CPU rank"), SECONDS)
