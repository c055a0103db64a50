"""Handouts: the contents of a page per audience, sanitising of hostile text, and rendering in an offline browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from conftest import PICTURES
from fabricate import FakeRun
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import Spec
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.course.exercises import check, exercise
from labkit.frontends.handout import LabError, RunError, course, executed, lab_page, run_page
from labkit.frontends.handout.clean import Prose, clean
from labkit.frontends.handout.files import read_lab, write
from labkit.frontends.handout.lab import STUDENT, TEACHER, page_of
from labkit.frontends.handout.recorded import RecordedRuns, run_of
from labkit.record.folder import RunFolder

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
HOSTILE = (
    "</script><script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 2'>",
    "</pre></main><svg onload='window.hurt = 3'>",
    "<a href='javascript:window.hurt=4'>click</a>",
    "<iframe srcdoc='<script>parent.hurt = 5</script>'></iframe>",
    "<details open ontoggle='window.hurt = 6'>",
    "<style>main{display:none}</style><meta http-equiv=refresh content='0;url=//host.example'>",
)
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
    """A finished run of two ranks."""
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(30)
    run.say(0, "step 20: loss 1.0\n")
    run.say(1, "hello\n")
    run.end()
    run.close()
    return run


def hostile_run(runs: Path) -> RunFolder:
    """A run in which all free text is hostile."""
    evil = "".join(HOSTILE)
    run = FakeRun(runs, steps=10, script=f"{evil}.py", strategy=None, args=[evil])
    run.start()
    run.step(10)
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            run.say(rank, "\n".join(HOSTILE) + "\n", stream)
        run.writers[rank].write("metric", step=3, name=evil, value=1.0)
    run.writers[0].write("error", type=evil, message=evil, traceback=evil)
    run.end("failed", message=evil, failures={"0": {"type": evil, "message": evil}}, exit_code=1)
    run.close()
    run.folder.script.write_text(f'"""{evil}"""\nprint({evil!r})\n', encoding="utf-8")
    run.folder.command.write_text(evil, encoding="utf-8")
    (run.folder.logs / "torchrun.log").write_text(evil, encoding="utf-8")
    return RunFolder(run.folder.path.rename(run.folder.path.with_name(evil.replace("/", "")[:200])))


def notebook(*cells) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_markdown_cell("# A lab\n\nWhy?"), *cells])


def code(source: str, *outputs, **metadata) -> nbformat.NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def shown(**data) -> nbformat.NotebookNode:
    return new_output("display_data", {name.replace("__", "/"): value for name, value in data.items()})


def printed(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def figure(title: str = "one line") -> dict:
    return {
        "data": [{"type": "scatter", "x": [1, 2], "y": [3, 1], "name": title}],
        "layout": {"title": {"text": title}, "height": 240},
    }


def page(*cells, runs: Path = Path("none"), **settings) -> str:
    return page_of(notebook(*cells), Path("labs/99_test.py"), runs, **settings).body


def ask(*argv: str) -> int:
    """The exit code of a command."""
    try:
        return act(cli.parse(argv))
    except SystemExit as refused:
        return refused.code


# ---- what may stand in a page


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("<b>bold</b>", "<b>bold</b>"),
        ("<script>x()</script>text", "text"),
        ("<p onclick='x()' ONLOAD=x()>text</p>", "<p>text</p>"),
        ("<a href='java\tscript:x()'>text</a>", "<a>text</a>"),
        ("<a href='https://pytorch.org'>text</a>", '<a href="https://pytorch.org">text</a>'),
        ("<img src='https://host.example/x.png'>", "<img/>"),
        ("<img src='data:image/png;base64,AAAA'>", '<img src="data:image/png;base64,AAAA"/>'),
        ("<p style='background:URL(//host.example)'>text</p>", "<p>text</p>"),
        ("<iframe src='x'>in</iframe><style>p{}</style><form action=x>in</form><link href=x>", ""),
        ("<p id='figures' name='plotly'>text</p>", "<p>text</p>"),
        ("</main></div><b>unclosed", "<b>unclosed</b>"),
    ],
)
def test_html_of_a_cell_is_cleaned(given, left):
    assert clean(given) == left


def test_svg_of_a_cell_stays_a_picture():
    assert (
        clean('<svg viewBox="0 0 1 1"><rect width="1" fill="#fff"/></svg>')
        .lower()
        .startswith('<svg viewbox="0 0 1 1"><rect')
    )


def test_headings_make_the_contents_and_have_addresses_of_their_own():
    prose = Prose()
    html = prose.take("<h2>The script</h2><h2>The <code>script</code></h2><h3>figures</h3>")
    assert prose.contents == [
        (2, "The-script", "The script"),
        (2, "The-script-2", "The script"),
        (3, "figures-2", "figures"),
    ]
    assert html.count("id=") == 3


def test_pictures_of_a_lab_are_taken_into_the_page(tmp_path):
    (tmp_path / "x.png").write_bytes(b"1234")
    html = Prose(folder=tmp_path).take("<img src='x.png'><img src='none.png'><img src='https://host.example/x.png'>")
    assert html == '<img src="data:image/png;base64,MTIzNA=="/><img/><img/>'


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("it costs $5 or $6", "it costs $5 or $6"),
        ("<code>$x$</code>", "<code>$x$</code>"),
        ("$\\frac{$ stays", "$\\frac{$ stays"),
        ("a &lt; $n$", '<math display="inline"'),
        ("$$T = \\alpha + n$$", '<math display="block"'),
        ("$\\href{javascript:x}{y}$", "<mrow><mrow>"),
    ],
)
def test_formulas_are_drawn_without_a_program(given, left):
    html = Prose().take(given)
    assert left in html and "javascript" not in html
    assert "&lt; <math" in html or "&lt;" not in given


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


def test_printed_script_and_diff_are_coloured_and_long_ones_folded():
    body = page(
        code("print(diff_scripts(a, b))", printed("-old\n+new\n")),
        code("print(write_script(spec))", printed("import torch\n" * 60)),
    )
    assert '<span class="gd">-old</span>' in body
    assert "<summary>The script · 60 lines</summary>" in body
    assert '<span class="kn">import</span>' in body


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
    recorded = page_of(notebook(code("run", labkit_runs=[name])), Path("labs/99_test.py"), runs, recorded=True)
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


# ---- hostile text


def assert_inert(html: str) -> None:
    """Checks that hostile text has added no element to the page."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(html, "html.parser")
    assert [one.name for one in soup.find_all(["iframe", "style"])] == ["style"]
    assert not soup.select("img[src]")
    assert not [
        element for element in soup.find_all(True) if any(name.lower().startswith("on") for name in element.attrs)
    ]
    assert not soup.select('[href^="javascript:"]')
    assert len(soup.find_all("main")) == 1
    scripts = soup.find_all("script")
    assert [one.get("id") for one in scripts] == ["figures", "plotly", None]
    assert "hurt" not in scripts[-1].text


