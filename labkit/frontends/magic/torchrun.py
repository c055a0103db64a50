"""`%%torchrun`: the run of a cell, and what is shown below the cell while it runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from labkit.analysis.diagnose import findings
from labkit.common.units import ranks_in_words
from labkit.frontends.magic import kept
from labkit.frontends.magic.cell import (
    KEEP,
    Cell,
    CellError,
    RankOutput,
    Shown,
    columns,
    counted_ranks,
    script_bundle,
    table_html,
    table_text,
    words_of,
)
from labkit.launch.job import LaunchError
from labkit.record.documents import Failure
from labkit.record.files import LogTail
from labkit.record.folder import STREAMS
from labkit.record.state import RunState
from labkit.runs.handle import Run, begin
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine

# ---- the run of a cell

KEPT = 400  # newest lines of one stream that are shown
_REDRAW = 0.25  # seconds between two redraws
_HANG_GRACE = 2.0  # seconds before a hanging run is stopped, so that every rank can report its position
_HANG = 10  # seconds without progress after which a rank is reported


class CellRun:
    """One cell on its ranks. `draw` is called with the output whenever it changes, at most four times per second."""

    def __init__(self, cell: Cell, draw: Callable[[Shown], None], before: CellRun | None = None):
        self.cell = cell
        self.run: Run | None = None
        self._draw, self._before = draw, before
        self._drawn: Shown | None = None
        self._tails: dict[tuple[int, str], LogTail] = {}
        self._stopped, self._over = threading.Event(), threading.Event()

    @property
    def over(self) -> bool:
        """Whether the run has ended and its final output is shown."""
        return self._over.is_set()

    def go(self, patient: bool = True) -> None:
        """Runs the cell to its end; a run whose ranks hang is stopped unless `patient`."""
        try:
            self._wait_for_previous()
            if not self._stopped.is_set():
                self._start()
                self._follow(patient)
        except (LaunchError, OSError) as error:
            self._show(Shown(str(error), "bad"))
        except KeyboardInterrupt:
            self.stop()
            if self.run is not None:
                self._show(self._shown(self.run.state))
            raise
        finally:
            self._before = None
            self._over.set()

    def stop(self) -> None:
        """Stops the run; one that has not started never starts."""
        self._stopped.set()
        if self.run is not None:
            self.run.stop()

    def stop_all(self) -> None:
        """Stops this run and the previous ones that it waits for."""
        before = self._before
        self.stop()
        if before is not None:
            before.stop_all()

    def wait(self) -> None:
        """Waits for the end of the run; an interrupt stops the run and is raised again."""
        try:
            while not self._over.wait(0.2):
                pass
        except KeyboardInterrupt:
            self.stop()
            raise

    def _wait_for_previous(self) -> None:
        while self._before is not None and not self._before.over and not self._stopped.wait(_REDRAW):
            self._show(Shown("waiting for the previous cell to finish", "waiting"))
        if self._stopped.is_set():
            self._show(Shown("stopped before it started", "quiet"))

    def _start(self) -> None:
        spec = self.cell.spec
        self._show(Shown(f"starting {counted_ranks(spec.nproc)}", "waiting", self._outputs(RunState())))
        self.run = run = begin(replace(spec, hang_after=_HANG), source=self.cell.script)
        for rank in range(spec.nproc):
            for stream in STREAMS:
                self._tails[rank, stream] = run.folder.log_tail(rank, stream, keep=KEPT)
        if self._stopped.is_set():
            run.stop()

    def _follow(self, patient: bool) -> None:
        hangs = 0.0
        while not (state := self.run.state).over:
            self._show(self._shown(state))
            hangs += _REDRAW if any(finding.name == "hang" for finding in findings(state)) else -hangs
            if hangs > _HANG_GRACE and not patient:
                self.run.stop()  # headless: no one can press Stop
            time.sleep(_REDRAW)
        self._show(self._shown(state))

    # ---- output

    def _show(self, shown: Shown) -> None:
        if shown != self._drawn:
            self._drawn = shown
            self._draw(shown)

    def _shown(self, state: RunState) -> Shown:
        for tail in self._tails.values():
            tail.poll()
        wrong = next((finding for finding in findings(state) if finding.kind == "wrong"), None)
        hint = self._named(f"{wrong.title}: {wrong.evidence}") if wrong and state.failure is None else ""
        reports = {rank: dict(values) for rank, values in state.reports.items()}
        return Shown(*self._title(state), self._outputs(state), reports, hint)

    def _title(self, state: RunState) -> tuple[str, str]:
        spec, status = self.cell.spec, state.status
        name, ranks = status.state, counted_ranks(spec.nproc, spec.device)
        if name in ("failed", "lost"):
            return self._failure(state), "bad"
        took = "" if state.seconds is None else f" after {state.seconds:.1f} s"
        return {
            "starting": (status.waiting or f"starting {ranks}", "waiting"),
            "running": (f"running on {ranks}", "busy"),
            "stopping": (f"stopping {ranks}", "waiting"),
            "finished": (f"finished on {ranks}{took}", "good"),
            "stopped": (f"stopped{took}", "quiet"),
        }[name]

    def _failure(self, state: RunState) -> str:
        failure = state.failure
        if failure is None:
            return state.words
        where = ""
        for line in self._named(failure.traceback).splitlines():
            if line.strip().startswith("Cell, line "):
                where = f" at line {line.split()[2].rstrip(',')} of the cell"
        said = failure.type + (f": {failure.message}" if failure.message else "")
        return f"{ranks_in_words(failure.alike, state.world_size)} failed{where}: {said}"

    def _outputs(self, state: RunState) -> tuple[RankOutput, ...]:
        failure = state.failure
        outputs = [self._output(rank, failure) for rank in range(self.cell.spec.nproc)]
        # the first to fail comes first
        return tuple(sorted(outputs, key=lambda output: failure is None or output.rank != failure.rank))

    def _output(self, rank: int, failure: Failure | None) -> RankOutput:
        texts, passed = {}, 0
        for stream in STREAMS:
            tail = self._tails.get((rank, stream))
            lines = [*tail.lines, *filter(None, [tail.partial])] if tail else []
            passed += tail.dropped if tail else 0
            texts[stream] = self._named("\n".join(lines))
        return RankOutput(rank, texts["stdout"], texts["stderr"], passed, *_fate(rank, failure))

    def _named(self, text: str) -> str:
        return text if self.run is None else self.cell.in_cell(text, self.run.folder.script)


def _fate(rank: int, failure: Failure | None) -> tuple[str, bool]:
    """What the failure of a run means for one of its ranks, and whether the rank was only terminated because of it."""
    if failure is None:
        return "", False
    if len(failure.alike) > 1 and rank in failure.alike:
        return "failed with the same error", False
    if rank == failure.rank:
        return "failed first", False
    aside = rank in failure.collateral
    return f"terminated because rank {failure.rank} failed" if aside else "", aside


class Reports:
    """The values that the ranks of a cell reported. `reports["name"]` is a list with one value per rank, None if a rank
    reported none.
    """

    def __init__(self, cell_run: CellRun):
        self._of = cell_run

    @property
    def run(self) -> Run:
        """The run; waits for its end."""
        self._of.wait()
        if self._of.run is None:
            raise LookupError("the cell was stopped before it started, so it has no run")
        return self._of.run

    @property
    def names(self) -> list[str]:
        """The names of the reported values; waits for the run's end, and an interrupt stops the run."""
        return columns(self.run.state.reports)

    def __getitem__(self, name: str) -> list[Any]:
        reports = self.run.state.reports
        if name not in columns(reports):
            raise LookupError(f"no rank reported {name!r}; reported: {', '.join(columns(reports)) or 'nothing'}")
        return [reports.get(rank, {}).get(name) for rank in range(self._of.cell.spec.nproc)]

    def __repr__(self) -> str:
        return table_text(self.run.state.reports, range(self._of.cell.spec.nproc)) or "nothing was reported"

    def _repr_html_(self) -> str:
        return table_html(self.run.state.reports, range(self._of.cell.spec.nproc)) or "<p>nothing was reported</p>"


