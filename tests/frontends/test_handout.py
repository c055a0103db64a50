"""Handouts: the contents of the page of a lab, per audience, and of the page of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fabricate import FakeRun, finished_folder
from handouts import PLOTLY, ask, code, figure, finished_run, notebook, page, printed, shown
from nbformat.v4 import new_markdown_cell, new_output

from labkit import Spec, diff_scripts, write_script
from labkit.course.exercises import check, exercise
from labkit.frontends.handout import LabError, RunError, run_page
from labkit.frontends.handout.page import STUDENT, TEACHER, page_of
from labkit.record.folder import RunFolder

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def fake(runs):
    return finished_run(runs)


# ---- a lab's page


def test_page_has_prose_code_and_outputs():
    body = page(
        code("print('a < b')", printed("a < b\r\x1b[31mred\x1b[0m\n"), printed("careful", "stderr")),
        code("show", shown(text__html="<table><tr><td>1</td></tr></table>", text__plain="1")),
        code("widget", shown(**{WIDGET: {"model_id": "x"}, "text/plain": "Button()"})),
        code(
            "run",
            new_output("execute_result", {"text/plain": "<Run 2026-ddp-x2: finished, step 3/3>"}, execution_count=1),
        ),
    )
    assert '<h1 id="A-lab">A lab</h1>' in body
    assert '<span class="nb">print</span>' in body, "code is highlighted"
    assert '<pre class="stdout">red\n</pre>' in body, "as a terminal shows it"
    assert '<pre class="stderr">careful</pre>' in body
    assert "<td>1</td>" in body
    assert "This output is interactive" in body and "Button()" not in body
    assert "&lt;Run" not in body


def test_scripts_and_diffs_of_a_lab_are_coloured():
    ddp = Spec(strategy="ddp", nproc=2)
    shown_as_html = [
        {"text/html": code._repr_html_(), "text/plain": str(code)}
        for code in (diff_scripts(Spec(strategy="single"), ddp), write_script(ddp))
    ]
    body = page(*(code("it", shown(**data)) for data in shown_as_html))
    assert re.search(r'<span style="background-color:[^"]*">\+ +model = DistributedDataParallel', body)
    assert "<summary>train.py: " in body
    assert re.search(r'<span style="color:[^"]*font-weight:600">import</span>', body)


def test_on_paper_a_lab_has_one_script_and_each_diff_once(fake, runs):
    fake.folder.script.write_text("import torch\n", encoding="utf-8")
    other = finished_folder(runs, "fsdp2", 2, step_seconds=0.1)
    other.script.write_text("import torch\n", encoding="utf-8")
    names = [fake.folder.name, fake.folder.name, other.name]
    made = page(*(code("run", labkit_runs=[name]) for name in names), runs=runs)
    kinds = re.findall(r'<details class="(code[^"]*)"><summary>(Script|Diff)', made)
    assert kinds == [
        ("code", "Script"),
        ("code", "Diff"),
        ("code screen", "Script"),
        ("code screen", "Diff"),
        ("code screen", "Script"),
        ("code", "Diff"),
    ]


def test_answers_and_verdicts_are_for_those_who_may_see_them():
    asked = check("start.steps", ...)
    data, metadata = asked._repr_mimebundle_()
    verdict = new_output("execute_result", data, metadata=metadata, execution_count=1)
    cells = (
        new_markdown_cell(
            'Ask.\n\n<details class="answer"><summary>Answer</summary>\n\nforty-two\n\n</details>\n\nGo on.'
        ),
        code('check("start.steps", ...)', verdict, tags=["exercise"]),
    )
    assert "0 of" not in page(code("my_progress()", shown(text__html="<b>0 of 30</b>"))), "a handout shows no progress"
    plain, student, teacher = (page(*cells, audience=audience) for audience in ("", STUDENT, TEACHER))
    key = exercise("start.steps").key.split("**")[1]
    assert "forty-two" in plain and "not answered yet" in plain and "Answer key:" not in plain
    assert (
        "forty-two" not in student
        and "not answered yet" not in student
        and "Go on." in student
        and "Answer key:" not in student
    )
    assert "forty-two" in teacher and "Answer key: Steps per epoch" in teacher and key in teacher


def test_a_key_that_is_not_there_is_named():
    with pytest.raises(LabError, match=r"no exercise 'start\.nothing'"):
        page(code('check("start.nothing", ...)'), audience=TEACHER)


def test_runs_stand_under_the_cell_that_started_them(fake, runs):
    fake.folder.script.write_text("import torch\n", encoding="utf-8")
    name = fake.folder.name
    bundle = {
        PLOTLY: figure(),
        "text/html": "<div><svg></svg></div>",
        "text/plain": f"loss, memory of {name}: finished",
    }
    made = page_of(notebook(code("run", shown(**bundle), labkit_runs=[name])), Path("labs/99_test.py"), runs)
    assert len(made.plots) == 4, "each live chart is a separate figure, so that a phone can stack them"
    assert "<b>ddp · cnn</b> finished · ran on 2 CPU ranks (no GPU)" in made.body
    assert "Log of rank 0 · 1 line<" in made.body and "--rank:#E69F00" in made.body
    assert "Script · 1 line<" in made.body and "Diff to one device" in made.body
    assert "on 2 CPU ranks (no GPU)" in made.about
    magic = page(code("%%torchrun 2\nreport(rank=rank)", labkit_runs=[name]), runs=runs)
    assert "ran on 2 CPU ranks" in magic and "Log of" not in magic, (
        "its ranks and its script are shown by the cell itself"
    )
    recorded = page_of(
        notebook(code("run", labkit_runs=[name])), Path("labs/99_test.py"), runs, recorded="with recorded runs"
    )
    assert "with recorded runs" in recorded.about
    assert re.search(r"recorded \d+ \w+ \d{4}, \d\d:\d\d, on 2 CPU ranks", recorded.body)


def test_gpus_are_named(runs):
    run = FakeRun(runs, device="cuda")
    run.status("running")
    for rank, writer in enumerate(run.writers):
        writer.write(
            "start",
            pid=1,
            host="h",
            local_rank=rank,
            world_size=2,
            device=f"cuda:{rank}",
            device_name="Tesla T4",
            attempt=0,
        )
    run.end()
    run.close()
    assert "on 2 × Tesla T4" in run_page(run.folder).about


# ---- a run's page


def test_the_page_of_a_run_has_all_sections(fake):
    made = run_page(fake.folder)
    assert [text for _, _, text in made.contents][1:] == ["Findings", "Figures", "Ranks", "Logs"]
    assert len(made.plots) == 4
    assert made.body.count("<svg") == 4, "a static picture of each, until plotly draws"


def test_the_newest_lines_of_a_long_log_are_included(fake):
    fake.say(0, "".join(f"line {number}\n" for number in range(5000)))
    body = run_page(fake.folder).body
    assert "Log of rank 0 · 5,001 lines" in body
    assert "… 4,801 earlier lines" in body
    assert "line 4999" in body and "line 4799\n" not in body


@pytest.mark.parametrize(
    ("state", "code", "says"),
    [
        ("running", 2, "is still active"),
        (None, 1, "was interrupted before it started"),
        ("foreign", 1, "was not recorded by labkit"),
    ],
)
def test_an_unfinished_or_foreign_run_is_refused_in_one_sentence(runs, tmp_path, capsys, state, code, says):
    run = FakeRun(runs)
    if state == "foreign":
        RunFolder.write_json(run.folder.spec, {"of": "something else"})
    elif state:
        run.start()
    run.close()
    with pytest.raises(RunError, match=says):
        run_page(run.folder)
    assert ask("handout", run.folder.name, "-o", str(tmp_path / "x.html")) == code
    assert not (tmp_path / "x.html").exists()
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1
