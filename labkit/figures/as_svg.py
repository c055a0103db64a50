"""A chart as inline SVG without scripts or embedded fonts, in the text colour of the page. Every text is escaped."""

from __future__ import annotations

import math
from itertools import groupby

from labkit.common.text import escape
from labkit.figures.model import Bars, Drawn, Line, Marks, Points, Spans, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 92, 26, 34
_DASHES = {"dot": "1.5 3", "dash": "6 4", "dashdot": "6 3 1.5 3"}


class _Canvas:
    """A plot area in a picture of `width` × `height` units, and the elements drawn so far."""

    def __init__(self, drawn: Drawn, width: int, height: int):
        self.width, self.height = width, height
        self.x_span, self.y_span = drawn.x_span, drawn.y_span
        longest = max((len(name) for name, _ in _named(drawn)), default=0)
        self.left = max(_LEFT, 12 + 6 * max(map(len, drawn.chart.y.categories), default=0))  # width of the lanes' names
        self.right = max(_RIGHT, 35 + 6 * longest)  # width of the legend
        self.elements: list[str] = []

    def x(self, value: float) -> float:
        low, high = self.x_span
        return self.left + (value - low) / (high - low or 1) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_span
        return self.height - _BOTTOM - (value - low) / (high - low or 1) * (self.height - _TOP - _BOTTOM)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.elements.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>')

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> None:
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            f' fill="{escape(colour)}">{title}</rect>'
        )


def drawing(drawn: Drawn, width: int, height: int) -> str:
    """The chart as one `<svg>` element of `width` × `height` units, which scales with its column."""
    canvas = _Canvas(drawn, width, height)
    _frame(canvas, drawn)
    if drawn.chart.bars:
        _bars(canvas, drawn)
    elif drawn.chart.spans:
        _spans(canvas, drawn)
    else:
        _areas(canvas, drawn)
        for line, points in zip(drawn.chart.lines, drawn.points):
            if not line.stacked:
                _line(canvas, line, points)
        for name, start, end, colour in drawn.chart.bands:
            foot = canvas.height - _BOTTOM
            canvas.rectangle(canvas.x(start), foot - 5, canvas.x(end) - canvas.x(start), 5, colour, name)
    _legend(canvas, drawn)
    label = escape(drawn.chart.title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{label}" style="max-width:100%;height:auto" font-family="system-ui, sans-serif"'
        ' font-size="11" fill="currentColor">' + "".join(canvas.elements) + "</svg>"
    )


def _frame(canvas: _Canvas, drawn: Drawn) -> None:
    chart, right, bottom = drawn.chart, canvas.width - canvas.right, canvas.height - _BOTTOM
    room = (canvas.width - 24 - 7.5 * len(chart.title)) / max(len(chart.note), 1)
    size = f"{max(6.0, min(10.0, 1.9 * room)):.3g}"  # a long note in smaller type, so that it fits into the picture
    note = ""
    if chart.note:
        note = f'<tspan dx="8" font-size="{size}" font-weight="400" opacity="0.75">{escape(chart.note)}</tspan>'
    canvas.elements.append(f'<text x="8" y="15" font-size="13" font-weight="600">{escape(chart.title)}{note}</text>')
    for value in () if chart.y.categories else ticks(*canvas.y_span):
        canvas.line(canvas.left, canvas.y(value), right, canvas.y(value), 'stroke="currentColor" stroke-opacity="0.2"')
        canvas.text(canvas.left - 5, canvas.y(value) + 4, _short(value), 'text-anchor="end"')
    middle = (canvas.height - _BOTTOM + _TOP) / 2
    canvas.text(0, 0, chart.y.title, f'text-anchor="middle" transform="translate(12 {middle:.0f}) rotate(-90)"')
    if not chart.bars:
        names = chart.x.categories  # of lines: an x value is the index of one
        values = [*map(float, range(len(names)))] if names else ticks(*canvas.x_span, about=6)
        longest = max(map(len, names), default=0)
        apart = max(1, math.ceil(7 * longest * len(names) / (right - canvas.left)))  # so that names do not overlap
        for at, value in [*enumerate(values)][::apart]:
            canvas.text(canvas.x(value), bottom + 14, names[at] if names else _short(value), 'text-anchor="middle"')
        canvas.text((canvas.left + right) / 2, bottom + 28, chart.x.title, 'text-anchor="middle"')
    canvas.line(canvas.left, bottom, right, bottom, 'stroke="currentColor" stroke-opacity="0.6"')


def _line(canvas: _Canvas, line: Line, points: Points) -> None:
    dash = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash in _DASHES else ""
    style = (
        f'fill="none" stroke="{escape(line.colour or "currentColor")}" stroke-width="{line.width}"'
        f' stroke-linejoin="round"{dash}'
    )
    for known, part in groupby(zip(*points), key=lambda point: point[1] is not None):
        if known:
            path = " ".join(
                f"{canvas.x(min(x, canvas.x_span[1])):.1f},{canvas.y(y):.1f}" for x, y in part if y is not None
            )
            canvas.elements.append(f'<polyline points="{path}" {style}/>')