# ---- the cell magic `%%torchrun`

_NOTHING = {"text/html": "", "text/plain": ""}
_newest: CellRun | None = None


def register(ipython: Any) -> None:
    """Registers `%%torchrun`, `%%ranks` and `%ranks` with this IPython."""
    ipython.register_magic_function(torchrun, "cell", "torchrun")
    kept.register(ipython)


def torchrun(line: str, body: str) -> None:
    """%%torchrun N [--keep] [--device cpu|cuda] [--as NAME]

    Runs the cell on N ranks, one process each, and shows the output of each rank separately. These names are
    predefined: `torch`, `dist` (torch.distributed, with an initialised process group), `rank`, `world_size`, `device`,
    `os`, `time`, and `report(name=value)`, which returns values as a table of ranks. With `--as NAME` they are stored
    in a variable: `NAME["total"]` is a list with one value per rank.

    The ranks use GPUs if there are at least N of them, otherwise the CPU. In a notebook the cell returns immediately;
    the next `%%torchrun` waits for it, and so does reading `NAME`.

    With `--keep` the ranks stay, with their variables: `%%ranks` runs later cells on them, `%ranks` shows what they
    hold, and `%ranks stop` ends them.
    """
    global _newest
    try:
        if KEEP in words_of(line):
            kept.begin_with(line, body)
            return
        cell = Cell.read(line, body, Machine.here())
    except CellError as error:
        raise UsageError(f"%%torchrun: {error}") from None
    watched = in_notebook() and not headless()
    _newest = _live(cell, _newest) if watched else _run_to_end(cell)
    if cell.name is not None:
        get_ipython().push({cell.name: Reports(_newest)})


