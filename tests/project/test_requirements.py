"""Requirements: the same in three files; real processes, and extras that are requested."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from bootstrapping import Handed, having

from labkit import __main__
from labkit.cli import parser as cli
from labkit.cli import project
from labkit.cli.commands import act
from labkit.setup import environment
from labkit.setup.environment import CLONE, CONSTRAINTS, PROJECT, release

# ---- requirements, in three files


def pyproject() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
    return tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]


def constraints() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.partition(";")[0].strip().split("==") for line in lines)


def test_pyproject_is_read_as_toml_reads_it():
    project = pyproject()
    assert [str(wanted) for wanted in environment.requirements()] == project["dependencies"]
    for extra, wanted in project["optional-dependencies"].items():
        assert [str(one) for one in environment.requirements(extra)][len(project["dependencies"]) :] == [
            one for one in wanted if one not in project["dependencies"]
        ]
    assert not any(one.startswith("torch") for one in project["dependencies"])


def test_tested_versions_meet_every_requirement():
    pinned = constraints()
    wanted = environment.requirements("torch", "lab", "mnist", "deepspeed", "test")
    assert {one.name for one in wanted} | {"jupyterlab_widgets"} == set(pinned)
    for one in wanted:
        assert release(pinned[one.name]) >= release(one.minimum), one
        assert pinned[one.name] not in one.unfit, one
    assert pinned["torch"] == "2.13.0"
    assert pinned["torchvision"] == "0.28.0"


def test_tested_versions_are_available_for_the_oldest_python():
    from importlib import metadata

    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    for line in (line for line in lines if "==" in line and "python_version" not in line):
        name, version = line.split("==")
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        oldest = re.search(r">=\s*3\.(\d+)", distribution.metadata.get("Requires-Python") or ">=3.0")
        if distribution.version.partition("+")[0] == version:
            assert int(oldest[1]) <= __main__.OLDEST[1], line


def test_conda_environment_asks_for_the_same():
    asked = yaml.safe_load((CLONE / "environment.yml").read_text(encoding="utf-8"))
    assert asked["channels"] == ["conda-forge", "nodefaults"]
    *packages, pip = asked["dependencies"]
    assert pip == {"pip": ["-e ."]}
    wanted = {str(one) for one in environment.requirements("lab")}
    pinned = constraints()
    assert set(packages) == wanted | {
        "python>=3.10",
        "pip",
        f"pytorch=={pinned['torch']}",
        f"torchvision=={pinned['torchvision']}",
    }
    assert pyproject()["requires-python"] == ">=3.10"


# ---- real processes


def test_fresh_clone_in_a_complete_environment(tmp_path):
    """A clone in an empty home, a Python that has everything: no set-up, and under three seconds with all that
    JupyterLab does not do."""
    clone = tmp_path / "a clone"
    shutil.copytree(CLONE / "labkit", clone / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT, clone)
    command = [sys.executable, "-m", "labkit", "runs", "--json"]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=clone, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"runs": []}), done.stderr
    assert time.monotonic() - began < 30
    assert not (clone / ".venv").exists()


def test_old_python_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(__main__.sys, "version_info", (3, 9, 18))
    assert __main__.main(["lab"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "needs Python 3.10 or newer" in said.err


def test_help_needs_no_environment(tmp_path):
    """A Python without packages handles --help and wrong usage before it creates an environment."""
    clone = tmp_path / "clone"
    shutil.copytree(CLONE / "labkit", clone / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT, clone)
    bare = [getattr(sys, "_base_executable", sys.executable), "-S", "-m", "labkit"]
    for arguments, code, says in (
        (["--help"], 0, "doctor"),
        (["run", "ddpp"], 2, "did you mean ddp?"),
        (["rnu"], 2, "did you mean run?"),
    ):
        done = subprocess.run([*bare, *arguments], cwd=clone, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert says in done.stdout + done.stderr
    assert not Path(clone / ".venv").exists()


def test_ci_calls_the_test_command():
    ci = CLONE / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert ci.read_text().splitlines()[-1] == "exec python3 -m labkit test"


# ---- requested extras


def asked(*extras: str):
    return cli.parse(["setup", *(word for extra in extras for word in ("--with", extra))])


def test_setup_with_an_extra_asks_for_it():
    assert asked().extras == ("lab",)
    assert asked("deepspeed").extras == ("lab", "deepspeed")
    assert asked("deepspeed,mnist", "deepspeed").extras == ("lab", "deepspeed", "mnist")
    for extra in environment.OPTIONAL:
        assert environment.requirements(extra), f"pyproject.toml has no extra {extra}"


def test_an_extra_goes_into_the_environment_that_is_active_and_changes_nothing_there(calls, monkeypatch, tmp_path):
    having(monkeypatch, lacks=["deepspeed"], active="the conda environment /opt/lab")
    environment.ensure(asked("deepspeed").extras, ["setup", "--with", "deepspeed"])
    ((_, arguments),) = calls
    assert arguments[-1] == "deepspeed>=1" and arguments[0] == "-c"


def test_an_extra_goes_into_the_clone_s_own_environment_with_the_tested_versions(calls, monkeypatch):
    having(monkeypatch, lacks=["deepspeed"], torch=False)
    with pytest.raises(Handed):
        environment.ensure(asked("deepspeed").extras, ["setup", "--with", "deepspeed"])
    install = next(call[1] for call in calls if call[0] == "install")
    assert install[-1].endswith("[deepspeed,lab,torch]")
    assert install[install.index("-c") + 1] == str(environment.CONSTRAINTS)
    assert calls[-1] == ("become", [str(environment.VENV_PYTHON), "-m", "labkit", "setup", "--with", "deepspeed"])


def test_an_environment_without_pip_is_one_clear_sentence(calls, monkeypatch):
    having(monkeypatch, lacks=["deepspeed"], active="the conda environment /opt/lab")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else found(name, *rest))
    with pytest.raises(environment.SetupError) as caught:
        environment.ensure(asked("deepspeed").extras, ["setup", "--with", "deepspeed"])
    assert (
        str(caught.value)
        == "the conda environment /opt/lab lacks deepspeed and has no pip; install them in it, or deactivate it"
    )
    assert calls == []


@pytest.mark.parametrize(
    ("extra", "clone", "says"),
    [
        (
            "mnist",
            True,
            "torchvision must match the torch of the conda environment /opt/lab, so setup does not add it; install it",
        ),
        (
            "deepspeed",
            True,
            "deepspeed was not added to the conda environment /opt/lab; install it there, or deactivate",
        ),
        ("deepspeed", False, "labkit is installed as a package in"),
    ],
)
def test_an_extra_that_could_not_be_added_is_refused_with_the_reason(place, monkeypatch, capsys, extra, clone, says):
    having(monkeypatch, active="the conda environment /opt/lab")
    monkeypatch.setattr(environment, "has", lambda name: False)
    if not clone:
        environment.PROJECT.unlink()
    assert act(asked(extra)) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"labkit: {says}") and told.count("\n") == 1


def test_no_message_says_to_install_a_package_called_labkit():
    """On public registries, that name belongs to a different project."""
    texts = [
        path
        for folder in ("labkit", "labs")
        for path in (CLONE / folder).rglob("*")
        if path.suffix in (".py", ".md", ".j2", ".js")
    ]
    for path in (*texts, CLONE / "README.md", CLONE / "environment.yml"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(pip3?|uv|conda|pipx)\s[^\n]*install[^\n]*\blabkit\b", text), path
        assert not re.search(r"labkit\[\w+\]", text), path


# ---- Debian packages of some tests


def debian(monkeypatch, *, root: bool, programs: set[str], fails: bool = False) -> list[list[str]]:
    """A machine that has `programs`; an installation adds chromium to them unless it `fails`. The commands that ran."""
    ran: list[list[str]] = []

    def run(command, **settings):
        ran.append([*command, sys.stderr.getvalue()])
        if "install" in command and not fails:
            programs.add("chromium")

    monkeypatch.setattr(project.subprocess, "run", run)
    monkeypatch.setattr(project.shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    monkeypatch.setattr(project.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return ran


def test_debian_packages_are_announced_with_the_reason_before_they_are_installed(monkeypatch):
    ran = debian(monkeypatch, root=True, programs={"apt-get"})
    project._ensure("the browser tests", ("chromium", "google-chrome"), "chromium", "fonts-dejavu-core")
    assert [command[1] for command in ran] == ["update", "install"]
    for *_, said in ran:
        assert "the browser tests need chromium, which is not on the PATH" in said
        assert "apt-get install chromium fonts-dejavu-core" in said
    assert "skipped" not in sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"root": False, "programs": {"apt-get"}}, "to run them: sudo apt-get install chromium fonts-dejavu-core"),
        ({"root": False, "programs": set()}, "to run them: install chromium"),
        ({"root": True, "programs": set()}, "to run them: install chromium"),
        ({"root": True, "programs": {"apt-get"}, "fails": True}, "to run them: sudo apt-get install chromium"),
    ],
)
def test_what_may_not_be_installed_is_asked_for_in_one_line(monkeypatch, machine, says):
    ran = debian(monkeypatch, **machine)
    project._ensure("the browser tests", ("chromium", "google-chrome"), "chromium", "fonts-dejavu-core")
    assert bool(ran) == ("fails" in machine)
    (line,) = [line for line in sys.stderr.getvalue().splitlines() if "skipped" in line]
    assert says in line


def test_nothing_is_installed_where_a_browser_is(monkeypatch):
    ran = debian(monkeypatch, root=True, programs={"apt-get", "google-chrome"})
    project._ensure("the browser tests", ("chromium", "google-chrome"), "chromium")
    assert ran == [] and sys.stderr.getvalue() == ""
