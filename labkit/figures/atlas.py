"""The atlas of published runs as text, HTML table and figure: what was measured, what is modelled, and what failed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.metrics import median, quartiles
from labkit.common.arguments import check_choice
from labkit.common.text import escape
from labkit.common.units import counted, size
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure, heading, numbers, plain_look
from labkit.figures.tables import Rows, Tables
from labkit.prediction.scale.atlas import Evidence, Published, common, failed, modelled, published, speed
from labkit.prediction.scale.model import parameters_in_words

if TYPE_CHECKING:
    import plotly.graph_objects

HEADS = (
    *("model", "GPUs", "machine", "layout", "micro-batches × samples", "tokens/s per GPU", "modelled"),
    *("memory", "modelled", "source"),
)
ROWS = 30  # of a table
FAILED = "failed"
BY: Mapping[str, Callable[[Published], Any]] = {  # what the colour of a dot shows
    "model": lambda run: run.title,
    "tp": lambda run: run.layout.tensor,
    "pp": lambda run: run.layout.pipeline,
    "sharding": lambda run: run.layout.sharding.title,
    "gpus": lambda run: run.training.devices,
    "source": lambda run: run.source,
}
_IN_WORDS = {"tp": "TP {}", "pp": "PP {}", "gpus": "{} GPUs"}


class Atlas(Tables):
    """Some of the published runs, of which at most `limit` are shown as rows."""

    def __init__(self, runs: Sequence[Published], limit: int = ROWS):
        self.runs = tuple(sorted(runs, key=_order))
        self.limit = limit

    @property
    def title(self) -> str:
        """How many runs there are, and what became of them."""
        ran = sum(speed(run) is not None for run in self.runs)
        dead = sum(map(failed, self.runs))
        return (
            f"{counted(len(self.runs), 'published run')} on real GPUs: {ran:,} with a speed, {dead:,} that ran out of"
            " memory or crashed"
        )

    @property
    def question(self) -> str:
        """What the runs have in common if they differ in their layout only, in lines; otherwise `ValueError`."""
        several = {(common(run), run.training.devices) for run in self.runs}
        if len(several) > 1:
            raise ValueError(f"the runs must be of one model, batch and number of GPUs, got {len(several)} of them")
        one = self.runs[0].training
        model = one.model
        lines = (
            f"{self.runs[0].title}: {parameters_in_words(model.parameters)} parameters, {model.layers} layers ×"
            f" {model.width:,}, MLP {model.hidden:,}, vocabulary {model.vocabulary:,}",
            f"{one.batch:,} samples of {one.sequence:,} tokens per step, {one.precision}",
            f"{one.devices:,} × {one.accelerator.name} in nodes of {one.machine.per_node}",
            counted(len(self.runs), "published run"),
        )
        return "\n".join(lines)

    def tables(self) -> list[tuple[Sequence[str], Rows]]:
        """The runs by number of GPUs and model, the fastest first; the failures last."""
        return [(HEADS, [_cells(run) for run in self.runs[: self.limit]])]

    @property
    def sentences(self) -> list[str]:
        """The number of runs that are not shown, and what is known about all of them."""
        hidden = len(self.runs) - self.limit
        return ([f"{counted(hidden, 'more run')}."] if hidden > 0 else []) + self._known

    @property
    def _known(self) -> list[str]:
        """How far the modelled figures are from the measured ones, and where the runs come from."""
        said = [_compared("speed", "tokens/s", _speeds(self.runs)), _compared("memory", "memory", _memories(self.runs))]
        counts = Counter(run.source for run in self.runs)
        sources = ", ".join(f"{source} ({count:,})" for source, count in counts.most_common())
        refused = len(published()[1])
        more = f" {counted(refused, 'more row')} of the file cannot be computed." if refused else ""
        return [*filter(None, said), f"Sources: {sources}; --json has the exact place of each run.{more}"]

    def figure(self, by: str = "model") -> plotly.graph_objects.Figure:
        """One dot per run: speed by number of GPUs, memory and speed as measured and as modelled, and the failures.
        Colours show the `by`: model, tp, pp, sharding, gpus or source."""
        return _figure(self.runs, check_choice("by", by, BY))

    def page(self, by: str = "model") -> str:
        """The figure as one HTML file with plotly.js in it, which works offline, in light and dark themes."""
        head = f'<!DOCTYPE html><meta charset="utf-8"><title>{escape(self.title)}</title>'
        theme = "<style>:root { color-scheme: light dark }</style>"
        return f"{head}{theme}{self.figure(by).to_html(full_html=False, include_plotlyjs=True)}"

    def to_json(self) -> dict[str, Any]:
        """The runs as a dict that can be written as JSON. Sizes are in bytes."""
        return {"runs": [run_json(run) for run in self.runs], "sentences": self._known}


def _order(run: Published) -> tuple[Any, ...]:
    return run.training.devices, run.training.model.parameters, run.title, failed(run), -(speed(run) or 0.0)


def _cells(run: Published) -> tuple[str, ...]:
    layout, estimate = run.layout, modelled(run)
    return (
        run.title,
        f"{run.training.devices:,}",
        run.training.machine.name,
        layout.title,
        f"{layout.micro_batches} × {layout.micro_batch}",
        measured_speed(run),
        f"{estimate.tokens_per_second_per_gpu:,.0f}",
        measured_memory(run),
        size(estimate.memory_bytes),
        run.source,
    )


def measured_speed(run: Published) -> str:
    """The speed of a run in words: `6,539`, `failed`, or a dash if it was not published."""
    found = speed(run)
    return FAILED if failed(run) else "–" if found is None else f"{found:,.0f}"


def measured_memory(run: Published) -> str:
    """The peak memory of a run in words: `63.0 GiB`, `failed`, or a dash if it was not published."""
    found = run.measured.memory
    return FAILED if failed(run) else "–" if found is None else size(found)


def run_json(run: Published) -> dict[str, Any]:
    layout, training, estimate = run.layout, run.training, modelled(run)
    return {
        "source": run.source,
        "where": run.where,
        "model": run.title,
        "parameters": training.model.parameters,
        "machine": training.machine.name,
        "devices": training.devices,
        "batch": training.batch,
        "sequence": training.sequence,
        "precision": training.precision,
        "title": layout.title,
        **{name: getattr(layout, name) for name in _FIELDS},
        "sharding": layout.sharding.name,
        "failed": failed(run),
        "measured": {"tokens_per_second_per_gpu": speed(run), "memory_bytes": run.measured.memory},
        "modelled": {
            "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
            "memory_bytes": estimate.memory_bytes,
            "fits": estimate.fits,
        },
    }


_FIELDS = ("data", "tensor", "pipeline", "context", "micro_batch", "micro_batches", "recompute")


# ---- modelled against measured

Pair = tuple[Published, float, float]  # modelled, measured


def _speeds(runs: Iterable[Published]) -> list[Pair]:
    known = ((run, speed(run)) for run in runs)
    return [(run, modelled(run).tokens_per_second_per_gpu, measured) for run, measured in known if measured]


def _memories(runs: Iterable[Published]) -> list[Pair]:
    return [(run, modelled(run).memory_bytes, run.measured.memory) for run in runs if run.measured.memory]


_ENOUGH = 10  # runs of which a median and quantiles say something


def _compared(name: str, what: str, pairs: Sequence[Pair]) -> str:
    ratios = [there / measured for _, there, measured in pairs]
    if len(ratios) < _ENOUGH:
        return ""
    low, high = quartiles(ratios)
    return (
        f"Modelled / measured {what} of {len(ratios):,} runs: median {median(ratios):.2f}, half of them between"
        f" {low:.2f} and {high:.2f}."
    )


# ---- evidence for a layout

EVIDENCE_HEADS = (
    *("layout", "tokens/s per GPU", "measured nearby", "memory", "measured nearby"),
    "nearest published run, its distance and differences",
)
_MENTIONED = 3  # differences in a cell


def evidence_cells(title: str, rate: float | None, needs: float, found: Evidence) -> tuple[str, ...]:
    """The cells below `EVIDENCE_HEADS` for the modelled figures of a layout: tokens per second and GPU (None if it does
    not fit) and bytes. If the nearest run is far away, they say that none is near."""
    run, more = found.run, len(found.differences) - _MENTIONED
    differences = ", ".join(found.differences[:_MENTIONED]) + (f" and {more} more" if more > 0 else "")
    measured = (measured_speed(run), measured_memory(run)) if found.near else ("none near", "none near")
    return (
        title,
        "–" if rate is None else f"{rate:,.0f}",
        measured[0],
        size(needs),
        measured[1],
        f"{run.title}, {found.distance:.1f}" + (f": {differences}" if differences else ""),
    )


def evidence_json(found: Evidence) -> dict[str, Any]:
    differences = list(found.differences)
    return {"distance": found.distance, "near": found.near, "differences": differences, "run": run_json(found.run)}


# ---- the figure

_COLOURS = len(colours.RANKS)
_REST = "others"
_HEIGHT = 720  # px
_SPREAD = 0.42  # of the distance between two columns, on each side


def _figure(runs: Sequence[Published], by: str) -> plotly.graph_objects.Figure:
    groups = _groups(runs, by)
    positions = _positions(runs)
    data: list[dict[str, Any]] = []
    for number, (name, members) in enumerate(groups.items()):
        look = {"name": escape(name), "legendgroup": name, "color": colours.rank_colour(number)}
        data += _dots(members, positions, look)
    most = max(run.layout.tensor for run in runs)
    by_tp = f"; for each number of GPUs from TP 1 (left) to TP {most} (right)" if most > 1 else ""
    gpus = _numbers_of_gpus(runs)
    speeds = [found for run in runs if (found := speed(run))]
    stored = [found for run in runs if (found := _stored(run))]
    needed = [_needed(run) for run in runs if run.measured.memory or failed(run)]
    expected = [_expected(run) for run in runs if speed(run)]
    rate = "tokens/s per GPU"
    layout = {
        **plain_look(),
        "height": _HEIGHT,
        "hovermode": "closest",
        "margin": {"l": 64, "r": 12, "t": 34, "b": 44},
        "legend": {
            "x": 1.01,
            "y": 1,
            "yanchor": "top",
            "font": {"size": 10},
            "itemsizing": "constant",
            "bgcolor": "rgba(0,0,0,0)",
        },
        "xaxis": {
            "title": {"text": "GPUs", "standoff": 4},
            "anchor": "y2",
            "range": [-0.6, len(gpus) - 0.4],
            "tickvals": [*range(len(gpus))],
            "ticktext": [f"{number:,}" for number in gpus],
            "tickangle": 0,
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": _axis(rate, speeds, (0.57, 1.0), "x"),
        "yaxis2": _strip((0.49, 0.555), "x"),
        "xaxis2": _axis("modelled, GiB", needed, _LEFT, "y3"),
        "yaxis3": _axis("measured, GiB", stored, (0.0, 0.32), "x2"),
        "yaxis4": _strip((0.335, 0.39), "x2"),
        "xaxis3": _axis(f"modelled, {rate}", expected, _RIGHT, "y5"),
        "yaxis5": _axis(f"measured, {rate}", speeds, (0.0, 0.39), "x3"),
        "annotations": [
            heading(f"<b>Speed, measured{by_tp}</b>", 0.0, 1.0),
            heading("<b>Memory, measured and modelled (dotted: of a GPU)</b>", 0.0, 0.395),
            heading("<b>Speed, measured and modelled</b>", _RIGHT[0], 0.395),
        ],
        "shapes": [*_diagonal(_memories(runs), "x2", "y3", _GIB), *_diagonal(_speeds(runs), "x3", "y5", 1.0)],
    }
    for memory in {run.training.memory / _GIB for run in runs}:
        layout["shapes"].append(_limit(memory))
    return as_figure(data, layout)


_GIB = float(1 << 30)
_LEFT, _RIGHT = (0.0, 0.44), (0.57, 1.0)  # of the width


def _groups(runs: Sequence[Published], by: str) -> dict[str, list[Published]]:
    """The runs by what their colour shows, in order; values without a colour of their own are together."""
    value, words = BY[by], _IN_WORDS.get(by, "{}")
    counts = Counter(map(value, runs))
    shown = {value for value, _ in counts.most_common(_COLOURS - (len(counts) > _COLOURS))}
    first = {value(run): run for run in runs}
    order = sorted(shown, key=lambda group: (first[group].training.model.parameters * (by == "model"), group))
    groups: dict[str, list[Published]] = {words.format(shown_value): [] for shown_value in order}
    for run in runs:
        name = words.format(value(run)) if value(run) in shown else _REST
        groups.setdefault(name, []).append(run)
    return groups


def _positions(runs: Sequence[Published]) -> dict[int, float]:
    """The x of each run, by its line: the column of its number of GPUs, spread by its layout so that dots do not hide
    each other."""
    positions = {}
    for column, gpus in enumerate(_numbers_of_gpus(runs)):
        members = [run for run in runs if run.training.devices == gpus]
        members.sort(key=lambda run: (run.layout.tensor, run.layout.pipeline, run.layout.data, run.layout.micro_batch))
        for number, run in enumerate(members):
            positions[run.line] = column + _SPREAD * ((2 * number + 1) / len(members) - 1)
    return positions


def _numbers_of_gpus(runs: Sequence[Published]) -> list[int]:
    return sorted({run.training.devices for run in runs})


def _dots(runs: Sequence[Published], positions: Mapping[int, float], look: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The traces of one colour: speed and failures by GPUs, memory and failures by modelled memory, modelled speed."""
    ran = [run for run in runs if speed(run)]
    dead = [run for run in runs if failed(run)]
    stored = [run for run in runs if run.measured.memory]
    traces = [
        _trace(ran, look, ("x", "y"), lambda run: positions[run.line], speed),
        _trace(dead, look, ("x", "y2"), lambda run: positions[run.line], _lane),
        _trace(stored, look, ("x2", "y3"), _needed, _stored),
        _trace(dead, look, ("x2", "y4"), _needed, _lane),
        _trace(ran, look, ("x3", "y5"), _expected, speed),
    ]
    traces[0 if ran else 1]["showlegend"] = True
    return traces


