"""Shared by the pictures: checks of their arguments, boxes, text, lanes of time, layouts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from labkit.common.arguments import Number, check_choice, check_flag, shown
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure, plain_look
from labkit.plan.spec import Spec
from labkit.training.workloads import WORKLOADS

if TYPE_CHECKING:
    import plotly.graph_objects as go

# ---- the arguments of pictures: each one checked by its annotation and, for counts, by the bounds for its name
#
# A picture with thousands of ranks would take minutes to draw and be unreadable, so counts are bounded.


_Function = TypeVar("_Function", bound=Callable[..., Any])
_COUNT = Number(int, 1, 64)
_COUNTS = {  # other bounds than _COUNT; "each of" stands for the elements of a list
    "samples": Number(int, 1, 10_000),
    "batch": Number(int, 1, 10_000),
    "epochs": Number(int, 1, 16),
    "micro_batches": Number(int, 1, 128),
    "per_node": Number(int, 1, 4096),
    "axes": Number(int, 1, 256),
    "each of held": Number(int, 0, 64),
    "each of ranks": Number(int, 1, 65_536),
    "each of clusters": Number(int, 1, 1 << 20),
    "devices": Number(int, 1, 4096),
    **dict.fromkeys(("width", "inner", "expert"), Number(int, 1, 1 << 20)),
    **dict.fromkeys(("rank", "workers", "prefetch", "each of counts", "each of choices"), Number(int, 0, 64)),
    "each of order": Number(int, 0, 10**9),
    "stage": Number(int, 0, 3),
}
_MEASURE = Number(float, 0.0, 1e18)  # seconds, bytes, parameters
_ANY = Number(float, -1e300, 1e300)
_SIGNED = ("x", "a", "b", "h", "gradients", "measured", "modelled")  # arguments whose numbers may be negative
_MAX_ELEMENTS = 10_000  # of a list


def checked(function: _Function) -> _Function:
    """Wraps a picture function: invalid arguments raise `TypeError` or `ValueError` with one sentence."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            wanted = signature.replace(return_annotation=signature.empty)
            raise TypeError(f"{function.__name__}{wanted}: {error}") from None
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                _check(name, str(parameter.annotation), value)
        return function(*bound.args, **bound.kwargs)

    return call


def _check(name: str, annotation: str, value: Any) -> None:
    wanted, _, optional = annotation.partition(" | ")
    if optional == "None" and value is None:
        return
    if wanted == "Matrix":
        wanted = "Sequence[Sequence[float]]"
    if wanted.startswith("Sequence["):
        inner = name if name.startswith("each of ") else f"each of {name}"
        for element in _elements(name, value):
            _check(inner, wanted[len("Sequence[") : -1], element)
    elif wanted.startswith("Mapping[str, "):
        for value_of_key in _values(name, value):
            _check(name, wanted[len("Mapping[str, ") : -1], value_of_key)
    else:
        _SCALARS.get(wanted, functools.partial(_instance, wanted))(name, value)


def _whole(name: str, value: Any) -> None:
    _COUNTS.get(name, _COUNT).check(name, value)


def _real(name: str, value: Any) -> None:
    bounds = _ANY if name.rpartition(" ")[2] in _SIGNED else _MEASURE
    bounds.check(name, value)


def _text(name: str, value: Any) -> None:
    if name == "workload":
        check_choice(name, value, WORKLOADS)
    elif not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")


def _run(name: str, value: Any) -> None:
    if not hasattr(value, "state"):
        raise TypeError(f"{name} must be a Run such as run('pp', nproc=2).wait(), got {shown(value)}")


_SCALARS = {"int": _whole, "float": _real, "bool": check_flag, "str": _text, "Run": _run}


def _instance(wanted: str, name: str, value: Any) -> None:
    """Checks by class name, because importing the class would load modules that a picture does not need."""
    if not any(kind.__name__ == wanted for kind in type(value).__mro__):
        raise TypeError(f"{name} must be a {wanted}, got {shown(value)}")


