"""`labkit grade`: a folder of submissions, judged in a sandbox; a failing one stops nothing."""

from __future__ import annotations

import csv
import inspect
import json
import time
from pathlib import Path

import pytest
from answers import capstone, dtensor, profiles
from commands import called
from conftest import processes_of

import labkit
from labkit.course import grade
from labkit.course.build import sandbox
from labkit.course.build.sandbox import Limits
from labkit.course.build.solutions import precision as precision
from labkit.course.build.solutions import without_restart as replicas
from labkit.course.exercises import Learner, judged_labs, tasks_of

RIGHT = """
import torch.distributed as dist
from labkit import check, run

run("ddp")
MEAN = 1

def average(tensor):
    return tensor / dist.get_world_size() * MEAN

def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad = average(parameter.grad)

check("build_data_parallel.naive", average_gradients)
"""
DOTS = """
class Overlapped:
    def __init__(self, model):
        # make the parameters equal
        ...

    def finish(self):
        ...

check("build_data_parallel.hooks", Overlapped)
"""
ENDLESS = """
import time, torch.distributed as dist

def average_gradients(model):
    while True:
        dist.all_reduce(next(model.parameters()).grad)

check("build_data_parallel.naive", average_gradients)
"""


def notebook(text):
    return json.dumps({"cells": [{"cell_type": "code", "source": ["%load_ext x\n", text]}]})


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    return folder


def test_a_folder_is_graded_and_a_csv_written(folder, capsys, monkeypatch):
    # an endless answer is ended by its computing time, so that other programs of the machine matter less
    monkeypatch.setattr("labkit.course.build.sandbox.Limits", lambda **limits: Limits(**limits | {"cpu_seconds": 6}))
    (folder / "ada.ipynb").write_text(notebook(RIGHT))
    (folder / "bob.py").write_text(RIGHT.replace("/ dist.get_world_size()", ""))
    (folder / "cy.py").write_text(DOTS + "\nraise SystemExit")
    (folder / "dan.py").write_text("def f(:")
    (folder / "eve.py").write_text(ENDLESS)
    (folder / "fay.py").write_text("print(1)")
    (folder / "gil.py").write_text('check("build_data_parallel.naive", lambda model: model)')
    assert called("grade", str(folder), "--timeout", "200") == 0
    printed = capsys.readouterr()
    with (folder.parent / "class-grades.csv").open(encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {
        "ada.ipynb": "right",
        "bob.py": "wrong",
        "cy.py": "empty",
        "dan.py": "wrong",
        "eve.py": "wrong",
        "fay.py": "missing",
        "gil.py": "wrong",
    }, printed
    assert "divide by the number of ranks" in rows["bob.py"]["message"]
    assert "Overlapped still has the three dots" in rows["cy.py"]["message"]
    assert "cannot be read" in rows["dan.py"]["message"]
    assert float(rows["ada.ipynb"]["sent_bytes"]) > 1e6 and float(rows["ada.ipynb"]["difference"]) < 1e-4
    assert "1 of 7 answers are right" in printed.out + printed.err


def test_what_an_answer_uses_is_taken_from_the_file_and_nothing_else(folder):
    (folder / "ada.py").write_text(RIGHT)
    (answer,) = grade.answers_in(grade.ast.parse(grade.text_of(folder / "ada.py"))).values()
    assert answer.name == "average_gradients"
    assert "MEAN = 1" in answer.text and "def average(" in answer.text
    assert "run(" not in answer.text and "check(" not in answer.text


def test_an_answer_may_be_a_script_next_to_the_submission(folder, capsys):
    call = 'check("profiles.faults", answer)'
    for name, value in {"ada": '"fast_training.py"', "bob": "...", "cy": '"../ada/fast_training.py"'}.items():
        (folder / name).mkdir()
        (folder / name / "lab.py").write_text(f"from pathlib import Path\nanswer = {value}\n{call}\n")
    (folder / "dan.py").write_text(f'mine = Path("none.py")\nanswer = mine\n{call}\n')
    (folder / "ada" / "fast_training.py").write_text(profiles.FAST)
    called("grade", str(folder))
    printed = capsys.readouterr()
    with (folder.parent / "class-grades.csv").open(encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file) if row["exercise"] == "profiles.faults"}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {"ada/lab.py": "right", "bob/lab.py": "empty", "cy/lab.py": "wrong", "dan.py": "wrong"}, printed
    assert "a script in the same folder" in rows["cy/lab.py"]["message"]
    assert "there is no file" in rows["dan.py"]["message"]