def _bars(canvas: _Canvas, drawn: Drawn) -> None:
    names = drawn.chart.x.categories
    room = (canvas.width - canvas.left - canvas.right) / max(len(names), 1)
    longest = max((len(line) for label in drawn.chart.x.labels for line in label.split("\n")), default=1)
    style = f'text-anchor="middle" font-size="{min(11.0, room / (0.65 * longest)):.3g}"'  # labels do not overlap
    for index, name in enumerate(names):
        left, base = canvas.left + (index + 0.175) * room, 0.0
        for bars in drawn.chart.bars:
            top = base + bars.values[index]
            height = canvas.y(base) - canvas.y(top)
            value, y = bars.values[index], drawn.chart.y
            words = y.in_words(value) if y.bytes_each else f"{value:.3g}"
            canvas.rectangle(left, canvas.y(top), 0.65 * room, height, bars.colour, f"{name}: {bars.name} {words}")
            base = top
        for marks in drawn.chart.marks:
            level = marks.values[index]
            if level is not None:
                words, top = drawn.mark_in_words(level), canvas.y(drawn.height_of(level))
                hint = f"{name}: {marks.name} {words}"
                canvas.rectangle(left - 0.05 * room, top - 1.25, 0.75 * room, 2.5, marks.colour, hint)
                if drawn.chart.is_beyond(level):
                    canvas.text(left + 0.325 * room, top - 4, f"↑ {words}", 'text-anchor="middle" font-size="10"')
        lines = (drawn.chart.x.labels or names)[index].split("\n")
        for number, text in enumerate(lines):
            canvas.text(left + 0.325 * room, canvas.height - _BOTTOM + 14 + 12 * number, text, style)


def _spans(canvas: _Canvas, drawn: Drawn) -> None:
    lanes = drawn.chart.y.categories
    room = (canvas.height - _TOP - _BOTTOM) / max(len(lanes), 1)
    for index, name in enumerate(lanes):
        canvas.text(canvas.left - 5, _TOP + (index + 0.5) * room + 4, name, 'text-anchor="end"')
    for spans in drawn.chart.spans:
        for lane, start, end, words in spans.stretches:
            width = max(canvas.x(end) - canvas.x(start), 0.3)
            canvas.rectangle(canvas.x(start), _TOP + (lane + 0.1) * room, width, 0.8 * room, spans.colour, words)


def _areas(canvas: _Canvas, drawn: Drawn) -> None:
    """Stacked step areas, each on top of the previous one."""
    stacked = [(line, points) for line, points in zip(drawn.chart.lines, drawn.points) if line.stacked]
    if not stacked:
        return
    xs = [*stacked[0][1][0], drawn.x.high]
    base = [0.0] * len(xs)
    for line, (_, ys) in stacked:
        top = [low + (value or 0.0) for low, value in zip(base, [*ys, ys[-1] if ys else 0.0])]
        edge = [*_steps(canvas, xs, top), *reversed(_steps(canvas, xs, base))]
        canvas.elements.append(f'<polygon points="{" ".join(edge)}" fill="{escape(line.colour or "currentColor")}"/>')
        base = top


def _steps(canvas: _Canvas, xs: list[float], ys: list[float]) -> list[str]:
    corners = [(xs[0], ys[0])] if xs else []
    for index in range(1, len(xs)):
        corners += [(xs[index], ys[index - 1]), (xs[index], ys[index])]
    return [f"{canvas.x(x):.1f},{canvas.y(y):.1f}" for x, y in corners]


def _legend(canvas: _Canvas, drawn: Drawn) -> None:
    for number, (name, colour) in enumerate(_named(drawn)):
        y = _TOP + 4 + 15 * number
        thin = any(not line.stacked for line in drawn.chart.lines)
        canvas.rectangle(canvas.width - canvas.right + 10, y, 14, 4 if thin else 10, colour)
        canvas.text(canvas.width - canvas.right + 29, y + (6 if thin else 9), name)


def _named(drawn: Drawn) -> list[tuple[str, str]]:
    """The entries of the legend with their colours; stacked areas and bars from top to bottom."""
    chart = drawn.chart
    stacked = [line for line in chart.lines if line.stacked]
    parts: list[Bars | Spans | Marks] = [*reversed(chart.bars), *chart.spans, *chart.marks]
    shown = [(part.name, part.colour) for part in parts]
    lines = (*reversed(stacked), *(line for line in chart.lines if not line.stacked))
    return shown + [(line.name, line.colour or "currentColor") for line in lines if line.in_legend]


def _short(value: float) -> str:
    """A number in few characters: 12, 0.5, 1.5k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
