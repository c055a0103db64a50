"""What closed formulas say about training a transformer at any scale, as text, HTML tables, charts and JSON: advice,
scaling, one layout that was asked for, and how well estimates agree with published runs. All figures are modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.common.units import size
from labkit.figures import colours
from labkit.figures.as_svg import drawing
from labkit.figures.atlas import EVIDENCE_HEADS, evidence_cells, evidence_json
from labkit.figures.model import Axis, Bars, Chart, Line
from labkit.figures.tables import Rows, Tables
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
from labkit.prediction.scale.atlas import FEWEST, NEAR, Agreement, Checked, evidence
from labkit.prediction.scale.layouts import FRAMEWORKS, USABLE, Layout
from labkit.prediction.scale.step import RESERVED_FOR, Estimate, Memory, Training

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


class Scaled(Tables):
    """Strong and weak scaling of several strategies."""

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

    def tables(self) -> Iterator[tuple[Sequence[str], Rows]]:
        """For each mode the efficiency, the exposed communication and the time of each strategy, by the number of
        devices; a dash if nothing fits or the batch is too small."""
        devices = tuple(f"{number:,}" for number in self.series[0].devices)
        for mode in MODES:
            for what, words in TABLES.items():
                heads = (f"{mode} scaling: {what}", *devices, _BOUND)
                yield heads, [_cells(series, words) for series in self._known(mode)]

    def _known(self, mode: Mode) -> list[Series]:
        return [series for series in self.series if series.mode == mode and any(series.estimates)]

    def charts(self) -> tuple[Chart, ...]:
        """Efficiency and exposed communication over the number of devices, for each mode."""
        return tuple(self._chart(mode, what) for what in _CHARTS for mode in MODES)

    def _chart(self, mode: Mode, what: str) -> Chart:
        unit, value = _CHARTS[what]
        lines = tuple(line for number, series in enumerate(self._known(mode)) for line in _lines(series, number, value))
        devices = self.series[0].devices
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


def _cells(series: Series, words: Callable[[Estimate], str]) -> tuple[str, ...]:
    bound = "–" if series.bound_from is None else f"{series.bound_from:,}"
    return series.kind, *("–" if estimate is None else words(estimate) for estimate in series.estimates), bound


def in_seconds(seconds: float) -> str:
    """`12.3 s`, `45 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _lines(series: Series, number: int, value: Callable[[Estimate], float]) -> list[Line]:
    """A line up to the point from which communication takes longer than computation, and a dotted one after it."""
    ys = [float("nan") if estimate is None else value(estimate) for estimate in series.estimates]
    at = len(ys) - 1 if series.bound_from is None else series.devices.index(series.bound_from)
    xs = [*map(float, range(len(ys)))]
    colour = colours.rank_colour(number)
    lines = [Line(f"series{number}", series.kind, xs[: at + 1], ys[: at + 1], colour=colour, width=2.0)]
    if at < len(ys) - 1:
        lines.append(Line(f"series{number}-bound", series.kind, xs[at:], ys[at:], colour, 2.0, "dot", in_legend=False))
    return lines


def _series_json(series: Series) -> dict[str, Any]:
    return {
        "strategy": series.kind,
        "scaling": series.mode,
        "communication_bound_from": series.bound_from,
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
            for devices, estimate in zip(series.devices, series.estimates)
        ],
    }


# ---- advice

HEADS = (
    *("strategy", "micro-batches × samples", "recompute", "memory", "per step", "tokens/s", "TFLOP/s", "MFU"),
    *("exposed", "bubble"),
)
MISFIT_HEADS = ("does not fit", "needs at least", "missing", "fits with")
ROWS = 10  # strategies in a table
_DEGREES = ("data", "shards", "tensor", "pipeline", "context", "micro_batch", "micro_batches", "recompute")
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


class Advised(Tables):
    """The advice for a model and devices."""

    def __init__(self, advice: Advice):
        self.advice = advice
        self.verdict = verdict(advice)

    @property
    def title(self) -> str:
        """What is trained, on what."""
        return f"{in_words(self.advice.training)}: all figures are modelled"

    def tables(self) -> list[tuple[Sequence[str], Rows]]:
        """What fits, what does not, and the nearest published runs."""
        tables = ((HEADS, self.rows), (MISFIT_HEADS, self.misfits), (EVIDENCE_HEADS, self.evidence))
        return [(heads, rows) for heads, rows in tables if rows]

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
        fits = self.advice.ranked[:ROWS]
        rows: list[tuple[Layout, float | None, Memory]] = []
        rows += [(fit.layout, fit.tokens_per_second_per_gpu, fit.memory) for fit in fits]
        rows += [(misfit.layout, None, misfit.memory) for misfit in self._misfits]
        return [
            evidence_cells(layout.title, rate, needs.total, evidence(asked, layout, 1)[0])
            for layout, rate, needs in rows
        ]

    @property
    def rule(self) -> list[str]:
        """What the common rule of thumb says about this case, and whether it misleads."""
        return rule_in_words(self.advice, self.verdict)

    @property
    def sentences(self) -> list[str]:
        """The common rule, what is not shown, and the assumptions."""
        said = [*self.rule, *self._not_shown()]
        accelerator = self.advice.training.accelerator
        reached = f"{accelerator.efficiency:.0%} of the peak of {accelerator.name} in large matrix products"
        said.append(
            f"Assumed: {reached} ({accelerator.sources['efficiency']}); {USABLE:.0%} of the memory can be used"
            f" ({RESERVED_FOR})."
        )
        return [*said, EVIDENCE]

    def _not_shown(self) -> list[str]:
        advice, said = self.advice, []
        if len(advice.ranked) > ROWS:
            said.append(f"{len(advice.ranked) - ROWS} slower strategies also fit.")
        if len(advice.misfits) > ROWS:
            said.append(f"{len(advice.misfits) - ROWS} more strategies do not fit.")
        simple = [kind for kind in advice.too_small if "×" not in kind] or [*advice.too_small]
        for number in sorted({advice.too_small[kind] for kind in simple}):
            kinds = ", ".join(kind for kind in simple if advice.too_small[kind] == number)
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
            **_training_json(asked),
            "accelerator": {"name": asked.accelerator.name, "efficiency": asked.accelerator.efficiency},
            "memory_bytes": asked.memory,
            "usable_bytes": asked.usable,
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


def _training_json(asked: Training) -> dict[str, Any]:
    return {
        "source": "modelled",
        "model": {**vars(asked.model), "parameters": asked.model.parameters},
        "machine": asked.machine.name,
        "devices": asked.devices,
        "batch": asked.batch,
        "sequence": asked.sequence,
        "precision": asked.precision,
    }


def cells(estimate: Estimate) -> tuple[str, ...]:
    layout = estimate.layout
    return (
        layout.title,
        f"{layout.micro_batches} × {layout.micro_batch}",
        {"none": "–", "selective": "selective", "full": "all layers"}[layout.recompute],
        size(estimate.memory.total),
        in_seconds(estimate.seconds),
        f"{estimate.tokens_per_second:,.0f}",
        f"{estimate.flops_per_device / 1e12:,.0f}",
        f"{estimate.mfu:.0%}",
        f"{estimate.exposed / estimate.seconds:.0%}",
        f"{estimate.parts['bubble'] / estimate.seconds:.0%}",
    )


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    layout = estimate.layout
    return {
        "strategy": layout.kind,
        "title": layout.title,
        **{name: getattr(layout, name) for name in _DEGREES},
        "memory_bytes": estimate.memory.owners,
        "peak_memory_bytes": estimate.memory.total,
        "seconds_per_step": estimate.seconds,
        "seconds": dict(estimate.parts),
        "comm_bytes_per_step": dict(estimate.sent),
        "communication_seconds": dict(estimate.busy),
        "communication_bound": estimate.communication_bound,
        "tokens_per_second": estimate.tokens_per_second,
        "flops_per_second_per_device": estimate.flops_per_device,
        "mfu": estimate.mfu,
    }


def _misfit(misfit: Misfit) -> tuple[str, ...]:
    change = misfit.change
    fits = misfit.words + (f" ({change.title})" if change and change.title != misfit.words else "")
    return misfit.layout.title, size(misfit.memory.total), size(misfit.missing), fits or "–"


def _misfit_json(misfit: Misfit) -> dict[str, Any]:
    return {
        "strategy": misfit.layout.kind,
        "title": misfit.layout.title,
        "memory_bytes": misfit.memory.owners,
        "peak_memory_bytes": misfit.memory.total,
        "missing_bytes": misfit.missing,
        "change": misfit.words or None,
        "fits_as": misfit.change and misfit.change.title,
    }


def rule_in_words(advice: Advice, said: RuleVerdict | None) -> list[str]:
    """What the common rule of thumb says here, and whether it misleads, computed from the estimates."""
    if not advice.fitting:
        return [_nothing_fits(advice)]
    if said is None:
        return []
    begin = [f"The common rule: {RULE}."]
    begin += [_passed(advice, kind) for kind in said.passed]
    best = said.fastest
    if said.chosen is None:
        other = f"{best.layout.title} does: {in_seconds(best.seconds)} per step."
        return [*begin, f"It finds nothing that fits, but {other}"]
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


def _passed(advice: Advice, kind: str) -> str:
    if kind in advice.too_small:
        multiple = f"{advice.too_small[kind]:,} samples"
        return f"{kind} is not possible: the batch of {advice.training.batch:,} is not a multiple of {multiple}."
    missing = next((misfit.missing for misfit in advice.misfits if misfit.layout.kind == kind), None)
    return f"{kind} is not possible here." if missing is None else f"{kind} does not fit: {size(missing)} are missing."


def _nothing_fits(advice: Advice) -> str:
    asked = advice.training
    least = min((misfit.missing for misfit in advice.misfits), default=None)
    if least is None:
        return (
            f"Nothing is possible: no mesh of {asked.devices:,} devices divides the batch of {asked.batch:,} samples."
        )
    more = devices_needed(asked)
    fix = f"; it fits on {more:,} devices" if more else "; no number of these devices is enough, use more memory each"
    return f"Nothing fits: at least {size(least)} per device are missing{fix}."


# ---- one layout, and estimates compared with published runs

FIGURE_HEADS = ("modelled", "value", "80 % range")
PART_HEADS = ("part of a step", "time", "of the step")
CHECK_HEADS = (
    *("rows", "number", "not computed", "speed: median", "p90", "memory: median", "p90", "speed in range"),
    *("memory in range", "fits right", "groups", "order", "regret: median", "worst"),
)
REFUSED_HEADS = ("line", "source", "model", "not computed, because")
_NEAREST = 3
_SHOWN = 1e-4  # of a step


class Estimated(Tables):
    """The estimate of one layout: figures with their 80 % ranges, the parts of a step, and the nearest published runs.
    All but the last are modelled."""

    def __init__(self, estimate: Estimate):
        self.estimate = estimate
        self.nearest = evidence(estimate.training, estimate.layout, _NEAREST)

    @property
    def title(self) -> str:
        """What is trained, on what, and how it is split."""
        layout = self.estimate.layout
        batch = f"{layout.micro_batches} micro-batches of {layout.micro_batch}"
        how = f"{layout.title}, {batch}, {layout.framework.title}, {'compiled' if layout.compiled else 'eager'}"
        return f"{in_words(self.estimate.training)}; {how}: all figures are modelled"

    def tables(self) -> list[tuple[Sequence[str], Rows]]:
        """Figures, parts, and the nearest runs."""
        estimate, ranges = self.estimate, self.estimate.ranges
        words = {
            "seconds": ("time per step", in_seconds),
            "tokens_per_second_per_gpu": ("tokens/s per GPU", lambda value: f"{value:,.0f}"),
            "mfu": ("MFU", lambda value: f"{value:.1%}"),
            "memory_bytes": ("memory per GPU", size),
        }
        figures = [
            (title, shown(getattr(estimate, name)), f"{shown(ranges[name][0])} to {shown(ranges[name][1])}")
            for name, (title, shown) in words.items()
        ]
        parts = [
            (PARTS[name][1].removeprefix("the "), in_seconds(seconds), f"{seconds / estimate.seconds:.1%}")
            for name, seconds in estimate.parts.items()
            if seconds > _SHOWN * estimate.seconds
        ]
        nearest = [
            evidence_cells(estimate.layout.title, estimate.tokens_per_second_per_gpu, estimate.memory.total, near)
            for near in self.nearest
        ]
        heads = (EVIDENCE_HEADS[-1], *EVIDENCE_HEADS[1:-1])  # without the layout, which is the same in all rows
        rows = [(cells[-1], *cells[1:-1]) for cells in nearest]
        return [(FIGURE_HEADS, figures), (PART_HEADS, parts), (heads, rows)]

    @property
    def sentences(self) -> list[str]:
        """Whether it fits, and what the framework's row is based on."""
        estimate = self.estimate
        usable = estimate.layout.framework.usable * estimate.training.memory
        fits = f"It does not fit: {size(estimate.memory.total - usable)} are missing."
        if estimate.fits:
            fits = f"It fits: {size(usable - estimate.memory.total)} of {size(usable)} that can be used are left."
        framework = estimate.layout.framework
        known = "published runs of it were fitted" if framework.fitted else "no runs of it were fitted"
        return [fits, f"Framework: {framework.title} ({framework.source}); {known}."]

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain values. Sizes are in bytes, times in seconds."""
        estimate, asked = self.estimate, self.estimate.training
        return {
            **_training_json(asked),
            "framework": estimate.layout.framework.name,
            "fits": estimate.fits,
            **estimate_json(estimate),
            "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
            "ranges": {name: list(both) for name, both in estimate.ranges.items()},
            "nearest": [evidence_json(near) for near in self.nearest],
        }


class Comparison(Tables):
    """How well the estimates of a file of published runs agree with what was measured."""

    def __init__(self, checked: Checked):
        self.checked = checked

    @property
    def title(self) -> str:
        """Which file."""
        computed = len(self.checked.pairs)
        return f"{self.checked.path.name}: {computed:,} of {computed + len(self.checked.refused):,} rows are computed"

    def tables(self) -> list[tuple[Sequence[str], Rows]]:
        """The agreement by source and by part, and the rows that are not computed."""
        refused = [(str(row.line), row.source, row.title, row.reason) for row in self.checked.refused]
        computed = [_checked_cells(agreement) for agreement in self.checked.agreements]
        return [(CHECK_HEADS, computed), (REFUSED_HEADS, refused)] if refused else [(CHECK_HEADS, computed)]

    @property
    def sentences(self) -> list[str]:
        """What the columns mean, and which rows were fitted."""
        used = Counter(pair.run.layout.framework.title for pair in self.checked.pairs)
        fitted = sorted(
            framework.title for framework in FRAMEWORKS.values() if framework.fitted and framework.title in used
        )
        fitted = [title for title in fitted if "," not in title]  # not the variants of a row
        return [
            "Errors: |modelled / measured − 1|, of tokens/s and of peak memory per GPU; p90: nine tenths of the rows"
            " have at most this error. In range: the part of the measured figures in their 80 % range.",
            "Fits right: the part of the rows that survived or failed as modelled. Order: Spearman's rank correlation"
            f" of the layouts of a model on some GPUs, the median of the groups of at least {FEWEST}. Regret: measured"
            " speed of the layout that is ranked first, relative to the best measured one.",
            f"Constants were fitted to published runs of {', '.join(fitted) or 'none of these frameworks'}"
            " (labkit/MEASUREMENTS.md says which, and how large the errors are for runs that were left out).",
        ]

    def to_json(self) -> dict[str, Any]:
        """The table and the rows that are not computed, as plain values."""
        return {
            "source": "modelled against measured",
            "file": str(self.checked.path),
            "rows": [_agreement_json(agreement) for agreement in self.checked.agreements],
            "not_computed": [vars(row) for row in self.checked.refused],
            "sentences": self.sentences,
        }


def _checked_cells(agreement: Agreement) -> tuple[str, ...]:
    return (
        agreement.name,
        f"{agreement.rows:,}",
        f"{agreement.refused:,}",
        *_percents(agreement.speed, 2),
        *_percents(agreement.memory, 2),
        *_percents((agreement.within_speed, agreement.within_memory, agreement.fits), 3),
        str(agreement.groups),
        "–" if agreement.order is None else f"{agreement.order:.2f}",
        *(("–", "–") if agreement.regret is None else (f"{value:.2f}" for value in agreement.regret)),
    )


def _percents(values: Sequence[float | None] | None, count: int) -> tuple[str, ...]:
    known = values if values is not None else (None,) * count
    return tuple("–" if value is None else f"{value:.1%}" for value in known)


def _agreement_json(agreement: Agreement) -> dict[str, Any]:
    pairs = {"speed_error": agreement.speed, "memory_error": agreement.memory}
    return {
        "name": agreement.name,
        "rows": agreement.rows,
        "not_computed": agreement.refused,
        **{name: both and {"median": both[0], "p90": both[1]} for name, both in pairs.items()},
        "speed_in_range": agreement.within_speed,
        "memory_in_range": agreement.within_memory,
        "fits_right": agreement.fits,
        "groups": agreement.groups,
        "rank_correlation": agreement.order,
        "regret": agreement.regret and {"median": agreement.regret[0], "worst": agreement.regret[1]},
    }
