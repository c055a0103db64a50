"""The CUDA build of torch on a machine without a driver, as after the usual `pip install torch` on a laptop: CPU ranks
over gloo are used, and one line says why. The same environment, without the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from labkit.setup.environment import CLONE

LINE = "torch is a build for CUDA 13.0, but this machine has no GPU: CPU ranks over gloo are used"


@pytest.fixture(scope="module")
def without_driver(tmp_path_factory) -> dict[str, str]:
    """The environment variables of a process on this machine itself."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CUDA_STAND_IN_")
        and name not in ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    }
    place = tmp_path_factory.mktemp("runs")
    with tempfile.TemporaryDirectory(prefix="labkit-") as runtime:  # a socket's path must be short
        yield own | {
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).with_name("site")), str(CLONE))),  # for coverage
            "LABKIT_RUNS": str(place),
            "LABKIT_LEASES": str(place / "leases"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "XDG_RUNTIME_DIR": runtime,
        }


def labkit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "labkit", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_doctor_is_content_and_says_it_in_one_line(without_driver):
    report = json.loads(labkit(without_driver, "doctor", "--json").stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["devices"]["level"] == "fine" and checks["devices"]["says"].startswith(LINE)
    assert {checks[name]["level"] for name in ("torch", "backends", "all-reduce", "torchvision")} == {"fine"}


def test_a_run_trains_on_cpu_ranks_and_says_why(without_driver):
    done = labkit(without_driver, "run", "ddp", "--workload", "mlp", "--steps", "3", "--batch-size", "16", "--json")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["state"], summary["device"], summary["world_size"]) == (0, "finished", "cpu", 2)
    assert done.stderr.splitlines()[0] == f"labkit: {LINE}"
    asked = labkit(without_driver, "run", "ddp", "--workload", "mlp", "--steps", "3", "--device", "cuda")
    assert asked.returncode == 2
    assert asked.stderr == "labkit: --device cuda is not available: this machine has no GPU; use --device cpu\n"


def test_memory_on_gpus_is_predicted(without_driver):
    done = labkit(without_driver, "predict", "ddp", "--workload", "mlp", "--device", "cuda", "--nproc", "2", "--json")
    plan = json.loads(done.stdout)
    assert plan["method"] == "simulated"
    assert all(rank["peak_memory_bytes"] > 0 and rank["comm_bytes_per_step"] > 0 for rank in plan["ranks"])


def test_the_warm_start_a_model_of_torchvision_and_the_panel_use_cpu_ranks(without_driver):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("scripts") / "without_driver.py"],
        env=without_driver,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["starts"] == ["warm", "warm"] and seen["ends"] == ["finished", "finished"]
    assert seen["devices"] == ["cpu", "cpu"]
    assert seen["panel"] == ["cpu"]
