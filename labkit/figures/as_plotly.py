"""A chart as plotly data and layout: plain dicts for the live chart, or one Figure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labkit.common.text import escape
from labkit.figures import colours
from labkit.figures.model import Axis, Drawn, Marks, Points, Spans

if TYPE_CHECKING:
    import plotly.graph_objects

FONT = "system-ui, sans-serif"
# What is not the markup of charts and pictures: tags of plotly may have links and styles, with addresses.
_OTHER_MARKUP = re.compile(
    r"""<(?!/?(?:b|br|extra|span)>|span style='font-size:1\dpx'>|span style="color:#[0-9a-f]{6}">)""", re.IGNORECASE
)
_MARK = 0.01  # height of a mark, as a share of the axis
_DIGITS = 6  # significant digits: finer than a pixel, and every character is sent to the browser


def literal(text: str) -> str:
    """A text as plotly's markup, which is shown as it is, with visible escapes."""
    return escape(text, quote=False)


def plain_look(size: int = 11) -> dict[str, Any]:
    """The part of a layout that all charts and pictures share: the font, in px, and a transparent background."""
    clear = "rgba(0,0,0,0)"
    return {"font": {"family": FONT, "size": size, "color": colours.INK}, "paper_bgcolor": clear, "plot_bgcolor": clear}


