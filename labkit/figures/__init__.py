"""Figures of a run: pure functions from RunState to a chart, which becomes a plotly figure, a live chart or inline SVG.

They depend on no widget and no process, so a live, recorded or replayed run gives the same figure. The package never
imports torch, ipywidgets or `launch`.

One `Chart` (`figures/model.py`, `figures/charts.py`) is lines and bars computed from a RunState; `figures/as_plotly.py`
and `figures/as_svg.py` draw it; `figures/displayed.py` is the Figure of notebooks. `figures/comparison.py` does the
same for the rows of a comparison. The live view receives only the new points. `figures/tables.py` has findings, ledger,
ranks and predictions as HTML. There is one colour per rank everywhere (Okabe–Ito). Long lines are reduced to a thousand
points, and keep their extremes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.analysis.metrics import expert_loads, phase_shares, throughput
from labkit.common.arguments import shown
from labkit.figures.as_svg import drawing
from labkit.figures.charts import CHARTS
from labkit.figures.colours import rank_colour
from labkit.figures.model import LIMIT, Chart

if TYPE_CHECKING:
    import plotly.graph_objects

    from labkit.record.state import RunState

__all__ = ["CHARTS", "LIVE", "NAMES", "chart", "figure", "live", "of_run", "overview", "rank_colour", "svg"]

NAMES = {
    "loss": "loss per rank and their mean, over steps",
    "throughput": "samples per second over all ranks, over steps",
    "memory": "memory per GPU or CPU rank, in MiB or GiB, over seconds",
    "phases": "milliseconds per step in each phase, per rank",
    "timeline": "one profiled step of all ranks: computation and communication, over milliseconds",
    "memory_by_owner": "memory at the peak of a profiled step by owner, per rank, in MiB or GiB",
    "memory_of_step": "memory by owner over one profiled step of the rank with the highest peak",
    "experts": "how often each expert of a mixture was chosen, per rank, in the newest step that was logged",
}
LIVE = ("loss", "throughput", "memory", "phases")  # charts that grow with every step


def live(state: RunState) -> tuple[str, ...]:
    """The names of the charts that are shown while a run trains: the load of experts only if it has any."""
    if state.imported:
        return tuple(name for name in _of_files(state) if name in LIVE)
    return (*LIVE, "experts") if expert_loads(state)[1] else LIVE


def of_run(state: RunState) -> tuple[str, ...]:
    """The names of the charts that a run has data for: those of profiled steps only if there are any."""
    if state.imported:
        return _of_files(state)
    sampled = any(rank.timelines for rank in state.ranks.values())
    return (*live(state), *(name for name in NAMES if sampled and name not in (*LIVE, "experts")))


def _of_files(state: RunState) -> tuple[str, ...]:
    """The names of the charts that an imported run has data for: empty axes would look as if it had trained without
    any."""
    ranks = state.ranks.values()
    known = {
        "loss": state.loss_at() is not None,
        "throughput": throughput(state) is not None,
        "memory": any(rank.steps.peak is not None for rank in ranks),
        "phases": bool(phase_shares(state)),
        "timeline": any(rank.timelines for rank in ranks),
        "memory_by_owner": any(rank.memory_step for rank in ranks),
        "memory_of_step": any(rank.memory_step and len(rank.memory_step.times) > 1 for rank in ranks),
    }
    return tuple(name for name in NAMES if known.get(name))


def chart(name: str, state: RunState) -> Chart:
    """The chart called `name` (one of NAMES) of a run. Raises `LookupError` for an unknown name."""
    if not isinstance(name, str) or name not in CHARTS:
        raise LookupError(f"unknown figure {shown(name)}; choose from {', '.join(NAMES)}")
    return CHARTS[name](state)


def figure(name: str, state: RunState) -> plotly.graph_objects.Figure:
    """The chart called `name` (one of NAMES) as a plotly figure with at most 1,000 points per line."""
    from labkit.figures.as_plotly import as_figure, parts

    return as_figure(*parts(chart(name, state).drawn()))


def overview(state: RunState) -> plotly.graph_objects.Figure:
    """The live charts of a run as one plotly figure, two in a row."""
    from labkit.figures.as_plotly import as_figure, grid

    return as_figure(*grid([chart(name, state).drawn(LIMIT // 2) for name in live(state)]))


def svg(name: str, state: RunState, width: int = 560, height: int = 220, points: int = 400) -> str:
    """The chart called `name` (one of NAMES) as an inline SVG element of `width` × `height` units, with no script.

    Each line has at most `points` points.
    """
    return drawing(chart(name, state).drawn(points), width, height)
