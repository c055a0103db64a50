"""Will it fit, and which strategy to use: the bytes of the model states by formula, and a decision tree as a function
and a figure.

Each of Ψ parameters takes 16 bytes (Rajbhandari et al. 2020, section 3.1): in 32 bits 4 for the parameter, 4 for its
gradient and 8 for Adam's two moments; in mixed precision 2, 2, and 4 + 4 + 4 for a 32-bit copy and the moments, which
belong to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import Number, check_choice, check_flag
from labkit.common.units import size
from labkit.course.pictures.checked import checked
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure, plain_look

if TYPE_CHECKING:
    import plotly.graph_objects as go

OWNERS = ("parameters", "gradients", "optimizer")
RECIPES: dict[str, tuple[int, int, int]] = {"fp32": (4, 4, 8), "mixed": (2, 2, 12)}  # bytes per parameter of each owner
_SHARDED = {"DDP": (), "ZeRO-1": OWNERS[2:], "ZeRO-2": OWNERS[1:], "ZeRO-3 / FSDP": OWNERS}


# ---- the decision


_BOUNDS = {
    **dict.fromkeys(("parameters", "memory"), Number(float, 1.0, 1e18)),
    **dict.fromkeys(("activations", "least", "block"), Number(float, 0.0, 1e18)),
    **dict.fromkeys(("devices", "machines"), Number(int, 1, 65_536)),
}


@dataclass(frozen=True)
class Case:
    """A model to train, and the hardware. Sizes are in bytes per device.

    `activations` are those of the device's samples, and `least` is what remains of them with activation checkpointing
    and the smallest micro-batch (default: all). `block` is what FSDP gathers at once: the parameters of the largest
    block. `devices` is the number of devices per machine. `fast` means that the interconnect between machines has at
    least 100 Gbit/s per device. `recipe` is one of RECIPES. Raises `ValueError` for an unknown recipe, or a count or
    size out of range.
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
        """Minimum bytes of activations."""
        return self.activations if self.least is None else self.least

    @property
    def ranks(self) -> int:
        """Number of devices in all machines."""
        return self.devices * self.machines


@dataclass(frozen=True)
class Question:
    """A question of the tree: the bytes per device as a function and as a formula, the advice if it fits, and whether
    the question applies to a case. In `formula`, {kept} and {optimizer} are bytes per parameter."""

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
    """The advice for a case: `use`, and the questions that led to it, each with its answer."""

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
        "Does it fit with fewer activations?",
        "16Ψ + activations with checkpointing",
        lambda case: case.states + case.kept,
        lambda case: (
            ("DDP" if case.ranks > 1 else "one device") + " with activation checkpointing, smaller micro-batches"
        ),
    ),
    Question(
        "Is sharding the optimizer state enough?",
        "{kept}Ψ + {optimizer}Ψ/n + activations",
        _zero1,
        lambda case: "ZeRO-1",
    ),
    Question(
        "Is sharding within one machine enough?",
        "16Ψ/d + a block + activations",
        lambda case: _in_shards(case, case.devices),
        lambda case: "FSDP2" if case.machines == 1 else "HSDP: FSDP2 in a machine, replicas between machines",
    ),
    Question(
        "Sharding over all machines (fast link)?",
        "16Ψ/n + a block + activations",
        lambda case: _in_shards(case, case.ranks),
        lambda case: "FSDP2 over all machines",
        lambda case: case.fast,
    ),
    Question(
        "Sharding over all machines (slow link)?",
        "16Ψ/n + a block + activations",
        lambda case: _in_shards(case, case.ranks),
        lambda case: "PP between machines, FSDP2 in a machine",
        lambda case: not case.fast and case.machines > 1,
    ),
    Question(
        "Is splitting each block as well enough?",
        "16Ψ/n + (a block + activations)/d",
        lambda case: case.states / case.ranks + (case.block + case.kept) / case.devices,
        lambda case: "FSDP2 × TP, TP in a machine",
        lambda case: case.devices > 1,
    ),
)
_ELSE = "more devices, offload to CPU memory, or a smaller model"


@checked
def advise(case: Case) -> Advice:
    """The advice of the first of QUESTIONS whose answer is yes, with the questions before it."""
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
    """Bytes of model states per device under DDP and the ZeRO stages, by owner, by formula; `memory` draws a line."""
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
    title = f"Model states per device, by formula: {parameters:,.0f} parameters, {devices} devices, {recipe}"
    layout = _layout(title, 330) | {"barmode": "stack", "legend": {"orientation": "h", "y": -0.18}}
    layout |= {
        "yaxis": {"title": {"text": word}, "gridcolor": colours.GRID, "zeroline": False},
        "xaxis": {"type": "category"},
    }
    if memory:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": memory / unit, "y1": memory / unit}
        layout["shapes"] = [line | {"line": {"color": colours.INK, "width": 2, "dash": "dash"}}]
        words = f"device memory: {memory / unit:,.0f} {word}"
        layout["annotations"] = [_note(1, memory / unit, words, xref="paper", xanchor="right", yanchor="bottom")]
    return as_figure(data, layout)


_WIDTH, _LEAF, _END = 5.0, 6.2, 11.0  # right edge of a question's box; left and right edge of an advice's box


@checked
def tree(case: Case | None = None) -> go.Figure:
    """The decision tree. With a case, the path that it takes, with the bytes that decide."""
    advice = advise(case) if case else None
    taken = dict(advice.way) if advice else {}
    shapes, notes, last = [], [], len(QUESTIONS)
    for place, question in enumerate(QUESTIONS):
        yes, on_way = taken.get(question, False), question in taken
        shapes.append(_box(0, _WIDTH, place, on_way))
        notes.append(
            _note(_WIDTH / 2, place, f"<b>{question.text}</b><br>{_asked(question, case if on_way else None)}")
        )
        leaf = question.advice(case or Case(1, 1, devices=2, machines=1 if place < 4 else 2))
        shapes += [_line(_WIDTH, place, _LEAF, place, yes), _box(_LEAF, _END, place, yes)]
        notes += [
            _note((_WIDTH + _LEAF) / 2, place, "yes", yanchor="bottom"),
            _note((_LEAF + _END) / 2, place, _words(leaf, yes)),
        ]
        shapes.append(_line(_WIDTH / 2, place + 0.36, _WIDTH / 2, place + 0.64, on_way and not yes))
        notes.append(_note(_WIDTH / 2, place + 0.5, " no", xanchor="left"))
    lost = bool(advice) and not any(taken.values())
    shapes.append(_box(0, _WIDTH, last, lost))
    notes.append(_note(_WIDTH / 2, last, _words(_ELSE.replace(", offload", ",<br>offload"), lost)))
    title = "Which strategy to use" + (f": {advice.use}" if advice else "")
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
        return f"{formula}: does not apply"
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
        "title": {
            "text": f"<b>{title}</b>",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "font": {"size": 13},
            "pad": {"l": 8},
        },
        "height": height,
        "margin": {"l": 50, "r": 10, "t": 40, "b": 30},
        **plain_look(12),
    }
