"""Bootstrap: which environment is used, and what is installed in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
from bootstrapping import Handed, having, kept

from labkit.cli import parser as cli
from labkit.setup import environment
from labkit.setup.environment import CLONE, TEXT_ONLY, Requirement, release
from labkit.setup.progress import Progress

# ---- which environment


def test_python_that_has_everything_is_used_as_it_is(calls, monkeypatch):
    having(monkeypatch)
    environment.ensure((), ["runs"])
    assert calls == []


def test_active_environment_with_torch_gets_only_what_it_lacks(calls, monkeypatch):
    having(monkeypatch, lacks=["jupytext", "rich"], active="the conda environment /opt/lab")
    environment.ensure(("lab",), ["lab"])
    ((_, arguments),) = calls
    assert [word for word in arguments if ">=" in word] == ["jupytext>=1", "rich>=1"]
    assert not any("torch" in word or word == "-e" for word in arguments)
    assert not environment.VENV.exists()


def test_installed_widgets_are_never_upgraded(calls, monkeypatch, capsys):
    having(monkeypatch, active="Colab's image")
    lacking = [
        Requirement("ipywidgets", "99"),
        Requirement("jupytext", "1"),
    ]  # ipywidgets is installed here, and older than 99
    monkeypatch.setattr(environment, "missing", lambda *extras: lacking)
    environment.ensure((), ["runs"])
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
        environment.ensure(("lab",), ["lab", "--no-browser"])
    kinds = [call[0] for call in calls]
    assert kinds == ["create", "install", "become"]
    assert calls[1][1][-2:] == ["-e", f"{environment.CLONE}[lab,torch]"]
    assert calls[2][1] == [str(environment.VENV_PYTHON), "-m", "labkit", "lab", "--no-browser"]


def test_second_start_installs_nothing(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    for _ in range(2):
        with pytest.raises(Handed):
            environment.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "install", "become", "become"]


def test_another_extra_or_version_is_added_to_the_environment(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    with pytest.raises(Handed):
        environment.ensure((), ["runs"])
    with pytest.raises(Handed):
        environment.ensure(("lab", "test"), ["test"])
    assert [call[0] for call in calls[3:]] == ["install", "become"]
    assert calls[3][1][-1].endswith("[lab,test,torch]")
    environment.CONSTRAINTS.write_text("torch==2.13.1\n")
    with pytest.raises(Handed):
        environment.ensure((), ["runs"])
    assert [call[0] for call in calls[5:]] == ["install", "become"]
    assert calls[5][1][-1].endswith("[lab,test,torch]")  # installed extras are kept


def test_packages_that_another_extra_brought_are_not_installed_again(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    with pytest.raises(Handed):
        environment.ensure(("test",), ["test"])
    assert environment._state()["extras"] == ["lab", "test", "torch"]
    having(monkeypatch, own=True)
    environment.ensure(("handout",), ["handout"])
    environment.ensure(("mcp",), ["mcp"])
    assert [call[0] for call in calls] == ["create", "install", "become"]
    monkeypatch.setattr(Requirement, "met", property(lambda package: package.name != "mcp"))
    with pytest.raises(Handed):
        environment.ensure(("mcp",), ["mcp"])
    assert [call[0] for call in calls[3:]] == ["install", "become"]


def test_interrupted_setup_starts_again(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(environment, "_install", cut)
        with pytest.raises(KeyboardInterrupt):
            environment.ensure((), ["runs"])
    assert json.loads(environment.STATE.read_text())["building"]
    with pytest.raises(Handed):
        environment.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "create", "install", "become"]


def test_failed_pip_keeps_the_installed_packages(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)

    def fail(*_):
        raise environment.SetupError("no network")

    with monkeypatch.context() as broken:
        broken.setattr(environment, "_install", fail)
        with pytest.raises(environment.SetupError, match="no network"):
            environment.ensure((), ["runs"])
    with pytest.raises(Handed):
        environment.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["create", "install", "become"]


def test_environment_that_lost_its_python_is_created_again(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    for _ in range(2):
        with pytest.raises(Handed):
            environment.ensure((), ["runs"])
        environment.VENV_PYTHON.unlink()
    assert [call[0] for call in calls] == ["create", "install", "become"] * 2


def link(folder):
    environment.VENV.symlink_to(folder)


def moved(folder):
    folder.rename(environment.VENV)
    environment.STATE.write_text(json.dumps({"place": str(folder), "made_from": "x", "extras": ["lab", "torch"]}))


def unknown(folder):
    folder.rename(environment.VENV)
    environment.VENV_PYTHON.unlink()


def a_file(folder):
    folder.rename(environment.CLONE / "elsewhere")
    environment.VENV.write_text("precious")


@pytest.mark.parametrize("extras", [(), ("lab",), (TEXT_ONLY,)])
@pytest.mark.parametrize(
    ("arranged", "says"),
    [
        (link, "is a link to"),
        (moved, "was created as"),
        (unknown, "was not created by this clone"),
        (a_file, "was not created by this clone"),
    ],
)
@pytest.mark.parametrize("state", ["none", "of the other clone", "building"])
def test_environment_that_this_clone_did_not_create_is_never_emptied(
    place, monkeypatch, tmp_path, extras, arranged, says, state
):
    """Nothing is faked but the packages: the real `_create`, and the real `python -m venv` if it gets so far."""
    having(monkeypatch, lacks=["torch"], torch=False)
    other = tmp_path / "another clone" / ".venv"
    intact = kept(other)
    if state != "none":
        building = {"building": True} if state == "building" else {"made_from": "x", "extras": ["lab", "torch"]}
        (other / "labkit.json").write_text(json.dumps({"place": str(other)} | building))
    arranged(other)
    with pytest.raises(environment.SetupError) as caught:
        environment.ensure(extras, ["runs"])
    message = str(caught.value)
    assert str(environment.VENV) in message and "\n" not in message
    assert (says if state == "none" or arranged in (link, moved, a_file) else "was created as") in message
    if arranged is link:
        assert intact() and environment.VENV.is_symlink()
    else:
        file = environment.VENV if arranged is a_file else environment.VENV / "precious.txt"
        assert file.read_text() == "precious"


def test_a_linked_environment_is_not_this_clone_s_own(place, monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(environment.sys, "prefix", str(tmp_path / "other"))
    environment.VENV.symlink_to(tmp_path / "other")
    assert not environment.is_own()
    environment.VENV.unlink()
    environment.VENV.mkdir()
    monkeypatch.setattr(environment.sys, "prefix", str(environment.VENV))
    assert environment.is_own()


def test_an_environment_of_the_user_at_that_place_is_completed_and_never_becomes_the_clone_s_own(calls, monkeypatch):
    having(monkeypatch, lacks=["rich"], torch=False)
    intact = kept(environment.VENV)
    with pytest.raises(Handed):
        environment.ensure((), ["runs"])  # hands over to its Python, which lacks something, too
    having(monkeypatch, lacks=["rich"], torch=False, own=True)
    with pytest.raises(Handed):
        environment.ensure((), ["runs"])
    assert [call[0] for call in calls] == ["become", "install", "become"]
    assert "place" not in json.loads(environment.STATE.read_text())
    environment.VENV_PYTHON.unlink()
    having(monkeypatch, lacks=["rich"], torch=False)
    with pytest.raises(environment.SetupError, match="was not created by this clone"):
        environment.ensure((), ["runs"])
    assert not intact() and (environment.VENV / "precious.txt").exists()  # the test removed the Python


def test_creating_again_removes_links_and_not_what_they_lead_to(place, monkeypatch, tmp_path):
    """And whose environment it is stays known at every moment: an interrupted one is created again."""
    intact = kept(tmp_path / "other")
    kept(environment.VENV)
    environment.STATE.write_text(json.dumps({"place": str(environment.VENV), "made_from": "x"}))
    (environment.VENV / "lib").symlink_to(tmp_path / "other")
    (environment.VENV / "file").symlink_to(tmp_path / "other" / "precious.txt")
    made = []

    def run(command, **settings):
        made.append(sorted(path.name for path in environment.VENV.iterdir()))
        assert "--clear" not in command
        raise KeyboardInterrupt

    monkeypatch.setattr(environment.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        environment._create()
    assert made == [["labkit.json"]] and intact()
    state = json.loads(environment.STATE.read_text())
    assert state == {"place": str(environment.VENV), "building": True}
    environment._require_own(state)


# ---- commands that only print text


def test_a_command_that_prints_text_installs_no_torch(calls, monkeypatch):
    having(monkeypatch, lacks=["rich"], torch=False)
    for _ in range(2):
        with pytest.raises(Handed):
            environment.ensure((TEXT_ONLY,), ["glossary"])
    assert [call[0] for call in calls] == ["create", "install", "become", "become"]
    packages = calls[1][1][2:]
    assert {package.partition(">=")[0] for package in packages} >= {"rich", "ruff", "psutil"}
    assert not {package.partition(">=")[0] for package in packages} & {"torch", "jupyterlab", "plotly", "ipywidgets"}
    with pytest.raises(Handed):
        environment.ensure((), ["run", "ddp"])
    assert [call[0] for call in calls[4:]] == ["install", "become"]
    assert calls[4][1][-1].endswith("[lab,torch]")
    with pytest.raises(Handed):
        environment.ensure((TEXT_ONLY,), ["glossary"])
    assert [call[0] for call in calls[6:]] == ["become"]


_PRINTING = [
    *(["script", "ddp"], ["diff", "single", "fsdp2"], ["glossary"], ["glossary", "fsdp"], ["advise", "--params", "7b"]),
    *(["schema"], ["progress"], ["runs"], ["show"], ["show", "--json"], ["logs"], ["replay", "--speed", "10000"]),
    *(["stop"], ["compare"], ["export", "--to", "csv"], ["clean", "--keep", "9"], ["unpack", "none.zip"], ["capture"]),
    ["gather", "last", "-o", "gathered"],
]
_WITHOUT_OTHERS = """
import contextlib, io, json, sys
from importlib import metadata
from importlib.machinery import PathFinder
from labkit.setup import environment

