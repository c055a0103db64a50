"""What the Live tab shows above its charts until there are steps: what will run, by formula, then how far each rank is."""

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

_REFUSED = '<div class="labkit-told"><p>These choices cannot run; the sentence above the Run button says why.</p></div>'
_DEBOUNCE = 0.15  # seconds without another choice after which the formulas are computed


class Before:
    """A strip that is as high as it needs to be, and gone once every rank has finished a step.

    `plan` may be called at every choice: the formulas of the last one are computed in a thread, when no other choice has
    followed.
    """

    def __init__(self) -> None:
        self.widget = ipywidgets.HTML(layout={"display": "none"})
        self.widget.add_class("labkit-before")
        self._lock = threading.Lock()
        self._newest = 0  # of the calls

    def plan(self, spec: Spec | None) -> None:
        """Shows soon what the ranks of a Spec will hold and send; None stands for choices that cannot run."""
        with self._lock:
            self._newest += 1
            timer = threading.Timer(_DEBOUNCE, self._compute, (self._newest, spec))
        timer.daemon = True
        timer.start()

    def _compute(self, call: int, spec: Spec | None) -> None:
        if call != self._newest:
            return  # another choice has followed, or a run has begun
        html = plan_html(spec) if spec else _REFUSED
        with self._lock:
            if call == self._newest:
                self._show(html)

    def draw(self, state: RunState) -> None:
        """Shows how far the ranks of a run have come, as long as they start."""
        with self._lock:
            self._newest += 1
            self._show(startup_html(state) if is_starting(state) else "")

    def _show(self, html: str) -> None:
        if self.widget.value != html:
            self.widget.value = html
        self.widget.layout.display = "" if html else "none"


def plan_html(spec: Spec) -> str:
    """What each rank of a Spec will hold and send, with the words that it is by formula."""
    held, flows, ranks = states(spec), theory(spec), spec.processes
    what = f"{spec.strategy_row.title} · {spec.workload} on {spec.data} · {counted(ranks, 'rank')}"
    title = f"<b>Next run, by formula</b> {escape(what)}"
    if held is None:
        rest = f"no formula says what {spec.strategy_row.title} keeps on a rank; {_sent(flows)}"
        return f'<div class="labkit-told"><p>{title}</p><p>{escape(rest)}</p></div>'
    mean = size(sum(flow.theory for flow in flows) / ranks)
    sends = "sends per step (mean)" if ranks > 1 else "sends per step"
    head = ("rank", "parameters", "gradients", "optimizer state", "kept from step to step", sends)
    sizes = [map(size, (one.parameters, one.gradients, one.optimizer, one.total)) for one in held]
    rows = [(str(rank), *cells, mean) for rank, cells in enumerate(sizes)]
    note = f"Activations and buffers come on top. {_sent(flows)}"
    return f'<div class="labkit-told"><p>{title}. {escape(note)}</p></div>{_table(head, rows)}'


def _sent(flows: Sequence[Flow]) -> str:
    """`Sent per step, all ranks: all_reduce 3.1 MiB = 2(n−1)/n · 4P per rank`."""
    told = []
    for op in dict.fromkeys(flow.op for flow in flows if flow.theory):
        same = [flow for flow in flows if flow.op == op and flow.theory]
        formula = " + ".join(dict.fromkeys(flow.formula for flow in same))
        told.append(f"{op} {size(sum(flow.theory for flow in same))} = {formula}")
    return f"Sent per step, all ranks: {'; '.join(told) or 'nothing'}"


def startup_html(state: RunState) -> str:
    """How far each rank has come, with the seconds since the run was asked for."""
    head, *rows = table(state)
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(_row(rank, cells) for rank, *cells in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _row(rank: str, cells: Sequence[str]) -> str:
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><td><i style="background:{rank_colour(int(rank))}"></i>{rank}</td>{texts}</tr>'
