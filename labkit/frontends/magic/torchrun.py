"""The cell magic `%%torchrun`: displays its output live in a notebook, or at the end if headless."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from labkit.frontends.magic.cell import Cell, CellError
from labkit.frontends.magic.following import CellRun, Reports
from labkit.frontends.magic.output import Shown, script_html
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine

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
