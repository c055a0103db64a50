"""Will it fit, and what to use: the bytes that training keeps, by formula, and a decision tree that is a function, drawn.

Ψ parameters take 16 bytes each, whichever way (Rajbhandari et al. 2020, section 3.1): in 32 bits 4 of the parameter, 4 of its gradient, 8
of Adam's two moments; in mixed precision 2, 2, and 4 + 4 + 4 of a 32-bit copy and the moments, which belong to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import Number, check_choice, check_flag
from labkit.common.units import size
from labkit.course.pictures.checked import checked
from labkit.figures import colours
from labkit.figures.as_plotly import FONT, as_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

OWNERS = ("parameters", "gradients", "optimizer")
RECIPES: dict[str, tuple[int, int, int]] = {"fp32": (4, 4, 8), "mixed": (2, 2, 12)}  # bytes of each owner for one parameter
_SHARDED = {"DDP": (), "ZeRO-1": OWNERS[2:], "ZeRO-2": OWNERS[1:], "ZeRO-3 / FSDP": OWNERS}


# ---- what there is to decide


_BOUNDS = {
    **dict.fromkeys(("parameters", "memory"), Number(float, 1.0, 1e18)),
    **dict.fromkeys(("activations", "least", "block"), Number(float, 0.0, 1e18)),
    **dict.fromkeys(("devices", "machines"), Number(int, 1, 65_536)),
}


@dataclass(frozen=True)
class Case:
    """What is to be trained, and on what. Everything but counts is in bytes, and of one device.

    `activations` are those of its share of a batch, and `least` what is left of them with activation checkpointing and the smallest
    micro-batch (all, where nothing is said). `block` is what is gathered whole at once under FSDP: the largest block's parameters.
    `devices` are those of one machine; `fast` says that the wire between machines carries 100 Gbit/s and more for each device. `recipe`
    is one of RECIPES. Raises `ValueError` for another recipe, and where a count or size cannot be.
    """

    parameters: float
    memory: float
    activations: float = 0.0
    least: float | None = None
    block: float = 0.0
    devices: int = 1
    machines: int = 1
    fast: bool = False
    recipe: str = "mixed"

    def __post_init__(self) -> None:
        check_choice("recipe", self.recipe, RECIPES)
        check_flag("fast", self.fast)
        for name, bounds in _BOUNDS.items():
            if getattr(self, name) is not None or name != "least":
                bounds.check(name, getattr(self, name))

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer state, whole."""
        return sum(RECIPES[self.recipe]) * self.parameters

    @property
    def kept(self) -> float:
        """Bytes of activations that cannot be done without."""
        return self.activations if self.least is None else self.least

    @property
    def ranks(self) -> int:
        """Devices of all machines."""
        return self.devices * self.machines


@dataclass(frozen=True)
class Question:
    """A question of the tree: what a device would hold, in bytes and as a formula, what a yes leads to, and whether it may be asked of
    a case at all. In `formula`, {kept} and {optimizer} are bytes for one parameter."""

    text: str
    formula: str
    holds: Callable[[Case], float]
    advice: Callable[[Case], str]
    asked: Callable[[Case], bool] = lambda case: True

    def answer(self, case: Case) -> bool:
        """Whether it fits."""
        return self.asked(case) and self.holds(case) <= case.memory


@dataclass(frozen=True)
class Advice:
    """What the tree says to a case: `use`, and the questions on the way, each with its answer."""

    use: str
    way: tuple[tuple[Question, bool], ...]

    def __repr__(self) -> str:
        return self.use


def _zero1(case: Case) -> float:
    mine, gradients, optimizer = RECIPES[case.recipe]
    return (mine + gradients + optimizer / case.ranks) * case.parameters + case.kept


def _in_shards(case: Case, ranks: int) -> float:
    return case.states / ranks + case.block + case.kept


