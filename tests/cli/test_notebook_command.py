"""`labkit notebook`: a lab as an .ipynb whose first cell installs the project into an existing image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import labkit.frontends.handout.execute as module
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.frontends.handout import LabError, to_import
from labkit.setup.environment import CLONE

LAB = CLONE / "labs" / "00_start_here.py"


def ask(*argv: str) -> int:
    try:
        return act(cli.parse(argv))
    except SystemExit as refused:
        return refused.code


@pytest.fixture
def first_cell(tmp_path):
    """The first cell of a notebook created with this source."""

    def made(source: str | None) -> str:
        return nbformat.read(to_import(LAB, tmp_path / "lab.ipynb", source), 4).cells[0].source

    return made


def run(cell: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a cell in a Python without the project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-c", cell], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_it_is_a_notebook_without_outputs_and_without_a_pair(tmp_path, capsys):
    target = tmp_path / "lab.ipynb"
    assert ask("notebook", str(LAB), "-o", str(target), "--source", "https://host.example/lab.git") == 0
    assert capsys.readouterr().out.strip() == str(target)
    notebook = nbformat.read(target, 4)
    nbformat.validate(notebook)
    assert notebook.cells[1].source.startswith("# Start here")
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "jupytext" not in notebook.metadata and notebook.metadata.kernelspec.name == "python3"
    assert json.loads(target.read_text(encoding="utf-8"))["nbformat"] == 4


def test_the_same_lab_gives_the_same_file(tmp_path):
    one, two = (to_import(LAB, tmp_path / name, "x").read_bytes() for name in ("1.ipynb", "2.ipynb"))
    assert one == two


def test_a_notebook_that_is_there_is_left_alone(tmp_path, capsys):
    target = tmp_path / "lab.ipynb"
    target.write_text("mine", encoding="utf-8")
    assert ask("notebook", str(LAB), "-o", str(target)) == 2
    assert "already exists" in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ("https://host.example/lab.git", "https://host.example/lab.git"),
        ("https://me:secret@host.example/lab.git", "https://host.example/lab.git"),
        ("git@host.example:me/lab.git", "git@host.example:me/lab.git"),
        ("", ""),
    ],
)
def test_the_source_is_this_clones_origin_without_a_secret(first_cell, monkeypatch, tmp_path, origin, source):
    clone = tmp_path / "clone"
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    if origin:
        subprocess.run(["git", "-C", str(clone), "remote", "add", "origin", origin], check=True)
    monkeypatch.setattr(module, "CLONE", clone)
    assert f"SOURCE = {source!r}  #" in first_cell(None)


def test_a_source_cannot_break_out_of_its_line(first_cell):
    evil = 'x\'; import os  # \n"""'
    scope: dict[str, str] = {}
    line = next(line for line in first_cell(evil).splitlines() if line.startswith("SOURCE"))
    exec(line, scope)
    assert scope["SOURCE"] == evil


def test_the_first_cell_clones_and_starts_a_command_which_adds_what_is_missing(first_cell, tmp_path):
    """A repository in a folder instead of a remote one; its command prints its arguments."""
    source = tmp_path / "source"
    (source / "labkit").mkdir(parents=True)
    (source / "labkit" / "__init__.py").write_text("", encoding="utf-8")
    (source / "labkit" / "__main__.py").write_text("import sys; print('started with', *sys.argv[1:])", encoding="utf-8")
    git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x@host.example"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    work = tmp_path / "work"
    work.mkdir()
    done = run(first_cell(f"file://{source}") + "import labkit; print(labkit.__file__)", work)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["started with doctor", str(work / "labkit-project" / "labkit" / "__init__.py")]


def test_without_a_source_the_first_cell_asks_for_the_folder(first_cell, tmp_path):
    done = run(first_cell(""), tmp_path)
    assert done.returncode == 1
    assert "attach the project's folder as data" in done.stderr.splitlines()[-1]


def test_where_the_project_is_there_the_first_cell_does_nothing(first_cell, tmp_path):
    done = run(f"import sys; sys.path.insert(0, {str(CLONE)!r})\n{first_cell('nowhere')}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "labkit-project").exists()


def test_what_is_no_lab_is_refused(tmp_path):
    with pytest.raises(LabError, match="must end in"):
        to_import(tmp_path / "x.txt", tmp_path / "x.ipynb")


def test_kaggle_gets_the_machine_and_the_user(tmp_path, capsys):
    target, metadata = tmp_path / "DDP run.ipynb", tmp_path / "kernel-metadata.json"
    assert ask("notebook", str(LAB), "-o", str(target), "--source", "x", "--kaggle", "Ann-3") == 0
    assert capsys.readouterr().out.split("\n")[:2] == [str(target), str(metadata)]
    said = json.loads(metadata.read_text(encoding="utf-8"))
    assert (said["id"], said["title"], said["code_file"]) == ("ann-3/labkit-ddp-run", "labkit ddp run", target.name)
    assert said["machine_shape"] == "NvidiaTeslaT4" and said["enable_gpu"] and said["is_private"]
    other = tmp_path / "other.ipynb"
    assert ask("notebook", str(LAB), "-o", str(other), "--source", "x", "--kaggle", "Ann-3") == 2
    assert "kernel-metadata.json already exists" in capsys.readouterr().err and not other.exists()
    assert ask("notebook", str(LAB), "-o", str(tmp_path / "a" / "b.ipynb"), "--kaggle", "../ann") == 2
    assert "letters, digits and hyphens, got '../ann'" in capsys.readouterr().err and not (tmp_path / "a").exists()
