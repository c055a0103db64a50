"""Pictures of pipelines: the schedules of stages and micro-batches, and their bubbles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from labkit.analysis.metrics import USUAL
from labkit.analysis.profiled import ahead, aligned, profiled_steps
from labkit.common.units import counted
from labkit.course.pictures.canvas import SCALED, checked, layout
from labkit.figures import colours
from labkit.figures.as_plotly import as_figure
from labkit.record.events import Timeline
from labkit.training.strategies.rules import ONE_PER_STAGE, V_SHAPED, holder

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.plan.spec import Spec
    from labkit.runs.handle import Run


__all__ = ["activations", "bubbles", "gantt", "measured", "order", "planned", "simulate"]

# ---- pipeline schedules whose stages go down the ranks and up again


Passes = list[tuple[str, int]]


def zero_bubble(rank: int, ranks: int, micro_batches: int) -> Passes:
    """ZB-V, for at least 2p − 1 micro-batches; the passes of those that do not exist are to be left out."""
    count = max(2 * ranks - 1, micro_batches)
    down, up = 2 * (ranks - rank) - 1, ranks - rank  # forwards that fill the pipeline, in each direction
    done = [("F", 0)] * down + [("F", 1), ("F", 0)] * rank + [("F", 1), ("B", 1), ("W", 1)] * up
    for k in range(count - ranks):
        done += [("F", 0)] if k < count - down - rank else []
        done += [("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)]
    done += [("B", 0), ("B", 1)] * rank + [("B", 0), ("W", 0)] * up
    return done + [("W", 1)] * rank + [("W", 0)] * rank


def dual_pipe(rank: int, ranks: int, micro_batches: int) -> Passes:
    """DualPipeV, for at least 2p micro-batches. Torch computes the forward and the backward that the paper overlaps one
    after the other."""
    after = ranks - 1 - rank  # ranks that are closer to the tip of the V
    done = [("F", 0)] * (2 * after) + [("F", 0), ("F", 1)] * (rank + 1) + [("B", 1), ("W", 1), ("F", 1)] * after
    done += [("F", 0), ("BW", 1), ("F", 1), ("BW", 0)] * (micro_batches - 2 * ranks + rank + 1)
    done += [("BW", 1), ("F", 1), ("BW", 0)] * after
    # In the last 2 (rank + 1) backwards, those of the second half are split, and so are all that follow.
    ends = [1, 0] * (rank + 1)
    done += [("BW", which) for which in ends[: rank + 1]]
    split = ends[rank + 1 :]
    done += [("B", which) for which in split]
    waiting = [*split, *[0] * after]  # stages whose weight gradients are still to be computed
    for which in waiting[:after]:
        done += [("W", which), ("B", 0)]
    return done + [("W", which) for which in waiting[after:]]


def bubble(ranks: int, micro_batches: int) -> float:
    """The fraction of idle time if stages are equal and each half of a backward takes as long as a forward."""
    idle = max(ranks - 1, 2 * (2 * ranks - 1 - micro_batches))  # in forwards of a stage; too few do not fill the V
    return idle / (6 * micro_batches + idle)


# ---- pipeline schedules


@dataclass(frozen=True)
class Slot:
    """A pass of a rank from `start` to `end`: micro-batch `number` in `stage`; both are None if they are unknown.

    `kind` is F (forward), B (backward; only of the inputs if the schedule splits it), W (backward of the weights), or
    BW (a whole backward of a schedule that splits others).
    """

    rank: int
    kind: str
    stage: int | None
    number: int | None
    start: float
    end: float


@dataclass(frozen=True)
class PipelineStep:
    """A pipeline step. Times are in `unit`: mean forwards of a rank ("forwards") if it is `modelled`, otherwise
    milliseconds."""

    title: str
    slots: tuple[Slot, ...]
    unit: str
    modelled: bool

    @property
    def ranks(self) -> list[int]:
        """The ranks, in the order of the first stages."""
        return sorted({slot.rank for slot in self.slots})

    @property
    def span(self) -> tuple[float, float]:
        """The start of the first slot and the end of the last one."""
        return min(slot.start for slot in self.slots), max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The fraction of the step, over all ranks, in which they are idle."""
        first, last = self.span
        return 1 - sum(slot.end - slot.start for slot in self.slots) / (len(self.ranks) * (last - first))

    @property
    def kept(self) -> dict[int, float]:
        """By rank, the peak of stored activations, in units of one micro-batch through all of its stages.

        Activations are stored from a forward to the end of its backward (of both halves if it is split).
        """
        halved = any(slot.kind == "W" for slot in self.slots)
        stages = len({slot.stage for slot in self.slots}) // len(self.ranks)
        most = dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            mine = [slot for slot in self.slots if slot.rank == rank]
            moments = [(slot.start, 1) for slot in mine if slot.kind == "F"]
            moments += [(slot.end, -1) for slot in mine if slot.kind in ("W" if halved else "B", "BW")]
            held = 0
            for _, change in sorted(moments):
                held += change
                most[rank] = max(most[rank], held)
        return {rank: held / stages for rank, held in most.items()}


