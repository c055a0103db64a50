"""A chart as inline SVG: no script, no font of its own, the page's ink. Every text is escaped."""

from __future__ import annotations

from html import escape
from itertools import groupby

from labkit.figures.model import Drawn, Points, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 92, 26, 34
_DASHES = {"dot": "1.5 3", "dash": "6 4"}


class _Canvas:
    """A plot area in a picture of `width` × `height` units, and the elements that were put there."""

    def __init__(self, drawn: Drawn, width: int, height: int):
        self.width, self.height = width, height
        self.x_span, self.y_span = drawn.x_span, drawn.y_span
        self.elements: list[str] = []

    def x(self, value: float) -> float:
        low, high = self.x_span
        return _LEFT + (value - low) / (high - low or 1) * (self.width - _LEFT - _RIGHT)

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
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{escape(colour)}">{title}</rect>'
        )


def drawing(drawn: Drawn, width: int, height: int) -> str:
    """The chart as one `<svg>` element of `width` × `height` units, which shrinks with its column."""
    canvas = _Canvas(drawn, width, height)
    _frame(canvas, drawn)
    if drawn.chart.bars:
        _bars(canvas, drawn)
    else:
        for line, points in zip(drawn.chart.lines, drawn.points):
            _line(canvas, line, points)
    _legend(canvas, drawn)
    label = escape(drawn.chart.title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}" style="max-width:100%;height:auto" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        + "".join(canvas.elements)
        + "</svg>"
    )


def _frame(canvas: _Canvas, drawn: Drawn) -> None:
    chart, right, bottom = drawn.chart, canvas.width - _RIGHT, canvas.height - _BOTTOM
    note = f'<tspan dx="8" font-size="10" font-weight="400" opacity="0.75">{escape(chart.note)}</tspan>' if chart.note else ""
    canvas.elements.append(f'<text x="8" y="15" font-size="13" font-weight="600">{escape(chart.title)}{note}</text>')
    for value in ticks(*canvas.y_span):
        canvas.line(_LEFT, canvas.y(value), right, canvas.y(value), 'stroke="currentColor" stroke-opacity="0.2"')
        canvas.text(_LEFT - 5, canvas.y(value) + 4, _short(value), 'text-anchor="end"')
    middle = (canvas.height - _BOTTOM + _TOP) / 2
    canvas.text(0, 0, chart.y.title, f'text-anchor="middle" transform="translate(12 {middle:.0f}) rotate(-90)"')
    if not chart.x.categories:
        for value in ticks(*canvas.x_span, about=6):
            canvas.text(canvas.x(value), bottom + 14, _short(value), 'text-anchor="middle"')
        canvas.text((_LEFT + right) / 2, bottom + 28, chart.x.title, 'text-anchor="middle"')
    canvas.line(_LEFT, bottom, right, bottom, 'stroke="currentColor" stroke-opacity="0.6"')


def _line(canvas: _Canvas, line, points: Points) -> None:
    dash = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash in _DASHES else ""
    style = f'fill="none" stroke="{escape(line.colour or "currentColor")}" stroke-width="{line.width}" stroke-linejoin="round"{dash}'
    for known, part in groupby(zip(*points), key=lambda point: point[1] is not None):
        if known:
            path = " ".join(f"{canvas.x(x):.1f},{canvas.y(y):.1f}" for x, y in part)
            canvas.elements.append(f'<polyline points="{path}" {style}/>')


def _bars(canvas: _Canvas, drawn: Drawn) -> None:
    names = drawn.chart.x.categories
    room = (canvas.width - _LEFT - _RIGHT) / max(len(names), 1)
    for index, name in enumerate(names):
        left, base = _LEFT + (index + 0.175) * room, 0.0
        for bars in drawn.chart.bars:
            top = base + bars.values[index]
            height = canvas.y(base) - canvas.y(top)
            canvas.rectangle(left, canvas.y(top), 0.65 * room, height, bars.colour, f"{name}: {bars.name} {bars.values[index]:.3g}")
            base = top
        canvas.text(left + 0.325 * room, canvas.height - _BOTTOM + 14, name, 'text-anchor="middle"')


def _legend(canvas: _Canvas, drawn: Drawn) -> None:
    shown = [(bars.name, bars.colour) for bars in reversed(drawn.chart.bars)]
    shown += [(line.name, line.colour or "currentColor") for line in drawn.chart.lines if line.in_legend]
    for number, (name, colour) in enumerate(shown):
        y = _TOP + 4 + 15 * number
        canvas.rectangle(canvas.width - _RIGHT + 10, y, 14, 4 if drawn.chart.lines else 10, colour)
        canvas.text(canvas.width - _RIGHT + 29, y + (6 if drawn.chart.lines else 9), name)


def _short(value: float) -> str:
    """A number in few letters: 12, 0.5, 1.5k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