def test_hostile_run_is_inert(runs):
    html = run_page(hostile_run(runs)).html()
    assert "window.hurt" in html, "it is there, as text"
    assert_inert(html)


def test_hostile_outputs_are_inert(runs):
    evil = "".join(HOSTILE)
    error = new_output("error", ename=evil, evalue=evil, traceback=[evil])
    cells = [
        code(f"print({evil!r})  # {evil}", printed(evil), printed(evil, "stderr"), error),
        code(
            "show",
            shown(text__plain=evil),
            shown(text__html=evil),
            shown(text__markdown=evil),
            shown(**{PLOTLY: figure(evil)}),
        ),
        code("print(write_script(spec))", printed(evil)),
        new_markdown_cell(evil),
        code("run", labkit_runs=[hostile_run(runs).name]),
    ]
    html = page_of(notebook(*cells), Path("labs/99_test.py"), runs).html()
    assert_inert(html)


def test_pages_ask_no_host(fake):
    html = run_page(fake.folder).html()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http:" not in policy and "unsafe-eval" not in policy and policy.count("sha256-") == 2
    assert not re.search(r"<(link|script|img)[^>]+(src|href)=", html)
    assert len(html.encode()) <= 3_000_000


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
    assert RunFolder.read_json(folder.status)["state"] == "stopped"


# ---- files and commands


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write(tmp_path / "x.html", "old")

    def fail(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError):
        write(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
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


# ---- in a browser, with the network cut


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens a page's file offline; fails on any other request, any console message and any error."""
    asked, said, contexts = [], [], []

    def open_page(html: str, width: int = 1280, **settings):
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 800}, offline=True, **settings)
        contexts.append(context)
        context.route(lambda url: not url.startswith(("file:", "data:", "blob:")), lambda route: route.abort())
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [url for url in asked if not url.startswith(("file:", "blob:", "data:"))]
    assert not said


def drawn(page) -> None:
    page.wait_for_selector("html[data-figures=drawn]", timeout=60_000)


