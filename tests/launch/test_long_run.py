"""The benchmark of a long run: its arithmetic and its results file."""

from __future__ import annotations

import io
import json

import pytest
from bench import results
from bench.long_run import Sample, _printed_step, figures, growth, sampled, table
from bench.main import main
from rich.console import Console

MIB = 2**20


def sample(minute: float, **sizes) -> Sample:
    return Sample(minute, step=int(60 * minute), ranks=(100 * MIB, 300 * MIB, 120 * MIB), **sizes)


def test_growth_is_the_slope_per_hour_after_the_first_ten_minutes():
    samples = [sample(minute, kernel=900 * MIB if minute < 10 else minute * MIB // 2) for minute in range(61)]
    assert growth(samples, "kernel") == pytest.approx(30 * MIB)
    assert growth(samples, "rank") == 0
    noisy = [one._replace(kernel=one.kernel + (-1) ** int(one.minute) * MIB) for one in samples]
    assert growth(noisy, "kernel") == pytest.approx(30 * MIB, abs=MIB / 2)


def test_what_was_not_measured_has_no_growth():
    short = [sample(minute, kernel=MIB) for minute in range(11)]
    assert growth(short, "kernel") is None, "one sample after the first ten minutes"
    assert growth(short, "kernel", after=0) == 0
    assert growth([sample(minute) for minute in range(61)], "page") is None


def test_the_figures_are_of_what_there_was():
    samples = [sample(minute, kernel=(90 + minute) * MIB, nodes=10_000 + 2 * minute) for minute in range(21)]
    found = {figure.name.partition(" under ")[0]: figure for figure in figures("the lab", samples, 3)}
    assert list(found) == ["memory of the kernel", "memory of a rank (median)", "DOM nodes of the page"]
    kernel, rank, nodes = found.values()
    assert kernel.median == pytest.approx(60) and kernel.unit == "MiB/h" and kernel.each == tuple(range(90, 111))
    assert rank.median == 0 and set(rank.each) == {120.0}, "the median of the ranks"
    assert nodes.median == pytest.approx(120) and nodes.unit == "nodes/h" and nodes.each[-1] == 10_040
    assert "3 ranks, 1,200 steps in 20 minutes" in kernel.note
    assert figures("torchrun", samples[:5], 3)[0].median is None


def test_the_table_has_a_row_per_sample():
    console = Console(width=120, file=io.StringIO())
    console.print(
        table(
            [
                sample(0.01, kernel=70 * MIB, page=50 * MIB, nodes=10_062),
                sample(1, kernel=71 * MIB, folder=3 * MIB // 2),
            ]
        )
    )
    rows = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row.strip("│").split("│")] for row in rows] == [
        ["0", "0", "70.0", "", "120.0", "50.0", "", "10,062"],
        ["1", "60", "71.0", "", "120.0", "", "1.5", ""],
    ]


def test_samples_are_taken_once_per_minute_however_long_one_takes():
    now, waited, noted = [1000.0], [], []

    def take(minute: float) -> Sample:
        now[0] += 7.0
        return sample(minute)

    def wait(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    found = sampled(take, wait, 3, noted.append, clock=lambda: now[0])
    assert [one.minute for one in found] == [0, 1, 2, 3] and noted == found
    assert waited == [0, 53, 53, 53]


def test_the_newest_step_is_read_from_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("starting\n")
    assert _printed_step(log) == 0
    log.write_text("x\n" * 100_000 + "step 20: loss 2.1\nstep 1,040: loss 0.1\nepoch 1: accuracy 0.9\n")
    assert _printed_step(log) == 1040


def test_results_are_appended_line_by_line(tmp_path):
    path = tmp_path / "results.jsonl"
    assert results.read(path) == []
    results.append(path, {"minute": 0, "ranks": (1, 2)})
    path.write_text(path.read_text() + '{"minute": 1, "ra')
    assert results.read(path) == [{"minute": 0, "ranks": [1, 2]}], "a benchmark was killed while it wrote"
    results.append(path, {"minute": 2})
    assert [one["minute"] for one in results.read(path)] == [0, 2]
    assert json.loads(path.read_text().splitlines()[-1]) == {"minute": 2}


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / "missing" / "results.jsonl"
    with pytest.raises(ValueError, match=r"--results must name a file .* got .*results\.jsonl: No such file"):
        main(only="memory_growth", results=str(path))
    with pytest.raises(ValueError, match="--minutes does not apply to the benchmark importing"):
        main(only="importing", minutes=5)