def _needed(run: Published) -> float:
    return modelled(run).memory_bytes / _GIB


def _stored(run: Published) -> float | None:
    return run.measured.memory and run.measured.memory / _GIB


def _expected(run: Published) -> float:
    return modelled(run).tokens_per_second_per_gpu


def _lane(run: Published) -> float:
    """The height of a failure in its strip, so that neighbours do not hide each other."""
    return 7 * run.line % _LANES


def _trace(
    runs: Sequence[Published],
    look: Mapping[str, Any],
    axes: tuple[str, str],
    x: Callable[[Published], float],
    y: Callable[[Published], float | None],
) -> dict[str, Any]:
    shape = {"symbol": "x", "size": 4} if axes[1] in _STRIPS else {"size": 5}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": look["name"],
        "legendgroup": look["legendgroup"],
        "showlegend": False,
        "x": numbers(map(x, runs)),
        "y": numbers(map(y, runs)),
        "xaxis": axes[0],
        "yaxis": axes[1],
        "marker": {"color": look["color"], "opacity": 0.75, **shape},
        "text": [_hover(run) for run in runs],
        "hovertemplate": "%{text}<extra></extra>",
    }


_STRIPS, _LANES = ("y2", "y4"), 11
_DECADES = 100.0


def _hover(run: Published) -> str:
    training, layout, estimate = run.training, run.layout, modelled(run)
    model = f"{run.title} ({parameters_in_words(training.model.parameters)} parameters)"
    lines = (
        f"{model} on {training.devices:,} × {training.accelerator.name}",
        f"{layout.title}: {counted(layout.micro_batches, 'micro-batch', 'es')} × {layout.micro_batch}"
        + (f", {layout.recompute} recomputation" if layout.recompute != "none" else ""),
        f"measured: {measured_speed(run)} tokens/s per GPU, {measured_memory(run)}"
        if not failed(run)
        else "ran out of memory or crashed",
        f"modelled: {estimate.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, {size(estimate.memory_bytes)}",
        run.source,
    )
    return "<br>".join(map(escape, lines))