QUESTIONS: tuple[Question, ...] = (
    Question(
        "Does everything fit on one device?",
        "16Ψ + activations",
        lambda case: case.states + case.activations,
        lambda case: "DDP" if case.ranks > 1 else "one device, no strategy",
    ),
    Question(
        "Are only the activations too much?",
        "16Ψ + what checkpointing leaves",
        lambda case: case.states + case.kept,
        lambda case: ("DDP" if case.ranks > 1 else "one device") + " with activation checkpointing, smaller micro-batches",
    ),
    Question(
        "Does it do to shard the optimizer state?",
        "{kept}Ψ + {optimizer}Ψ/n + activations",
        _zero1,
        lambda case: "ZeRO-1",
    ),
    Question(
        "Do shards over one machine's devices fit?",
        "16Ψ/d + a block + activations",
        lambda case: _in_shards(case, case.devices),
        lambda case: "FSDP2" if case.machines == 1 else "HSDP: FSDP2 in a machine, replicas between machines",
    ),
    Question(
        "Shards over all machines, on a fast wire?",
        "16Ψ/n + a block + activations",
        lambda case: _in_shards(case, case.ranks),
        lambda case: "FSDP2 over all machines",
        lambda case: case.fast,
    ),
    Question(
        "The same, on a slow wire?",
        "16Ψ/n + a block + activations",
        lambda case: _in_shards(case, case.ranks),
        lambda case: "PP between machines, FSDP2 in a machine",
        lambda case: not case.fast and case.machines > 1,
    ),
    Question(
        "Is a block too large, or what it computes?",
        "16Ψ/n + (a block + activations)/d",
        lambda case: case.states / case.ranks + (case.block + case.kept) / case.devices,
        lambda case: "FSDP2 × TP, TP in a machine",
        lambda case: case.devices > 1,
    ),
)
_ELSE = "more devices, offload to CPU memory, or a smaller model"


@checked
def advise(case: Case) -> Advice:
    """The first of QUESTIONS that is answered with yes, and the way there."""
    way = []
    for question in QUESTIONS:
        yes = question.answer(case)
        way.append((question, yes))
        if yes:
            return Advice(question.advice(case), tuple(way))
    return Advice(_ELSE, tuple(way))


# ---- drawn


@checked
def states(parameters: float, devices: int, recipe: str = "mixed", memory: float | None = None) -> go.Figure:
    """Bytes that a device keeps from step to step under DDP and the stages of ZeRO, by owner, by formula; `memory` draws a line there."""
    case = Case(parameters, memory or 1, devices=devices, recipe=recipe)
    unit, word = (1e9, "GB") if case.states >= 1e9 else (2**20, "MiB")
    shares = {
        owner: [each * parameters / (devices if owner in sharded else 1) / unit for sharded in _SHARDED.values()]
        for owner, each in zip(OWNERS, RECIPES[recipe])
    }
    names = [f"{name}<br>{sum(parts):,.1f} {word}" for name, *parts in zip(_SHARDED, *shares.values())]
    data = [
        {"type": "bar", "name": owner, "x": names, "y": share, "marker": {"color": colours.OWNERS[owner]}}
        | {"hovertemplate": f"{owner} %{{y:.3~s}} {word}<extra>%{{x}}</extra>"}
        for owner, share in shares.items()
    ]
    title = f"What a device keeps, by formula: {parameters:,.0f} parameters, {devices} devices, {recipe}"
    layout = _layout(title, 330) | {"barmode": "stack", "legend": {"orientation": "h", "y": -0.18}}
    layout |= {"yaxis": {"title": {"text": word}, "gridcolor": colours.GRID, "zeroline": False}, "xaxis": {"type": "category"}}
    if memory:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": memory / unit, "y1": memory / unit}
        layout["shapes"] = [line | {"line": {"color": colours.INK, "width": 2, "dash": "dash"}}]
        words = f"memory of a device: {memory / unit:,.0f} {word}"
        layout["annotations"] = [_note(1, memory / unit, words, xref="paper", xanchor="right", yanchor="bottom")]
    return as_figure(data, layout)


