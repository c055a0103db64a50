"""`%%torchrun`: from the cell to its run, and what is shown below the cell while it runs."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from labkit.analysis.diagnose import findings
from labkit.common.arguments import shown
from labkit.common.text import escape, visible, visible_log
from labkit.common.units import ranks_in_words
from labkit.figures import rank_colour
from labkit.launch.job import LaunchError
from labkit.plan.spec import DEVICES, Spec, SpecError, bounds_of
from labkit.record.documents import Failure
from labkit.record.folder import STREAMS
from labkit.record.logs import LogTail
from labkit.record.state import RunState
from labkit.runs.handle import Run, begin
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine

# ---- parses a `%%torchrun` cell and generates its script
#
# Nothing is started here.


OPTIONS = "--device cpu, --device cuda and --as NAME"
_INITIALISE = {
    "cpu": 'device = torch.device("cpu")\ndist.init_process_group("gloo")',
    "cuda": (
        'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\n'
        "torch.cuda.set_device(device)\n"
        'dist.init_process_group("nccl", device_id=device)'
    ),
}
_BEFORE = """\
# One cell on {nproc} ranks: torchrun --standalone --nproc-per-node={nproc} train.py
import os
import time

import torch
import torch.distributed as dist

from labkit import report

{initialise}
rank, world_size = dist.get_rank(), dist.get_world_size()

# ---- the cell
"""
_AFTER = """

# ---- shutdown
if dist.is_initialized():
    dist.destroy_process_group()
"""


class CellError(ValueError):
    """A cell cannot be started; the message is one sentence with the value and the fix."""


@dataclass(frozen=True)
class Cell:
    """A valid cell for a number of ranks that this machine supports. `name` is the variable for its reports, if any."""

    body: str
    spec: Spec
    name: str | None = None

    @classmethod
    def read(cls, line: str, body: str, machine: Machine) -> Cell:
        """Parses the rest of the first line after `%%torchrun`, and the lines below it. Raises `CellError`."""
        nproc, device, name = _asked(line)
        if device is None:
            device = "cuda" if len(machine.gpus) >= nproc else "cpu"
        cell = cls(body, _settled(nproc, device, machine), name)
        cell._check()
        return cell

    @property
    def before(self) -> str:
        """The part of the script before the cell, which initialises the process group."""
        return _BEFORE.format(nproc=self.spec.nproc, initialise=_INITIALISE[self.spec.device])

    @property
    def script(self) -> str:
        """The complete script that every rank runs."""
        return self.before + self.body.rstrip("\n") + _AFTER

    def in_cell(self, text: str, script: Path) -> str:
        """Replaces references to lines of `script` in `text` by lines of the cell; `%%torchrun` is line 1."""
        first, count = self.before.count("\n"), len(self.body.splitlines())

        def rename(found: re.Match[str]) -> str:
            number = int(found["file"] or found["line"]) - first
            return f"Cell, line {number + 1}" if 0 < number <= count else found[0]

        path = re.escape(str(script))
        return re.sub(
            rf'File "{path}", line (?P<file>\d+)|(?:{path}|\b{re.escape(script.name)}):(?P<line>\d+)', rename, text
        )

    def _check(self) -> None:
        if not self.body.strip():
            raise CellError("the cell is empty; write the code for every rank below the first line")
        try:
            compile(self.script, "cell", "exec", dont_inherit=True)
        except SyntaxError as error:
            number = min((error.lineno or 0) - self.before.count("\n"), len(self.body.splitlines())) + 1
            raise CellError(
                f"the cell does not parse, line {max(number, 2)}: {error.msg}; nothing was started"
            ) from None
        except ValueError as error:  # a null byte
            raise CellError(f"the cell does not parse: {error}; nothing was started") from None


def _asked(line: str) -> tuple[int, str | None, str | None]:
    """The number of ranks, the device and the variable name in the first line."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CellError(f"cannot parse {shown(line)}: {error}") from None
    if not words:
        raise CellError("the number of ranks is missing, as in %%torchrun 4")
    try:
        nproc = bounds_of("nproc").read("the number of ranks", words[0])
    except ValueError as error:
        raise CellError(f"{error}; write %%torchrun 4") from None
    given = dict(zip(words[1::2], words[2::2]))
    for option in words[1::2]:
        if option not in ("--device", "--as"):
            raise CellError(f"unknown option {shown(option)}; the options are {OPTIONS}")
        if option not in given:
            raise CellError(f"{option} needs a value; the options are {OPTIONS}")
    device, name = given.get("--device"), given.get("--as")
    if device is not None and device not in DEVICES[1:]:
        raise CellError(f"--device must be {' or '.join(DEVICES[1:])}, got {shown(device)}")
    if name is not None and not name.isidentifier():
        raise CellError(f"--as must be a variable name, got {shown(name)}")
    return nproc, device, name


