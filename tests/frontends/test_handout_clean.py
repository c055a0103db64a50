"""Handouts: sanitising of foreign HTML, and of hostile text in runs and outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from handouts import HOSTILE, PLOTLY, code, figure, finished_run, hostile_run, notebook, printed, shown
from nbformat.v4 import new_markdown_cell, new_output

from labkit import Run
from labkit.course.exercises import check
from labkit.figures import LIVE, svg
from labkit.figures.tables import ranks_html
from labkit.frontends.handout import run_page
from labkit.frontends.handout.clean import Prose, clean, draw_formulas, output
from labkit.frontends.handout.page import page_of
from labkit.frontends.magic.cell import RankOutput, Shown


@pytest.fixture
def fake(runs):
    return finished_run(runs)


# ---- what may stand in a page


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("<b>bold</b>", "<b>bold</b>"),
        ("<script>x()</script>text", "text"),
        ("<p onclick='x()' ONLOAD=x()>text</p>", "<p>text</p>"),
        ("<a href='java\tscript:x()'>text</a>", "<a>text</a>"),
        ("<a href='https://pytorch.org'>text</a>", '<a href="https://pytorch.org">text</a>'),
        ("<img src='https://host.example/x.png'>", "<img>"),
        ("<img src='data:image/png;base64,AAAA'>", '<img src="data:image/png;base64,AAAA">'),
        ("<p style='background:URL(//host.example)'>text</p>", "<p>text</p>"),
        ("<iframe src='x'>in</iframe><style>p{}</style><form action=x>in</form><link href=x>", ""),
        ("<p id='figures' name='plotly'>text</p>", "<p>text</p>"),
        ("</main></div><b>unclosed", "<b>unclosed</b>"),
    ],
)
def test_html_of_a_cell_is_cleaned(given, left):
    assert clean(given) == left


@pytest.mark.parametrize(
    ("attack", "left"),
    [
        # styles that cover the page, load an address without `url(`, or hide the name of a function
        ("<p style='color:red;position:fixed;inset:0'>text</p>", '<p style="color:red">text</p>'),
        ("<p style='background:image-set(\"//host.example/x\" 1x)'>text</p>", "<p>text</p>"),
        ("<p style='background:u\\72l(//host.example/x)'>text</p>", "<p>text</p>"),
        ("<p style=\"quotes:';position:fixed;x:'\">text</p>", "<p>text</p>"),
        # elements and attributes that a list of forbidden ones lacks
        ("<portal src='https://host.example'></portal>text", "text"),
        ("<svg><use href='https://host.example/x.svg#a'></use></svg>", "<svg></svg>"),
        ("<svg><image href='https://host.example/x.png'></image></svg>", "<svg></svg>"),
        ("<svg><rect fill='url(https://host.example/x.svg#a)'></rect></svg>", "<svg><rect></rect></svg>"),
        ("<svg><set attributeName='href' to='javascript:x'></set></svg>", "<svg></svg>"),
        ("<math><maction xlink:href='javascript:x'></maction></math>", "<math></math>"),
        ("<a href='data:text/html,x' ping='//host.example' target='_top'>text</a>", "<a>text</a>"),
        ("<button formaction='javascript:x' popovertarget='text'>text</button>", "text"),
        ("<input autofocus value='x'>text", "text"),
        ("<figure class='plot' data-figure='0' contenteditable>text</figure>", '<figure class="plot">text</figure>'),
        # what parsers read in different ways
        ("<svg><title><a title='</title><img src=x onerror=x()>'></a></title></svg>", "<svg><title></title></svg>"),
        ("<noscript><img src=x onerror=x()></noscript>text", "text"),
        ("<p title='<table onmouseover=x()>'>text</p>", '<p title="&lt;table onmouseover=x()&gt;">text</p>'),
    ],
)
def test_what_is_not_on_the_list_is_removed(attack, left):
    assert clean(attack) == left
    assert Prose().take(attack) == left
    assert output(attack) == left


def test_what_the_lab_displays_in_a_notebook_stays_complete(fake):
    """In the notebook it is an output like any other, and is sanitised."""
    state = Run.attach(fake.folder.path).state
    ranks = [RankOutput(0, "a < b", "careful", fate="failed first"), RankOutput(1, "c")]
    shown_by_the_lab = (
        *(svg(name, state) for name in LIVE),
        ranks_html("name", state),
        Shown("done", "good", ranks, {0: {"x": 1.5}, 1: {"x": 2}}).html(),
        check("start.steps", ...)._repr_mimebundle_()[0]["text/html"],
        draw("$$\\begin{pmatrix} a & \\frac{1}{2} \\end{pmatrix} \\sum_{i=1}^{n} x_i \\text{ bytes}$$"),
    )
    for html in shown_by_the_lab:
        assert markup(clean(html)) == markup(html)


def draw(formula: str) -> str:
    soup = BeautifulSoup(formula, "html.parser")
    draw_formulas(soup)
    return str(soup)


def markup(html: str) -> list[tuple]:
    """The elements with their attributes and texts."""
    elements = BeautifulSoup(html, "html.parser").find_all(True)
    return [(one.name, {name: one[name] for name in one.attrs if name != "xmlns"}, one.string) for one in elements]


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
    assert html == '<img src="data:image/png;base64,MTIzNA=="><img><img>'


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


# ---- hostile text


def assert_inert(html: str) -> None:
    """Checks that hostile text has added no element to the page."""
    soup = BeautifulSoup(html, "html.parser")
    assert [one.name for one in soup.find_all(["iframe", "style"])] == ["style"]
    assert not soup.select("img[src]")
    assert not [
        element for element in soup.find_all(True) if any(name.lower().startswith("on") for name in element.attrs)
    ]
    assert not soup.select('[href^="javascript:"]')
    assert len(soup.find_all("main")) == 1
    scripts = soup.find_all("script")
    assert [one.get("id") for one in scripts if one.get("id") != "films"] == ["figures", "plotly", None]
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
