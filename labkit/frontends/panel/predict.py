"""Before a run: the button that predicts, the learner's own guess, and what is shown above the charts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import ipywidgets

from labkit.analysis.guess import FIGURES
from labkit.analysis.prediction import how_made, step_in_words
from labkit.analysis.theory.formulas import Flow, states, theory
from labkit.common.text import escape
from labkit.common.units import counted, size
from labkit.figures import rank_colour
from labkit.figures.tables import Prediction, guess_html, table_html
from labkit.frontends.panel import widgets
from labkit.frontends.panel.widgets import sentence_html
from labkit.launch.warm.client import tracing
from labkit.plan.spec import Spec
from labkit.prediction.devices import ACCELERATED, DEVICES, HERE
from labkit.prediction.predict import cached, predict
from labkit.prediction.timing import modelled, timed
from labkit.prediction.tracer import TRACER, Cancelled, TraceFailed
from labkit.record.documents import Plan
from labkit.record.state import RunState, is_starting, start_table
from labkit.runs.guesses import Guess, check_guess, guess, withdraw

# ---- the learner's own guess

_NAMES = ("peak_mb", "step_ms")
_GUESS_HINT = "What do you expect? The run stores your guess and compares it with the measurement"


class GuessFields:
    """A row with one field per figure, and behind them other widgets about the next run. `enter` makes what is written
    in the fields the prediction of that run."""

    def __init__(self, *others: ipywidgets.Widget) -> None:
        self.fields = {name: _field(name) for name in _NAMES}
        for field in self.fields.values():
            field.observe(lambda _: self._check(), "value")
        head, self._wrong = widgets.HTML("<b>Your guess</b>"), widgets.HTML()
        self.widget = widgets.HBox(
            [head, *self.fields.values(), *others, self._wrong], layout=widgets.HIDDEN, css="labkit-guesses"
        )
        self._entered: list[Guess] = []

    def _check(self) -> None:
        """Says at once if what is written is no value of its figure."""
        self._wrong.value = ""
        for name, field in self.fields.items():
            try:
                if text := field.value.strip():
                    check_guess(name, _number(text))
            except ValueError as error:
                self._wrong.value = sentence_html(str(error).replace(name, FIGURES[name].label, 1))

    def show(self, shown: bool) -> None:
        widgets.show(self.widget, shown)

    def enter(self) -> None:
        """Predicts the figures of all fields that are not empty. Raises `ValueError` for a text that is no such
        value."""
        withdraw(self._entered)
        texts = {name: field.value.strip() for name, field in self.fields.items()}
        self._entered = [guess(name, _number(text)) for name, text in texts.items() if text]

    def clear(self) -> None:
        """Empties the fields, after a run has stored what they contained."""
        self._entered = []
        for field in self.fields.values():
            field.value = ""


def _field(name: str) -> ipywidgets.Text:
    figure = FIGURES[name]
    name = f"{figure.label} per rank ({figure.unit})"
    return widgets.Text(
        description=name, placeholder="optional", tooltip=_GUESS_HINT, continuous_update=False, css="labkit-guess-field"
    )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# ---- the button that predicts

_TITLE, _BUSY = "Predict", "Predicting…"
_HINT = "Predict the memory, traffic and time of a step of every rank, without running the script"
_FOR = "The machine for which Predict gives the time of a step: measured on this one, modelled for GPUs"
_UNDER_WAY = "Predicting: the script is traced without data, and its computation measured, in separate processes."
_TIMING = "The time of a step is being predicted: its computation is measured, in separate processes."


class Predict:
    """Predicts one Spec at a time, in a thread; the script is traced in a separate process. The prediction is cancelled
    when something else is chosen.

    `chosen` returns the Spec to predict, or None. `began` and `ended` are called with that Spec when its prediction
    begins, and when `known` has its result: first without the time of a step, then with it. `machine` chooses where a
    step is timed: measured on this machine, or modelled for one of the table, whose GPUs the script then uses.
    """

    def __init__(self, chosen: Callable[[], Spec | None], began: Callable[[Spec], None], ended: Callable[[Spec], None]):
        TRACER.forked = tracing  # the panel has prepared a warm server
        self._chosen, self._began, self._ended = chosen, began, ended
        self._allowed = False
        self._under_way: Spec | None = None
        self._cancel = threading.Event()  # of what is under way
        self._failed: tuple[Spec | None, str] = (None, "")
        self._untimed: tuple[Spec | None, str] = (None, "")
        self._elsewhere: tuple[Spec | None, str, Plan | None] = (None, "", None)  # the newest plan for another machine
        self.button = widgets.button(_TITLE, _HINT, self._start, disabled=True, css="labkit-predict")
        names = [("this machine", HERE), *((name, name) for name in ACCELERATED)]
        self.machine = widgets.dropdown("Predict for", names, HERE, tooltip=_FOR, css="labkit-guess-field")
        self.machine.observe(lambda _: self._move(), names="value")

    def allow(self, allowed: bool) -> None:
        """Sets whether what is chosen can be predicted."""
        self._allowed = allowed
        self._draw()

    def choose(self, spec: Spec | None) -> None:
        """What is chosen now; None: it cannot run. The prediction of another Spec is cancelled."""
        if self._under_way not in (None, spec):
            self._end()

    def _move(self) -> None:
        """Another machine is chosen."""
        self._end()
        self._failed = None, ""
        spec = self._chosen()
        if spec and self._allowed:
            self._began(spec)

    def _end(self) -> None:
        self._cancel.set()
        self._under_way = None
        self._draw()

    def known(self, spec: Spec) -> Plan | str | None:
        """The prediction of a Spec, if it is cached; a sentence, if it is under way or failed; otherwise None."""
        failed, why = self._failed
        said = _UNDER_WAY if spec == self._under_way else why if spec == failed else None
        if self.machine.value != HERE:
            *of, plan = self._elsewhere
            return plan if of == [spec, self.machine.value] else said
        return cached(spec) or said

    def untimed(self, spec: Spec) -> str:
        """Why the prediction of a Spec has no time of a step; empty if it has one, or there is no prediction."""
        if spec == self._under_way:
            return _TIMING
        of, why = self._untimed
        return why if spec == of else ""

    def _time(self, spec: Spec, plan: Plan, cancel: threading.Event) -> None:
        self._ended(spec)  # the memory is known
        try:
            timed(spec, plan, cancel.is_set)
        except (LookupError, TraceFailed) as error:
            self._untimed = spec, f"There is no time of a step: {error}."

    def _draw(self) -> None:
        busy = self._under_way is not None
        self.button.description = _BUSY if busy else _TITLE
        self.button.disabled = busy or not self._allowed
        self.machine.disabled = not self._allowed

    def _start(self) -> None:
        spec = self._chosen()
        if spec is None or self._under_way is not None:
            return
        self._under_way, self._cancel = spec, threading.Event()
        self._draw()
        self._began(spec)
        widgets.in_thread("prediction", self._predict, spec, self.machine.value, self._cancel)

    def _predict(self, spec: Spec, machine: str, cancel: threading.Event) -> None:
        try:
            asked = spec if machine == HERE else replace(spec, device="cuda")
            plan = predict(asked, cancel.is_set)
            if machine != HERE:
                self._elsewhere = spec, machine, modelled(asked, plan, DEVICES[machine], cancel.is_set)
            elif plan.method == "formula":
                self._failed = spec, f"Predicted {how_made(plan)}."
            else:
                self._time(spec, plan, cancel)
        except Cancelled:
            pass
        except ValueError as error:  # the machine lacks something that is chosen
            self._failed = spec, f"{error}."
        except Exception as error:  # show it: an exception in a thread would go unnoticed
            self._failed = spec, f"The prediction failed: {type(error).__name__}: {error}"
        finally:
            if not cancel.is_set():
                self._under_way = None
                self._draw()
                self._ended(spec)


# ---- above the charts of the Live tab

_REFUSED = '<div class="labkit-notes"><p>This configuration cannot run; see the message above the Run button.</p></div>'
_FEW = 4  # ranks that have a row each
_DEBOUNCE = 0.15  # seconds without another change after which the formulas are evaluated


class Before:
    """A strip above the charts, the fields for the learner's prediction, and the button that predicts what is `chosen`.
    Once every rank has finished a step, the strip has what the learner predicted, or is hidden.

    `plan` may be called on every change: only the last configuration is looked up and computed, in a thread.
    `on_prediction` is called in that thread, when the prediction of a Spec is shown.
    """

    def __init__(self, chosen: Callable[[], Spec | None], on_prediction: Callable[[Spec, Plan], None]) -> None:
        self.widget = widgets.HTML(layout=widgets.HIDDEN, css="labkit-before")
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
            widgets.later(_DEBOUNCE, self._compute, self._newest, spec)

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
            self._show(startup_html(state) if is_starting(state) else guess_html(state))
            self.guess.show(False)

    def _show(self, html: str) -> None:
        self.widget.value = html
        widgets.show(self.widget, bool(html))


def plan_html(spec: Spec, known: Plan | str | None = None, untimed: str = "") -> str:
    """The memory and traffic of each rank of a Spec: predicted, if its prediction is `known`, and otherwise by formula,
    below the sentence that is known about its prediction; `untimed` says why it has no time of a step."""
    what = f"{spec.strategy_row.title} · {spec.workload} on {spec.data} · {counted(spec.processes, 'rank')}"
    if known and not isinstance(known, str):
        time = f"{_source(known)}, {step}." if (step := step_in_words(known)) else untimed
        if why := known.untimed:
            time = f"{why[0].upper()}{why[1:]}."
        how = f"{what}. Predicted {how_made(known)}, bytes at the peak. {time}"
        title, found = f"<p><b>What each rank will hold and send (predicted)</b> {escape(how)}</p>", Prediction(known)
        return f'<div class="labkit-notes">{title}</div>{table_html(found.heads, found.rows)}'
    said = f'<p role="status">{escape(known)}</p>' if known else ""
    note, table = _by_formula(spec)
    title = f"<p><b>What each rank will hold and send (by formula)</b> {escape(what)}. {escape(note)}</p>"
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
    sizes = [
        map(size, (rank_states.parameters, rank_states.gradients, rank_states.optimizer, rank_states.total))
        for rank_states in held
    ]
    rows = [(str(rank), *cells, mean) for rank, cells in enumerate(sizes)]
    shown = rows if ranks <= _FEW else list(_merged(rows))
    return f"Activations and buffers are not included. {_sent(spec, flows)}", _table(head, shown)


def _merged(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """One row for neighbouring ranks with the same figures: `0–7`."""
    for figures, group in groupby(rows, key=lambda row: row[1:]):
        same = [row[0] for row in group]
        yield (same[0] if len(same) == 1 else f"{same[0]}–{same[-1]}", *figures)


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
    head, *rows = start_table(state)
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(_row(rank, cells) for rank, *cells in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _row(rank: str, cells: Sequence[str]) -> str:
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    colours = "".join(f'<i style="background:{rank_colour(number)}"></i>' for number in _numbers(rank))
    return f"<tr><td>{colours}{rank}</td>{texts}</tr>"


def _numbers(ranks: str) -> range:
    first, _, last = ranks.partition("–")
    return range(int(first), int(last or first) + 1)