def test_answers_of_lab_22_are_graded(folder):
    text = Path(precision.__file__).read_text(encoding="utf-8") + '\ncheck("precision.step", MixedPrecision)\n'
    (folder / "ada.py").write_text(text)
    (row,) = grade.grade(folder, (), Limits(), lambda row: None)
    assert (row.exercise, row.verdict) == ("precision.step", "right"), row.message
    assert row.sent_bytes and row.tensor_bytes and row.sent_bytes < row.tensor_bytes


def test_the_trainer_of_lab_17_is_graded(folder):
    for name, text in (("ada", capstone.SOLVED), ("bob", capstone.STARTER)):
        (folder / name).mkdir()
        (folder / name / "lab.py").write_text('check("capstone.trainer", "mesh_training.py")\n')
        (folder / name / "mesh_training.py").write_text(text)
    rows = grade.grade(folder, (), Limits(), lambda row: None)
    ada, bob = (row for row in rows if row.name.endswith("lab.py"))
    assert (ada.exercise, ada.verdict) == ("capstone.trainer", "right"), ada.message
    assert ada.sent_bytes and ada.tensor_bytes and ada.difference is not None
    assert bob.verdict == "empty", bob.message


def test_a_drawn_task_is_that_of_the_learner(folder):
    """Bob hands in the plan for Ada's block with a number of his own, cy with a copy of hers, and dan without one."""
    names, numbers = ("ada", "bob", "cy", "dan"), {"ada": 1, "bob": 2, "cy": 1}
    with tasks_of(Learner(1)):
        text = inspect.getsource(inspect.getmodule(dtensor.right_plan()))
    for name in names:
        (folder / name / "runs").mkdir(parents=True)
        (folder / name / "lab21.py").write_text(f'{text}\n\ncheck("dtensor.plan", parallelize)\n')
        if name in numbers:
            (folder / name / "runs" / "learner.json").write_text(json.dumps({"seed": numbers[name]}))
    rows = grade.grade(folder, (), Limits(), lambda row: None)
    assert [row.verdict for row in rows] == ["right", "wrong", "right", "missing"], rows
    assert "is a copy of that of ada" in rows[2].message and "copy" not in rows[0].message
    assert "learner.json" in rows[3].message


def test_the_answers_of_lab_23_are_graded(folder):
    text = Path(replicas.__file__).read_text(encoding="utf-8")
    text += '\ncheck("without_restart.diloco", DiLoCo)\ncheck("without_restart.recovery", recover)\n'
    (folder / "ada.py").write_text(text)
    rows = grade.grade(folder, (), Limits(), lambda row: None)
    assert [row.verdict for row in rows] == ["right", "right"], rows


def test_the_page_names_the_labs_that_are_graded():
    page = (Path(labkit.__file__).parent / "reference" / "course.md").read_text(encoding="utf-8")
    assert f"scripts of labs {judged_labs()}. " in " ".join(page.split())


def test_the_wrong_usage_of_the_command(tmp_path, capsys):
    assert called("grade", str(tmp_path / "none")) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert called("grade", str(tmp_path), "--exercise", "build_data_parallel.none") == 2
    assert "there is no exercise" in capsys.readouterr().err
    assert called("grade", str(tmp_path), "--exercise", "ddp.steps") == 2
    assert "its answer does not run" in capsys.readouterr().err


def test_a_message_is_no_formula(tmp_path):
    grade.write([grade.Row("=1+1", "naive", "wrong", message="-x")], tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()[1].startswith("'=1+1,")


@pytest.mark.thorough
def test_nothing_is_left_of_an_answer_that_starts_processes(tmp_path):
    text = (
        f"import os, time\nif os.fork() == 0:\n    os.chdir('/')\n    time.sleep(600)\ntime.sleep(600)  # {tmp_path}\n"
    )
    began = time.monotonic()
    sandbox.run_sandboxed(text, 1, tmp_path, Limits(seconds=8.0))
    assert time.monotonic() - began < 60
    assert not processes_of(str(tmp_path))
