"""Text from outside asks for nothing: every field of every event and document of a run holds the address of a beacon,
in handouts and in the panel. And no control of a chart sends anything anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from browser import HEADER, RUN_TIMEOUT, command, open_notebook, picture, see, sync_api
from conftest import wait_until
from fabricate import FakeRun
from hostile import Beacon, beacon, full_run

from labkit.frontends.handout import run_page

pytestmark = pytest.mark.browser

_SENDS = re.compile(r"share|cloud|upload|edit|studio|send|plotly", re.IGNORECASE)
_BUTTONS = """boxes => boxes.flatMap(box => [...box.querySelectorAll(".modebar-btn")].map(one => one.dataset.title))"""
_LINKS = """boxes => boxes.flatMap(box => [...box.querySelectorAll("a")].map(one => one.outerHTML))"""
NOTEBOOK = (
    HEADER
    + """from labkit import Lab
Lab(recorded="last")

# %%
from IPython.display import display
from labkit import figures
from labkit.figures.comparison import figure
from labkit.frontends.panel.view import display_static
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run
run = Run.attach(RunFolder.find("last").path)
display_static(run.name, run.state)
for name in figures.NAMES:
    display(run.figure(name))
for one in (run, run.findings(), run.ledger(), run.summary()):
    display(one)
print("all is shown")
"""
)


@pytest.fixture
def asked() -> Iterator[Beacon]:
    with beacon() as server:
        yield server


@pytest.fixture
def tab(chromium) -> Iterator[sync_api.Page]:
    """A page that may ask any address."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def without_policy(html: str) -> str:
    """A page that a browser would let ask for anything."""
    changed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert changed != html
    return changed


def hover(page: sync_api.Page, plots: sync_api.Locator) -> None:
    """The pointer visits every part of every plot, so that hover texts are shown."""
    for plot in plots.filter(visible=True).all():
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        for row in range(1, 6):
            for column in range(1, 10):
                page.mouse.move(box["x"] + column * box["width"] / 10, box["y"] + row * box["height"] / 6)


def nothing_is_sent(page: sync_api.Page, plots: sync_api.Locator) -> None:
    """No button of a toolbar sends the chart anywhere, by its name and when it is pressed; and there is no link."""
    names = plots.evaluate_all(_BUTTONS)
    assert len(names) >= plots.count() and {"Zoom in", "Reset axes"} <= set(names)
    assert not list(filter(_SENDS.search, names))
    assert plots.evaluate_all(_LINKS) == [] or all("href=" not in link for link in plots.evaluate_all(_LINKS))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    pages = len(page.context.pages)
    plot = plots.filter(visible=True).first
    plot.scroll_into_view_if_needed()
    plot.hover()
    for button in plot.locator(".modebar-btn").all():
        if "Download" not in button.get_attribute("data-title"):
            button.click()
    page.wait_for_timeout(200)
    assert len(page.context.pages) == pages and page.locator(".plotly-cloud-dialog-box").count() == 0
    assert [
        url for url in requests if not url.startswith(("data:", "blob:", "http://127.0.0.1", "http://localhost"))
    ] == []


def test_the_beacon_hears_what_a_browser_interprets(tab, asked):
    """What the other tests rely on: the text asks, if it is not escaped."""
    tab.set_content(f"<!doctype html><body>{asked.text('control')}</body>")
    wait_until(lambda: {"/control/i", "/control/b", "/control/f", "/control/q"} <= set(asked.asked))


def test_plotly_interprets_its_markup(tab, asked):
    """The same for a title of a chart, which plotly's own markup lets ask."""
    from plotly.offline import get_plotlyjs

    tab.set_content("<div id=chart></div>")
    tab.add_script_tag(content=get_plotlyjs())
    tab.evaluate("title => Plotly.newPlot('chart', [{y: [1, 2]}], {title: {text: title}})", asked.text("title"))
    wait_until(lambda: any(path.startswith("/title/") for path in asked.asked))
    assert "Share chart..." in tab.locator("#chart").evaluate_all(_BUTTONS), (
        "the test knows plotly's button by its name"
    )


def test_no_field_of_a_run_asks_in_a_handout(tab, asked, runs, tmp_path):
    html = run_page(full_run(runs, asked.text)).html()
    assert html.count("127.0.0.1") > 20
    file = tmp_path / "page.html"
    file.write_text(without_policy(html), encoding="utf-8")
    tab.goto(file.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(fold => (fold.open = true))")
    tab.wait_for_selector("html[data-figures=drawn]", timeout=60_000)
    plots = tab.locator("figure.plot .js-plotly-plot")
    assert plots.count() >= 7
    hover(tab, plots)
    tab.wait_for_timeout(500)
    assert asked.asked == []


def test_no_control_of_a_handout_sends_anything(tab, runs, tmp_path):
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(30)
    run.end()
    run.close()
    file = tmp_path / "page.html"
    file.write_text(without_policy(run_page(run.folder).html()), encoding="utf-8")
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-figures=drawn]", timeout=60_000)
    nothing_is_sent(tab, tab.locator("figure.plot .js-plotly-plot"))


def test_neither_in_the_panel_and_its_figures(page, jupyter, asked):
    """The panel with a recorded run and all of its tabs, its figures that stay in the notebook, and their toolbars."""
    folder = full_run(jupyter.runs, asked.text)
    (jupyter.work / "labs" / "hostile.py").write_text(NOTEBOOK)
    open_notebook(page, jupyter, "labs/hostile.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-run"))
    panel.wait_for(timeout=RUN_TIMEOUT)
    see(panel)
    sync_api.expect(panel.locator(".labkit-recording")).to_be_visible()
    panel.get_by_role("button", name="■ failed").click()  # the end of its time line
    charts = panel.locator(".labkit-chart .js-plotly-plot, .labkit-chart.js-plotly-plot")
    wait_until(lambda: charts.count() >= 4, 60)
    tabs = panel.locator(".lm-TabBar-tab")
    for number in range(tabs.count()):
        tabs.nth(number).click()
        page.wait_for_timeout(300)
        hover(page, charts)
        picture(page, f"60-hostile-{number}")
    tabs.first.click()
    nothing_is_sent(page, charts)
    sync_api.expect(page.locator(".jp-Notebook")).to_contain_text("all is shown", timeout=RUN_TIMEOUT)
    see(page.locator(".jp-Cell").nth(1))
    static = page.locator(".jp-Cell").nth(1).locator(".js-plotly-plot")
    wait_until(lambda: static.count() >= 5, 60)
    hover(page, static)
    nothing_is_sent(page, static)
    page.wait_for_timeout(500)
    assert asked.asked == []
    assert json.loads(folder.spec.read_text())["nproc"] == 2
