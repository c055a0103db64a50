"""`labkit explain`: a page in the terminal, one JSON object, and one sentence for what cannot be read."""

from __future__ import annotations

import json

import pytest
from chrome_traces import all_reduce, kernel, step, trace, write
from commands import called
from rich.cells import cell_len

import labkit
from labkit.frontends.console import Console
from labkit.frontends.terminal import explanation


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        events = [step(1, 0, 1000), kernel(10, 100 + 300 * rank), all_reduce(120 + 300 * rank, 500 - 300 * rank, 1000)]
        events += [kernel(700, 100, name="void \x1b[31mred<int>(float)"), step(2, 1000, 1000)]
        write(tmp_path / f"rank{rank}.json.gz", trace(events, rank=rank))
    return tmp_path


def test_page_says_what_it_is_then_what_happened_then_tables(folder, capsys):
    assert called("explain", str(folder)) == 0
    shown = capsys.readouterr().out
    heads = ["2 profiles of torch.profiler", "communication that nothing overlaps", "Time by rank", "Kernels by time"]
    places = [shown.index(head) for head in [*heads, "Step 2 is left out"]]
    assert places == sorted(places)
    assert "\x1b" not in shown and r"\x1b[31mred" in shown


def test_page_fits_into_80_columns(folder):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explanation(labkit.explain(folder)))
    lines = console.export_text().splitlines()
    assert max(map(cell_len, lines)) <= 80
    heads = [line for line in lines if "launch-bound" in line]
    assert len(heads) == 2 and all("per step" in head or "step" in head for head in heads)  # no table is split


def test_json_is_one_object(folder, capsys):
    assert called("explain", "--json", str(folder / "rank0.json.gz")) == 0
    pages = json.loads(capsys.readouterr().out)["pages"]
    assert [page["kind"] for page in pages] == ["profile"]
    assert pages[0]["ranks"][0]["total"]["exposed_seconds"] == pytest.approx(500e-6)


def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path, capsys):
    assert called("explain", str(tmp_path / "missing.json")) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"labkit: {tmp_path}/missing.json cannot be read: No such")
    )
    assert called("explain", "--json", "/dev/null") == 1
    assert json.loads(capsys.readouterr().out)["error"] == "/dev/null cannot be read: it is no regular file"
    assert called("explain") == 2


def test_in_python_it_is_text_and_html(folder):
    found = labkit.explain(folder / "rank0.json.gz", folder / "rank1.json.gz")
    assert "rank 1 arrives last" in repr(found) or found.findings
    assert "<script" not in found._repr_html_() and "Time by rank" in found._repr_html_()
    with pytest.raises(TypeError, match="path must be a path"):
        labkit.explain(7)
    with pytest.raises(ValueError, match="needs the path"):
        labkit.explain()