_WIDTH, _LEAF, _END = 5.0, 6.2, 11.0  # where a question's box ends, and where an advice's begins and ends


@checked
def tree(case: Case | None = None) -> go.Figure:
    """The decision tree; of a case, the way that it takes, with the bytes that decide."""
    advice = advise(case) if case else None
    taken = dict(advice.way) if advice else {}
    shapes, notes, last = [], [], len(QUESTIONS)
    for place, question in enumerate(QUESTIONS):
        yes, on_way = taken.get(question, False), question in taken
        shapes.append(_box(0, _WIDTH, place, on_way))
        notes.append(_note(_WIDTH / 2, place, f"<b>{question.text}</b><br>{_asked(question, case if on_way else None)}"))
        leaf = question.advice(case or Case(1, 1, devices=2, machines=1 if place < 4 else 2))
        shapes += [_line(_WIDTH, place, _LEAF, place, yes), _box(_LEAF, _END, place, yes)]
        notes += [_note((_WIDTH + _LEAF) / 2, place, "yes", yanchor="bottom"), _note((_LEAF + _END) / 2, place, _words(leaf, yes))]
        shapes.append(_line(_WIDTH / 2, place + 0.36, _WIDTH / 2, place + 0.64, on_way and not yes))
        notes.append(_note(_WIDTH / 2, place + 0.5, " no", xanchor="left"))
    lost = bool(advice) and not any(taken.values())
    shapes.append(_box(0, _WIDTH, last, lost))
    notes.append(_note(_WIDTH / 2, last, _words(_ELSE.replace(", offload", ",<br>offload"), lost)))
    title = "What to use" + (f": {advice.use}" if advice else "")
    axis = {"visible": False, "fixedrange": True}
    layout = _layout(title, 76 * (last + 1)) | {"shapes": shapes, "annotations": notes}
    layout["margin"] = {"l": 6, "r": 6, "t": 40, "b": 6}
    layout |= {"xaxis": axis | {"range": [-0.1, _END + 0.1]}, "yaxis": axis | {"range": [last + 0.5, -0.5]}}
    return as_figure([{"type": "scatter", "x": [], "y": [], "hoverinfo": "skip"}], layout)


def _asked(question: Question, case: Case | None) -> str:
    mine, gradients, optimizer = RECIPES[case.recipe if case else "mixed"]
    formula = question.formula.format(kept=mine + gradients, optimizer=optimizer)
    if case is None:
        return formula
    if not question.asked(case):
        return f"{formula}: not here"
    holds = question.holds(case)
    return f"{formula}: {size(holds)} {'≤' if holds <= case.memory else '>'} {size(case.memory)}"


def _words(text: str, strong: bool) -> str:
    lines = text.replace(" with ", "<br>with ").replace(": ", ":<br>").replace(", FSDP2", ",<br>FSDP2")
    return f"<b>✓ {lines}</b>" if strong else lines


def _box(left: float, right: float, place: int, strong: bool) -> dict[str, Any]:
    ends = {"x0": left, "x1": right, "y0": place - 0.36, "y1": place + 0.36}
    return {"type": "rect", **ends, "line": _pen(strong), "layer": "below"}


def _line(x0: float, y0: float, x1: float, y1: float, strong: bool) -> dict[str, Any]:
    return {"type": "line", "x0": x0, "y0": y0, "x1": x1, "y1": y1, "line": _pen(strong)}


def _pen(strong: bool) -> dict[str, Any]:
    return {"color": colours.COMMUNICATION if strong else colours.INK, "width": 3.5 if strong else 1}


def _note(x: Any, y: float, text: str, **more: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": {"size": 12}} | more


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "title": {"text": f"<b>{title}</b>", "x": 0, "xref": "container", "xanchor": "left", "font": {"size": 13}, "pad": {"l": 8}},
        "height": height,
        "margin": {"l": 50, "r": 10, "t": 40, "b": 30},
        "font": {"family": FONT, "size": 12, "color": colours.INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