def _settled(nproc: int, device: str, machine: Machine) -> Spec:
    most = len(machine.gpus) if device == "cuda" else machine.max_cpu_ranks
    if 0 < most < nproc:
        limit = f"{most} GPUs" if device == "cuda" else f"at most {most} CPU ranks ({machine.cores} cores)"
        raise CellError(f"this machine has {limit}, got {nproc} ranks; write %%torchrun {most}")
    try:
        return Spec(script="cell.py", nproc=nproc, device=device).on(machine)
    except SpecError as error:
        raise CellError(str(error)) from None


# ---- the current output of a cell's ranks as a value, which renders as HTML (all text escaped) and as text


_TONES = {"good": "#009E73", "bad": "#D55E00", "busy": "#0A86D8", "waiting": "#E69F00", "quiet": "#8C8C8C"}
_MONO = "font:12px/1.45 var(--jp-code-font-family,monospace)"
_BLOCK = (
    "border:1px solid rgba(128,128,128,.35);border-left:5px solid {colour};border-radius:6px;padding:4px"
    " 10px;min-width:0"
)
# keeps the newest line visible
_LINES = f"{_MONO};max-height:20em;overflow:auto;display:flex;flex-direction:column-reverse"
_PRE = f"{_MONO};margin:0;padding:0;background:none;white-space:pre-wrap;overflow-wrap:anywhere"
_DIGITS = 6  # significant digits of a number in the table


@dataclass(frozen=True)
class RankOutput:
    """The output of one rank: the newest lines of both streams, the number of earlier lines, and how the rank ended."""

    rank: int
    stdout: str
    stderr: str = ""
    passed: int = 0
    fate: str = ""  # in words, such as "failed first"
    aside: bool = False  # whether its errors are only a consequence of another rank's failure

    @property
    def heading(self) -> str:
        """The rank and how it ended."""
        return f"rank {self.rank}" + (f" · {self.fate}" if self.fate else "")


@dataclass(frozen=True)
class Shown:
    """The whole output: a title with a tone, the ranks, and their reports by rank."""

    title: str
    tone: str
    ranks: Sequence[RankOutput] = ()
    reports: Mapping[int, Mapping[str, Any]] | None = None
    hint: str = ""

    @property
    def _said(self) -> Sequence[RankOutput]:
        """The ranks whose output is shown: all of them, or none if they reported values and wrote nothing."""
        return (
            self.ranks
            if not self.reports or any(output.stdout or output.stderr or output.passed for output in self.ranks)
            else ()
        )

    def html(self) -> str:
        """The whole output as HTML with inline styles only."""
        dot = f'<span aria-hidden="true" style="color:{_TONES[self.tone]}">●</span>'
        hint = f'<div style="opacity:.8">{escape(self.hint)}</div>' if self.hint else ""
        head = f'<div role="status" class="labkit-cell-state">{dot} <b>{escape(self.title)}</b>{hint}</div>'
        blocks = "".join(_block(output) for output in self._said)
        grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(190px,100%),1fr));gap:6px;margin:4px 0"
        table = table_html(self.reports or {}, len(self.ranks))
        return f'<div class="labkit-cell">{head}<div style="{grid}">{blocks}</div>{table}</div>'

    def text(self) -> str:
        """The whole output as plain text."""
        parts = [self.title, self.hint]
        for output in self._said:
            passed = f"… {output.passed:,} earlier lines\n" if output.passed else ""
            said = passed + "\n".join(filter(None, (output.stdout, output.stderr)))
            parts.append(f"── {output.heading}\n{_plain(said) or '(no output)'}")
        parts.append(table_text(self.reports or {}, len(self.ranks)))
        return visible("\n".join(filter(None, parts)))


def _block(one: RankOutput) -> str:
    colour = rank_colour(one.rank)
    passed = f'<div style="opacity:.7">… {one.passed:,} earlier lines are in the log</div>' if one.passed else ""
    said = f'<pre style="{_PRE}">{_clean(one.stdout)}</pre>' if one.stdout else ""
    errors = (
        f'<pre class="labkit-cell-stderr" style="{_PRE};border-top:1px dashed'
        f' {_TONES["bad"]}">{_clean(one.stderr)}</pre>'
    )
    if not one.stderr:
        errors = ""
    elif one.aside:
        errors = f"<details><summary>stderr</summary>{errors}</details>"
    nothing = "" if said or errors or passed else '<span style="opacity:.6">(no output)</span>'
    mark = f'<span aria-hidden="true" style="color:{colour}">■</span> <b>{escape(one.heading)}</b>'
    lines = f'<div style="{_LINES}" tabindex="0"><div>{passed}{said}{errors}{nothing}</div></div>'
    style = _BLOCK.format(colour=colour)
    return (
        f'<div role="group" aria-label="rank {one.rank}" class="labkit-cell-rank" style="{style}">{mark}{lines}</div>'
    )


