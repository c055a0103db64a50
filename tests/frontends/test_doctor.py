"""The doctor: every check on this machine, and every problem that it detects, simulated."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from types import SimpleNamespace

import psutil
import pytest

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.frontends import doctor
from labkit.frontends.doctor import LEVELS, Check, serves
from labkit.setup import preflight
from labkit.setup.machine import Gpu, Machine

T4 = Gpu(0, "Tesla T4", 15 << 30, (7, 5))
P100 = Gpu(0, "Tesla P100", 16 << 30, (6, 0))
H200 = Gpu(0, "NVIDIA H200", 139 << 30, (9, 0))
ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "compute_90")


def having(monkeypatch, *gpus: Gpu, **torch) -> None:
    """Simulates a machine with some GPUs and a torch with the given properties."""
    said = {"version": "2.13.0", "cuda": "12.8", "available": True, "archs": ARCHS, "gloo": True, "nccl": True} | torch
    monkeypatch.setattr(doctor.preflight, "torch", lambda: preflight.Torch(**said))
    monkeypatch.setattr(doctor.Machine, "here", lambda: Machine(gpus, cores=4, memory=1 << 34))


def test_this_machine(capsys):
    code = act(cli.parse(["doctor", "--json"]))
    said = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in said["checks"]}
    assert len(found) == len(doctor.CHECKS)
    assert {
        "python",
        "torch",
        "devices",
        "backends",
        "all-reduce",
        "torchvision",
        "jupyterlab",
        "widgets",
        "ports",
        "loopback",
        "runs",
    } <= set(found)
    for check in found.values():
        assert check["level"] in LEVELS
        assert check["says"]
        assert check["fix"] or check["level"] == "fine", check
        assert "could not be checked" not in check["says"], check
    assert found["torch"]["level"] == found["all-reduce"]["level"] == "fine"
    assert code == int(any(check["level"] == "broken" for check in found.values()))
    assert not [
        child for child in psutil.Process().children(recursive=True) if "all_reduce" in " ".join(child.cmdline())
    ]


def test_every_fix_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "CHECKS", (lambda: Check("one", "fine", "good"), lambda: Check("two", "broken", "bad [red]", "mend it"))
    )
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "bad [red]" in said
    assert "→ mend it" in said


def test_check_that_fails_is_a_line_not_the_end(monkeypatch):
    def odd() -> Check:
        raise RuntimeError("who knows")

    monkeypatch.setattr(doctor, "CHECKS", (odd, lambda: Check("next", "fine", "good")))
    first, second = doctor.checks()
    assert (first.name, first.level) == ("odd", "broken")
    assert "RuntimeError: who knows" in first.says
    assert second.name == "next"


@pytest.mark.parametrize(
    ("archs", "gpu", "expected"),
    [
        (ARCHS, T4, True),
        (ARCHS, H200, True),
        (ARCHS, P100, False),  # Kaggle's P100 under a torch whose is_available() returns True
        (ARCHS, Gpu(0, "L4", 1, (8, 9)), True),  # code for 8.6 runs on 8.9
        (ARCHS, Gpu(0, "RTX 5090", 1, (12, 0)), True),  # by PTX for 9.0
        (("sm_80",), H200, False),
        (("sm_90a",), H200, True),
        ((), T4, False),
    ],
)
def test_which_torch_serves_which_gpu(archs, gpu, expected):
    assert serves(archs, gpu) is expected


def test_gpu_that_torch_is_not_built_for(monkeypatch):
    having(monkeypatch, P100)
    check = doctor.devices()
    assert check.level == "broken"
    assert "not for Tesla P100" in check.says


@pytest.mark.parametrize(
    ("torch", "level", "says"),
    [
        ({}, "fine", "Tesla T4 (15 GiB, 7.5)"),
        ({"cuda": None, "available": False, "archs": ()}, "degraded", "CPU build"),
        ({"available": False, "archs": ()}, "broken", "no CUDA driver"),
        ({"error": "ImportError: libcudart", "cuda": None}, "broken", "without torch"),
    ],
)
def test_gpu_and_torch(monkeypatch, torch, level, says):
    having(monkeypatch, T4, **torch)
    check = doctor.devices()
    assert check.level == level
    assert says in check.says


def test_t4_has_no_bf16(monkeypatch):
    having(monkeypatch, T4)
    assert "Tesla T4 has no bf16" in doctor.precision().says
    having(monkeypatch, H200)
    assert "bf16" in doctor.precision().says


def test_several_gpus_need_nccl(monkeypatch):
    having(monkeypatch, T4, T4, nccl=False)
    check = doctor.backends()
    assert check.level == "degraded" and check.says == "gloo; several GPUs need nccl"


def test_torch_that_cannot_be_imported_or_is_too_old(monkeypatch):
    having(monkeypatch, error="OSError: libcudart.so.13: cannot open shared object file")
    for check in (doctor.torch(), doctor.backends(), doctor.all_reduce()):
        assert check.level == "broken"
        assert check.fix
    having(monkeypatch, version="2.5.1")
    assert doctor.torch().level == "broken"


def test_mismatched_torchvision_is_named_with_its_fix(monkeypatch):
    monkeypatch.setattr(
        doctor.preflight, "torchvision", lambda: ("0.28.0", "RuntimeError: operator torchvision::nms does not exist")
    )
    check = doctor.torchvision()
    assert check.level == "degraded"
    assert '"operator torchvision::nms does not exist"' in check.says
    assert "only --workload resnet18 and --data mnist or cifar10 need it" in check.fix


def test_all_reduce_over_gloo_and_its_failure(monkeypatch):
    seconds, error = preflight.all_reduce("gloo")
    assert (error, seconds > 0) == ("", True)
    monkeypatch.setattr(preflight, "_ALL_REDUCE", "import sys; sys.exit('no way')")
    assert preflight.all_reduce("gloo")[1] == "no way"
    monkeypatch.setattr(preflight, "_ALL_REDUCE", "import time; time.sleep(600)")
    monkeypatch.setattr(preflight, "_LIMIT", 0.5)
    assert "no answer within" in preflight.all_reduce("gloo")[1]
    assert not [child for child in psutil.Process().children() if "time.sleep(600)" in " ".join(child.cmdline())]


def test_import_that_crashes_is_an_answer():
    assert preflight._ask("import os; os.abort()")[1] == "exit code -6"
    assert preflight._ask("raise ImportError('libcudart')")[1] == "ImportError: libcudart"
    assert preflight._ask("print('noise'); print('{\"version\": 1}')") == ({"version": 1}, "")


def test_halves_of_a_widget_that_do_not_match(monkeypatch):
    monkeypatch.setattr(doctor, "_extension_version", {"anywidget": "0.9.21", "jupyterlab-plotly": "7.1.0"}.get)
    check = doctor.widgets()
    assert check.level == "degraded"
    assert "anywidget 0.9.21 in JupyterLab" in check.says
    assert "@jupyter-widgets/jupyterlab-manager missing" in check.says
    assert "plotly" not in check.says


def test_disk_that_is_nearly_full(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=100 << 20))
    assert doctor.runs_folder().level == "broken"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=500 << 20))
    assert doctor.runs_folder().level == "degraded"


def test_small_shared_memory_matters_with_several_gpus(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    having(monkeypatch, T4)
    assert doctor.shared_memory().level == "fine"
    having(monkeypatch, T4, T4)
    if sys.platform == "linux":
        assert doctor.shared_memory().level == "degraded"


def test_a_port_in_use_is_reported_and_harmless():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not doctor._is_free(server.getsockname()[1])
    assert doctor.ports().level == "fine"


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "requirements", lambda *extras: [doctor_requirement("no-such-package")])
    check = doctor.python()
    assert check.level == "degraded"
    assert "no-such-package>=1 (here: none)" in check.says


def doctor_requirement(name: str):
    from labkit.setup.environment import Requirement

    return Requirement(name, "1")


class _Process:
    def __init__(self, user: str, uid: int):
        self.info = {"username": user, "uids": SimpleNamespace(real=uid)}


@pytest.mark.parametrize(
    ("people", "level", "says"),
    [
        ([("root", 0), ("daemon", 2), ("nobody", 65_534)], "fine", "no other user is active"),
        (
            [("root", 0), ("ann", 1001), ("bob", 1002)],
            "degraded",
            "ann, bob also use this machine: torch's store and gloo accept connections of every local user",
        ),
    ],
)
def test_other_people_on_the_machine_are_named(monkeypatch, people, level, says):
    active = [_Process(*one) for one in [*people, ("me", os.geteuid())]]
    monkeypatch.setattr(doctor, "psutil", SimpleNamespace(process_iter=lambda fields: active))
    check = doctor.other_users()
    assert check.level == level and says in check.says
    assert bool(check.fix) == (level != "fine")
