"""Above the charts of the Live tab until the first steps: the expected memory and traffic, then the start-up of each
rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ipywidgets

from labkit.analysis.theory import Flow, states, theory
from labkit.common.text import escape
from labkit.common.units import counted, size
from labkit.figures import rank_colour
from labkit.plan.spec import Spec
from labkit.record.startup import is_starting, table
from labkit.record.state import RunState

_REFUSED = '<div class="labkit-notes"><p>This configuration cannot run; see the message above the Run button.</p></div>'
_DEBOUNCE = 0.15  # seconds without another change after which the formulas are evaluated


class Before:
    """A strip above the charts, hidden once every rank has finished a step.

    `plan` may be called on every change: only the formulas of the last configuration are evaluated, in a thread.
    """

    def __init__(self) -> None:
        self.widget = ipywidgets.HTML(layout={"display": "none"})
        self.widget.add_class("labkit-before")
        self._lock = threading.Lock()
        self._newest = 0  # of the calls

    def plan(self, spec: Spec | None) -> None:
        """Shows the expected memory and traffic of a Spec after a short delay; None: the configuration cannot run."""
        with self._lock:
            self._newest += 1
            timer = threading.Timer(_DEBOUNCE, self._compute, (self._newest, spec))
        timer.daemon = True
        timer.start()

    def _compute(self, call: int, spec: Spec | None) -> None:
        if call != self._newest:
            return  # superseded by another change, or a run has started
        html = plan_html(spec) if spec else _REFUSED
        with self._lock:
            if call == self._newest:
                self._show(html)

    def draw(self, state: RunState) -> None:
        """Shows the start-up of each rank until the first steps."""
        with self._lock:
            self._newest += 1
            self._show(startup_html(state) if is_starting(state) else "")

    def _show(self, html: str) -> None:
        if self.widget.value != html:
            self.widget.value = html
        self.widget.layout.display = "" if html else "none"


def plan_html(spec: Spec) -> str:
    """The expected memory and traffic of each rank of a Spec, labelled as computed by formula."""
    held, flows, ranks = states(spec), theory(spec), spec.processes
    what = f"{spec.strategy_row.title} · {spec.workload} on {spec.data} · {counted(ranks, 'rank')}"
    title = f"<b>Next run (expected)</b> {escape(what)}"
    if held is None:
        rest = f"there is no memory formula for {spec.strategy_row.title}; {_sent(spec, flows)}"
        return f'<div class="labkit-notes"><p>{title}</p><p>{escape(rest)}</p></div>'
    mean = "–" if flows is None else size(sum(flow.theory for flow in flows) / ranks)
    sends = "sent per step (mean)" if ranks > 1 else "sent per step"
    head = ("rank", "parameters", "gradients", "optimizer state", "total state", sends)
    sizes = [map(size, (one.parameters, one.gradients, one.optimizer, one.total)) for one in held]
    rows = [(str(rank), *cells, mean) for rank, cells in enumerate(sizes)]
    note = f"Activations and buffers are not included. {_sent(spec, flows)}"
    return f'<div class="labkit-notes"><p>{title}. {escape(note)}</p></div>{_table(head, rows)}'


def _sent(spec: Spec, flows: Sequence[Flow] | None) -> str:
    """`Sent per step, all ranks: all_reduce 3.1 MiB = 2(n−1)/n · 4P per rank`."""
    if flows is None:
        return f"Sent per step: there is no formula for {spec.strategy_row.title}"
    parts = []
    for op in dict.fromkeys(flow.op for flow in flows if flow.theory):
        same = [flow for flow in flows if flow.op == op and flow.theory]
        formula = " + ".join(dict.fromkeys(flow.formula for flow in same))
        parts.append(f"{op} {size(sum(flow.theory for flow in same))} = {formula}")
    return f"Sent per step, all ranks: {'; '.join(parts) or 'nothing'}"


def startup_html(state: RunState) -> str:
    """The start-up milestones of each rank, with the seconds since launch."""
    head, *rows = table(state)
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(_row(rank, cells) for rank, *cells in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _row(rank: str, cells: Sequence[str]) -> str:
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><td><i style="background:{rank_colour(int(rank))}"></i>{rank}</td>{texts}</tr>'
