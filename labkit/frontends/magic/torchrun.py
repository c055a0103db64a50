"""The cell magic `%%torchrun`, and where its output goes: live where a person watches, at the end where nobody does."""

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
    """Makes `%%torchrun` known to this IPython."""
    ipython.register_magic_function(torchrun, "cell", "torchrun")


def torchrun(line: str, body: str) -> None:
    """%%torchrun N [--device cpu|cuda] [--as NAME]

    Runs the cell on N ranks, each a process of its own, and shows what each prints apart. There are in it already: `torch`,
    `dist` (torch.distributed, its process group initialised), `rank`, `world_size`, `device`, `os`, `time`, and `report(name=value)`,
    which brings values back as a table of ranks. With `--as NAME` they are kept: `NAME["total"]` is a list with one value a rank.

    The ranks take GPUs where there are enough of them, and are CPU ranks else. In a notebook the cell returns at once; the next
    `%%torchrun` waits for it, and so does whoever reads `NAME`.
    """
    global _newest
    try:
        cell = Cell.read(line, body, Machine.here())
    except CellError as error:
        raise UsageError(f"%%torchrun: {error}") from None
    watched = in_notebook() and not headless()
    _newest = _live(cell, _newest) if watched else _to_the_end(cell)
    if cell.name is not None:
        get_ipython().push({cell.name: Reports(_newest)})


def _to_the_end(cell: Cell) -> CellRun:
    """Runs it to its end and leaves plain output; in a notebook that nobody watches a run that hangs is ended."""
    newest: deque[Shown] = deque(maxlen=1)
    run = CellRun(cell, newest.append)
    try:
        run.go(patient=not in_notebook())
    finally:
        display(_bundle(newest[0]), raw=True)
        display(_fold(cell), raw=True)
    return run


def _live(cell: Cell, before: CellRun | None) -> CellRun:
    """Runs it while the kernel is free. All that it writes stays in the notebook as plain HTML; only the Stop button is a widget."""
    import ipywidgets

    _heed_interrupts(get_ipython().kernel)
    place = display(_NOTHING, raw=True, display_id=True)
    button = ipywidgets.Button(description="■ Stop", tooltip="End the run of this cell: no process of it is left")
    control = display(button, display_id=True)
    display(_fold(cell), raw=True)
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


def _heed_interrupts(kernel: Any) -> None:
    """Has an interrupt end the run though the kernel is idle: then ipykernel goes back to the handler that it saved, which ignores it."""
    if hasattr(kernel, "saved_sigint_handler"):
        kernel.saved_sigint_handler = lambda number, frame: _in_thread(_newest.stop_all)


def _in_thread(act: Callable[[], None]) -> None:
    threading.Thread(target=act, daemon=True, name="labkit cell").start()


def _bundle(shown: Shown) -> dict[str, str]:
    return {"text/html": shown.html(), "text/plain": shown.text()}


def _fold(cell: Cell) -> dict[str, str]:
    return {"text/html": script_html(cell.script), "text/plain": ""}