def _run_to_end(cell: Cell) -> CellRun:
    """Runs the cell to its end and displays static output; in a headless notebook a run that hangs is stopped."""
    newest: deque[Shown] = deque(maxlen=1)
    run = CellRun(cell, newest.append)
    try:
        run.go(patient=not in_notebook())
    finally:
        display(newest[0].bundle, raw=True)
        display(script_bundle(cell.script), raw=True)
    return run


def _live(cell: Cell, before: CellRun | None) -> CellRun:
    """Runs the cell in the background. Its output stays in the notebook as static HTML; only the Stop button is a
    widget.
    """
    import ipywidgets

    _handle_interrupts(get_ipython().kernel)
    place = display(_NOTHING, raw=True, display_id=True)
    button = ipywidgets.Button(description="■ Stop", tooltip="Stop the run of this cell and all its processes")
    control = display(button, display_id=True)
    display(script_bundle(cell.script), raw=True)
    run = CellRun(cell, lambda shown: place.update(shown.bundle, raw=True), before)

    def stop() -> None:
        button.disabled = True
        _in_thread(run.stop)

    def follow() -> None:
        try:
            run.go()
        finally:
            control.update(_NOTHING, raw=True)

    button.on_click(lambda _: stop())
    _in_thread(follow)
    return run


def _handle_interrupts(kernel: Any) -> None:
    """Makes an interrupt stop the run while the kernel is idle, by replacing the saved handler of ipykernel, which
    ignores it.
    """
    if hasattr(kernel, "saved_sigint_handler"):
        kernel.saved_sigint_handler = lambda number, frame: _in_thread(_newest.stop_all)


def _in_thread(act: Callable[[], None]) -> None:
    threading.Thread(target=act, daemon=True, name="labkit cell").start()