def script_html(script: str) -> str:
    """The generated script in a collapsible section."""
    code = f'<pre style="{_PRE};padding:4px 10px">{escape(script)}</pre>'
    return f'<details class="labkit-cell-script"><summary>The script that every rank runs</summary>{code}</details>'


def columns(reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The names that any rank reported, in order of first occurrence."""
    return list(dict.fromkeys(name for rank in sorted(reports) for name in reports[rank]))


def table_html(reports: Mapping[int, Mapping[str, Any]], ranks: int) -> str:
    """The table of ranks as HTML; empty if nothing was reported."""
    names = columns(reports)
    if not names:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("rank", *names))
    rows = []
    for rank in range(ranks):
        mark = f'<span aria-hidden="true" style="color:{rank_colour(rank)}">■</span> {rank}'
        cells = "".join(f"<td>{escape(value_text(reports.get(rank, {}).get(name)))}</td>" for name in names)
        rows.append(f"<tr><td>{mark}</td>{cells}</tr>")
    head, body = f"<thead><tr>{heads}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<table class="labkit-cell-reports" style="font-variant-numeric:tabular-nums">{head}{body}</table>'


def table_text(reports: Mapping[int, Mapping[str, Any]], ranks: int) -> str:
    """The table of ranks as aligned text; empty if nothing was reported."""
    names = columns(reports)
    if not names:
        return ""
    rows = [["rank", *names]]
    rows += [[str(rank), *(value_text(reports.get(rank, {}).get(name)) for name in names)] for rank in range(ranks)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def value_text(value: Any) -> str:
    """A reported value as the table shows it; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)


def _plain(text: str) -> str:
    return visible_log(text).rstrip()


def _clean(text: str) -> str:
    return escape(_plain(text))


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
        self._show(Shown(f"starting {_ranks(spec.nproc)}", "waiting", self._outputs(RunState())))
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
        name, ranks = status.state, _ranks(spec.nproc, spec.device)
        if name in ("failed", "lost"):
            return self._failure(state), "bad"
        took = "" if state.seconds is None else f" after {state.seconds:.1f} s"
        return {
            "starting": (f"starting {ranks}", "waiting"),
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
        return tuple(
            sorted(outputs, key=lambda output: failure is None or output.rank != failure.rank)
        )  # the first to fail comes first

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
        return table_text(self.run.state.reports, self._of.cell.spec.nproc) or "nothing was reported"

    def _repr_html_(self) -> str:
        return table_html(self.run.state.reports, self._of.cell.spec.nproc) or "<p>nothing was reported</p>"


def _ranks(nproc: int, device: str = "") -> str:
    kind = {"cpu": "CPU rank", "cuda": "GPU"}.get(device, "rank")
    return f"{nproc} {kind}" + ("" if nproc == 1 else "s")


# ---- the cell magic `%%torchrun`


_NOTHING = {"text/html": "", "text/plain": ""}
_newest: CellRun | None = None


def register(ipython: Any) -> None:
    """Registers `%%torchrun` with this IPython."""
    ipython.register_magic_function(torchrun, "cell", "torchrun")


def torchrun(line: str, body: str) -> None:
    """%%torchrun N [--device cpu|cuda] [--as NAME]

    Runs the cell on N ranks, one process each, and shows the output of each rank separately. These names are
    predefined: `torch`, `dist` (torch.distributed, with an initialised process group), `rank`, `world_size`, `device`,
    `os`, `time`, and `report(name=value)`, which returns values as a table of ranks. With `--as NAME` they are stored
    in a variable: `NAME["total"]` is a list with one value per rank.

    The ranks use GPUs if there are at least N of them, otherwise the CPU. In a notebook the cell returns immediately;
    the next `%%torchrun` waits for it, and so does reading `NAME`.
    """
    global _newest
    try:
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
        display(_bundle(newest[0]), raw=True)
        display(_script(cell), raw=True)
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
    display(_script(cell), raw=True)
    run = CellRun(cell, lambda shown: place.update(_bundle(shown), raw=True), before)

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


def _bundle(shown: Shown) -> dict[str, str]:
    return {"text/html": shown.html(), "text/plain": shown.text()}


def _script(cell: Cell) -> dict[str, str]:
    return {"text/html": script_html(cell.script), "text/plain": ""}
