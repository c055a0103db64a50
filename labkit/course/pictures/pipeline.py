"""Pictures of pipelines: which rank computes what and when, simulated and measured, and the cost in time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.clocks import ahead
from labkit.analysis.metrics import USUAL
from labkit.analysis.profiled import aligned, profiled_steps
from labkit.course.pictures.canvas import SCALED, layout
from labkit.course.pictures.checked import checked
from labkit.course.pictures.schedules import SCHEDULES, Plan, Slot, least, order, planned, simulate
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure
from labkit.record.events import Timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.runs.handle import Run

__all__ = ["activations", "bubbles", "gantt", "measured", "order", "planned", "simulate"]

_KINDS = {  # name in the legend, colour, colour of the number on it
    "F": ("forward", colours.PHASES["forward"], "#000000"),
    "B": ("backward", colours.PHASES["backward"], "#FFFFFF"),
    "W": ("backward of the weights", colours.PHASES["optimizer"], "#FFFFFF"),
    "BW": ("whole backward", "#7B50B0", "#FFFFFF"),
}
_HATCHED = {
    "shape": "/",
    "size": 7,
    "fillmode": "overlay",
    "fgcolor": "rgba(255, 255, 255, 0.55)",
}  # a rank's second stage
_MARKS = {
    "GPipe": "circle",
    "1F1B": "x",
    "Interleaved1F1B": "square",
    "ZB-H1": "diamond",
    "InterleavedZeroBubble": "triangle-up",
    "ZBVZeroBubble": "triangle-down",
    "DualPipeV": "star",
}
_PATTERNS = dict(zip(SCHEDULES, ("", "/", "x", ".", "-", "\\", "+")))


@checked
def gantt(plan: Plan) -> go.Figure:
    """A Gantt chart with one lane per rank and one bar per pass of a micro-batch, labelled with the number of the
    micro-batch."""
    halved = any(slot.kind == "W" for slot in plan.slots)
    first, last = plan.span
    traces = []
    for kind, second in sorted(
        {(slot.kind, _second(slot, plan)) for slot in plan.slots}, key=lambda pair: (pair[1], [*_KINDS].index(pair[0]))
    ):
        slots = [slot for slot in plan.slots if (slot.kind, _second(slot, plan)) == (kind, second)]
        name, colour, ink = _KINDS[kind]
        name = "backward of the inputs" if kind == "B" and halved else name
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "legendgroup": kind,
                "showlegend": not second,
                "y": [f"rank {slot.rank}" for slot in slots],
                "base": [round(slot.start - first, 4) for slot in slots],
                "x": [round(slot.end - slot.start, 4) for slot in slots],
                "text": ["" if slot.number is None else str(slot.number) for slot in slots],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "none",
                "textfont": {"color": ink, "size": 10},
                "marker": (
                    {"color": colour, "line": {"width": 1, "color": colours.INK}}
                    | ({"pattern": _HATCHED} if second else {})
                ),
                "hovertext": [_words(slot, plan, name) for slot in slots],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    lanes = [f"rank {rank}" for rank in plan.ranks]
    if any(_second(slot, plan) for slot in plan.slots):  # an entry of the legend without a bar
        hatched = {"color": colours.PHASES["forward"], "line": {"width": 1, "color": colours.INK}, "pattern": _HATCHED}
        traces.append({"type": "bar", "name": "second stage of a rank", "x": [None], "y": lanes[:1], "marker": hatched})
    how = "modelled" if plan.modelled else "measured"
    unit = "mean forward of a rank = 1" if plan.modelled else plan.unit
    return _figure(
        traces,
        f"<b>{plan.title}</b>  {how} · idle {plan.bubble:.0%}",
        {"title": {"text": unit, "standoff": 4}, "range": [0, last - first], **SCALED},
        {"type": "category", "categoryarray": lanes, "range": [len(lanes) - 0.5, -0.5], "showgrid": False},
        height=110 + 34 * len(lanes),
    )


@checked
def bubbles(ranks: int, schedules: Sequence[str] = tuple(SCHEDULES), most: int = 32) -> go.Figure:
    """The bubble (fraction of idle time) versus the number of micro-batches, for `ranks` ranks with equal stages."""
    traces = []
    for index, schedule in enumerate(schedules):
        counts = [ranks * rounds for rounds in range(1, max(4, most // ranks) + 1)]
        counts = [count for count in counts if count >= least(schedule, ranks)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": schedule,
                "x": counts,
                "y": [round(100 * simulate(schedule, ranks, count).bubble, 3) for count in counts],
                "line": {"color": colours.rank_colour(index), "dash": ("solid", "dot")[schedule == "1F1B"]},
                "marker": {"symbol": _MARKS[schedule], "size": 8},
                "hovertemplate": f"{schedule}: %{{x}} micro-batches, %{{y:.1f}} %<extra></extra>",
            }
        )
    return _figure(
        traces,
        f"<b>Bubble of {ranks} ranks</b>  modelled",
        {"title": {"text": "micro-batches", "standoff": 4}, **SCALED},
        {"title": {"text": "% of a step"}, "rangemode": "tozero", **SCALED},
        height=300,
    )


@checked
def activations(ranks: int, micro_batches: int, schedules: Sequence[str] = tuple(SCHEDULES)) -> go.Figure:
    """The peak of stored activations on each rank, in units of one micro-batch through all stages of a rank."""
    traces = []
    for index, schedule in enumerate(schedules):
        kept = simulate(schedule, ranks, micro_batches).kept
        traces.append(
            {
                "type": "bar",
                "name": schedule,
                "x": [f"rank {rank}" for rank in kept],
                "y": list(kept.values()),
                "text": [f"{value:g}" for value in kept.values()],
                "textposition": "outside",
                "marker": {"color": colours.rank_colour(index), "pattern": {"shape": _PATTERNS[schedule], "size": 5}},
                "hovertemplate": f"{schedule}: activations of %{{y:g}} micro-batches<extra>%{{x}}</extra>",
            }
        )
    figure = _figure(
        traces,
        f"<b>Peak of stored activations, {ranks} ranks, {micro_batches} micro-batches</b>  modelled",
        {"type": "category"},
        {"title": {"text": "micro-batches"}, "rangemode": "tozero", **SCALED},
        height=300,
    )
    return figure.update_layout(barmode="group")


@checked
def measured(run: Run) -> Plan:
    """The measured timeline of a step of a pp run, in milliseconds: the fastest profiled step, because it has the least
    noise.

    Raises `ValueError` if the run has no profiled step, or is of a version that did not measure the halves of a
    backward.
    """
    state = run.state
    if state.spec.strategy != "pp":
        raise ValueError(f"the strategy of run {run.name} must be pp, got {state.spec.strategy or 'a script'}")
    whole = [step for step in profiled_steps(state) if all(step in rank.timelines for rank in state.ranks.values())]
    usual = [step for step in whole if step >= USUAL] or whole
    if not usual:
        raise ValueError(f"run {run.name} has no step that all ranks profiled yet; wait for it with .wait()")
    schedule, micro_batches = state.spec.options["schedule"], state.spec.options["micro_batches"]
    plans = []
    for step in usual:
        found = {number: rank.timelines[step] for number, rank in sorted(state.ranks.items())}
        shifts, _ = aligned(found, ahead(state))
        rules = {rank: _computed(order(schedule, rank, len(found), micro_batches)) for rank in found}
        if any(_misses_halves(one, rules[rank]) for rank, one in found.items()):
            raise ValueError(f"run {run.name} does not tell the halves of a backward apart; run it again")
        slots = tuple(slot for rank, one in found.items() for slot in _seen(rank, one, shifts[rank], rules[rank]))
        words = (
            f"{schedule}, {len(found)} ranks, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, step"
            f" {step}"
        )
        plans.append(Plan(words, slots, "ms", modelled=False))
    return min(plans, key=lambda plan: plan.span[1] - plan.span[0])


def _computed(rule: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The passes that take time: the first stage has no gradient of its inputs, and computes a split backward as a
    whole in its second half."""
    halved = any(kind == "W" for kind, _, _ in rule)
    return [each for each in rule if not (halved and each[:2] == ("B", 0))]