@dataclass(frozen=True)
class Rule:
    """A schedule: stages per rank, whether backward is split in halves, and the passes of rank r of p with m
    micro-batches, as kinds with the index of the rank's stage.

    `formula` gives the bubble for m ≥ p if stages are equal and a backward takes twice as long as a forward.
    """

    stages: int
    halved: bool
    passes: Callable[[int, int, int], list[tuple[str, int]]]
    formula: Callable[[int, int], float]


def _by_warm_up(
    stages: int, halved: bool, warm_up: Callable[[int, int, int], int], formula: Callable[[int, int], float]
) -> Rule:
    """A schedule of `warm_up` forwards, then one forward and one backward alternately, then the other backwards."""

    def passes(rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int]]:
        turn, every = _turn(ranks, micro_batches), stages * micro_batches
        warm = min(every, warm_up(rank, ranks, micro_batches))
        local = [(k // turn) % stages for k in range(every)]
        backwards = [stages - 1 - which for which in local]
        done = [("F", which) for which in local[:warm]]
        for k, which in enumerate(backwards):
            done += [*(("F", number) for number in local[warm + k : warm + k + 1]), ("B", which)]
            if halved and k >= rank:  # `rank` of them are delayed and fill the bubble at the end
                done.append(("W", backwards[k - rank]))
        if halved:
            done += [("W", which) for which in backwards[max(0, every - rank) :]]
        return done

    return Rule(stages, halved, passes, formula)


SCHEDULES: dict[str, Rule] = {
    "GPipe": _by_warm_up(1, False, lambda r, p, m: m, lambda p, m: (p - 1) / (m + p - 1)),
    "1F1B": _by_warm_up(1, False, lambda r, p, m: p - 1 - r, lambda p, m: (p - 1) / (m + p - 1)),
    "Interleaved1F1B": _by_warm_up(
        2, False, lambda r, p, m: _turn(p, m) + 2 * (p - 1 - r), lambda p, m: (p - 1) / (2 * m + p - 1)
    ),
    "ZB-H1": _by_warm_up(1, True, lambda r, p, m: p - 1 - r, lambda p, m: (p - 1) / (3 * m + p - 1)),
    "InterleavedZeroBubble": _by_warm_up(
        2, True, lambda r, p, m: _turn(p, m) + p - 1 - r, lambda p, m: (p - 1) / (6 * m + p - 1)
    ),
    "ZBVZeroBubble": Rule(2, True, zero_bubble, bubble),
    "DualPipeV": Rule(2, True, dual_pipe, bubble),
}


@checked
def order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """The passes of `rank` in order: (kind, stage, number of the micro-batch). Raises `ValueError` for an impossible
    schedule.

    >>> order("1F1B", 1, 2, 2)
    [('F', 1, 0), ('B', 1, 0), ('F', 1, 1), ('B', 1, 1)]
    """
    _check(schedule, ranks, micro_batches)
    rule = SCHEDULES[schedule]
    own = [stage for stage in range(ranks * rule.stages) if holder(stage, ranks, schedule) == rank]
    numbers: Counter[tuple[str, int]] = Counter()
    numbered = []
    for kind, which in rule.passes(rank, ranks, micro_batches):
        stage, halves = own[which], ("B", "W") if kind == "BW" else (kind,)
        numbered.append((kind, stage, numbers[halves[0], stage]))
        numbers.update((half, stage) for half in halves)
    return [action for action in numbered if action[2] < micro_batches]


@checked
def simulate(
    schedule: str, ranks: int, micro_batches: int, costs: Sequence[float] = (), backward: float = 2.0
) -> PipelineStep:
    """Simulates a step. A backward takes `backward` times as long as a forward; communication takes no time.

    `costs` are the relative forward times of the stages (default: equal). Raises `ValueError` for an impossible
    schedule.
    """
    _check(schedule, ranks, micro_batches)
    rule = SCHEDULES[schedule]
    stages = ranks * rule.stages
    costs = tuple(costs) or (1.0,) * stages
    if len(costs) != stages or min(costs) <= 0:
        wanted = f"a positive number for each of the {stages} stages of {schedule} on {ranks} ranks"
        raise ValueError(f"costs must be {wanted}, got {costs}")
    times = [cost * ranks / sum(costs) for cost in costs]
    relative = {"F": 1.0, "B": backward / 2 if rule.halved else backward, "W": backward / 2, "BW": backward}
    waiting = {rank: order(schedule, rank, ranks, micro_batches)[::-1] for rank in range(ranks)}
    slots: list[Slot] = []
    ended: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(waiting, 0.0)
    while any(waiting.values()):
        for rank, left in waiting.items():
            while left and all(need in ended for need in needs(*left[-1], stages)):
                kind, stage, number = left.pop()
                start = max([free[rank], *(ended[need] for need in needs(kind, stage, number, stages))])
                free[rank] = ended[kind[0], stage, number] = start + relative[kind] * times[stage]
                slots.append(Slot(rank, kind, stage, number, start, free[rank]))
    title = f"{schedule}, {ranks} ranks, {counted(micro_batches, 'micro-batch', 'es')}"
    return PipelineStep(title, tuple(slots), "forwards", modelled=True)


def needs(kind: str, stage: int, number: int, stages: int) -> list[tuple[str, int, int]]:
    """The dependencies of a pass: a forward needs that of the previous stage, a backward its forward and the next
    stage's backward."""
    if kind == "F":
        return [("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [("B", stage, number)]
    return [("F", stage, number), *([("B", stage + 1, number)] if stage + 1 < stages else [])]


@checked
def planned(spec: Spec) -> PipelineStep:
    """The simulation of a Spec with strategy pp, with stage costs from the floating-point operations of its model."""
    begins, blocks = spec.strategy_row.constants(spec)["STAGES"], spec.workload_row.costs(spec.options)
    costs = [sum(blocks[first:last]) for first, last in pairwise(begins)]
    return simulate(spec.options["schedule"], spec.nproc, spec.options["micro_batches"], costs)


def least(schedule: str, ranks: int) -> int:
    """The minimum number of micro-batches: that of the stages if DualPipeV is to fill both halves of the V."""
    return 2 * ranks if schedule in V_SHAPED and schedule in ONE_PER_STAGE else 1


def _turn(ranks: int, micro_batches: int) -> int:
    """Number of micro-batches that a rank processes in one stage before it switches to its next stage."""
    return micro_batches // max(1, micro_batches // ranks)


def _check(schedule: str, ranks: int, micro_batches: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if ranks < 2 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least 2 ranks and 1 micro-batch, got {ranks} and {micro_batches}")
    if micro_batches < least(schedule, ranks):
        raise ValueError(
            f"{schedule} needs at least {least(schedule, ranks)} micro-batches on {ranks} ranks, got {micro_batches}"
        )
    if schedule not in V_SHAPED and SCHEDULES[schedule].stages > 1 and micro_batches % _turn(ranks, micro_batches):
        near = micro_batches // ranks * ranks
        raise ValueError(
            f"micro_batches must split into equal rounds for {schedule} on {ranks} ranks, got {micro_batches}; use"
            f" {near}"
        )


# ---- pictures of pipelines


_KINDS = {  # name in the legend, colour, colour of the number on it
    "F": ("forward", colours.PHASES["forward"], "#000000"),
    "B": ("backward", colours.PHASES["backward"], "#FFFFFF"),
    "W": ("backward of the weights", colours.PHASES["optimizer"], "#FFFFFF"),
    "BW": ("whole backward", "#7B50B0", "#FFFFFF"),
}
# a rank's second stage
_HATCHED = {"shape": "/", "size": 7, "fillmode": "overlay", "fgcolor": "rgba(255, 255, 255, 0.55)"}
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
def gantt(plan: PipelineStep) -> go.Figure:
    """A Gantt chart with one lane per rank and one bar per pass of a micro-batch, labelled with the number of the
    micro-batch."""
    halved = any(slot.kind == "W" for slot in plan.slots)
    first, last = plan.span
    traces = []
    for second, kind in product((False, True), _KINDS):
        slots = [slot for slot in plan.slots if (_second(slot, plan), slot.kind) == (second, kind)]
        if not slots:
            continue
        name, colour, ink = _KINDS[kind]
        name = "backward of the inputs" if kind == "B" and halved else name
        marker = {"color": colour, "line": {"width": 1, "color": colours.INK}}
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
                "marker": marker | {"pattern": _HATCHED} if second else marker,
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
def measured(run: Run) -> PipelineStep:
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
        lanes = {number: rank.timelines[step] for number, rank in sorted(state.ranks.items())}
        shifts, _ = aligned(lanes, ahead(state))
        rules = {rank: _computed(order(schedule, rank, len(lanes), micro_batches)) for rank in lanes}
        if any(_misses_halves(lane, rules[rank]) for rank, lane in lanes.items()):
            raise ValueError(f"run {run.name} does not tell the halves of a backward apart; run it again")
        slots = tuple(slot for rank, lane in lanes.items() for slot in _seen(rank, lane, shifts[rank], rules[rank]))
        title = f"{schedule}, {len(lanes)} ranks, {counted(micro_batches, 'micro-batch', 'es')}, step {step}"
        plans.append(PipelineStep(title, slots, "ms", modelled=False))
    return min(plans, key=lambda plan: plan.span[1] - plan.span[0])


def _computed(rule: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The passes that take time: the first stage has no gradient of its inputs, and computes a split backward as a
    whole in its second half."""
    halved = any(kind == "W" for kind, _, _ in rule)
    return [action for action in rule if not (halved and action[:2] == ("B", 0))]


def _misses_halves(timeline: Timeline, rule: list[tuple[str, int, int]]) -> bool:
    """Whether the schedule splits backwards, and the timeline has fewer of them."""
    measured = sum(name == "backward" for name, *_ in timeline.phases)
    return any(kind == "W" for kind, _, _ in rule) and measured < sum(kind != "F" for kind, _, _ in rule)


def _seen(rank: int, timeline: Timeline, shift: float, rule: list[tuple[str, int, int]]) -> Iterator[Slot]:
    """The forwards and backwards of one rank's timeline, named in the order of the schedule."""
    turns = {
        "forward": (action for action in rule if action[0] == "F"),
        "backward": (action for action in rule if action[0] != "F"),
    }
    for name, start, end in timeline.phases:
        if name in turns:
            kind, stage, number = next(turns[name], (name[0].upper(), None, None))
            yield Slot(rank, kind, stage, number, 1000 * (start + shift), 1000 * (end + shift))


def _second(slot: Slot, plan: PipelineStep) -> bool:
    """Whether the slot belongs to a rank's second stage."""
    return slot.stage is not None and slot.stage >= len(plan.ranks)


def _words(slot: Slot, plan: PipelineStep, name: str) -> str:
    what = name if slot.number is None else f"{name} of micro-batch {slot.number} in stage {slot.stage}"
    unit = "" if plan.modelled else " ms"
    return f"rank {slot.rank}: {what}<br>{slot.end - slot.start:.3g}{unit}"


def _figure(traces: list[dict[str, Any]], title: str, x: dict[str, Any], y: dict[str, Any], height: int) -> go.Figure:
    looks = layout(title, height + 40) | {
        "xaxis": x,
        "yaxis": y,
        "barmode": "overlay",
        "bargap": 0.15,
        "margin": {"l": 64, "r": 16, "t": 34, "b": 78},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 11}},
        "hovermode": "closest",
    }
    return as_figure(traces, looks)
