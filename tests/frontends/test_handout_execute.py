"""Handouts: execution of a lab, with new and recorded runs, and the files and commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fabricate import FakeRun
from handouts import ask, finished_run

from labkit import Spec
from labkit.common.files import MARK
from labkit.frontends.handout import LabError, course, executed, lab_page
from labkit.frontends.handout.execute import RecordedRuns, read_lab, run_of, write
from labkit.record.folder import RunFolder
from labkit.record.packed import SHIPPED

LAB = """# %% [markdown]
# # A small lab
# What is it?

# %%
print("first")

# %% tags=["long"]
print("takes its time")
"""


@pytest.fixture
def fake(runs):
    return finished_run(runs)


# ---- executing


@pytest.fixture
def lab(tmp_path) -> Path:
    path = tmp_path / "labs" / "90_small.py"
    path.parent.mkdir()
    path.write_text(LAB, encoding="utf-8")
    return path


def test_a_lab_is_executed_without_what_is_skipped(lab):
    cells = [cell for cell in executed(lab, skip=("long",)).cells if cell.cell_type == "code"]
    assert [cell.outputs[0].text for cell in cells] == ["first\n"]


def test_a_cell_that_fails_is_named_and_no_file_is_left(lab, tmp_path, capsys):
    lab.write_text(LAB + "\n# %%\nspeed = 1 / 0\nspeed\n", encoding="utf-8")
    target = tmp_path / "out" / "x.html"
    assert ask("handout", str(lab), "-o", str(target)) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == "labkit: 90_small.py, code cell 3 (speed = 1 / 0): ZeroDivisionError: division by zero"
    assert not target.parent.exists()


def test_a_kernel_that_dies_is_reported(lab):
    lab.write_text(LAB + "\n# %%\nimport os\nos._exit(3)\n", encoding="utf-8")
    with pytest.raises(LabError, match=r"code cell 3 \(import os\): its kernel died"):
        executed(lab)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("/a/runs/ddp-x2/checkpoints/step00000010", "ddp-x2"),
        ("/b/ddp-x2/checkpoints", "ddp-x2"),  # as older versions recorded it
        ("/tmp/of one execution/step100", "step100"),
    ],
)
def test_a_checkpoint_is_known_by_its_run_wherever_that_is(checkpoint, name):
    assert run_of(Path(checkpoint)) == name


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.txt", "", "must end in .py or .ipynb"),
        ("none.py", None, "there is no lab"),
        ("x.ipynb", "{", "cannot be read as a notebook"),
        ("x.py", "print(1)\n", "no markdown cell"),
    ],
)
def test_what_is_no_lab_is_named(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(LabError, match=re.escape(says)):
        read_lab(tmp_path / name)


def test_recorded_runs_take_the_place_of_new_ones(lab, runs, tmp_path):
    asked = "from labkit import Spec, run\nspec = Spec(strategy='ddp', nproc=2, device='cpu', steps=30)"
    elsewhere = tmp_path / "recorded"
    spec = Spec(strategy="ddp", nproc=2, device="cuda", precision="fp16", steps=30)
    run = FakeRun(elsewhere, steps=30, device="cuda")
    RunFolder.write_json(run.folder.spec, spec.to_json())
    run.start()
    run.step(30)
    run.end()
    run.close()
    lab.write_text(LAB + f"\n# %%\n{asked}\njob = run(spec)\nprint(job.wait().words, job.name)\n", encoding="utf-8")
    made = lab_page(lab, recorded=elsewhere)
    assert f"finished {run.folder.name}" in made.body
    assert '<span class="recorded">recorded</span>' in made.body
    lab.write_text(LAB + f"\n# %%\n{asked}\nrun(spec)\nrun(spec)\n", encoding="utf-8")
    with pytest.raises(LabError, match="has no further run of ddp-x2 with these settings"):
        lab_page(lab, recorded=elsewhere)
    assert RunFolder.all(elsewhere), "recorded runs stay in place"


def test_shipped_runs_take_the_place_of_all_runs_of_their_strategy(lab):
    cell = "from labkit import run\nfor steps in (7, 8):\n    run('tp', nproc=2, device='cpu', steps=steps).wait()"
    lab.write_text(f"{LAB}\n# %%\n{cell}\n", encoding="utf-8")
    made = lab_page(lab, recorded=SHIPPED)
    assert made.body.count('<span class="recorded">recorded</span>') == 2
    assert "other settings" in made.about


def test_a_recorded_cell_is_known_by_its_text(tmp_path):
    """Every cell of `%%torchrun` has the same Spec except for the script, which is in the folder of its run."""
    folders = {}
    for text in ("first", "second"):
        run = FakeRun(tmp_path)
        RunFolder.write_json(run.folder.spec, Spec(script=str(run.folder.script), nproc=2, device="cpu").to_json())
        RunFolder.write_text(run.folder.script, text)
        run.end()
        run.close()
        folders[text] = run.folder.name
    runs_of_lab, asked = RecordedRuns(tmp_path), Spec(script="cell.py", nproc=2, device="cpu")
    assert runs_of_lab.take(asked, source="first").name == folders["first"]
    with pytest.raises(LookupError, match="no further run of cell-x2"):
        runs_of_lab.take(asked, source="third")


def test_runs_that_a_lab_leaves_are_ended(lab, tmp_path):
    lab.write_text(
        LAB + "\n# %%\nfrom labkit import run\nrun('single', device='cpu', steps=100_000)\n", encoding="utf-8"
    )
    kept = tmp_path / "kept"
    cells = executed(lab, runs=kept).cells
    (folder,) = RunFolder.all(kept)
    assert cells[-1].metadata["labkit_runs"] == [folder.name]
    assert folder.read_status().state == "stopped"


# ---- files and commands


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write(tmp_path / "x.html", f"<!-- {MARK} -->old")

    def fail(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError):
        write(path, f"<!-- {MARK} -->new")
    assert path.read_text(encoding="utf-8") == f"<!-- {MARK} -->old"
    assert [each.name for each in tmp_path.iterdir()] == ["x.html"]


def test_the_course_has_an_index_and_goes_on_past_a_lab_that_fails(lab, tmp_path):
    broken = lab.with_name("91_broken.py")
    broken.write_text(LAB + "\n# %%\nraise ValueError('no')\n", encoding="utf-8")
    pages, failed = course([lab, broken], tmp_path / "site")
    assert sorted(each.name for each in (tmp_path / "site").iterdir()) == ["90_small.html", "index.html"]
    assert [each.name for each in pages] == ["index.html", "90_small.html"]
    assert failed == ["91_broken.py, code cell 3 (raise ValueError('no')): ValueError: no"]
    index = pages[0].read_text(encoding="utf-8")
    assert '<a href="90_small.html">A small lab</a><p>What is it?</p>' in index
    assert len(index) < 30_000, "no figure, no plotly"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["handout"], "nothing to write was given"),
        (["handout", "--all", "last"], "--all and a name ('last') exclude each other"),
        (["handout", "no-such-run"], "there is no run 'no-such-run'"),
        (["handout", "labs/00_start_here.py", "--student", "--teacher"], "not allowed with"),
        (["handout", "last", "--teacher"], "--teacher applies only to labs"),
        (["handout", "labs/00_start_here.py", "--recorded", "nowhere"], "there is no recorded run in nowhere"),
        (["handout", "last", "-o", "/"], "/ is a folder"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(fake, capsys, argv, says):
    assert ask(*argv) == 2
    assert says in capsys.readouterr().err
