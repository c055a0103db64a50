"""Advice and scaling as text, HTML tables and charts; all figures are modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.common.text import escape, visible
from labkit.common.units import size
from labkit.figures import colours
from labkit.figures.as_svg import drawing
from labkit.figures.atlas import EVIDENCE_HEADS, evidence_cells, evidence_json
from labkit.figures.model import Axis, Bars, Chart, Line
from labkit.figures.prediction import table_html
from labkit.figures.tables import table_text
from labkit.prediction.scale.advice import (
    MODES,
    RULE,
    Advice,
    Misfit,
    Mode,
    RuleVerdict,
    Series,
    devices_needed,
    efficiency,
    in_words,
    scaling,
    verdict,
)
from labkit.prediction.scale.atlas import NEAR, evidence
from labkit.prediction.scale.layouts import USABLE, Layout
from labkit.prediction.scale.step import RESERVED_FOR, Estimate

if TYPE_CHECKING:
    import plotly.graph_objects


# ---- scaling


TABLES: dict[str, Callable[[Estimate], str]] = {  # what the cells of a table show
    "efficiency": lambda estimate: f"{efficiency(estimate):.0%}",
    "exposed communication": lambda estimate: f"{estimate.exposed / estimate.seconds:.0%}",
    "time per step": lambda estimate: in_seconds(estimate.seconds),
}
_CHARTS: dict[str, tuple[str, Callable[[Estimate], float]]] = {
    "efficiency": ("% of perfect scaling", lambda estimate: 100 * efficiency(estimate)),
    "exposed communication": ("% of a step", lambda estimate: 100 * estimate.exposed / estimate.seconds),
}
_BOUND = "communication-bound from"


class Scaled:
    """Strong and weak scaling of several strategies; displays itself as tables in a notebook, as text elsewhere."""

    def __init__(self, series: Sequence[Series]):
        self.series = tuple(series)

    @property
    def title(self) -> str:
        """What is scaled."""
        known = [estimate for series in self.series for estimate in series.estimates if estimate]
        what = "".join(
            f"{estimate.training.model.title} on {estimate.training.accelerator.name}: " for estimate in known[:1]
        )
        return f"{what}efficiency = time of the computation, divided evenly / time of the step; modelled"

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """The heads and the rows of each table: for each mode the efficiency, the exposed communication and the time of
        each strategy, by the number of devices; a dash if nothing fits or the batch is too small."""
        devices = tuple(f"{number:,}" for number in next(series.devices for series in self.series))
        for mode in MODES:
            for what, words in TABLES.items():
                heads = (f"{mode} scaling: {what}", *devices, _BOUND)
                yield (
                    heads,
                    [_cells(series, words) for series in self.series if series.mode == mode and any(series.estimates)],
                )

    def charts(self) -> tuple[Chart, ...]:
        """Efficiency and exposed communication over the number of devices, for each mode."""
        return tuple(self._chart(mode, what) for what in _CHARTS for mode in MODES)

    def _chart(self, mode: Mode, what: str) -> Chart:
        unit, value = _CHARTS[what]
        drawn = [series for series in self.series if series.mode == mode and any(series.estimates)]
        lines = tuple(line for number, series in enumerate(drawn) for line in _lines(series, number, value))
        devices = next(series.devices for series in self.series)
        x = Axis("devices", end=len(devices) - 1, categories=tuple(f"{number:,}" for number in devices))
        title = f"{mode.capitalize()} scaling: {what}"
        note = "modelled; dotted: communication-bound"
        return Chart(f"{mode}-{what.split()[0]}", title, x, Axis(unit, end=100.0), lines, note=note)

    def figure(self) -> plotly.graph_objects.Figure:
        """All charts as one plotly figure, two by two."""
        from labkit.figures.as_plotly import as_figure, grid

        return as_figure(*grid([chart.drawn() for chart in self.charts()]))

    def svg(self, width: int = 560, height: int = 240) -> str:
        """All charts as inline SVG elements, with no script."""
        return "".join(drawing(chart.drawn(), width, height) for chart in self.charts())

    def to_json(self) -> dict[str, Any]:
        """The series as a dict that can be written as JSON; None where nothing fits."""
        return {"source": "modelled", "series": [_series_json(series) for series in self.series]}

    def __repr__(self) -> str:
        return visible("\n\n".join([self.title, *(table_text(*table) for table in self.tables())]))

    def _repr_html_(self) -> str:
        tables = "".join(table_html(*table) for table in self.tables())
        return f'<div class="labkit-notes"><p>{escape(self.title)}</p></div>{tables}'


def _cells(one: Series, words: Callable[[Estimate], str]) -> tuple[str, ...]:
    bound = "–" if one.bound_from is None else f"{one.bound_from:,}"
    return one.kind, *("–" if estimate is None else words(estimate) for estimate in one.estimates), bound


def in_seconds(seconds: float) -> str:
    """`12.3 s`, `45 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _lines(one: Series, number: int, value: Callable[[Estimate], float]) -> list[Line]:
    """A line up to the point from which communication takes longer than computation, and a dotted one after it."""
    ys = [float("nan") if estimate is None else value(estimate) for estimate in one.estimates]
    at = len(ys) - 1 if one.bound_from is None else one.devices.index(one.bound_from)
    xs = [*map(float, range(len(ys)))]
    colour = colours.rank_colour(number)
    lines = [Line(f"series{number}", one.kind, xs[: at + 1], ys[: at + 1], colour=colour, width=2.0)]
    if at < len(ys) - 1:
        lines.append(Line(f"series{number}-bound", one.kind, xs[at:], ys[at:], colour, 2.0, "dot", in_legend=False))
    return lines


def _series_json(one: Series) -> dict[str, Any]:
    return {
        "strategy": one.kind,
        "scaling": one.mode,
        "communication_bound_from": one.bound_from,
        "points": [
            {"devices": devices}
            if estimate is None
            else {
                "devices": devices,
                "title": estimate.layout.title,
                "batch": estimate.training.batch,
                "seconds_per_step": estimate.seconds,
                "tokens_per_second": estimate.tokens_per_second,
                "efficiency": efficiency(estimate),
                "exposed_seconds": estimate.exposed,
                "peak_memory_bytes": estimate.memory.total,
            }
            for devices, estimate in zip(one.devices, one.estimates)
        ],
    }


# ---- advice


HEADS = (
    "strategy",
    "micro-batches × samples",
    "recompute",
    "memory",
    "per step",
    "tokens/s",
    "TFLOP/s",
    "MFU",
    "exposed",
    "bubble",
)
MISFIT_HEADS = ("does not fit", "needs at least", "missing", "fits with")
ROWS = 10  # strategies in a table
EVIDENCE = (
    "Measured nearby: by the nearest run of labkit atlas. A distance of 1 is a factor of two in one figure, one more of"
    " parameters, gradients and optimizer state that is sharded, another precision or recomputation; another GPU is 2."
    f" Up to {NEAR:g} counts as near."
)

PARTS = {  # of a step: colour and words
    "computation": (colours.PHASES["forward"], "the computation"),
    "recomputation": (colours.PHASES["backward"], "recomputation"),
    "data": (colours.OPERATIONS["all_reduce"], "data-parallel communication"),
    "tensor": (colours.OPERATIONS["all_gather"], "tensor-parallel communication"),
    "context": (colours.OPERATIONS["reduce_scatter"], "context-parallel communication"),
    "pipeline": (colours.OPERATIONS["send"], "communication between stages"),
    "launch": (colours.PHASES["copy"], "launching kernels"),
    "waiting": (colours.PHASES["data"], "waiting for the slowest rank"),
    "allocator": (colours.PHASES["data"], "an allocator that is short of memory"),
    "bubble": (colours.PHASES["other"], "the bubble of the pipeline"),
    "optimizer": (colours.PHASES["optimizer"], "the optimizer"),
}


class Advised:
    """The advice for a model and devices; displays itself as tables in a notebook, as text elsewhere."""

    def __init__(self, found: Advice):
        self.advice = found
        self.verdict = verdict(found)

    @property
    def title(self) -> str:
        """What is trained, on what."""
        return f"{in_words(self.advice.training)}: all figures are modelled"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells below `HEADS`: the fastest layout of each strategy that fits, the fastest first."""
        return [cells(estimate) for estimate in self.advice.ranked[:ROWS]]

    @property
    def misfits(self) -> list[tuple[str, ...]]:
        """The cells below `MISFIT_HEADS`, the simplest strategies first."""
        return [_misfit(misfit) for misfit in self._misfits]

    @property
    def _misfits(self) -> list[Misfit]:
        in_order = sorted(self.advice.misfits, key=lambda misfit: (misfit.layout.kind.count("×"), misfit.missing))
        return in_order[:ROWS]

    @property
    def evidence(self) -> list[tuple[str, ...]]:
        """The cells below `EVIDENCE_HEADS`: for each layout of `rows` and `misfits` the nearest published run."""
        asked = self.advice.training
        fits = [
            (estimate.layout, estimate.tokens_per_second_per_gpu, estimate.memory)
            for estimate in self.advice.ranked[:ROWS]
        ]
        misfits = [(misfit.layout, None, misfit.memory) for misfit in self._misfits]
        return [
            evidence_cells(layout.title, rate, needs.total, evidence(asked, layout, 1)[0])
            for layout, rate, needs in (*fits, *misfits)
        ]

    @property
    def rule(self) -> list[str]:
        """What the common rule of thumb says about this case, and whether it misleads."""
        return rule_in_words(self.advice, self.verdict)

    @property
    def sentences(self) -> list[str]:
        """The common rule, what is not shown, and the assumptions."""
        said = [*self.rule, *self._not_shown()]
        one = self.advice.training.accelerator
        efficiency = (
            f"{one.efficiency:.0%} of the peak of {one.name} in large matrix products ({one.sources['efficiency']})"
        )
        said.append(f"Assumed: {efficiency}; {USABLE:.0%} of the memory can be used ({RESERVED_FOR}).")
        return [*said, EVIDENCE]

    def _not_shown(self) -> list[str]:
        found, said = self.advice, []
        if len(found.ranked) > ROWS:
            said.append(f"{len(found.ranked) - ROWS} slower strategies also fit.")
        if len(found.misfits) > ROWS:
            said.append(f"{len(found.misfits) - ROWS} more strategies do not fit.")
        simple = [kind for kind in found.too_small if "×" not in kind] or [*found.too_small]
        for number in sorted({found.too_small[kind] for kind in simple}):
            kinds = ", ".join(kind for kind in simple if found.too_small[kind] == number)
            said.append(f"Not possible, because the batch must be a multiple of {number:,} samples: {kinds}.")
        return said

    def scaling(self) -> Scaled:
        """Strong and weak scaling of each strategy, with the batch of this training."""
        return Scaled(scaling(self.advice.training))

    def figure(self) -> plotly.graph_objects.Figure:
        """The time of a step by what it is spent on, for each strategy that fits."""
        from labkit.figures.as_plotly import as_figure, parts

        return as_figure(*parts(self.chart.drawn()))

    def svg(self, width: int = 760, height: int = 260) -> str:
        """The same as inline SVG."""
        return drawing(self.chart.drawn(), width, height)

    @property
    def chart(self) -> Chart:
        """The data of `figure`."""
        shown = self.advice.ranked[:ROWS]
        bars = tuple(
            Bars(name, colour, tuple(estimate.parts[name] for estimate in shown))
            for name, (colour, _) in PARTS.items()
            if any(estimate.parts[name] for estimate in shown)
        )
        names = tuple(estimate.layout.title for estimate in shown)
        labels = tuple(name.replace(" × ", "\n") for name in names)
        x = Axis("", categories=names, labels=labels)
        return Chart("advice", "Time of a step", x, Axis("s per step", least=1e-3), bars=bars, note="modelled")

    def to_json(self) -> dict[str, Any]:
        """The advice as a dict that can be written as JSON. Sizes are in bytes, times in seconds."""
        asked, said = self.advice.training, self.verdict
        return {
            "source": "modelled",
            "model": {**vars(asked.model), "parameters": asked.model.parameters},
            "machine": asked.machine.name,
            "accelerator": {"name": asked.accelerator.name, "efficiency": asked.accelerator.efficiency},
            "devices": asked.devices,
            "memory_bytes": asked.memory,
            "usable_bytes": asked.usable,
            "batch": asked.batch,
            "sequence": asked.sequence,
            "precision": asked.precision,
            "attention": asked.attention,
            "fits": [estimate_json(estimate) | self._evidence_json(estimate.layout) for estimate in self.advice.ranked],
            "does_not_fit": [
                _misfit_json(misfit) | self._evidence_json(misfit.layout) for misfit in self.advice.misfits
            ],
            "needs_batch_multiple_of": self.advice.too_small,
            "rule": None
            if said is None
            else {
                "chosen": said.chosen and said.chosen.layout.title,
                "fastest": said.fastest.layout.title,
                "agrees": said.agrees,
            },
            "sentences": self.sentences,
        }

    def _evidence_json(self, layout: Layout) -> dict[str, Any]:
        [nearest] = evidence(self.advice.training, layout, 1)
        return {"evidence": evidence_json(nearest)}

    def __repr__(self) -> str:
        parts = [self.title]
        parts += [table_text(HEADS, self.rows)] if self.rows else []
        parts += [table_text(MISFIT_HEADS, self.misfits)] if self.misfits else []
        parts += [table_text(EVIDENCE_HEADS, self.evidence)]
        return visible("\n\n".join([*parts, "\n".join(self.sentences)]))

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        tables = table_html(HEADS, self.rows) if self.rows else ""
        tables += table_html(MISFIT_HEADS, self.misfits) if self.misfits else ""
        tables += table_html(EVIDENCE_HEADS, self.evidence)
        notes = f'<div class="labkit-notes"><p>{escape(self.title)}</p></div>'
        return f'{notes}{tables}<div class="labkit-notes">{said}</div>'


def cells(one: Estimate) -> tuple[str, ...]:
    """The cells below `HEADS`."""
    layout = one.layout
    return (
        layout.title,
        f"{layout.micro_batches} × {layout.micro_batch}",
        {"none": "–", "selective": "selective", "full": "all layers"}[layout.recompute],
        size(one.memory.total),
        in_seconds(one.seconds),
        f"{one.tokens_per_second:,.0f}",
        f"{one.flops_per_device / 1e12:,.0f}",
        f"{one.mfu:.0%}",
        f"{one.exposed / one.seconds:.0%}",
        f"{one.parts['bubble'] / one.seconds:.0%}",
    )


def estimate_json(one: Estimate) -> dict[str, Any]:
    """An estimate as plain values."""
    layout = one.layout
    return {
        "strategy": layout.kind,
        "title": layout.title,
        **{name: getattr(layout, name) for name in _DEGREES},
        "memory_bytes": one.memory.owners,
        "peak_memory_bytes": one.memory.total,
        "seconds_per_step": one.seconds,
        "seconds": dict(one.parts),
        "comm_bytes_per_step": dict(one.sent),
        "communication_seconds": dict(one.busy),
        "communication_bound": one.communication_bound,
        "tokens_per_second": one.tokens_per_second,
        "flops_per_second_per_device": one.flops_per_device,
        "mfu": one.mfu,
    }


_DEGREES = ("data", "shards", "tensor", "pipeline", "context", "micro_batch", "micro_batches", "recompute")


def _misfit(one: Misfit) -> tuple[str, ...]:
    change = one.change
    fits = one.words + (f" ({change.title})" if change and change.title != one.words else "")
    return one.layout.title, size(one.memory.total), size(one.missing), fits or "–"


def _misfit_json(one: Misfit) -> dict[str, Any]:
    return {
        "strategy": one.layout.kind,
        "title": one.layout.title,
        "memory_bytes": one.memory.owners,
        "peak_memory_bytes": one.memory.total,
        "missing_bytes": one.missing,
        "change": one.words or None,
        "fits_as": one.change and one.change.title,
    }


def rule_in_words(found: Advice, said: RuleVerdict | None) -> list[str]:
    """What the common rule of thumb says here, and whether it misleads, computed from the estimates."""
    if not found.fitting:
        return [_nothing_fits(found)]
    if said is None:
        return []
    begin = [f"The common rule: {RULE}."]
    begin += [_passed(found, kind) for kind in said.passed]
    best = said.fastest
    if said.chosen is None:
        return [
            *begin,
            f"It finds nothing that fits, but {best.layout.title} does: {in_seconds(best.seconds)} per step.",
        ]
    chosen = f"{said.chosen.layout.title} with {in_seconds(said.chosen.seconds)} per step"
    if said.agrees and best.layout.kind == said.chosen.layout.kind:
        return [*begin, f"It agrees with the estimate here: {chosen} is the fastest."]
    percent = said.chosen.seconds / best.seconds - 1
    if said.agrees:
        words = f"it chooses {chosen}, {percent:.1%} more than the fastest, {best.layout.title}"
        return [*begin, f"It agrees with the estimate here: {words}."]
    part, seconds = said.difference
    other = f"{best.layout.title} needs {in_seconds(best.seconds)}"
    reason = f"most of the difference is {PARTS[part][1]}, {in_seconds(seconds)} more"
    return [*begin, f"It misleads here: it chooses {chosen}, {percent:.0%} more than necessary. {other}; {reason}."]


def _passed(found: Advice, kind: str) -> str:
    if kind in found.too_small:
        return f"{kind} is not possible: the batch of {found.training.batch:,} is not a multiple of" + (
            f" {found.too_small[kind]:,} samples."
        )
    missing = next((misfit.missing for misfit in found.misfits if misfit.layout.kind == kind), None)
    return f"{kind} is not possible here." if missing is None else f"{kind} does not fit: {size(missing)} are missing."


def _nothing_fits(found: Advice) -> str:
    asked = found.training
    least = min((misfit.missing for misfit in found.misfits), default=None)
    if least is None:
        return (
            f"Nothing is possible: no mesh of {asked.devices:,} devices divides the batch of {asked.batch:,} samples."
        )
    more = devices_needed(asked)
    fix = f"; it fits on {more:,} devices" if more else "; no number of these devices is enough, use more memory each"
    return f"Nothing fits: at least {size(least)} per device are missing{fix}."