def _elements(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list, got {shown(value)}")
    if not 0 < len(value) <= _MAX_ELEMENTS and not (name == "costs" and len(value) == 0):
        raise ValueError(f"{name} must be a list of 1 to {_MAX_ELEMENTS} elements, got {shown(value)}")
    return value


def _values(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a dict with strings as keys, got {shown(value)}")
    if not value:
        raise ValueError(f"{name} must be a dict with at least one entry, got {shown(value)}")
    return value.values()


# ---- shared by the pictures


EVERY = "rgba(128, 128, 128, 0.22)"  # data that every rank has
HIDDEN = {"visible": False, "fixedrange": True}
SCALED = {"gridcolor": colours.GRID, "zeroline": False}
_DARK = (0, 2, 5)  # ranks whose colour needs white text


def layout(title: str, height: float) -> dict[str, Any]:
    """The common layout: a title at the top left, a transparent background, grey text; `height` in pixels."""
    place = {"x": 0, "xref": "container", "y": 1, "yanchor": "top", "pad": {"l": 8, "t": 7}}
    return {
        "title": place | {"text": title, "font": {"size": 13}},
        "height": round(height),
        "margin": {"l": 8, "r": 8, "t": 34, "b": 8},
        **plain_look(),
    }


def box(x: float, y: float, width: float, height: float, colour: str) -> dict[str, Any]:
    """A filled rectangle from its corner."""
    corners = {"x0": x, "y0": y, "x1": x + width, "y1": y + height}
    return {"type": "rect", **corners, "fillcolor": colour, "line": {"width": 0}, "layer": "below"}


def note(x: float, y: float, text: str, size: int, colour: str | None = None, anchor: str = "center") -> dict[str, Any]:
    """Text at a position, aligned by `anchor`; in grey if `colour` is None."""
    font = {"size": size} | ({"color": colour} if colour else {})
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, "xanchor": anchor, "yanchor": "middle"}


def arrow(
    start: tuple[float, float], end: tuple[float, float], colour: str, width: float, both: bool = False
) -> dict[str, Any]:
    """An arrow between two points, with a head at its end, or at both ends."""
    points = {"ax": start[0], "ay": start[1], "axref": "x", "ayref": "y", "x": end[0], "y": end[1]}
    look = {"showarrow": True, "text": "", "arrowhead": 2, "arrowwidth": width, "arrowcolor": colour}
    heads = {"startarrowhead": 2, "arrowside": "end+start"} if both else {}
    return {"xref": "x", "yref": "y"} | points | look | heads


def level(at: float, words: str = "", axis: str = "y", width: float = 2) -> dict[str, Any]:
    """The part of a layout that draws a dashed line from edge to edge at a value of an axis, with `words` above it."""
    line = {"color": colours.INK, "width": width, "dash": "dash"}
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": at, "y1": at, "line": line}
    place = {"xref": "paper", "x": 1, "xanchor": "right", "yref": axis, "y": at, "yanchor": "bottom"}
    return {"shapes": [shape], "annotations": [place | {"text": words, "showarrow": False}] if words else []}


def ink(owner: int | None) -> str | None:
    """The text colour on the colour of rank `owner`; None (grey) if `owner` is None, which means all ranks."""
    return None if owner is None else "#FFFFFF" if owner % len(colours.RANKS) in _DARK else "#000000"


# ---- pictures that move; complete before they are played, and after: so they are printed, and shown without JavaScript


_CONTROLS = 58  # px below the picture
_LENGTH = 3000  # ms that it plays


def played(
    data: list[dict[str, Any]], looks: dict[str, Any], moments: Sequence[tuple[str, list[dict[str, Any]]]]
) -> go.Figure:
    """A picture with a button that plays it and a slider. A moment is its name, and what changes in each trace; the
    last one is the picture itself."""

    def showing(names: list[str] | None) -> dict[str, Any]:
        frame = {"duration": round(_LENGTH / len(moments)), "redraw": True}
        at_once = {"mode": "immediate", "frame": frame, "transition": {"duration": 0}}
        return {"method": "animate", "args": [names, at_once]}

    names = [name for name, _ in moments]
    margin = looks["margin"]
    place = {"y": 0, "yanchor": "top", "bgcolor": "rgba(128, 128, 128, 0.2)", "bordercolor": colours.GRID}
    place["pad"] = {"t": margin["b"] + 4}
    play = place | {"type": "buttons", "x": 0, "xanchor": "left", "showactive": False}
    play |= {"buttons": [showing(None) | {"label": "▶ Play"}], "font": {"color": colours.INK}}
    steps = [showing([name]) | {"label": name} for name in names]
    slider = place | {"steps": steps, "active": len(steps) - 1, "x": 0.1, "len": 0.9}
    slider |= {"currentvalue": {"visible": False}, "font": {"color": colours.INK, "size": 10}, "ticklen": 3}
    looks = looks | {
        "meta": {"controls": _CONTROLS, "plays": _LENGTH},  # for handouts, which have controls of their own
        "height": looks["height"] + _CONTROLS,
        "margin": margin | {"b": margin["b"] + _CONTROLS},
        "updatemenus": [play],
        "sliders": [slider],
    }
    frames = [  # a change without a type would make its trace a scatter
        {"name": name, "data": [{"type": trace["type"]} | change for trace, change in zip(data, changes, strict=True)]}
        for name, changes in moments
    ]
    return as_figure(data, looks, frames)


# ---- pictures with one lane per rank or device, time to the right


_HALF = 0.27  # half the height of a box, relative to a lane
_BOXES = {
    "batch": colours.PHASES["copy"],
    "forward": colours.PHASES["forward"],
    "loss": colours.PHASES["other"],
    "backward": colours.PHASES["backward"],
    "all_reduce": colours.COMMUNICATION,
    "update": colours.PHASES["optimizer"],
}
_LIGHT = ("forward", "loss", "all_reduce")  # phases with black text; the others have white text


@dataclass(frozen=True)
class Box:
    """What a lane does from `start` to `end`: its phase, its text, and `more` text on hover."""

    lane: int
    start: float
    end: float
    phase: str
    words: str
    more: str = ""


@dataclass(frozen=True)
class Arrow:
    """A message from one lane to another at time `at`; in both directions if `both`."""

    start: int
    end: int
    at: float
    both: bool = False


def lane_name(lane: int, what: str = "rank") -> str:
    """The name of a rank or device, with its colour."""
    return f'<b><span style="color:{colours.rank_colour(lane)}">■</span> {what} {lane}</b>'


def side_by_side(
    title: str,
    subtitle: str,
    names: Sequence[str],
    boxes: Sequence[Box],
    arrows: Sequence[Arrow],
    heads: Sequence[tuple[float, str]],
) -> go.Figure:
    """Lanes from the top down, time to the right, without a scale: boxes are phases, arrows are messages between
    lanes, and `heads` are words above, by their place."""
    annotations = [note(x, -0.62, text, 13) | {"yanchor": "bottom"} for x, text in heads]
    annotations += map(_message, arrows)
    line = {"type": "line", "x0": 0, "x1": 10, "line": {"color": colours.GRID}, "layer": "below"}
    looks = wide_layout(title, subtitle, 150 + 92 * len(names)) | {
        "annotations": annotations,
        "shapes": [line | {"y0": lane, "y1": lane} for lane in range(len(names))],
        "xaxis": HIDDEN | {"range": [-0.1, 10]},
        "yaxis": lane_axis(names, -1.25),
        "showlegend": False,
    }
    return as_figure([bars(boxes)], looks)


def bars(boxes: Sequence[Box]) -> dict[str, Any]:
    """Boxes as one trace of horizontal bars."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [box.lane for box in boxes],
        "base": [box.start for box in boxes],
        "x": [box.end - box.start for box in boxes],
        "width": 2 * _HALF,
        "marker": {"color": [_BOXES[box.phase] for box in boxes], "line": {"width": 0}},
        "text": [box.words for box in boxes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "textfont": {"color": ["#000000" if box.phase in _LIGHT else "#FFFFFF" for box in boxes], "size": 13},
        "customdata": [f"{box.words}{box.more}" for box in boxes],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _message(message: Arrow) -> dict[str, Any]:
    """An arrow between the edges of two lanes' boxes."""
    down = math.copysign(_HALF + 0.03, message.end - message.start)
    ends = (message.at, message.start + down), (message.at, message.end - down)
    sizes = {"arrowsize": 0.9, "startarrowsize": 0.9}
    return arrow(*ends, colours.COMMUNICATION, 2.5, message.both) | sizes


def lane_axis(names: Sequence[str], top: float) -> dict[str, Any]:
    """The axis of the lanes' names, the first on top."""
    lanes = {"tickvals": list(range(len(names))), "ticktext": list(names), "range": [len(names) - 0.55, top]}
    return lanes | {"ticks": "", "showgrid": False, "zeroline": False, "fixedrange": True}


def wide_layout(title: str, subtitle: str, height: int) -> dict[str, Any]:
    """The layout of a picture for a projector: larger text, and a line below the title for its assumptions."""
    base = layout(f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>", height)
    return base | {
        "title": base["title"] | {"font": {"size": 16}, "pad": {"l": 8, "t": 18}},
        "font": base["font"] | {"size": 13},
        "margin": {"l": 84, "r": 12, "t": 56, "b": 12},
        "hovermode": "closest",
    }


def axis(title: str) -> dict[str, Any]:
    """An axis with a scale."""
    return SCALED | {"title": {"text": title, "standoff": 6, "font": {"size": 13}}, "fixedrange": True}


def model_words(spec: Spec) -> str:
    """`cnn: 405,898 parameters`."""
    return f"{spec.workload}: {spec.workload_row.parameters(spec.options):,} parameters"
