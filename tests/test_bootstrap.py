"""Bootstrap: which environment is used, what is installed in it, and that a failed setup is repaired."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from labkit import __main__
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.setup import bootstrap, environment
from labkit.setup.environment import CLONE, CONSTRAINTS, PROJECT, Requirement, release
from labkit.setup.progress import Progress


class Handed(Exception):
    """The command was restarted in another Python: a stand-in for `os.execv`, which does not return."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A separate clone without an environment, whose pip and venv only record their calls."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for path in (PROJECT, CONSTRAINTS):
        shutil.copy(path, clone / path.name)
    venv = clone / ".venv"
    for module, names in {
        environment: {"VENV": venv, "PROJECT": clone / PROJECT.name, "CONSTRAINTS": clone / CONSTRAINTS.name},
        bootstrap: {
            **{"CLONE": clone, "VENV": venv, "PROJECT": clone / PROJECT.name, "CONSTRAINTS": clone / CONSTRAINTS.name},
            **{"STATE": venv / "labkit.json", "PINS": venv / "held.txt", "VENV_PYTHON": venv / "bin" / "python"},
        },
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    return clone


@pytest.fixture
def calls(place, monkeypatch):
    """The calls in order: ("create",), ("install", arguments), ("become", command)."""
    made: list[tuple] = []

    def create() -> None:
        made.append(("create",))
        shutil.rmtree(bootstrap.VENV, ignore_errors=True)
        bootstrap.VENV_PYTHON.parent.mkdir(parents=True)
        bootstrap.VENV_PYTHON.symlink_to(sys.executable)

    def become(command, folder=None):
        made.append(("become", list(command)))
        raise Handed

    monkeypatch.setattr(bootstrap, "_create", create)
    monkeypatch.setattr(bootstrap, "_pip_for_venv", lambda: ["pip"])
    monkeypatch.setattr(bootstrap, "_install", lambda pip, arguments, *rest: made.append(("install", list(arguments))))
    monkeypatch.setattr(bootstrap, "_runs", lambda command: bootstrap.VENV_PYTHON.exists())
    monkeypatch.setattr(bootstrap, "become", become)
    return made


def having(monkeypatch, *, lacks=(), torch=True, active=None, own=False):
    """Fakes the packages of this Python."""
    monkeypatch.setattr(environment, "missing", lambda *extras: [Requirement(name, "1") for name in lacks])
    monkeypatch.setattr(environment, "has_supported_torch", lambda: torch)
    monkeypatch.setattr(environment, "active", lambda: active)
    monkeypatch.setattr(environment, "is_own", lambda: own)


# ---- which environment


def test_python_that_has_everything_is_used_as_it_is(calls, monkeypatch):
    having(monkeypatch)
    bootstrap.ensure((), ["runs"])
    assert calls == []


def test_active_environment_with_torch_gets_only_what_it_lacks(calls, monkeypatch):
    having(monkeypatch, lacks=["jupytext", "rich"], active="the conda environment /opt/lab")
    bootstrap.ensure(("lab",), ["lab"])
    ((_, arguments),) = calls
    assert [word for word in arguments if ">=" in word] == ["jupytext>=1", "rich>=1"]
    assert not any("torch" in word or word == "-e" for word in arguments)
    assert not bootstrap.VENV.exists()


def test_installed_widgets_are_never_upgraded(calls, monkeypatch, capsys):
    having(monkeypatch, active="Colab's image")
    lacking = [
        Requirement("ipywidgets", "99"),
        Requirement("jupytext", "1"),
    ]  # ipywidgets is installed here, and older than 99
    monkeypatch.setattr(environment, "missing", lambda *extras: lacking)
    bootstrap.ensure((), ["runs"])
    assert calls[0][1][-1] == "jupytext>=1"
    assert not any("ipywidgets" in word for word in calls[0][1])
    assert "keeping ipywidgets " in capsys.readouterr().err


def test_installed_packages_are_pinned(monkeypatch):
    lines = environment.pinned({"rich"})
    names = {line.partition("==")[0].lower() for line in lines}
    assert {"plotly", "ipywidgets", "pytest"} <= names
    assert "rich" not in names
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", line) for line in lines)


@pytest.mark.parametrize(
    "given",
    [
        {"lacks": ["torch"], "torch": False, "active": "the virtual environment /x"},  # one without torch
        {"lacks": ["rich"], "torch": True, "active": None},  # the system's Python
        {"lacks": ["torch", "rich"], "torch": False, "active": None},
    ],
)
def test_otherwise_the_clone_gets_its_own_environment(calls, monkeypatch, given):
    having(monkeypatch, **given)
    with pytest.raises(Handed):
        bootstrap.ensure(("lab",), ["lab", "--no-browser"])
    kinds = [call[0] for call in calls]
    assert kinds == ["create", "install", "become"]
    assert calls[1][1][-2:] == ["-e", f"{bootstrap.CLONE}[lab,torch]"]
    assert calls[2][1] == [str(bootstrap.VENV_PYTHON), "-m", "labkit", "lab", "--no-browser"]


def test_second_start_installs_nothing(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    for _ in range(2):
        with pytest.raises(Handed):
            bootstrap.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "install", "become", "become"]


def test_another_extra_or_version_is_added_to_the_environment(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    with pytest.raises(Handed):
        bootstrap.ensure(("lab", "test"), ["test"])
    assert [call[0] for call in calls[3:]] == ["install", "become"]
    assert calls[3][1][-1].endswith("[lab,test,torch]")
    bootstrap.CONSTRAINTS.write_text("torch==2.13.1\n")
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    assert [call[0] for call in calls[5:]] == ["install", "become"]
    assert calls[5][1][-1].endswith("[lab,test,torch]")  # installed extras are kept


def test_interrupted_setup_starts_again(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(bootstrap, "_install", cut)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.ensure((), ["runs"])
    assert json.loads(bootstrap.STATE.read_text())["building"]
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "create", "install", "become"]


def test_failed_pip_keeps_the_installed_packages(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)

    def fail(*_):
        raise bootstrap.SetupError("no network")

    with monkeypatch.context() as broken:
        broken.setattr(bootstrap, "_install", fail)
        with pytest.raises(bootstrap.SetupError, match="no network"):
            bootstrap.ensure((), ["runs"])
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "install", "become"]


def test_environment_that_moved_or_lost_its_python_is_created_again(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    state = json.loads(bootstrap.STATE.read_text())
    bootstrap.STATE.write_text(json.dumps(state | {"place": "/elsewhere/.venv", "made_from": "other"}))
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    bootstrap.VENV_PYTHON.unlink()
    with pytest.raises(Handed):
        bootstrap.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "install", "become"] * 3


def test_incomplete_setup_is_an_error_and_not_a_loop(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    monkeypatch.setattr(bootstrap, "_runs", lambda command: "missing" not in command[-1])
    with pytest.raises(bootstrap.SetupError, match="still lacks"):
        bootstrap.ensure((), ["runs"])


def test_clone_that_cannot_be_written_to(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    monkeypatch.setattr(bootstrap.os, "access", lambda path, mode: False)
    with pytest.raises(bootstrap.SetupError, match="is not writable; clone the project"):
        bootstrap.ensure((), ["runs"])
    assert calls == []


def test_two_starts_take_turns(place):
    order = []

    def second() -> None:
        with Progress(stream=open(os.devnull, "w")) as progress, bootstrap._lock(progress):
            order.append("second")

    with Progress(stream=open(os.devnull, "w")) as progress, bootstrap._lock(progress):
        other = threading.Thread(target=second)
        other.start()
        time.sleep(0.5)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]


def test_torch_of_the_base_python_is_pinned_in_a_venv_that_uses_it(place):
    bootstrap.PINS.parent.mkdir()
    bootstrap.PINS.write_text("torch==2.10.0+cu128\n")
    lines = bootstrap._versions().read_text().splitlines()
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.10.0+cu128"]
    assert any(line.startswith("plotly==") for line in lines)


def test_pip_says_why_it_failed(place, capfd):
    fake = [sys.executable, "-c", "print('Collecting rich'); print('ERROR: no such thing'); raise SystemExit(3)"]
    with Progress() as progress, pytest.raises(bootstrap.SetupError, match="exit code 3"):
        bootstrap._install(fake, [], progress)
    said = capfd.readouterr()
    assert "ERROR: no such thing" in said.err
    assert said.out == ""


# ---- the packages of this Python


def test_active_environments_are_distinguished_from_the_system(monkeypatch):
    for variable in ("CONDA_PREFIX", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(environment.sys, "prefix", "/usr")
    monkeypatch.setattr(environment.sys, "base_prefix", "/usr")
    assert environment.active() is None
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert environment.active() == "Kaggle's image"
    monkeypatch.setenv("CONDA_PREFIX", "/opt/other")
    assert environment.active() == "Kaggle's image"
    monkeypatch.setenv("CONDA_PREFIX", "/usr")
    assert environment.active() == "the conda environment /usr"
    monkeypatch.setattr(environment.sys, "prefix", "/home/a/venv")
    assert environment.active() == "the virtual environment /home/a/venv"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13)), ("2.8.0a0+git5228986c39.nv25.5", (2, 8)), ("8.0.0rc1", (8,)), ("13", (13,)), ("x", ())],
)
def test_release(version, numbers):
    assert release(version) == numbers