of = metadata.packages_distributions()
allowed = {package.name for package in environment.requirements(environment.TEXT_ONLY)}
allowed |= {"pygments", "markdown-it-py", "mdurl"}  # those that rich needs

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        packages = {package.lower().replace("_", "-") for package in of.get(name.partition(".")[0], ())} - {"labkit"}
        return None if packages and not packages & allowed else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from labkit.cli.commands import act
from labkit.cli.parser import parse
answers = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = act(parse(arguments))
    out.flush()
    answers.append([code, out.buffer.getvalue().decode(), err.getvalue()])
print(json.dumps(answers))
"""


def test_text_is_printed_without_any_other_package(tmp_path):
    """In a process that can import no package besides those that are installed for such commands."""
    for arguments in _PRINTING:
        assert cli.parse(arguments).extras == (TEXT_ONLY,)
    run = "20261122-022929-ddp-x2"
    shutil.copytree(CLONE / "tests" / "recorded" / "20261122-022927-ddp-x2", tmp_path / "runs" / run)
    settings = os.environ | {"LABKIT_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(CLONE)}
    command = [sys.executable, "-c", _WITHOUT_OTHERS, json.dumps(_PRINTING)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for arguments, (code, out, err) in zip(_PRINTING, json.loads(done.stdout), strict=True):
        assert out or err.startswith("labkit: "), (arguments, code, err)


def test_incomplete_setup_is_an_error_and_not_a_loop(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    monkeypatch.setattr(environment, "_runs", lambda command: "missing" not in command[-1])
    with pytest.raises(environment.SetupError, match="still lacks"):
        environment.ensure((), ["runs"])


def test_clone_that_cannot_be_written_to(calls, monkeypatch):
    having(monkeypatch, lacks=["torch"], torch=False)
    monkeypatch.setattr(environment.os, "access", lambda path, mode: False)
    with pytest.raises(environment.SetupError, match="is not writable; clone the project"):
        environment.ensure((), ["runs"])
    assert calls == []


def test_two_starts_take_turns(place):
    order = []

    def second() -> None:
        with Progress(stream=open(os.devnull, "w")) as progress, environment._lock(progress):
            order.append("second")

    with Progress(stream=open(os.devnull, "w")) as progress, environment._lock(progress):
        other = threading.Thread(target=second)
        other.start()
        time.sleep(0.5)
        order.append("first")
    other.join(60)
    assert order == ["first", "second"]


def test_torch_of_the_base_python_is_pinned_in_a_venv_that_uses_it(place):
    environment.PINS.parent.mkdir()
    environment.PINS.write_text("torch==2.10.0+cu128\n")
    lines = environment._versions().read_text().splitlines()
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.10.0+cu128"]
    assert any(line.startswith("plotly==") for line in lines)


def test_pip_says_why_it_failed(place, capfd):
    fake = [sys.executable, "-c", "print('Collecting rich'); print('ERROR: no such thing'); raise SystemExit(3)"]
    with Progress() as progress, pytest.raises(environment.SetupError, match="exit code 3"):
        environment._install(fake, [], progress)
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


def test_a_version_that_does_not_work_is_missing():
    installed = Requirement("pytest", "8").installed
    assert not Requirement("pytest", "8", (installed,)).met
    assert Requirement("pytest", "8", ("8.0.0",)).met
    assert Requirement.of("pytest>=8,!=8.0.0,!=8.0.1") == Requirement("pytest", "8", ("8.0.0", "8.0.1"))
