"""`%%torchrun` cells in real kernels, headless and interactive: their output, and how they are stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jupyter_client
import nbclient
import nbformat
import pytest
from conftest import processes_of, wait_until
from kernels import SECONDS, Front
from places import ROOT

from labkit.analysis.diagnose import Finding
from labkit.frontends.magic import torchrun
from labkit.frontends.magic.cell import Cell, Shown
from labkit.frontends.magic.torchrun import CellRun, Reports
from labkit.setup.machine import Machine

CPU = Machine(gpus=(), cores=2, memory=8 << 30)


def test_a_hanging_run_is_stopped_if_headless(runs, monkeypatch):
    hang = Finding("hang", "rank 0 waited", "for rank 1", "", "")
    shown: list[Shown] = []
    run = CellRun(Cell.read("1", "print('here')\ntime.sleep(600)", CPU), shown.append)
    monkeypatch.setattr(torchrun, "findings", lambda state: [hang] if run._tails[0, "stdout"].count else [])
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