def test_too_old_a_version_is_missing():
    assert Requirement("pytest", "8").met
    assert not Requirement("pytest", "999").met
    assert not Requirement("no-such-package", "1").met


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
    bootstrap.ensure(asked("deepspeed").extras, ["setup", "--with", "deepspeed"])
    ((_, arguments),) = calls
    assert arguments[-1] == "deepspeed>=1" and arguments[0] == "-c"


def test_an_extra_goes_into_the_clone_s_own_environment_with_the_tested_versions(calls, monkeypatch):
    having(monkeypatch, lacks=["deepspeed"], torch=False)
    with pytest.raises(Handed):
        bootstrap.ensure(asked("deepspeed").extras, ["setup", "--with", "deepspeed"])
    install = next(call[1] for call in calls if call[0] == "install")
    assert install[-1].endswith("[deepspeed,lab,torch]") and install[:2] == ["-c", str(bootstrap.CONSTRAINTS)]
    assert calls[-1] == ("become", [str(bootstrap.VENV_PYTHON), "-m", "labkit", "setup", "--with", "deepspeed"])


def test_an_environment_without_pip_is_one_clear_sentence(calls, monkeypatch):
    having(monkeypatch, lacks=["deepspeed"], active="the conda environment /opt/lab")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else found(name, *rest))
    with pytest.raises(bootstrap.SetupError) as caught:
        bootstrap.ensure(asked("deepspeed").extras, ["setup", "--with", "deepspeed"])
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
