"""Handouts in an offline browser: figures, themes, print, and hostile text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accessible import violations
from browser import sync_api
from conftest import PICTURES
from handouts import HOSTILE, PLOTLY, code, figure, finished_run, hostile_run, notebook, shown
from nbformat.v4 import new_markdown_cell

from labkit.course import pictures
from labkit.frontends.handout import run_page
from labkit.frontends.handout.execute import write
from labkit.frontends.handout.page import page_of


@pytest.fixture
def fake(runs):
    return finished_run(runs)


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
    assert violations(page) == []
    the_tools_of_a_chart_are_one_stop_of_the_tab_key(page)


def the_tools_of_a_chart_are_one_stop_of_the_tab_key(page) -> None:
    tools = page.locator("figure.drawn").nth(1).locator(".modebar button")
    first, second, last = tools.nth(0), tools.nth(1), tools.last
    first.focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(second).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(last).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('figure')?.dataset.figure") == "2"
    page.keyboard.press("Shift+Tab")
    sync_api.expect(last).to_be_focused()


@pytest.mark.browser
def test_dark_follows_the_system_and_can_be_switched(opened, html):
    page = opened(html, color_scheme="dark")
    drawn(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    assert page.evaluate(ground) == "rgb(20, 23, 27)"
    assert page.evaluate(ink) == "rgb(228, 231, 235)", "the figures' too"
    page.screenshot(path=PICTURES / "handout-2-dark.png")
    assert violations(page) == []
    page.locator("#theme").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert page.evaluate(ink) == "rgb(27, 31, 36)"
    page.reload()
    assert page.evaluate(ground) == "rgb(255, 255, 255)", "the choice is kept"


@pytest.mark.browser
def test_a_picture_plays_by_keyboard_and_is_whole_on_paper(opened, runs):
    moving = json.loads(pictures.context_parallel.ring(2).to_json())
    cells = [new_markdown_cell("## A picture"), code("ring(2)", shown(**{PLOTLY: moving}))]
    page = opened(page_of(notebook(*cells), Path("labs/99_test.py"), runs).html(), color_scheme="dark")
    drawn(page)
    bars = page.locator("figure.drawn .bars .point path")
    assert page.locator(".slider-container, .updatemenu-container").count() == 0, "plotly's, which no key reaches"
    slider, whole = page.get_by_label("moment"), bars.count()
    assert slider.get_attribute("aria-valuetext") == "turn 2"
    slider.press("Home")
    sync_api.expect(bars).to_have_count(whole // 2)
    assert slider.get_attribute("aria-valuetext") == "turn 1"
    page.screenshot(path=PICTURES / "handout-4-turn-1.png")
    assert violations(page) == []
    page.get_by_role("button", name="Play").press("Enter")
    sync_api.expect(bars).to_have_count(whole)
    slider.press("Home")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    sync_api.expect(bars).to_have_count(whole)
    sync_api.expect(slider).to_be_hidden()


@pytest.mark.browser
def test_a_phone_has_nothing_to_scroll_sideways(opened, html):
    page = opened(html, width=390)
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("nav details").get_attribute("open") is None, "the table of contents is closed"
    page.locator("figure").nth(2).scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "handout-3-phone.png")
    assert violations(page) == []


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
    made.body += "".join(text for text in HOSTILE if "refresh" not in text)  # a policy cannot stop a redirection
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
