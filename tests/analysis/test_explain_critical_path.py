"""The critical path through profiled steps: traces whose path is known, and real ones."""

from __future__ import annotations

import pytest
from chrome_traces import all_reduce, event, kernel, step, trace, write
from places import ROOT

from labkit.analysis.foreign.profiles import explain
from labkit.analysis.foreign.trace import read_profile

TRACES = ROOT.parent / "shared" / "traces"  # profiles of real accelerators, which are not part of the repository
CPU = "the CPU: Python, operators, launches"


def path(folder, *events, lasts: float = 1000) -> tuple[float, dict[str, tuple[int, int | None]]]:
    """The µs of a step; by part those on its path, and those of a step without the part."""
    whole = trace([step(1, 0, lasts), *events, step(2, lasts, 100), kernel(lasts + 20, 10)])
    found = explain([read_profile(write(folder / "a.json", whole))]).figures["critical_path"]
    us = {
        part["part"]: tuple(
            None if part[key] is None else round(1e6 * part[key]) for key in ("seconds", "without_seconds")
        )
        for part in found["parts"]
    }
    return round(1e6 * found["step_seconds"]), us


def test_a_step_whose_kernels_wait_for_each_other(tmp_path):
    kernels = [kernel(10 + 300 * number, 300, launched=1 + number) for number in range(3)]
    seconds, parts = path(tmp_path, *kernels)
    assert seconds == 910
    assert parts["computation"] == (900, 10)
    assert parts[CPU] == (1, 909)


def test_a_step_that_waits_for_launches(tmp_path):
    kernels = [kernel(100 * number, 10) for number in range(1, 9)]
    seconds, parts = path(tmp_path, *kernels)
    assert seconds == 810
    assert parts[CPU] == (795, 8 * 10 + 8 * 5)
    assert parts["computation"] == (10, 800)


def test_communication_that_nothing_overlaps(tmp_path):
    """The second kernel waits for the all-reduce, which waits for the first one."""
    seconds, parts = path(
        tmp_path,
        kernel(10, 200, launched=1),
        all_reduce(210, 300, launched=3, stream=20),
        kernel(511, 100, launched=4),
    )
    assert seconds == 611
    assert parts["communication"] == (300, 311)
    assert parts["computation"][0] == 300


def test_communication_that_computation_overlaps_gains_nothing(tmp_path):
    seconds, parts = path(
        tmp_path,
        kernel(10, 200, launched=1),
        all_reduce(210, 50, launched=3, stream=20),
        kernel(210, 300, launched=4),
    )
    assert seconds == 510
    assert "communication" not in parts
    assert parts["computation"] == (500, 60)


def test_the_cpu_waits_for_a_kernel(tmp_path):
    """As `.item()` does: it launches the second kernel 40 µs after the first one has ended."""
    seconds, parts = path(
        tmp_path,
        kernel(10, 200, launched=1),
        event("cuda_runtime", "cudaStreamSynchronize", 6, 206),
        kernel(255, 100, launched=250),
    )
    assert seconds == 355
    assert parts["computation"] == (300, 55)
    assert parts[CPU][0] == 1 + 2 + 38


def test_traces_without_steps_or_launches_have_no_path(tmp_path):
    whole = trace([kernel(10, 100), kernel(200, 10)])
    assert explain([read_profile(write(tmp_path / "a.json", whole))]).figures["critical_path"] is None


@pytest.mark.parametrize("name", ["a100_nccl.json.gz", "mi250_rocm.json.gz"])
def test_the_parts_of_real_steps(name):
    if not (TRACES / name).exists():
        pytest.skip(f"{TRACES} is not here")
    found = explain([read_profile(TRACES / name)]).figures["critical_path"]
    kinds = [
        part for part in found["parts"] if part["part"] == CPU or " " not in part["part"] or "trace" in part["part"]
    ]
    kinds = [part for part in kinds if "(" not in part["part"] and "<" not in part["part"]]
    assert sum(part["seconds"] for part in kinds) == pytest.approx(found["step_seconds"], rel=0.02)
    assert all((part["without_seconds"] or 0) <= 1.0001 * found["step_seconds"] for part in found["parts"])
    (cpu,) = [part for part in kinds if part["part"] == CPU]
    assert cpu["seconds"] > 0.9 * found["step_seconds"], "both are launch-bound by the breakdown, too"
