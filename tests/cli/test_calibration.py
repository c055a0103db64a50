"""`labkit doctor --calibrate`: real ranks are measured, the doctor shows the result, and no process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import psutil
import pytest
from conftest import wait_until
from lifetimes import LINUX, ROOT
from linked import MACHINE, table
from linked import cache as cache

from labkit.cli import parser
from labkit.cli.commands import act
from labkit.frontends import doctor
from labkit.prediction.links import OPERATIONS, LinkTable, store, stored
from labkit.probe import link_times
from labkit.runs import calibration
from labkit.runs.calibration import CalibrationError, calibrate, plan
from labkit.setup import preflight
from labkit.setup.machine import Gpu, Machine

SIZES = (1024, 65_536)


@pytest.fixture
def short(monkeypatch):
    """A calibration of few sizes, and a doctor with a single check."""
    monkeypatch.setattr(calibration, "calibrate", partial(calibrate, sizes=SIZES, seconds=0.5))
    monkeypatch.setattr(doctor, "CHECKS", (doctor.communication,))


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children(recursive=True) if "labkit.probe.link_times" in " ".join(one.cmdline())]


def test_two_cpu_ranks(cache, short, capsys):
    assert act(parser.parse(["doctor", "--calibrate", "--nproc", "2", "--json"])) == 0
    said = capsys.readouterr()
    assert "measuring communication between 2 gloo ranks" in said.err
    (links,) = json.loads(said.out)["links"]
    assert {*links["operations"], *links["missing"]} == set(OPERATIONS)
    assert set(links["operations"]) >= set(OPERATIONS) - {"all_to_all"}  # which not every gloo has
    for operation, points in links["operations"].items():
        assert [point["size"] for point in points] == list(SIZES)
        assert all(0 < point["low"] <= point["seconds"] <= point["high"] < 60 for point in points)
        assert all(point["repetitions"] >= 2 for point in points)
        assert all(len(point["after_computing"]) >= 12 and min(point["after_computing"]) > 0 for point in points)
        assert 0 < links["latency_seconds"][operation] <= min(point["seconds"] for point in points)
        assert links["bus_bytes_per_second"][operation] > 0
    assert links["kernels"]["copies"] > 1e6 and 0 < links["kernels"]["launch"] < 0.1
    assert links["kernels"]["slowdown"] > 0.9
    (kept,) = stored(Machine.here()).tables
    written = json.loads(json.dumps(kept.to_json()))
    assert {name: links[name] for name in written} == written
    assert ranks_of(psutil.Process()) == []


def test_the_rank_script_measures_what_the_models_know():
    assert tuple(link_times.OPERATIONS) == OPERATIONS


def test_the_doctor_shows_what_was_measured(cache, monkeypatch, capsys):
    monkeypatch.setattr(Machine, "here", lambda: MACHINE)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.communication,))
    assert doctor.main() == 0
    said = capsys.readouterr().out
    assert "has not been measured" in said and "→ run labkit doctor --calibrate" in said
    path = store(table(all_reduce=((1024, 197e-6), (1 << 26, 0.04))))
    assert doctor.main() == 0
    said = capsys.readouterr().out
    assert "Communication of 2 gloo ranks, measured on 2026-11-22" in said
    assert "197 µs (1.0 KiB)" in said and "1.68 GB/s (64.0 MiB)" in said
    path.write_text("{", encoding="utf-8")
    assert doctor.communication().level == "degraded"
    assert doctor.main(json=True) == 0
    assert json.loads(capsys.readouterr().out)["links"] == []


def test_the_backend_and_the_number_of_ranks(monkeypatch):
    gpus = tuple(Gpu(index, "Tesla T4", 1, (7, 5)) for index in range(4))
    torch = {"available": True, "nccl": True}
    monkeypatch.setattr(preflight, "torch", lambda: preflight.Torch(**torch))

    def planned(count: int, nproc: int | None = None) -> tuple[str, int]:
        monkeypatch.setattr(Machine, "here", lambda: Machine(gpus[:count], cores=2, memory=1))
        found = plan(nproc)
        return found.backend, found.ranks

    assert planned(0) == planned(1) == ("gloo", 2)
    assert planned(4) == ("nccl", 4) and planned(4, 2) == ("nccl", 2) and planned(4, 5) == ("gloo", 5)
    torch["nccl"] = False
    assert planned(4) == ("gloo", 2)
    with pytest.raises(ValueError, match="nproc must be an integer from 2 to 8, got 9"):
        planned(0, 9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "2"], "--nproc is the number of ranks for --calibrate; add --calibrate, or omit --nproc"),
        (["--calibrate", "--nproc", "60000"], "--nproc must be an integer from 2 to "),
    ],
)
def test_wrong_usage(cache, capsys, arguments, says):
    assert act(parser.parse(["doctor", *arguments])) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, time; time.sleep(600) if os.environ['RANK'] == '0' else exit('no network')", "no network"),
        ("import os, time; time.sleep(600) if os.environ['RANK'] == '0' else os.abort()", "exit code -6"),
    ],
)
def test_ranks_that_fail(monkeypatch, cache, capsys, short, code, says):
    monkeypatch.setattr(calibration, "_RANKS", ("-c", code))
    assert act(parser.parse(["doctor", "--calibrate"])) == 1
    assert f"communication could not be measured: rank 1 failed ({says})" in capsys.readouterr().err
    assert not [one for one in psutil.Process().children() if code in one.cmdline()]
    assert stored(Machine.here()).tables == ()


def test_ranks_that_never_answer(monkeypatch):
    monkeypatch.setattr(calibration, "_RANKS", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(calibration, "_LIMIT", 0.2)
    with pytest.raises(CalibrationError, match=r"the ranks took more than 0\.2 s"):
        calibrate(plan(2))


def test_an_interrupt_leaves_no_rank(monkeypatch):
    line = {"round": 1, "operation": "send", "size": 8, "seconds": [1.0], "after_computing": [], "computed": []}
    code = f"import json, time; print(json.dumps({line!r}), flush=True); time.sleep(600)"
    monkeypatch.setattr(calibration, "_RANKS", ("-c", code))

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:  # which holds the frames of the call
        calibrate(plan(2), interrupt)
    assert raised.tb and not [one for one in psutil.Process().children() if code in one.cmdline()]


def test_an_operation_that_the_backend_lacks_is_left_out_with_its_reason(monkeypatch):
    lines = [
        {
            "round": 1,
            "operation": "send",
            "size": 8,
            "seconds": [4.0, 1.0, 2.0],
            "after_computing": [9.0],
            "computed": [0.001],
        },
        {"round": 1, "operation": "all_to_all", "reason": "no support"},
        {
            "round": 2,
            "operation": "send",
            "size": 8,
            "seconds": [3.0, 5.0],
            "after_computing": [8.0],
            "computed": [0.0],
        },
        {"round": 2, "precision": "fp32", "flops": [5e10, 6e10]},
        {"round": 2, "kernels": {"copies": [4e9, 5e9], "launch": [2e-6, 3e-6], "slowdown": [3.0, 1.0, 2.0]}},
    ]
    code = f"import json, os\nif os.environ['RANK'] == '0':\n for line in {lines!r}: print(json.dumps(line))"
    monkeypatch.setattr(calibration, "_RANKS", ("-c", code))
    reports: list[str] = []
    found = calibrate(plan(2), reports.append)
    assert found.missing == {"all_to_all": "no support"} and list(found.points) == ["send"]
    (point,) = found.points["send"]
    assert (point.size, point.low, point.seconds, point.high, point.repetitions) == (8, 2.0, 3.0, 4.0, 5)
    assert (point.after_computing, point.computed) == ((8.0, 9.0), (0.0, 0.001))
    assert found.peaks == {"fp32": 6e10}, "of the fastest product"
    assert found.kernels == {"copies": 5e9, "launch": 2e-6, "slowdown": 2.0}
    assert LinkTable.from_json(found.to_json()) == found
    assert reports == ["round 1: send, 8 B", "round 2: send, 8 B", "round 2: matrix products, fp32"]


@LINUX
def test_ranks_die_with_a_doctor_that_is_killed(cache, tmp_path):
    code = "from labkit.runs.calibration import calibrate, plan; calibrate(plan(2), seconds=300.0)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}  # it cannot remove its files
    started = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_until(lambda: len(ranks_of(psutil.Process(started.pid))) == 2)
        ranks = ranks_of(psutil.Process(started.pid))
    finally:
        started.kill()
        started.wait()
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