def _axis(title: str, values: Sequence[float], domain: Sequence[float], anchor: str) -> dict[str, Any]:
    """A logarithmic axis with ticks at powers of ten; with few decades also at 2 and 5 times a power."""
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    steps = (1, 2, 5) if high < _DECADES * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return {
        "type": "log",
        "title": {"text": title, "standoff": 4},
        "domain": [*domain],
        "anchor": anchor,
        "gridcolor": colours.GRID,
        "zeroline": False,
        "tickvals": ticks,
        "ticktext": [f"{tick:,.12g}" for tick in ticks],
    }


def _strip(domain: Sequence[float], anchor: str) -> dict[str, Any]:
    """A strip of runs that failed, which have no speed and no memory."""
    hidden = {"showgrid": False, "zeroline": False, "showticklabels": False, "fixedrange": True}
    title = {"text": FAILED, "standoff": 4}
    return {"title": title, "domain": [*domain], "anchor": anchor, "range": [-2, 12], **hidden}


def _diagonal(pairs: Sequence[Pair], x: str, y: str, unit: float) -> list[dict[str, Any]]:
    """The line on which measured and modelled figures are equal."""
    known = [value / unit for _, there, measured in pairs for value in (there, measured) if math.isfinite(value)]
    if not known:
        return []
    low, high = min(known), max(known)
    line = {"type": "line", "xref": x, "yref": y, "x0": low, "y0": low, "x1": high, "y1": high}
    return [line | {"line": {"color": colours.INK, "width": 1, "dash": "dash"}}]


def _limit(memory: float) -> dict[str, Any]:
    """The memory of a GPU, across the failures."""
    line = {"type": "line", "xref": "x2", "yref": "paper", "x0": memory, "x1": memory, "y0": 0, "y1": 0.385}
    return line | {"line": {"color": colours.INK, "width": 1, "dash": "dot"}}
