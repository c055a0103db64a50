"""Plotly without a browser: text from outside is literal, and no figure has a control that sends it anywhere."""

from __future__ import annotations

import json
import re
from typing import Any

import plotly.io
import pytest
from hostile import full_run

from labkit import figures
from labkit.analysis import comparison
from labkit.figures import as_plotly
from labkit.figures.as_plotly import as_figure, inert, literal
from labkit.figures.comparison import figure as comparison_figure
from labkit.figures.controls import CONFIG
from labkit.figures.tables import Prediction
from labkit.frontends.handout import page
from labkit.frontends.panel.charts import Charts
from labkit.frontends.panel.view import figures_bundle
from labkit.record.follow import Follower
from labkit.setup.environment import RENDERER, RENDERER_VARIABLE

TAG = '<b style="background:url(http://host.example/x)">'
LINK = '<a href="http://host.example/x">'


def hostile(path: str) -> str:
    return f"{TAG}{LINK}{path}"


@pytest.fixture
def state(runs):
    follower = Follower(full_run(runs, hostile))
    follower.poll()
    return follower.state


def drawn(state) -> dict[str, dict[str, Any]]:
    """Every figure of a run as plain values, by name."""
    found = {name: figures.figure(name, state) for name in figures.NAMES}
    found |= {"overview": figures.overview(state), "prediction": Prediction(state.prediction).figure()}
    found |= {"predicted timeline": Prediction(state.prediction).timeline()}
    return {name: json.loads(figure.to_json()) for name, figure in found.items()}


# ---- text


def test_every_text_is_literal_where_it_is_used(state, monkeypatch):
    """Without the last resort: a text that a chart forgets to make literal is found here."""
    monkeypatch.setattr(as_plotly, "inert", lambda value: value)
    shown = drawn(state)
    texts = json.dumps(shown)
    assert "host.example" in texts and literal(TAG)[:4] == "&lt;"
    for name, figure in shown.items():
        assert "<b style" not in json.dumps(figure) and "<a href" not in json.dumps(figure), name


def test_names_of_compared_runs_are_literal(runs, monkeypatch):
    monkeypatch.setattr(as_plotly, "inert", lambda value: value)
    rows = comparison.recorded([full_run(runs, hostile)])
    assert "<b style" not in comparison_figure(rows).to_json()


def test_what_a_chart_forgets_is_inert(state):
    data = [{"type": "bar", "x": [TAG], "y": [1.5], "name": LINK, "text": ["a < b", "5 <b>bold</b>"]}]
    figure = as_figure(data, {"title": {"text": f"<b>{TAG}</b><br>{LINK}"}, "annotations": [{"text": TAG}]})
    text = figure.to_json()
    assert "<b style" not in text and "<a href" not in text
    assert figure.layout.title.text.startswith("<b>&lt;b style") and "</b><br>&lt;a href" in figure.layout.title.text
    assert figure.data[0].text == ("a &lt; b", "5 <b>bold</b>")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "<b style='x'>",
            "<B STYLE=x>",
            "<b\tstyle='x'>",
            "<b\nstyle=x>",
            "<b/style='x'>",
            "<a href=x>",
            "<A>",
            "<svg>",
        ),
        *(
            "<span style='font-size:10px;background:url(x)'>",
            "<span style=x>",
            "<sub style='x'>",
            "<img src=x>",
            "<br x>",
        ),
        *("< b style='x'>", "<<b style='x'>", "<b ><b style='x'>", "<i style=x>", "<em style=x>", "<sup><a href='x'>"),
    ],
)
def test_no_tag_with_an_attribute_survives(text):
    assert not re.search(r"<[^>]*[\s/=][^>]*>", inert({"x": [text]})["x"][0])


def test_the_markup_of_the_charts_survives(state):
    for text in ("<b>x</b>", "a<br>b", "%{y}<extra>%{x}</extra>", "<span style='font-size:10px'>note</span>"):
        assert inert(text) == text
    title = figures.figure("loss", state).layout.title.text
    assert title.startswith("<b>Loss</b><span style='font-size:10px'>")


def test_figures_of_labs_in_a_handout_are_inert():
    made = page.Plots()
    made.add({"data": [{"name": TAG}], "layout": {"title": {"text": f"<b>A</b>{LINK}"}}})
    assert "<b style" not in json.dumps(made._figures) and "<a href" not in json.dumps(made._figures)


# ---- controls


def sends_nothing(config: dict[str, Any]) -> None:
    """plotly.js has a button for its cloud unless the first is False; without an address, no other one could send."""
    assert config["showSendToCloud"] is False
    assert config["plotlyServerURL"] == "" and config["displaylogo"] is False
    assert {"sendChartToCloud", "sendDataToCloud", "editInChartStudio"} <= set(config["modeBarButtonsToRemove"])


def test_the_configuration_of_every_place_that_draws(state, runs, tmp_path, monkeypatch):
    sends_nothing(CONFIG)
    figure = figures.figure("loss", state)
    sends_nothing(figures_bundle("run", state)["application/vnd.plotly.v1+json"]["config"])
    sends_nothing(Charts().page.plotly_config)
    assert json.dumps(CONFIG) in page._program() and "%CONFIG%" not in page._program()

    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")
    sends_nothing(figure._repr_mimebundle_()["application/vnd.plotly.v1+json"]["config"])
    for html in (figure.to_html(include_plotlyjs=False), figure.to_html(config={"responsive": True})):
        assert '"showSendToCloud": false' in html
    figure.write_html(tmp_path / "figure.html", include_plotlyjs=False)
    assert '"showSendToCloud": false' in (tmp_path / "figure.html").read_text()


@pytest.mark.parametrize("renderer", [RENDERER, "notebook_connected"])
def test_what_a_cell_displays(state, monkeypatch, renderer):
    from IPython import display

    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(display, "display", lambda bundle, raw: shown.append(bundle))
    monkeypatch.setattr("plotly.io._renderers.ipython_display", display, raising=False)
    monkeypatch.setenv(RENDERER_VARIABLE, renderer)
    monkeypatch.setattr(plotly.io.renderers, "default", renderer)
    figures.figure("loss", state)._ipython_display_()
    (bundle,) = shown
    if renderer == RENDERER:
        sends_nothing(bundle["application/vnd.plotly.v1+json"]["config"])
    else:
        assert '"showSendToCloud": false' in bundle["text/html"]
