"""Pictures of devices and what connects them: the roofline of a device, meshes, links, nodes and rails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations, product
from typing import TYPE_CHECKING, Any

from labkit.analysis.theory import collectives as plans
from labkit.analysis.theory.collectives import bus_factor
from labkit.common.arguments import Number, check_choice
from labkit.common.units import counted, size
from labkit.course.pictures.canvas import HIDDEN, SCALED, box, checked, ink, layout, level, note, wide_layout
from labkit.figures import colours, rank_colour
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.figures.colours import GRID, INK
from labkit.prediction.devices import ACCELERATED, DEFAULT_MACHINE, DEVICES
from labkit.prediction.links import ALGORITHMS, Balance, Modelled
from labkit.prediction.links import known as operation_known

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.runs.handle import Run

# ---- the roofline of a device: the FLOP/s that it can reach at most, by arithmetic intensity (Williams et al. 2009)


_RATE = Number(float, 1.0, 1e18)  # FLOP/s, bytes per second
_INTENSITY = Number(float, 1e-9, 1e9)  # FLOP per byte
_WIDER = 2.0  # the axis beyond the outermost points


@checked
def ceiling(points: Mapping[str, Sequence[float]], peak: float, bandwidth: float) -> go.Figure:
    """The roof min(`peak`, `bandwidth` × intensity), in FLOP/s and bytes per second, on logarithmic axes; and measured
    `points` by name: FLOP per byte, FLOP/s."""
    _RATE.check("peak", peak)
    _RATE.check("bandwidth", bandwidth)
    for name, point in points.items():
        if len(point) != 2:
            raise ValueError(f"points must be pairs of FLOP per byte and FLOP/s, got {len(point)} numbers for {name}")
        _INTENSITY.check(f"FLOP per byte of {name}", point[0])
        _RATE.check(f"FLOP/s of {name}", point[1])
    ridge = peak / bandwidth
    every = [ridge, *(intensity for intensity, _ in points.values())]
    x = [min(every) / _WIDER, ridge, max(every) * _WIDER]
    roof = {
        "type": "scatter",
        "mode": "lines",
        "name": f"roof: bends at {ridge:.3g} FLOP per byte",
        "x": x,
        "y": [min(peak, bandwidth * value) for value in x],
        "line": {"color": INK, "dash": "dash"},
        "hoverinfo": "skip",
    }
    marks = []
    for number, (name, (intensity, reached)) in enumerate(points.items()):
        mark = {"type": "scatter", "mode": "markers", "name": name, "x": [intensity], "y": [reached]}
        mark |= {"hovertemplate": f"%{{x:.3~g}} FLOP per byte: %{{y:.3~s}}FLOP/s<extra>{name}</extra>"}
        marks.append(mark | {"marker": {"color": rank_colour(number), "size": 10}})
    axis = SCALED | {"type": "log", "exponentformat": "SI"}
    looks = plain_look() | {
        "hovermode": "closest",
        "height": 360,
        "margin": {"l": 70, "r": 20, "t": 20, "b": 50},
        "xaxis": axis | {"title": {"text": "arithmetic intensity, FLOP per byte"}},
        "yaxis": axis | {"title": {"text": "FLOP/s"}},
        "legend": {"bgcolor": "rgba(0,0,0,0)"},
    }
    return as_figure([roof, *marks], looks)


# ---- meshes: the groups of ranks along each axis, the traffic of an axis, and the interconnect that it uses


_AXES = {
    "pp": "#CC6677",
    "dp": "#88CCEE",
    "fsdp": "#88CCEE",
    "shard": "#88CCEE",
    "replicate": "#DDCC77",
    "tp": "#44AA99",
}
# traffic in a ring, in units of (n−1)/n of the payload
_SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


@checked
def groups(axes: Mapping[str, int], axis: str) -> list[list[int]]:
    """The groups of ranks along an axis of a mesh, in row-major order as in `init_device_mesh`: neighbours differ in
    the last axis.

    >>> groups({"dp": 2, "tp": 2}, "dp")
    [[0, 2], [1, 3]]
    """
    names = list(axes)
    if axis not in names:
        raise ValueError(f"axis must be one of {', '.join(names)}, got {axis!r}")
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    firsts = [rank for rank in range(math.prod(axes.values())) if rank // stride % axes[axis] == 0]
    return [[first + step * stride for step in range(axes[axis])] for first in firsts]


@checked
def grid(axes: Mapping[str, int], per_node: int | None = None) -> go.Figure:
    """The ranks of a mesh, once per axis: ranks with the same colour and letter form a group. A row is a node of
    `per_node` ranks.

    Without `per_node`, a row is one coordinate on the first axis.
    """
    ranks = math.prod(axes.values())
    wide = per_node or ranks // next(iter(axes.values()))
    if ranks % wide:
        raise ValueError(f"per_node must be a divisor of the {ranks} ranks of the mesh, got {wide}")
    shapes, notes = [], []
    for panel, axis in enumerate(axes):
        left = panel * (wide + 1.4)
        groups_of_axis = groups(axes, axis)
        summary = _summary(groups_of_axis, wide if per_node else None)
        notes.append(note(left, -0.75, f"<b>{axis}</b>: {summary}", 12, anchor="left"))
        for number, group in enumerate(groups_of_axis):
            colour = colours.rank_colour(number)
            for rank in group:
                x, y = left + rank % wide, rank // wide
                shapes.append(box(x, y, 0.92, 0.88, colour))
                letter = chr(ord("a") + number % 26)
                notes.append(note(x + 0.46, y + 0.44, f"<b>{rank}</b> {letter}", 11, ink(number)))
    rows = ranks // wide
    if per_node:
        notes += [note(-0.15, row + 0.44, f"node {row}", 11, anchor="right") for row in range(rows)]
    title = f"<b>{_sizes(axes)}</b>  number: rank; letter: group along the axis"
    looks = layout(title, 50 + 38 * (rows + 1.3)) | {
        "shapes": shapes,
        "annotations": notes,
        "xaxis": HIDDEN | {"range": [-1.2 if per_node else -0.2, max(12, len(axes) * (wide + 1.4))]},
        "yaxis": HIDDEN | {"range": [rows + 0.1, -1.2]},
        "showlegend": False,
    }
    return as_figure([], looks)


def _sizes(axes: Mapping[str, int]) -> str:
    """`dp 2 × tp 4`."""
    return " × ".join(f"{axis} {size}" for axis, size in axes.items())


@checked
def modelled(
    axes: Mapping[str, int], sent: Mapping[str, float], per_node: int, inside: float, between: float
) -> dict[tuple[str, ...], dict[str, tuple[float, bool]]]:
    """For each order of the axes, outermost first: the communication seconds per step of each axis, and whether it
    spans nodes.

    `sent` is in bytes per rank and step; `inside` and `between` are the bandwidths per rank, in bytes per second,
    within a node of `per_node` ranks and between nodes. An axis uses the slower interconnect if any of its groups spans
    two nodes. Nothing overlaps.
    """
    seconds = {}
    for names in permutations(axes):
        mesh = {name: axes[name] for name in names}
        seconds[names] = {}
        for axis in names:
            leaves = any(len({rank // per_node for rank in group}) > 1 for group in groups(mesh, axis))
            seconds[names][axis] = sent[axis] / (between if leaves else inside), leaves
    return seconds


@checked
def wires(
    axes: Mapping[str, int], sent: Mapping[str, float], per_node: int, inside: float, between: float
) -> go.Figure:
    """The result of `modelled`, with one bar per order of the axes, the fastest on top; traffic between nodes is
    hatched."""
    times = modelled(axes, sent, per_node, inside, between)
    best = sorted(times, key=lambda names: sum(seconds for seconds, _ in times[names].values()))
    lanes = [" × ".join(names) for names in best]
    traces = []
    for axis in axes:
        leaves = [times[names][axis][1] for names in best]
        hatched = ["/" if is_between else "" for is_between in leaves]
        pattern = {"shape": hatched, "fillmode": "overlay", "fgcolor": "#000000", "size": 7}
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": axis,
                "y": lanes,
                "x": [float(f"{1000 * times[names][axis][0]:.5g}") for names in best],
                "customdata": ["between nodes" if is_between else "within a node" for is_between in leaves],
                "marker": {"color": _AXES.get(axis, colours.OTHER_OPERATION), "pattern": pattern},
                "hovertemplate": f"{axis}: %{{x:.3s}} ms, %{{customdata}}<extra>%{{y}}</extra>",
            }
        )
    title = "<b>Communication per step</b>  modelled: bytes over bandwidth, no overlap · hatched: between nodes"
    looks = layout(title, 110 + 34 * len(lanes)) | {
        "barmode": "stack",
        "xaxis": SCALED | {"title": {"text": "ms", "standoff": 4}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "categoryarray": lanes, "range": [len(lanes) - 0.5, -0.5], "automargin": True},
        "margin": {"l": 112, "r": 60, "t": 34, "b": 44},
        "legend": {"x": 1.01, "y": 1, "title": {"text": "axis"}},
    }
    return as_figure(traces, looks)


@checked
def by_axis(run: Run, axes: Mapping[str, int]) -> dict[str, float]:
    """Bytes that rank 0 sent along each axis in the latest profiled step, counted as in a ring.

    Messages between pipeline stages count for the axis pp. Traffic to all ranks, or to a group along no axis, is
    `other`. Raises `ValueError` if the run has no profiled step.
    """
    timeline = run.state.ranks[0].timeline if 0 in run.state.ranks else None
    if timeline is None:
        raise ValueError(f"run {run.name} has no profiled step yet; wait for it with .wait()")
    along = {tuple(group): axis for axis in axes for group in groups(axes, axis)}
    sent = dict.fromkeys(axes, 0.0)
    for call in timeline.comm:
        if call.op == "send":
            axis, bytes_ = "pp", call.bytes or 0
        else:
            ranks = call.ranks or []
            axis, size = along.get(tuple(ranks), "other"), len(ranks) or run.state.world_size
            bytes_ = _SHARES.get(call.op, 0) * (size - 1) / size * (call.bytes or 0)
        if bytes_:
            sent[axis] = sent.get(axis, 0.0) + bytes_
    return sent


def _summary(members: list[list[int]], per_node: int | None) -> str:
    if per_node is None:
        return " · ".join(" ".join(map(str, group)) for group in members[:4]) + (" …" if len(members) > 4 else "")
    leaves = any(len({rank // per_node for rank in group}) > 1 for group in members)
    return f"{len(members)} groups, {'between nodes' if leaves else 'within a node'}"


# ---- links, modelled from the table of machines (`prediction/devices.py`): what they carry, the bus bandwidth of
# collectives on them, and from which batch on they are not the bottleneck


SIZES = tuple(4**power for power in range(5, 17))  # bytes: 1 KiB to 4 GiB
TOKENS = tuple(2**power for power in range(7, 17))  # per device: 128 to 65,536
_GB = 1e9


@checked
def bandwidths() -> go.Figure:
    """GB/s that one accelerator sends over each link of the table, in one direction, as in NCCL's own model."""
    links = {link.name: link for name in ACCELERATED for link in (DEVICES[name].inside, DEVICES[name].between) if link}
    shown = sorted(links.values(), key=lambda link: link.simple.bandwidth)
    rates = [link.simple.bandwidth / _GB for link in shown]
    bars = {"type": "bar", "orientation": "h", "x": rates, "y": [link.name for link in shown]}
    bars |= {"text": [f"{rate:.3g}" for rate in rates], "textposition": "outside", "cliponaxis": False}
    bars |= {"customdata": [link.source for link in shown], "marker": {"color": INK, "opacity": 0.6}}
    bars |= {"hovertemplate": "%{x:.3g} GB/s: %{customdata}<extra>%{y}</extra>"}
    subtitle = "modelled: GB/s per accelerator and direction; the figures of NCCL's own model"
    looks = wide_layout("Links", subtitle, 100 + 36 * len(shown)) | {
        "xaxis": {"type": "log", "title": {"text": "GB/s"}, "gridcolor": GRID, "range": [0.5, 3]},
        "yaxis": {"automargin": True},
        "margin": {"l": 110, "r": 40, "t": 56, "b": 44},
    }
    return as_figure([bars], looks)


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
    subtitle = f"modelled: {counted(devices, 'device')} on {counted(nodes, 'node')}; {row.title}"
    ticks = {"tickvals": [*SIZES[::2]], "ticktext": [size(count, 0) for count in SIZES[::2]]}
    looks = wide_layout(f"Bus bandwidth of {operation}", subtitle, 340) | {
        "xaxis": ticks | {"type": "log", "title": {"text": "message of one rank"}, "gridcolor": GRID},
        "yaxis": {"title": {"text": "GB/s"}, "rangemode": "tozero", "gridcolor": GRID},
        "margin": {"l": 60, "r": 20, "t": 56, "b": 44},
    }
    return as_figure(lines, looks)


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
    model = f"MLP of {width:,} × {inner:,}, experts of {expert:,}"
    subtitle = f"modelled: {model}; {devices} devices; {DEVICES[machine].title}"
    scale = SCALED | {"type": "log"}
    looks = wide_layout("Communication per computation", subtitle, 400) | {
        "xaxis": scale | {"title": {"text": "tokens per device"}, "tickvals": [*TOKENS[::3]]},
        "yaxis": scale | {"title": {"text": "seconds per second"}},
        "margin": {"l": 70, "r": 20, "t": 56, "b": 44},
    }
    return as_figure(lines, looks | level(1))


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
    nodes = counted(ranks // per_node, "node")
    title = f"<b>{_sizes(axes)} on {nodes}: rings along {axis}</b>  messages per round: "
    return panel.figure(title + _counted(pairs, per_node), -0.5 if panel.nodes > 1 else _HEIGHTS["gpu"] - 0.5)


@checked
def two_level(nodes: int = 2, per_node: int = 4) -> go.Figure:
    """The three phases of an all-reduce within nodes, between them, and within them again: the links that each phase
    uses, and what a rank sends in it, by the messages of the plan. At most 4 nodes of up to 8 ranks, 16 in total."""
    _check_levels(nodes, per_node)
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
    _check_levels(nodes, per_node)
    every = [plans.all_reduce(nodes * per_node, by) for by in plans.ALL_REDUCES] + [plans.two_level(nodes, per_node)]
    names = [plan.title.partition(": ")[2] for plan in every]
    traces = []
    for name, between, colour in (("within the node", False, _INSIDE), ("to other nodes", True, _BETWEEN)):
        sent = [max(plan.sent(per_node, between)) for plan in every]
        totals = [sum(plan.sent(per_node, between)) for plan in every]
        bars = {"type": "bar", "orientation": "h", "name": name, "x": sent, "y": names, "marker": {"color": colour}}
        bars |= {"text": [f"{amount:.3g}" for amount in sent], "textposition": "outside", "cliponaxis": False}
        words = "%{x:.3g} messages; all ranks together %{customdata:.3g}<extra>%{y}</extra>"
        traces.append(bars | {"customdata": totals, "hovertemplate": words})
    subtitle = f"{nodes} nodes of {per_node} ranks; in messages of a rank, counted from the plans of lab 01, not timed"
    looks = wide_layout("What the busiest rank sends in an all-reduce", subtitle, 110 + 46 * len(every)) | {
        "barmode": "group",
        "bargap": 0.3,
        "xaxis": {"rangemode": "tozero", "gridcolor": colours.GRID, "zeroline": False, "fixedrange": True},
        "yaxis": {"categoryarray": names[::-1], "type": "category", "automargin": True, "fixedrange": True},
        "legend": {"traceorder": "normal", "x": 1, "xanchor": "right", "y": 0, "yanchor": "bottom"},
    }
    return as_figure(traces, looks | {"margin": {"l": 270, "r": 30, "t": 56, "b": 30}})


def _check_levels(nodes: int, per_node: int) -> None:
    if nodes < 2 or per_node < 2:
        raise ValueError(f"two levels need at least 2 nodes of 2 ranks, got {nodes} of {per_node}")
    _check(nodes * per_node, per_node)


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
_BOX = "#D0D0D0"  # opaque, so that lines end at its edge


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
            look = {"color": colour, "width": 3.5} if used[link] else {"color": _UNUSED, "width": 1}
            line = {"type": "scatter", "mode": "lines", "x": [above[0], below[0]], "y": [above[1], below[1]]}
            self.traces.append(line | {"line": look, "hoverinfo": "skip"})
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


def _counted(pairs: Sequence[tuple[int, int]], per_node: int) -> str:
    """How many messages use which links."""
    passed = [{what for what, _, _ in _hops(*pair, per_node)} for pair in pairs]
    inside = sum("nvswitch" in places for places in passed)
    spine = sum("spine" in places for places in passed)
    between = f"{len(pairs) - inside} between nodes"
    return f"{inside} over NVLink, {between}" + (f", of which {spine} over the spine switch" if spine else "")