def _misses_halves(one: Timeline, rule: list[tuple[str, int, int]]) -> bool:
    """Whether the schedule splits backwards, and the timeline has fewer of them."""
    measured = sum(name == "backward" for name, *_ in one.phases)
    return any(kind == "W" for kind, _, _ in rule) and measured < sum(kind != "F" for kind, _, _ in rule)


def _seen(rank: int, one: Timeline, shift: float, rule: list[tuple[str, int, int]]) -> Iterator[Slot]:
    """The forwards and backwards of one rank's timeline, named in the order of the schedule."""
    turns = {
        "forward": (each for each in rule if each[0] == "F"),
        "backward": (each for each in rule if each[0] != "F"),
    }
    for name, start, end in one.phases:
        if name in turns:
            kind, stage, number = next(turns[name], (name[0].upper(), None, None))
            yield Slot(rank, kind, stage, number, 1000 * (start + shift), 1000 * (end + shift))


def _second(slot: Slot, plan: Plan) -> bool:
    """Whether the slot belongs to a rank's second stage."""
    return slot.stage is not None and slot.stage >= len(plan.ranks)


def _words(slot: Slot, plan: Plan, name: str) -> str:
    what = name if slot.number is None else f"{name} of micro-batch {slot.number} in stage {slot.stage}"
    unit = "" if plan.modelled else " ms"
    return f"rank {slot.rank}: {what}<br>{slot.end - slot.start:.3g}{unit}"


def _figure(traces: list[dict[str, Any]], title: str, x: dict[str, Any], y: dict[str, Any], height: int) -> go.Figure:
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 11}}
    own = {
        "xaxis": x,
        "yaxis": y,
        "barmode": "overlay",
        "bargap": 0.15,
        "margin": {"l": 64, "r": 16, "t": 34, "b": 78},
        "legend": legend,
    }
    return as_figure(traces, layout(title, height + 40) | own | {"hovermode": "closest"})
