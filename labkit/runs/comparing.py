"""The same training by several strategies, one run after another: `plan` settles all Specs before the first starts, `Comparing` runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.analysis.comparison import BASELINE, Row, beside, document, rows
from labkit.analysis.equivalence import Badge
from labkit.common.arguments import check_seconds, shown
from labkit.plan.spec import Spec, SpecError, check_fields
from labkit.runs.handle import Run, run, settle
from labkit.runs.notebook import cell, in_notebook
from labkit.training.strategies import STRATEGIES

if TYPE_CHECKING:
    import plotly.graph_objects as go


def plan(strategies: Sequence[str] | str, **fields: Any) -> tuple[list[Spec], dict[str, str]]:
    """The Specs of a comparison as this machine would run them, the baseline first, and what is left out, with the reason.

    `strategies` are names, or "all": then those that cannot run are left out, where otherwise the first of them raises `SpecError`.
    `fields` are those of Spec. The global batch is the same for all (`scaling` is strong if nothing is said), and an option goes to
    the strategies that have it. The baseline is added where it can run.
    """
    everything = isinstance(strategies, str) and strategies == "all"
    names = list(STRATEGIES) if everything else _names(strategies)
    check_fields(fields)
    for name in ("strategy", "script", "args", "as_module"):
        if name in fields:
            raise SpecError(name, f"{name} does not go with a comparison, which runs strategies; name them in the first argument")
    if not names:
        raise SpecError("strategies", f"no strategy was named; name some of {', '.join(STRATEGIES)}, or all")
    specs, left_out = [], {}
    for name in dict.fromkeys((BASELINE, *names)):
        try:
            specs.append(_settled(name, names, **fields))
        except SpecError as error:
            if not everything and name in names:
                raise SpecError(error.field, f"{name} cannot be compared: {error}") from None
            left_out[name] = str(error)
    if not specs:
        raise SpecError("strategies", f"none of them can run here; the first says: {next(iter(left_out.values()))}")
    return specs, left_out


def _names(strategies: Sequence[str] | str) -> list[str]:
    """The strategies that were named, each once; a single name may stand without a list."""
    if not isinstance(strategies, (str, list, tuple, set, frozenset, Mapping)):
        raise SpecError("strategies", f"strategies must be a list of names such as ['ddp', 'fsdp2'], or 'all'; got {shown(strategies)}")
    names = [strategies] if isinstance(strategies, str) else list(strategies)
    for name in names:
        if not isinstance(name, str) or name not in STRATEGIES:
            raise SpecError("strategies", f"strategy {shown(name)} is not known; there is {', '.join(STRATEGIES)}, or all")
    return list(dict.fromkeys(names))


def _settled(name: str, names: Sequence[str], **fields: Any) -> Spec:
    row = STRATEGIES[name]
    asked = {"scaling": "strong", "tensors": True} | fields
    if row.default_nproc == 1:
        asked["nproc"] = 1
    elif asked.get("nproc") is None:
        asked["nproc"] = row.default_nproc
    given = asked.get("options", {})
    if not isinstance(given, Mapping):
        return settle(name, **asked)  # refuses them
    elsewhere = {option.name for other in names for option in STRATEGIES[other].all_options} - {option.name for option in row.all_options}
    asked["options"] = {option: value for option, value in given.items() if option not in elsewhere}
    return settle(name, **asked)


class Comparing:
    """Runs the Specs one after another, in a thread of its own; `rows` are the figures at any moment.

    `show` draws it when it is the last line of a notebook's cell; without it, the cell shows its repr.
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
        self._badges: dict[str, Badge] = {}
        self.shown_in: int | None = None  # the cell that showed it last
        self._thread = threading.Thread(target=self._work, daemon=True, name="labkit compare")

    def start(self) -> Comparing:
        """Begins, and returns at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the run that is under way; those that have not begun do not begin."""
        self._stopping.set()
        for one in self._runs[-1:]:
            one.stop()
        self.wait()

    def wait(self, timeout: float | None = None) -> Comparing:
        """Waits until all have run. Raises what kept a run from being started."""
        timeout = check_seconds("timeout", timeout)
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return self

    def __repr__(self) -> str:
        over = [row.over for row in self.rows]
        return f"<Comparing {', '.join(spec.strategy_row.title for spec in self.specs)}: {sum(over)} of {len(over)} over>"

    def _ipython_display_(self) -> None:
        """Shows it as the last line of a notebook's cell, unless it was shown in the same cell."""
        if self._show is None or not in_notebook():
            raise NotImplementedError  # IPython takes the repr then
        if self.shown_in != cell():
            self._show(self)

    @property
    def over(self) -> bool:
        """Whether nothing runs any more."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def runs(self) -> list[Run]:
        """The runs that were started, in order."""
        return list(self._runs)

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for each Spec, in order."""
        started = self.runs
        known = [(one.folder, one.state) for one in started]
        waiting = [Row(spec.strategy, spec.strategy_row.title, spec.workload, devices=spec.nproc) for spec in self.specs[len(started) :]]
        if self._stopping.is_set():
            waiting = [replace(row, words="not started", over=True) for row in waiting]
        return (*rows(known, self._badges), *waiting)

    def to_json(self) -> dict[str, Any]:
        """Everything in one dict of plain values."""
        return document(self.rows, self.left_out)

    def figure(self) -> go.Figure:
        """The charts as they are now, as one plotly figure."""
        from labkit.figures.comparison import figure

        found = self.rows
        return figure(found, beside(found))

    def _work(self) -> None:
        try:
            for spec in self.specs:
                if self._stopping.is_set():
                    return
                started = run(spec, cold=self._cold)
                self._runs.append(started)
                if self._stopping.is_set():  # who stopped had not seen this one yet
                    started.stop()
                started.wait()
        except BaseException as error:  # it is raised again where somebody waits
            self._error = error
