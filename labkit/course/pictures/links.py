"""Links between accelerators, from the table of machines (`prediction/devices.py`): what they carry, and the bus
bandwidth of collectives on them, and from which batch on they are not the bottleneck. All figures are modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.analysis.theory.collectives import bus_factor
from labkit.common.arguments import check_choice
from labkit.common.units import counted, size
from labkit.course.pictures.canvas import checked, wide_layout
from labkit.figures import rank_colour
from labkit.figures.as_plotly import as_figure
from labkit.figures.colours import GRID, INK
from labkit.prediction.devices import ACCELERATED, DEFAULT_MACHINE, DEVICES
from labkit.prediction.links import ALGORITHMS, Balance, Modelled
from labkit.prediction.links import known as operation_known

if TYPE_CHECKING:
    import plotly.graph_objects as go

SIZES = tuple(4**power for power in range(5, 17))  # bytes: 1 KiB to 4 GiB
TOKENS = tuple(2**power for power in range(7, 17))  # per device: 128 to 65,536
_GB = 1e9


@checked
def bandwidths() -> go.Figure:
    """GB/s that one accelerator sends over each link of the table, in one direction, as in NCCL's own model."""
    links = {link.name: link for name in ACCELERATED for link in (DEVICES[name].inside, DEVICES[name].between) if link}
    shown = sorted(links.values(), key=lambda link: link.simple.bandwidth)
    rates = [link.simple.bandwidth / _GB for link in shown]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": rates,
        "y": [link.name for link in shown],
        "marker": {"color": INK, "opacity": 0.6},
        "text": [f"{rate:.3g}" for rate in rates],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [link.source for link in shown],
        "hovertemplate": "%{x:.3g} GB/s: %{customdata}<extra>%{y}</extra>",
    }
    note = "modelled: GB/s per accelerator and direction; the figures of NCCL's own model"
    return as_figure(
        [bars],
        wide_layout("Links", note, 100 + 36 * len(shown))
        | {
            "xaxis": {"type": "log", "title": {"text": "GB/s"}, "gridcolor": GRID, "range": [0.5, 3]},
            "yaxis": {"automargin": True},
            "margin": {"l": 110, "r": 40, "t": 56, "b": 44},
        },
    )


@checked
def bus(operation: str = "all_reduce", machine: str = DEFAULT_MACHINE, devices: int = 8) -> go.Figure:
    """The bus bandwidth of each algorithm of an operation by size, in GB/s, on whole nodes of a named machine or on
    fewer devices than one has. Raises `LookupError` if the machine has no such nodes."""
    operation = operation_known(operation)
    row = DEVICES[check_choice("machine", machine, ACCELERATED)]
    if devices < 2:
        raise ValueError(f"devices must be at least 2, got {devices}")
    nodes = -(-devices // row.per_node)
    if nodes > 1 and devices % row.per_node:
        raise ValueError(f"devices must be whole nodes of {row.per_node}, or fewer than one has, got {devices}")
    model = Modelled(row)
    times = [model.by_algorithm(operation, count, devices, nodes) for count in SIZES]
    lines = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [*SIZES],
            "y": [bus_factor(operation, devices) * count / seconds[name] / _GB for count, seconds in zip(SIZES, times)],
            "text": [size(count, 0) for count in SIZES],
            "line": {"color": rank_colour(number)},
            "hovertemplate": f"%{{text}}: %{{y:.3~g}} GB/s<extra>{name}</extra>",
        }
        for number, name in enumerate(ALGORITHMS[operation])
    ]
    note = f"modelled: {counted(devices, 'device')} on {counted(nodes, 'node')}; {row.title}"
    return as_figure(
        lines,
        wide_layout(f"Bus bandwidth of {operation}", note, 340)
        | {
            "xaxis": {
                "type": "log",
                "title": {"text": "message of one rank"},
                "tickvals": [*SIZES[::2]],
                "ticktext": [size(count, 0) for count in SIZES[::2]],
                "gridcolor": GRID,
            },
            "yaxis": {"title": {"text": "GB/s"}, "rangemode": "tozero", "gridcolor": GRID},
            "margin": {"l": 60, "r": 20, "t": 56, "b": 44},
        },
    )


@checked
def thresholds(
    machine: str = DEFAULT_MACHINE, devices: int = 64, width: int = 8192, inner: int = 28672, expert: int = 2048
) -> go.Figure:
    """Communication per computation in the MLP of one layer, by tokens per device, with the layouts of `Balance`
    (`prediction/links.py`): below 1 it can be hidden. Raises `ValueError` if the devices are not whole nodes, two or
    more."""
    balance = Balance(machine, devices, width, inner, expert)
    least = balance.thresholds()
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{name}: {_from(least[name])}",
            "x": [*TOKENS],
            "y": [ratio(tokens) for tokens in TOKENS],
            "line": {"color": rank_colour(number)},
            "hovertemplate": f"%{{x:,}} tokens: %{{y:.2f}}<extra>{name}</extra>",
        }
        for number, (name, ratio) in enumerate(balance.ratios().items())
    ]
    note = f"modelled: MLP of {width:,} × {inner:,}, experts of {expert:,}; {devices} devices; {DEVICES[machine].title}"
    scale = {"type": "log", "gridcolor": GRID, "zeroline": False}
    border = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": 1,
        "y1": 1,
        "line": {"color": INK, "dash": "dash"},
    }
    return as_figure(
        lines,
        wide_layout("Communication per computation", note, 400)
        | {
            "xaxis": scale | {"title": {"text": "tokens per device"}, "tickvals": [*TOKENS[::3]]},
            "yaxis": scale | {"title": {"text": "seconds per second"}},
            "shapes": [border],
            "margin": {"l": 70, "r": 20, "t": 56, "b": 44},
        },
    )


def _from(tokens: int | None) -> str:
    if tokens is None:
        return "above 1 with any batch"
    return "below 1 with any batch" if tokens <= TOKENS[0] else f"below 1 from {tokens:,} tokens"