def parts(drawn: Drawn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The traces and the layout, as `Plotly.newPlot` takes them."""
    chart = drawn.chart
    corner = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"l": 8, "t": 7}}
    layout = {
        "title": {"text": _title(drawn), "font": {"size": 13}} | corner,
        "xaxis": axis(drawn, "x"),
        "yaxis": axis(drawn, "y"),
        "barmode": "stack",
        "bargap": 0.35,
        "margin": {"l": 58, "r": 88 if _has_legend(drawn) else 16, "t": 30, "b": 36},
        "legend": {
            "x": 1.01,
            "y": 1.25 if chart.bars else 1,
            "maxheight": 160,  # px: fits next to a live chart without scrolling
            "yanchor": "top",
            "font": {"size": 10},
            "tracegroupgap": 0,
            "itemwidth": 30,
            "bgcolor": "rgba(0,0,0,0)",
        },
        "hovermode": "closest",
        **plain_look(),
        "uirevision": chart.name,  # the zoom of the user survives new points
    }
    if chart.spans:
        layout |= {"barmode": "overlay", "bargap": 0.2}
        layout["margin"]["l"] = 12 + 7 * max(map(len, chart.y.categories), default=0)
    if any(line.stacked for line in chart.lines):
        layout["legend"]["traceorder"] = "reversed"  # from top to bottom, in the order of the stack
    if chart.marks:
        layout["annotations"] = _names(drawn)
    if chart.bands:
        layout["shapes"] = [_band(*band) for band in chart.bands]
    return inert(traces(drawn)), inert(layout)


def _band(name: str, start: float, end: float, colour: str) -> dict[str, Any]:
    """A strip along the bottom of the plot that marks one phase."""
    place = {"xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 0.05}
    return {"type": "rect", "name": literal(name), **place, "fillcolor": colour, "line": {"width": 0}, "layer": "above"}


def traces(drawn: Drawn) -> list[dict[str, Any]]:
    """The traces alone."""
    chart = drawn.chart
    if chart.bars:
        return [
            {
                "type": "bar",
                "name": literal(bars.name),
                "x": list(map(literal, chart.x.categories)),
                "y": numbers(bars.values),
                "marker": {"color": bars.colour},
                "textposition": "none",
                "hovertemplate": f"{literal(bars.name)} %{{y:.3~s}} {_unit(chart.y)}<extra>%{{x}}</extra>",
            }
            | _in_words(chart.y, bars.values, f"{literal(bars.name)} %{{text}}<extra>%{{x}}</extra>")
            for bars in chart.bars
        ] + [_marks(drawn, marks) for marks in chart.marks]
    if chart.spans:
        return [_spans(drawn, spans) for spans in chart.spans]
    return [_line(drawn, line, points) for line, points in zip(chart.lines, drawn.points)]


def _marks(drawn: Drawn, marks: Marks) -> dict[str, Any]:
    """A thin bar at each level; its base excludes it from the stack."""
    chart = drawn.chart
    known = [(name, value) for name, value in zip(chart.x.categories, marks.values) if value is not None]
    values, height = [value for _, value in known], _MARK * drawn.y_span[1]
    return {
        "type": "bar",
        "name": literal(marks.name),
        "x": [literal(name) for name, _ in known],
        "base": numbers(drawn.height_of(value) - height / 2 for value in values),
        "y": numbers([height] * len(known)),
        "text": list(map(drawn.mark_in_words, values)),
        "textposition": "none",
        "showlegend": False,
        "marker": {"color": marks.colour, "line": {"color": marks.colour, "width": 1}},
        "hovertemplate": f"{literal(marks.name)} %{{text}}<extra>%{{x}}</extra>",
    }


def _names(drawn: Drawn, suffix: str = "") -> list[dict[str, Any]]:
    """The name of each kind of marks, above its first one: a legend entry would be far away. Marks at the edge of the
    plot have an arrow and their number, too."""
    names = []
    for marks in drawn.chart.marks:
        first = next(((name, y) for name, y in zip(drawn.chart.x.categories, marks.values) if y is not None), None)
        if first is not None:
            name, level = first
            place = {"x": literal(name), "y": drawn.height_of(level), "xref": f"x{suffix}", "yref": f"y{suffix}"}
            look = {"font": {"size": 9, "color": "#FFFFFF"}, "bgcolor": marks.colour, "borderpad": 1}
            text = marks.name + (f" ↑ {drawn.mark_in_words(level)}" if drawn.chart.is_beyond(level) else "")
            place["xanchor"] = "left" if len(drawn.chart.x.categories) > 1 else "center"  # not over the axis
            names.append({"text": literal(text), "showarrow": False, "yanchor": "bottom"} | place | look)
    return names


def _spans(drawn: Drawn, spans: Spans) -> dict[str, Any]:
    lanes = list(map(literal, drawn.chart.y.categories))
    return {
        "type": "bar",
        "orientation": "h",
        "name": literal(spans.name),
        "y": [lanes[lane] for lane, *_ in spans.stretches],
        "base": numbers(start for _, start, _, _ in spans.stretches),
        "x": numbers(end - start for _, start, end, _ in spans.stretches),
        "text": [literal(words) for *_, words in spans.stretches],
        "textposition": "none",
        "marker": {"color": spans.colour, "line": {"width": 0}},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _line(drawn: Drawn, line, points: Points) -> dict[str, Any]:
    xs, ys = points
    shape = {"color": line.colour, "width": 0.5, "shape": "hv"}
    area = {"stackgroup": "all", "line": shape, "fillcolor": line.colour} if line.stacked else {}
    what, where = literal(drawn.chart.y.title), _unit(drawn.chart.x)
    at = "%{x}" if drawn.chart.x.categories else "%{x:,.4~r}"
    return {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "lines+markers",
        "name": literal(line.name),
        "showlegend": line.in_legend,
        "legendgroup": line.key.split("-")[0],
        "x": _positions(drawn.chart.x, xs or [None]),  # plotly omits lines without values from the legend
        "y": numbers(ys or [None]),
        "line": {"color": line.colour or colours.INK, "width": line.width, "dash": line.dash},
        "meta": {"ink": line.colour is None},
        "hovertemplate": f"%{{y:.4~g}} {what}<br>{where} {at}<extra>{literal(line.name)}</extra>",
    } | (area | _in_words(drawn.chart.y, ys, f"%{{text}}<br>{where} {at}<extra>{literal(line.name)}</extra>"))


def _positions(axis: Axis, values: Iterable[float | None]) -> list[Any]:
    """The x values of a line; on an axis of categories, a value is the index of one."""
    if not axis.categories:
        return numbers(values)
    return [None if value is None else literal(axis.categories[int(value)]) for value in values]


def _in_words(axis: Axis, values: Iterable[float | None], hover: str) -> dict[str, Any]:
    """Hover text with each value in the unit that suits it, such as 4.6 MiB on an axis in GiB; empty for other axes."""
    return {"text": words(axis, values), "hovertemplate": hover} if axis.bytes_each else {}


def words(axis: Axis, values: Iterable[float | None]) -> list[str]:
    """The values of an axis of bytes in words; empty for any other axis."""
    return [axis.in_words(value) for value in values] if axis.bytes_each else []


def axis(drawn: Drawn, which: str) -> dict[str, Any]:
    """The x or the y axis, with its range."""
    of = getattr(drawn.chart, which)
    plain = {
        "title": {"text": literal(of.title), "standoff": 4},
        "gridcolor": colours.GRID,
        "zeroline": False,
        "automargin": False,
    } | ({"ticklabelstandoff": 4} if which == "x" else {"ticklabelshift": -2})  # two zeros meet at the origin
    if of.categories and which == "y":
        order = {"categoryarray": list(map(literal, of.categories)), "range": [len(of.categories) - 0.5, -0.5]}
        return plain | {"type": "category", "showgrid": False, "fixedrange": True} | order
    if of.categories:
        span = [-0.5, len(of.categories) - 0.5]
        order = {"categoryarray": list(map(literal, of.categories))} if drawn.chart.lines else {}
        return plain | {"type": "category", "fixedrange": True, "range": span, "showgrid": False} | order | _labels(of)
    fixed = {"nticks": 6, "tickangle": 0, "separatethousands": True, "autorange": False}
    return plain | fixed | {"range": list(getattr(drawn, f"{which}_span"))}


def _unit(of: Axis) -> str:
    """The first word of an axis title."""
    return literal(of.title.split(" ")[0])


def _labels(of: Axis) -> dict[str, Any]:
    """What stands below bars whose names are too long for one line; the margin grows where it must be rotated."""
    if not of.labels:
        return {}
    below = [literal(label).replace("\n", "<br>") for label in of.labels]
    return {"tickvals": list(map(literal, of.categories)), "ticktext": below, "automargin": "height"}


def grid(several: list[Drawn]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Several charts as the traces and the layout of one figure, two in a row."""
    data: list[dict[str, Any]] = []
    rows = max(1, -(-len(several) // 2))
    height, vertical = 280 * rows, {"t": 30, "b": 40}
    unit = 490 / (height - sum(vertical.values()))  # the sizes below are fractions of the area of two rows
    layout: dict[str, Any] = {"annotations": [], "height": height}
    for number, drawn in enumerate(several):
        row, column = divmod(number, 2)
        suffix = "" if number == 0 else str(number + 1)
        left, bottom, tall = 0.56 * column, 0.58 * unit * (rows - 1 - row), 0.38 * unit
        alone, its_layout = parts(drawn)
        data += [trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "legend": f"legend{suffix}"} for trace in alone]
        common = ("font", "barmode", "bargap", "hovermode", "paper_bgcolor", "plot_bgcolor")
        layout |= {name: its_layout[name] for name in common}
        layout[f"xaxis{suffix}"] = its_layout["xaxis"] | {"domain": [left, left + 0.36], "anchor": f"y{suffix}"}
        layout[f"yaxis{suffix}"] = its_layout["yaxis"] | {"domain": [bottom, bottom + tall], "anchor": f"x{suffix}"}
        layout[f"legend{suffix}"] = its_layout["legend"] | {"x": left + 0.365, "y": bottom + tall}
        layout["annotations"] += _names(drawn, suffix)
        layout["annotations"].append(heading(_title(drawn), left, bottom + tall + 0.01 * unit))
    return data, layout | {"margin": {"l": 60, "r": 10, **vertical}}


def heading(markup: str, x: float, y: float) -> dict[str, Any]:
    """A title in a figure, which begins at a place in fractions of it."""
    place = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return {"text": markup, "showarrow": False, "font": {"size": 12}} | place


def as_figure(
    data: list[dict[str, Any]], layout: dict[str, Any], frames: list[dict[str, Any]] | None = None
) -> plotly.graph_objects.Figure:
    """A Figure that looks like the live chart: without plotly's own template, which paints a background."""
    from labkit.figures.displayed import Figure

    parts = {"data": inert(data), "layout": inert(layout) | {"template": "none"}}
    return Figure(parts | {"frames": inert(frames)} if frames else parts)


def inert(value: Any) -> Any:
    """A part of a figure, in which tags that are not of the charts' own markup are visible text. Text from outside is
    `literal` where it is used; this holds where that is forgotten, too."""
    if isinstance(value, str):
        return _OTHER_MARKUP.sub("&lt;", value)
    if isinstance(value, dict):
        return {name: inert(part) for name, part in value.items()}
    return [inert(part) for part in value] if isinstance(value, (list, tuple)) else value


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Values rounded to as many digits as a figure can show."""
    rounded = (None if value is None else float(f"{value:.{_DIGITS}g}") for value in values)
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]


def _has_legend(drawn: Drawn) -> bool:
    return bool(drawn.chart.bars or drawn.chart.spans) or any(line.in_legend for line in drawn.chart.lines)


def _title(drawn: Drawn) -> str:
    note = literal(drawn.chart.note)
    return f"<b>{literal(drawn.chart.title)}</b>" + (f"<span style='font-size:10px'>  {note}</span>" if note else "")
