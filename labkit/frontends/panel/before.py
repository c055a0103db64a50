"""Above the charts of the Live tab: until the first steps, the expected or predicted memory and traffic, then the
start-up of each rank; afterwards, what the learner predicted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import ipywidgets

from labkit.analysis.prediction import how_made, step_in_words
from labkit.analysis.theory import Flow, states, theory
from labkit.common.text import escape
from labkit.common.units import counted, size
from labkit.figures import rank_colour
from labkit.figures.prediction import Prediction, table_html
from labkit.figures.tables import guess_html, speed_html
from labkit.frontends.panel.guess import GuessFields
from labkit.frontends.panel.predict import Predict
from labkit.plan.spec import Spec
from labkit.record.documents import Plan
from labkit.record.startup import is_starting, table
from labkit.record.state import RunState

_REFUSED = '<div class="labkit-notes"><p>This configuration cannot run; see the message above the Run button.</p></div>'
_DEBOUNCE = 0.15  # seconds without another change after which the formulas are evaluated


class Before:
    """A strip above the charts, the fields for the learner's prediction, and the button that predicts what is `chosen`.
    Once every rank has finished a step, the strip has what the learner predicted, or is hidden.

    `plan` may be called on every change: only the last configuration is looked up and computed, in a thread.
    `on_prediction` is called in that thread, when the prediction of a Spec is shown.
    """

    def __init__(self, chosen: Callable[[], Spec | None], on_prediction: Callable[[Spec, Plan], None]) -> None:
        self.widget = ipywidgets.HTML(layout={"display": "none"})
        self.widget.add_class("labkit-before")
        self.predict = Predict(chosen, self.plan, self._predicted)
        self.guess = GuessFields(self.predict.machine)
        self._on_prediction = on_prediction
        self._lock = threading.Lock()
        self._newest = 0  # of the calls
        self._planned: Spec | None = None  # that the strip is about

    def plan(self, spec: Spec | None) -> None:
        """Shows after a short delay what is predicted for a Spec, or else what the formulas say; None: the
        configuration cannot run."""
        self.predict.choose(spec)
        with self._lock:
            self._newest += 1
            self._planned = spec
            timer = threading.Timer(_DEBOUNCE, self._compute, (self._newest, spec))
        timer.daemon = True
        timer.start()

    def _predicted(self, spec: Spec) -> None:
        if spec == self._planned:
            self.plan(spec)

    def _compute(self, call: int, spec: Spec | None) -> None:
        if call != self._newest:
            return  # superseded by another change, or a run has started
        known = self.predict.known(spec) if spec else None
        html = plan_html(spec, known, self.predict.untimed(spec)) if spec else _REFUSED
        with self._lock:
            if call != self._newest:
                return
            self._show(html)
            self.guess.show(spec is not None)
        if spec and known and not isinstance(known, str):
            self._on_prediction(spec, known)

    def draw(self, state: RunState) -> None:
        """Shows the start-up of each rank until the first steps, then what the learner predicted."""
        with self._lock:
            self._newest += 1
            self._planned = None
            self._show(startup_html(state) if is_starting(state) else guess_html(state) + speed_html(state))
            self.guess.show(False)

    def _show(self, html: str) -> None:
        if self.widget.value != html:
            self.widget.value = html
        self.widget.layout.display = "" if html else "none"


def plan_html(spec: Spec, known: Plan | str | None = None, untimed: str = "") -> str:
    """The memory and traffic of each rank of a Spec: predicted, if its prediction is `known`, and otherwise by formula,
    below the sentence that is known about its prediction; `untimed` says why it has no time of a step."""
    what = f"{spec.strategy_row.title} · {spec.workload} on {spec.data} · {counted(spec.processes, 'rank')}"
    if known and not isinstance(known, str):
        time = f"{_source(known)}, {step}." if (step := step_in_words(known)) else untimed
        if why := known.untimed:
            time = f"{why[0].upper()}{why[1:]}."
        how = f"{what}. Predicted {how_made(known)}, bytes at the peak. {time}"
        title, found = f"<p><b>Next run (predicted)</b> {escape(how)}</p>", Prediction(known)
        return f'<div class="labkit-notes">{title}</div>{table_html(found.heads, found.rows)}'
    said = f'<p role="status">{escape(known)}</p>' if known else ""
    note, table = _by_formula(spec)
    title = f"<p><b>Next run (expected)</b> {escape(what)}. {escape(note)}</p>"
    return f'<div class="labkit-notes">{said}{title}</div>{table}'


def _source(plan: Plan) -> str:
    """Where the time of a step comes from, in the few words for which there is room."""
    return f"Modelled for {plan.time.links}" if plan.time and plan.time.modelled else "By simulation"


def _by_formula(spec: Spec) -> tuple[str, str]:
    """What the formulas say about a Spec: a note, and a table of the ranks, which is empty without a formula for
    memory."""
    held, flows, ranks = states(spec), theory(spec), spec.processes
    if held is None:
        return f"There is no memory formula for {spec.strategy_row.title}. {_sent(spec, flows)}", ""
    mean = "–" if flows is None else size(sum(flow.theory for flow in flows) / ranks)
    sends = "sent per step (mean)" if ranks > 1 else "sent per step"
    head = ("rank", "parameters", "gradients", "optimizer state", "total state", sends)
    sizes = [map(size, (one.parameters, one.gradients, one.optimizer, one.total)) for one in held]
    rows = [(str(rank), *cells, mean) for rank, cells in enumerate(sizes)]
    return f"Activations and buffers are not included. {_sent(spec, flows)}", _table(head, rows)


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
