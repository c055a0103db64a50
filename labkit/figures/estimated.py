"""One layout that was asked for, and estimates compared with published runs, as text, HTML tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.common.text import escape, visible
from labkit.common.units import size
from labkit.figures.advice import PARTS, estimate_json, in_seconds
from labkit.figures.atlas import EVIDENCE_HEADS, evidence_cells, evidence_json
from labkit.figures.prediction import table_html
from labkit.figures.tables import table_text
from labkit.prediction.scale.advice import in_words
from labkit.prediction.scale.atlas import evidence
from labkit.prediction.scale.check import FEWEST, Agreement, Checked
from labkit.prediction.scale.layouts import FRAMEWORKS
from labkit.prediction.scale.step import Estimate

FIGURE_HEADS = ("modelled", "value", "80 % range")
PART_HEADS = ("part of a step", "time", "of the step")
CHECK_HEADS = (
    "rows",
    "number",
    "not computed",
    "speed: median",
    "p90",
    "memory: median",
    "p90",
    "speed in range",
    "memory in range",
    "fits right",
    "groups",
    "order",
    "regret: median",
    "worst",
)
REFUSED_HEADS = ("line", "source", "model", "not computed, because")
_NEAREST = 3
_SHOWN = 1e-4  # of a step


class _Tables:
    """What shows a title, tables and sentences as text, and as HTML in a notebook."""

    title: str

    def tables(self) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
        """The heads and the rows of each table that has any."""
        raise NotImplementedError

    @property
    def sentences(self) -> list[str]:
        """What follows the tables."""
        raise NotImplementedError

    def __repr__(self) -> str:
        tables = (table_text(heads, rows) for heads, rows in self.tables())
        return visible("\n\n".join([self.title, *tables, "\n".join(self.sentences)]))

    def _repr_html_(self) -> str:
        tables = "".join(table_html(heads, rows) for heads, rows in self.tables())
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        title = f'<div class="labkit-notes"><p>{escape(self.title)}</p></div>'
        return f'{title}{tables}<div class="labkit-notes">{said}</div>'


class Estimated(_Tables):
    """The estimate of one layout: figures with their 80 % ranges, the parts of a step, and the nearest published runs.
    All but the last are modelled."""

    def __init__(self, estimate: Estimate):
        self.estimate = estimate
        self.nearest = evidence(estimate.training, estimate.layout, _NEAREST)

    @property
    def title(self) -> str:  # type: ignore[override]
        """What is trained, on what, and how it is split."""
        layout = self.estimate.layout
        batch = f"{layout.micro_batches} micro-batches of {layout.micro_batch}"
        how = f"{layout.title}, {batch}, {layout.framework.title}, {'compiled' if layout.compiled else 'eager'}"
        return f"{in_words(self.estimate.training)}; {how}: all figures are modelled"

    def tables(self) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
        """Figures, parts, and the nearest runs."""
        one, found = self.estimate, self.estimate.ranges
        words = {
            "seconds": ("time per step", in_seconds),
            "tokens_per_second_per_gpu": ("tokens/s per GPU", lambda value: f"{value:,.0f}"),
            "mfu": ("MFU", lambda value: f"{value:.1%}"),
            "memory_bytes": ("memory per GPU", size),
        }
        figures: list[tuple[str, ...]] = [
            (title, shown(getattr(one, name)), f"{shown(found[name][0])} to {shown(found[name][1])}")
            for name, (title, shown) in words.items()
        ]
        parts: list[tuple[str, ...]] = [
            (PARTS[name][1].removeprefix("the "), in_seconds(seconds), f"{seconds / one.seconds:.1%}")
            for name, seconds in one.parts.items()
            if seconds > _SHOWN * one.seconds
        ]
        nearest = [
            evidence_cells(one.layout.title, one.tokens_per_second_per_gpu, one.memory.total, near)
            for near in self.nearest
        ]
        heads = (EVIDENCE_HEADS[-1], *EVIDENCE_HEADS[1:-1])  # without the layout, which is the same in all rows
        rows = [(cells[-1], *cells[1:-1]) for cells in nearest]
        return [(FIGURE_HEADS, figures), (PART_HEADS, parts), (heads, rows)]

    @property
    def sentences(self) -> list[str]:
        """Whether it fits, and what the framework's row is based on."""
        one = self.estimate
        usable = one.layout.framework.usable * one.training.memory
        fits = (
            f"It fits: {size(usable - one.memory.total)} of {size(usable)} that can be used are left."
            if one.fits
            else f"It does not fit: {size(one.memory.total - usable)} are missing."
        )
        framework = one.layout.framework
        known = "published runs of it were fitted" if framework.fitted else "no runs of it were fitted"
        return [fits, f"Framework: {framework.title} ({framework.source}); {known}."]

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain values. Sizes are in bytes, times in seconds."""
        one, asked = self.estimate, self.estimate.training
        return {
            "source": "modelled",
            "model": {**vars(asked.model), "parameters": asked.model.parameters},
            "machine": asked.machine.name,
            "devices": asked.devices,
            "batch": asked.batch,
            "sequence": asked.sequence,
            "precision": asked.precision,
            "framework": one.layout.framework.name,
            "fits": one.fits,
            **estimate_json(one),
            "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
            "ranges": {name: list(both) for name, both in one.ranges.items()},
            "nearest": [evidence_json(near) for near in self.nearest],
        }


class Comparison(_Tables):
    """How well the estimates of a file of published runs agree with what was measured."""

    def __init__(self, checked: Checked):
        self.checked = checked

    @property
    def title(self) -> str:  # type: ignore[override]
        """Which file."""
        computed = len(self.checked.pairs)
        return f"{self.checked.path.name}: {computed:,} of {computed + len(self.checked.refused):,} rows are computed"

    def tables(self) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
        """The agreement by source and by part, and the rows that are not computed."""
        refused: list[tuple[str, ...]] = [
            (str(row.line), row.source, row.title, row.reason) for row in self.checked.refused
        ]
        tables: list[tuple[Sequence[str], list[tuple[str, ...]]]] = [
            (CHECK_HEADS, [_cells(agreement) for agreement in self.checked.agreements])
        ]
        return [*tables, (REFUSED_HEADS, refused)] if refused else tables

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


def _cells(one: Agreement) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.rows:,}",
        f"{one.refused:,}",
        *_percents(one.speed, 2),
        *_percents(one.memory, 2),
        *_percents((one.within_speed, one.within_memory, one.fits), 3),
        str(one.groups),
        "–" if one.order is None else f"{one.order:.2f}",
        *(("–", "–") if one.regret is None else (f"{value:.2f}" for value in one.regret)),
    )


def _percents(values: Sequence[float | None] | None, count: int) -> tuple[str, ...]:
    known = values if values is not None else (None,) * count
    return tuple("–" if value is None else f"{value:.1%}" for value in known)


def _agreement_json(one: Agreement) -> dict[str, Any]:
    pairs = {"speed_error": one.speed, "memory_error": one.memory}
    return {
        "name": one.name,
        "rows": one.rows,
        "not_computed": one.refused,
        **{name: both and {"median": both[0], "p90": both[1]} for name, both in pairs.items()},
        "speed_in_range": one.within_speed,
        "memory_in_range": one.within_memory,
        "fits_right": one.fits,
        "groups": one.groups,
        "rank_correlation": one.order,
        "regret": one.regret and {"median": one.regret[0], "worst": one.regret[1]},
    }
