"""Comparison of strategies on the same training: `plan` resolves all Specs before the first run, `Comparing` runs them
in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.analysis.comparison import Badge, Row, document, recorded_elsewhere, rows
from labkit.analysis.guess import SPEEDUP
from labkit.common.arguments import check_seconds, shown
from labkit.plan.spec import Spec, SpecError, about, check_fields
from labkit.runs.guesses import PENDING, Guess, ask_for
from labkit.runs.handle import Run, begin, settle
from labkit.runs.notebook import cell, in_notebook
from labkit.training.strategies import BASELINE, STRATEGIES

if TYPE_CHECKING:
    import plotly.graph_objects as go


def plan(strategies: Sequence[str] | str, *, look: bool = True, **fields: Any) -> tuple[list[Spec], dict[str, str]]:
    """The Specs of a comparison, resolved for this machine, the baseline first; and the excluded strategies with the
    reason.

    `strategies` are names, or "all". With "all", strategies that cannot run here are excluded; otherwise the first of
    them raises `SpecError`. `fields` are fields of Spec. The global batch size is the same for all strategies
    (`scaling` defaults to strong), and an option applies to the strategies that have it. The baseline is added if it
    can run. Without `look`, nothing that takes long is looked for (see `settle`).
    """
    everything = isinstance(strategies, str) and strategies == "all"
    names = list(STRATEGIES) if everything else _names(strategies)
    check_fields(fields)
    for name in fields:
        if not about(Spec.__dataclass_fields__[name]).compared:
            raise SpecError(name, f"{name} cannot be used in a comparison; name the strategies in the first argument")
    if not names:
        raise SpecError("strategies", f"strategies must not be empty; name some of {', '.join(STRATEGIES)}, or all")
    specs, left_out = [], {}
    for name in dict.fromkeys((BASELINE.name, *names)):
        try:
            specs.append(_settled(name, names, look, fields))
        except SpecError as error:
            if not everything and name in names:
                raise SpecError(error.field, f"{name} cannot be compared: {error}") from None
            left_out[name] = str(error)
    if not specs:
        raise SpecError(
            "strategies", f"no strategy can run on this machine; the first reason: {next(iter(left_out.values()))}"
        )
    return specs, left_out


def _names(strategies: Sequence[str] | str) -> list[str]:
    """The strategies, without duplicates; a single name does not need a list."""
    if not isinstance(strategies, (str, list, tuple, set, frozenset, Mapping)):
        raise SpecError(
            "strategies",
            f"strategies must be a list of names such as ['ddp', 'fsdp2'], or 'all', got {shown(strategies)}",
        )
    names = [strategies] if isinstance(strategies, str) else list(strategies)
    for name in names:
        if not isinstance(name, str) or name not in STRATEGIES:
            raise SpecError("strategies", f"strategy must be one of {', '.join(STRATEGIES)}, or all, got {shown(name)}")
    return list(dict.fromkeys(names))


def _settled(name: str, names: Sequence[str], look: bool, fields: Mapping[str, Any]) -> Spec:
    row = STRATEGIES[name]
    asked = {"scaling": "strong", "tensors": True, **fields}
    if row.default_nproc == 1:
        asked["nproc"] = 1
    elif asked.get("nproc") is None:
        asked["nproc"] = row.default_nproc
    given = asked.get("options", {})
    if not isinstance(given, Mapping):
        return settle(name, look=look, **asked)  # raises SpecError
    elsewhere = {option.name for other in names for option in STRATEGIES[other].all_options} - {
        option.name for option in row.all_options
    }
    asked["options"] = {option: value for option, value in given.items() if option not in elsewhere}
    return settle(name, look=look, **asked)


class Comparing:
    """Runs the Specs one after another in a separate thread; `rows` has the current figures.

    `show` displays the comparison if it is the last expression of a notebook cell; without it, the cell displays the
    repr.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        left_out: Mapping[str, str] | None = None,
        *,
        cold: bool = False,
        show: Callable[[Comparing], object] | None = None,
    ):
        self.specs = tuple(specs)
        self._cold = cold
        self._show = show
        self.left_out = dict(left_out or {})
        self._runs: list[Run] = []
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._guess: Guess | None = None
        self._badges: dict[str, Badge] = {}
        self._judging = threading.Lock()  # of `_badges`: each badge is computed once, whichever thread asks first
        self.shown_in: int | None = None  # the cell that displayed it last
        self._thread = threading.Thread(target=self._work, daemon=True, name="labkit compare")

    def start(self) -> Comparing:
        """Starts the runs and returns at once; takes the speed-up that the learner has predicted."""
        for self._guess in ask_for([guess for guess in PENDING.values() if guess.figure is SPEEDUP]):
            self._guess.compared_in(lambda: self.rows)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the current run and skips the remaining ones."""
        self._stopping.set()
        for run in self._runs[-1:]:
            run.stop()
        self.wait()

    def wait(self, timeout: float | None = None) -> Comparing:
        """Waits until all runs are over, at most `timeout` seconds. Raises the error of a run that could not be
        started."""
        timeout = check_seconds("timeout", timeout)
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return self

    def __repr__(self) -> str:
        over = [row.over for row in self.rows]
        return (
            f"<Comparing {', '.join(spec.strategy_row.title for spec in self.specs)}: {sum(over)} of {len(over)} over>"
        )

    def _ipython_display_(self) -> None:
        """Displays the comparison as the last expression of a notebook cell, unless the same cell has displayed it
        already."""
        if self._show is None or not in_notebook():
            raise NotImplementedError  # IPython then displays the repr
        if self.shown_in != cell():
            self._show(self)

    @property
    def over(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def runs(self) -> list[Run]:
        return list(self._runs)

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per Spec, in order."""
        started = self.runs
        known = [(run.folder, run.state) for run in started]
        waiting = [
            Row(spec.strategy, spec.strategy_row.title, spec.workload, devices=spec.nproc)
            for spec in self.specs[len(started) :]
        ]
        if self._stopping.is_set():
            waiting = [replace(row, words="not started", over=True) for row in waiting]
        with self._judging:
            return (*rows(known, self._badges), *waiting)

    def watched(self, seconds: float) -> Iterator[tuple[Row, ...]]:
        """The rows, again every `seconds` until all runs are over; `rows` then has the final ones."""
        while not self.over:
            yield self.rows
            time.sleep(seconds)

    def to_json(self) -> dict[str, Any]:
        return document(self.rows, self.left_out)

    def figure(self) -> go.Figure:
        from labkit.figures.comparison import figure

        found = self.rows
        return figure(found, recorded_elsewhere(found))

    def _work(self) -> None:
        guess = self._guess
        try:
            for spec in self.specs:
                if self._stopping.is_set():
                    return
                started = begin(spec, cold=self._cold, guesses=guess.of(spec.strategy) if guess else [])
                self._runs.append(started)
                if self._stopping.is_set():  # stop() was called before this run was listed
                    started.stop()
                started.wait()
        except BaseException as error:  # wait() raises it again
            self._error = error