@pytest.fixture
def html(fake, runs) -> str:
    """A page with all kinds of content."""
    name = fake.folder.name
    fake.folder.script.write_text("import torch\n" * 80, encoding="utf-8")
    bundle = {PLOTLY: figure(), "text/html": "<svg></svg>", "text/plain": f"loss of {name}: finished"}
    stepped = figure("a picture to step through") | {"frames": [{"name": "2", "data": [{"x": [1, 2], "y": [1, 3]}]}]}
    cells = [
        new_markdown_cell("## A picture\n\n" + "Words to read. " * 80 + "\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"),
        code("picture()", shown(**{PLOTLY: stepped})),
        new_markdown_cell('## A run\n\n<details class="answer"><summary>Answer</summary>\n\nforty-two\n\n</details>'),
        code("show(run('ddp', nproc=2, steps=30))  # " + "long " * 30, shown(**bundle), labkit_runs=[name]),
    ]
    return page_of(notebook(*cells), Path("labs/99_test.py"), runs).html()


@pytest.mark.browser
def test_figures_are_drawn_with_the_network_cut(opened, html):
    page = opened(html)
    drawn(page)
    assert page.locator("figure.plot").count() == page.locator("figure.drawn .main-svg >> nth=0").count() + 4 == 5
    assert page.locator("figure.drawn").count() == 5
    assert page.locator(".still:visible").count() == 0
    bar = page.locator("figure.drawn .bars .point path").nth(3)
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".hoverlayer .hovertext", timeout=10_000)
    page.locator("nav a", has_text="A run").click()
    assert page.evaluate("scrollY") > 100
    page.screenshot(path=PICTURES / "handout-1-light.png")


@pytest.mark.browser
def test_dark_follows_the_system_and_can_be_switched(opened, html):
    page = opened(html, color_scheme="dark")
    drawn(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    assert page.evaluate(ground) == "rgb(20, 23, 27)"
    assert page.evaluate(ink) == "rgb(228, 231, 235)", "the figures' too"
    page.screenshot(path=PICTURES / "handout-2-dark.png")
    page.locator("#theme").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert page.evaluate(ink) == "rgb(27, 31, 36)"
    page.reload()
    assert page.evaluate(ground) == "rgb(255, 255, 255)", "the choice is kept"


@pytest.mark.browser
def test_a_phone_has_nothing_to_scroll_sideways(opened, html):
    page = opened(html, width=390)
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("nav details").get_attribute("open") is None, "the table of contents is closed"
    page.locator("figure").nth(2).scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "handout-3-phone.png")


@pytest.mark.browser
def test_print_has_clean_pages(opened, html, tmp_path):
    page = opened(html, color_scheme="dark")
    drawn(page)
    closed = page.locator("main details:not([open])").count()
    assert closed >= 4
    page.evaluate(
        "document.body.dataset.seen = ''; addEventListener('beforeprint', () => document.body.dataset.seen ="
        " JSON.stringify({closed: document.querySelectorAll('details:not([open])').length,widths:"
        " [...document.querySelectorAll('.drawn .main-svg')].map(one => one.clientWidth)}))"
    )
    pdf = page.pdf(path=PICTURES / "handout-4-print.pdf", format="A4")
    seen = json.loads(page.evaluate("document.body.dataset.seen"))
    assert seen["closed"] == 0, "all sections are open"
    assert set(seen["widths"]) == {680, 332}, "as wide as the page, or half of it"
    assert b"/Subtype /Image" not in pdf, "figures are vectors"
    assert page.locator("main details:not([open])").count() == closed, "restored afterwards"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".top").is_hidden() and page.locator("nav").is_hidden()
    assert set(
        page.evaluate("[...document.querySelectorAll('.plot')].map(one => getComputedStyle(one).breakInside)")
    ) == {"avoid"}


@pytest.mark.browser
def test_hostile_text_does_nothing_in_a_browser(opened, runs):
    page = opened(run_page(hostile_run(runs)).html())
    drawn(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hurt") is None
    assert page.locator("main").is_visible()


@pytest.mark.browser
def test_what_gets_past_the_cleaning_is_stopped_by_the_policy(chromium, fake, tmp_path):
    """The second line of defence alone: the content security policy allows only the page's own scripts."""
    made = run_page(fake.folder)
    made.body += "".join(HOSTILE)
    file = write(tmp_path / "page.html", made.html())
    page = chromium.new_context(offline=True).new_page()
    page.goto(file.as_uri())
    page.wait_for_timeout(500)
    assert page.evaluate("window.hurt") is None
    page.context.close()


@pytest.mark.browser
def test_where_plotly_never_comes_the_still_pictures_stay(opened, fake):
    page = opened(run_page(fake.folder).html(), java_script_enabled=False)
    assert page.locator(".still svg:visible").count() == 4
    assert page.locator("main").is_visible()
