"""The button that predicts what is chosen, and what is known about the prediction of a Spec."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import ipywidgets

from labkit.analysis.prediction import how_made
from labkit.launch.warm.client import tracing
from labkit.plan.spec import Spec
from labkit.prediction.devices import ACCELERATED, DEVICES, HERE
from labkit.prediction.predict import cached, predict
from labkit.prediction.timing import modelled, timed
from labkit.prediction.tracer import TRACER, Cancelled, TraceFailed
from labkit.record.documents import Plan

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
        self.button = ipywidgets.Button(description=_TITLE, tooltip=_HINT, disabled=True)
        self.button.on_click(lambda _: self._start())
        self.button.add_class("labkit-predict")
        names = [("this machine", HERE), *((name, name) for name in ACCELERATED)]
        self.machine = ipywidgets.Dropdown(options=names, value=HERE, description="Predict for", tooltip=_FOR)
        self.machine.add_class("labkit-guess-field")
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
        arguments = spec, self.machine.value, self._cancel
        threading.Thread(target=self._predict, args=arguments, daemon=True, name="labkit prediction").start()

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
