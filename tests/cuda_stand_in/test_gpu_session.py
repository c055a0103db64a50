"""A rehearsal of the session on GPUs. Kernels compute nothing here, so losses mean nothing, and the report has to say
so; every part runs, and limits are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import processes_of
from gpu_session.parts import PARTS
from gpu_session.report import MEASURED, OK, WRONG, Report

from labkit.record.folder import RunFolder
from labkit.runs.handle import Run
from labkit.setup.environment import CLONE
from labkit.setup.machine import Machine

# of every part a case or two
CASES = (
    *(
        "machine/devices",
        "strategies/single, gpt",
        "strategies/ddp",
        "overhead/ddp, cnn, pair 1",
        "phases/alone",
        "warm",
    ),
    *("warm", "faults/out_of_memory", "faults/killed_rank", "bandwidth/kernels", "bandwidth/NCCL × 2", "tests/probe"),
    *("workloads/single, mlp", "options/ddp, accumulate", "options/ddp, save_every"),
)


def rehearse(folder: Path, minutes: float, *chosen: str) -> subprocess.CompletedProcess[str]:
    own = {"LABKIT_LEASES": str(folder / "leases")}
    command = [sys.executable, "-m", "labkit", "test", "--gpu", f"--minutes={minutes}", f"--results={folder}"]
    return subprocess.run(
        [*command, f"--only={';'.join(chosen)}"],
        cwd=CLONE,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("session")
    return folder, rehearse(folder, 60, *CASES)


def test_every_part_runs_and_the_report_has_it(rehearsal):
    folder, done = rehearsal
    report = Report(folder)
    known = report.cases()
    assert {part for part, _ in known} == set(PARTS), done.stderr
    assert {name: end["how"] for name, end in report.ends().items()} == dict.fromkeys(PARTS, "complete")
    assert not report.not_reached(PARTS)
    page = report.page.read_text()
    assert "## Not reached\n\nEverything was reached." in page
    assert all(f"## {part.title}" in page for part in PARTS.values())
    assert not processes_of(str(folder))


def test_losses_that_mean_nothing_are_reported_as_different(rehearsal):
    folder, done = rehearsal
    known = Report(folder).cases()
    (ddp,) = (line for (part, case), line in known.items() if part == "strategies" and case.startswith("ddp"))
    assert ddp["verdict"] == WRONG and ddp["figures"]["badge"]["verdict"] == "differs"
    assert f"- strategies, {ddp['case']}: differs" in Report(folder).page.read_text()
    assert done.returncode == 1


def test_what_needs_no_values_is_as_on_a_gpu(rehearsal):
    folder, _ = rehearsal
    known = Report(folder).cases()
    several = len(Machine.here().gpus) > 1
    assert known["machine", "devices"]["verdict"] == OK
    assert known["faults", "out_of_memory"]["verdict"] == OK
    assert known["faults", "killed_rank"]["verdict"] == (OK if several else "impossible")
    assert known["bandwidth", "NCCL × 2"]["verdict"] == (MEASURED if several else "impossible")
    assert known["phases", "alone"]["verdict"] == MEASURED
    assert [known["warm", case]["figures"]["summary"]["start"] for case in ("cold", "warm", "warm again")] == [
        "cold",
        "warm",
        "warm",
    ]
    assert all(value > 0 for value in known["overhead", "ddp, cnn, pair 1"]["figures"].values())
    for (part, _), line in known.items():
        if "probe_errors" in line["figures"]:
            assert not line["figures"]["probe_errors"], (part, line["case"])


def test_recorded_runs_are_packed_and_open_elsewhere(rehearsal, tmp_path):
    import zipfile

    folder, _ = rehearsal
    runs = [line["figures"]["run"] for line in Report(folder).cases().values() if "run" in line["figures"]]
    assert runs and all((folder / "packs" / f"{name}.zip").is_file() for name in runs)
    with zipfile.ZipFile(folder / "packs" / f"{runs[0]}.zip") as archive:
        archive.extractall(tmp_path)
    opened = Run.attach(RunFolder.find(runs[0], tmp_path).path)
    assert opened.words == "finished" and opened.state.step == opened.state.asked.steps


def test_a_session_that_is_too_short_says_what_it_did_not_reach(tmp_path):
    done = rehearse(tmp_path, 2, "strategies", "faults")
    report = Report(tmp_path)
    left = report.not_reached(["strategies", "faults"])
    assert left["strategies"] and left["faults"], done.stdout
    assert f"- strategies: {left['strategies'][0]}" in report.page.read_text().replace("\\_", "_")
    assert not processes_of(str(tmp_path))
