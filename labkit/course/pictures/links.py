"""Pictures of the links between accelerators, within a node and between nodes.

The first ones are modelled, from the table of machines (`prediction/devices.py`): what links carry, the bus bandwidth
of collectives on them, and from which batch on they are not the bottleneck. Then nodes with NVSwitch, network adapters
(NICs) and rails, on which messages are counted, not timed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory import collectives as plans
from labkit.analysis.theory.collectives import bus_factor
from labkit.common.arguments import check_choice
from labkit.common.units import counted, size
from labkit.course.pictures.canvas import HIDDEN, box, checked, ink, layout, note, wide_layout
from labkit.course.pictures.mesh import groups
from labkit.figures import colours, rank_colour
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


# ---- nodes and rails: local rank k of every node has the k-th NIC, and the k-th NICs of all nodes are connected by one
# switch, a *rail*. A message between different local ranks of different nodes passes a spine switch, too. (NCCL can
# avoid that: it first moves the message over NVLink to the accelerator on the right rail.)


_MOST_NODES, _MOST_PER_NODE, _MOST_RANKS = 4, 8, 16
Place = tuple[str, int, int]  # what it is ("gpu", "nvswitch", "nic", "rail", "spine"), its node and its local rank


def _hops(source: int, target: int, per_node: int) -> list[Place]:
    """What a message from rank `source` to rank `target` passes, ends included.

    >>> [what for what, _, _ in _hops(1, 5, per_node=4)]
    ['gpu', 'nic', 'rail', 'nic', 'gpu']
    """
    (sending, leaves), (receiving, arrives) = divmod(source, per_node), divmod(target, per_node)
    ends = ("gpu", sending, leaves), ("gpu", receiving, arrives)
    if sending == receiving:
        return [ends[0], ("nvswitch", sending, 0), ends[1]]
    rails = [("rail", 0, leaves)] if leaves == arrives else [("rail", 0, leaves), ("spine", 0, 0), ("rail", 0, arrives)]
    return [ends[0], ("nic", sending, leaves), *rails, ("nic", receiving, arrives), ends[1]]


@checked
def rails(axes: Mapping[str, int], axis: str, per_node: int = 8) -> go.Figure:
    """The links that an all-reduce along an `axis` of a mesh uses, as rings: each rank of a group sends to the next
    one. At most 4 nodes of up to 8 ranks.

    Raises `ValueError` for an unknown axis, or if the ranks are not whole nodes.
    """
    ranks = math.prod(axes.values())
    _check(ranks, per_node)
    rings = groups(axes, axis)
    pairs = [(rank, group[(place + 1) % len(group)]) for group in rings for place, rank in enumerate(group)]
    pairs = [(source, target) for source, target in pairs if source != target]
    panel = _Panel(ranks // per_node, per_node)
    panel.draw(pairs)
    mesh = " × ".join(f"{name} {size}" for name, size in axes.items())
    title = f"<b>{mesh} on {counted(ranks // per_node, 'node')}: rings along {axis}</b>  messages per round: "
    return panel.figure(title + _counted(pairs, per_node), -0.5 if panel.nodes > 1 else _HEIGHTS["gpu"] - 0.5)


@checked
def two_level(nodes: int = 2, per_node: int = 4) -> go.Figure:
    """The three phases of an all-reduce within nodes, between them, and within them again: the links that each phase
    uses, and what a rank sends in it, by the messages of the plan. At most 4 nodes of up to 8 ranks, 16 in total."""
    if nodes < 2 or per_node < 2:
        raise ValueError(f"two levels need at least 2 nodes of 2 ranks, got {nodes} of {per_node}")
    _check(nodes * per_node, per_node)
    if nodes * per_node > _MOST_RANKS:
        raise ValueError(f"nodes × per_node must be at most {_MOST_RANKS} ranks, got {nodes} × {per_node}")
    plan = plans.two_level(nodes, per_node)
    plan.states()
    inside = per_node - 1
    phases = (
        ("① reduce-scatter within the nodes", plan.rounds[:inside]),
        ("② all-reduce on each rail", plan.rounds[inside:-inside]),
        ("③ all-gather within the nodes", plan.rounds[-inside:]),
    )
    panel = _Panel(nodes, per_node)
    for number, (name, rounds) in enumerate(phases):
        panel.left = number * (panel.width + 0.9)
        messages = [message for messages in rounds for message in messages]
        pairs = [(message.source, message.target) for message in messages]
        panel.draw(pairs)
        share = sum(len(message.pieces) for message in messages) / plan.n / plan.parts
        words = f"<b>{name}</b><br>{counted(len(rounds), 'round')}, a rank sends {share:.3g}"
        panel.notes.append(note(panel.left, -0.95, words, 12, anchor="left") | {"align": "left"})
    return panel.figure(
        f"<b>A two-level all-reduce on {nodes} nodes of {per_node}</b>  in messages of a rank, counted from the plan",
        -1.5,
    )


@checked
def all_reduces(nodes: int = 2, per_node: int = 4) -> go.Figure:
    """What the busiest rank sends within its node and to other nodes, for each algorithm of an all-reduce, in units of
    its message: by counting the messages of the plans, whose ranks are numbered node by node."""
    if nodes < 2 or per_node < 2:
        raise ValueError(f"two levels need at least 2 nodes of 2 ranks, got {nodes} of {per_node}")
    _check(nodes * per_node, per_node)
    every = [plans.all_reduce(nodes * per_node, by) for by in plans.ALL_REDUCES] + [plans.two_level(nodes, per_node)]
    names = [plan.title.partition(": ")[2] for plan in every]
    traces = []
    for name, between, colour in (("within the node", False, _INSIDE), ("to other nodes", True, _BETWEEN)):
        sent = [max(plan.sent(per_node, between)) for plan in every]
        totals = [sum(plan.sent(per_node, between)) for plan in every]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": sent,
                "y": names,
                "marker": {"color": colour},
                "text": [f"{amount:.3g}" for amount in sent],
                "textposition": "outside",
                "cliponaxis": False,
                "customdata": totals,
                "hovertemplate": "%{x:.3g} messages; all ranks together %{customdata:.3g}<extra>%{y}</extra>",
            }
        )
    subtitle = f"{nodes} nodes of {per_node} ranks; in messages of a rank, counted from the plans of lab 01, not timed"
    looks = wide_layout("What the busiest rank sends in an all-reduce", subtitle, 110 + 46 * len(every)) | {
        "barmode": "group",
        "bargap": 0.3,
        "xaxis": {"rangemode": "tozero", "gridcolor": colours.GRID, "zeroline": False, "fixedrange": True},
        "yaxis": {"categoryarray": names[::-1], "type": "category", "automargin": True, "fixedrange": True},
        "legend": {"traceorder": "normal", "x": 1, "xanchor": "right", "y": 0, "yanchor": "bottom"},
    }
    return as_figure(traces, looks | {"margin": {"l": 270, "r": 30, "t": 56, "b": 30}})


def _check(ranks: int, per_node: int) -> None:
    if per_node > _MOST_PER_NODE or ranks % per_node or ranks > _MOST_NODES * per_node:
        raise ValueError(
            f"a picture has 1 to {_MOST_NODES} whole nodes of at most {_MOST_PER_NODE} ranks, got {ranks} ranks with"
            f" per_node={per_node}"
        )


_INSIDE, _BETWEEN = colours.OPERATIONS["all_reduce"], colours.OPERATIONS["send"]
_LINKS = {"nvswitch": _INSIDE, "spine": colours.OPERATIONS["all_to_all"], "nic": _BETWEEN}  # by one of their ends
_HEIGHTS = {"spine": 0.0, "rail": 1.1, "nic": 2.6, "gpu": 3.6, "nvswitch": 4.6}
_TALL = 0.56  # of a box
_ROW = 54  # px
_UNUSED = "rgba(128, 128, 128, 0.35)"


class _Panel:
    """Nodes with their switches: `left` is where the next drawing of them begins."""

    def __init__(self, nodes: int, per_node: int) -> None:
        self.nodes, self.per_node, self.left = nodes, per_node, 0.0
        self.width = nodes * (per_node + 0.6) - 0.6
        self.shapes: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.traces: list[dict[str, Any]] = []

    def draw(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Everything there is, with the links coloured that messages between `pairs` of ranks use."""
        used: dict[frozenset[Place], int] = Counter()
        for source, target in pairs:
            used.update(map(frozenset, pairwise(_hops(source, target, self.per_node))))
        for link in sorted({*self._links(), *used}, key=lambda link: used[link]):
            ends = sorted(link, key=lambda place: _HEIGHTS[place[0]])
            above, below = (self._middle(place) for place in ends)
            if "nvswitch" in (ends[0][0], ends[1][0]):
                below = (above[0], below[1])  # straight down to the switch, which is as wide as its node
            colour = next(_LINKS[name] for name in _LINKS if name in (ends[0][0], ends[1][0]))
            self.traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [above[0], below[0]],
                    "y": [above[1], below[1]],
                    "line": {"color": colour, "width": 3.5} if used[link] else {"color": _UNUSED, "width": 1},
                    "hoverinfo": "skip",
                }
            )
        self._boxes()

    def _links(self) -> list[frozenset[Place]]:
        """The links that exist; the spine switch is there if there is more than one node and rail."""
        links: list[frozenset[Place]] = []
        for node, local in product(range(self.nodes), range(self.per_node)):
            gpu: Place = ("gpu", node, local)
            links.append(frozenset((gpu, ("nvswitch", node, 0))))
            if self.nodes > 1:
                links += [frozenset((gpu, ("nic", node, local))), frozenset((("nic", node, local), ("rail", 0, local)))]
        if self.nodes > 1 and self.per_node > 1:
            links += [frozenset((("rail", 0, local), ("spine", 0, 0))) for local in range(self.per_node)]
        return links

    def _middle(self, place: Place) -> tuple[float, float]:
        what, node, local = place
        if what == "spine":
            x = self.width / 2
        elif what == "rail":
            x = self.width * (local + 0.5) / self.per_node
        elif what == "nvswitch":
            x = node * (self.per_node + 0.6) + self.per_node / 2
        else:
            x = node * (self.per_node + 0.6) + local + 0.5
        return self.left + x, _HEIGHTS[what]

    def _boxes(self) -> None:
        places = {place for link in self._links() for place in link}
        for what, node, local in sorted(places):
            x, y = self._middle((what, node, local))
            rank = node * self.per_node + local
            width = {"spine": self.width * 0.6, "nvswitch": self.per_node - 0.1, "rail": 0.94}.get(what, 0.82)
            words = {"gpu": f"<b>{rank}</b>", "nic": "NIC", "rail": f"rail {local}", "nvswitch": "NVSwitch"}
            owner = rank if what == "gpu" else None
            colour = _BOX if owner is None else colours.rank_colour(rank)
            self.shapes.append(box(x - width / 2, y - _TALL / 2, width, _TALL, colour) | {"layer": "above"})
            size = 12 if what == "gpu" else 10
            self.notes.append(note(x, y, words.get(what, "spine switch"), size, ink(owner) or "#000000"))
        for node in range(self.nodes):
            x, _ = self._middle(("nvswitch", node, 0))
            self.notes.append(note(x, _HEIGHTS["nvswitch"] + 0.6, f"node {node}", 11))

    def figure(self, title: str, top: float) -> go.Figure:
        bottom = _HEIGHTS["nvswitch"] + 0.95
        looks = layout(title, 40 + _ROW * (bottom - top)) | {
            "shapes": self.shapes,
            "annotations": self.notes,
            "xaxis": HIDDEN | {"range": [-0.2, self.left + self.width + 0.2]},
            "yaxis": HIDDEN | {"range": [bottom, top]},
            "showlegend": False,
        }
        return as_figure(self.traces, looks)


_BOX = "#D0D0D0"  # opaque, so that lines end at its edge


def _counted(pairs: Sequence[tuple[int, int]], per_node: int) -> str:
    """How many messages use which links."""
    passed = [{what for what, _, _ in _hops(*pair, per_node)} for pair in pairs]
    inside = sum("nvswitch" in places for places in passed)
    spine = sum("spine" in places for places in passed)
    between = f"{len(pairs) - inside} between nodes"
    return f"{inside} over NVLink, {between}" + (f", of which {spine} over the spine switch" if spine else "")
