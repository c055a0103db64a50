"""The panel's button that installs a missing extra, with a test command instead of the real one."""

from __future__ import annotations

import sys
import threading

import pytest

from labkit import SpecError
from labkit.frontends.panel import recorded
from labkit.frontends.panel.lab import Lab
from labkit.plan.spec import Spec
from labkit.setup import environment
from labkit.setup.machine import Machine

CPU = Machine(gpus=(), cores=2, memory=8 << 30, torch=(2, 13))
_INSTALLS = """
import pathlib, sys, time
print("labkit: installing", flush=True)
time.sleep(0.2)
if sys.argv[2] == "works":
    pathlib.Path(sys.argv[1], "package_of_the_test.py").touch()
else:
    print("labkit: pip install failed with exit code 1; start again", flush=True)
sys.exit(sys.argv[2] == "fails")
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages without the one that the strategy deepspeed needs."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(environment.OPTIONAL, "deepspeed", "package_of_the_test")
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: CPU))
    return folder


def installing(monkeypatch, packages, how: str) -> None:
    monkeypatch.setattr(recorded, "setup_command", lambda extra: [sys.executable, "-c", _INSTALLS, str(packages), how])


def shown_while_installing(button: recorded.Install) -> list[str]:
    said: list[str] = []
    button.progress.observe(lambda change: said.append(change["new"]), "value")
    button.button.click()
    button.join(60)
    return said


def test_a_missing_package_names_its_extra(packages):
    with pytest.raises(SpecError) as caught:
        Spec("deepspeed", nproc=2).on(CPU)
    assert (caught.value.field, caught.value.extra) == ("strategy", "deepspeed")
    assert (
        str(caught.value)
        == "deepspeed needs the package package_of_the_test, which is not installed; add it with: python3 -m labkit"
        " setup --with deepspeed, or use the strategy zero1"
    )


def test_button_installs_and_the_strategy_works_without_a_restart(packages, monkeypatch):
    installing(monkeypatch, packages, "works")
    lab = Lab(strategy="deepspeed", nproc=2)
    button = lab._install
    assert button.button.layout.display == "" and button.button.description == "Install package_of_the_test"
    assert lab._run_button.disabled
    before = threading.current_thread()
    said = shown_while_installing(button)
    assert any("installing" in text for text in said), "progress is shown"
    assert before is threading.current_thread() and not button.busy
    assert lab.spec.strategy == "deepspeed"
    assert button.button.layout.display == "none" and not lab._run_button.disabled


def test_another_strategy_needs_no_button(packages):
    lab = Lab(strategy="deepspeed", nproc=2)
    lab._choices.strategy.value = "ddp"
    assert lab._install.button.layout.display == "none"
    lab._choices.further.value = "deepspeed"
    assert lab._install.button.layout.display == ""


@pytest.mark.parametrize(
    ("how", "says"), [("fails", "pip install failed"), ("elsewhere", "installed, but not for this kernel")]
)
def test_a_failed_installation_shows_its_reason(packages, monkeypatch, how, says):
    installing(monkeypatch, packages, how)
    lab = Lab(strategy="deepspeed", nproc=2)
    shown_while_installing(lab._install)
    assert says in lab._install.progress.value
    assert not lab._install.button.disabled, "the user can retry"


def test_the_real_command_is_labkit_setup():
    assert recorded.setup_command("deepspeed") == [sys.executable, "-m", "labkit", "setup", "--with", "deepspeed"]
