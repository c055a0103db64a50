"""`%%torchrun 4 --keep`, `%%ranks` and `%ranks`: ranks that live across cells, with their variables.

A cell blocks the kernel as any other cell does, and an interrupt stops the cell.

A cell is over when each of its ranks has ended it. If those that have not wait for one that has, as after an exception
on one rank, no one can help them: after `PATIENCE` their collective is ended, and then the process group is made again.
If that fails, the ranks are restarted. In both cases it is said what is left.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import count
from typing import Any

from IPython import get_ipython
from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.display import display
from IPython.utils.tokenutil import token_at_cursor

from labkit.common.arguments import shown
from labkit.common.text import escape, visible
from labkit.common.units import size
from labkit.figures.tables import table_html, table_text
from labkit.frontends.magic.cell import (
    KEEP,
    PAGES,
    PICTURES,
    Cell,
    CellError,
    Measured,
    RankOutput,
    Shown,
    check_body,
    merged,
    page_bundles,
    ranks_text,
    script_bundle,
    seconds_text,
    words_of,
)
from labkit.frontends.magic.group import Group, Message, RanksGone
from labkit.launch.job import LaunchError
from labkit.plan.spec import Spec
from labkit.record.folder import STREAMS
from labkit.runs.notebook import cell as execution_count
from labkit.runs.notebook import headless, in_notebook
from labkit.setup.machine import Machine

PATIENCE = 3.0  # seconds for which ranks wait for one that has ended the cell, before their collective is ended
_SOON = 2.0  # seconds after an interrupt in which ranks in Python code end the cell
_HOPELESS = 10.0  # seconds of a hang after which a cell is interrupted if nobody watches it
_LIMIT = 20.0  # seconds after which ranks that do not return from C code are restarted
_REDRAW = 0.25
_LOOK = 0.5  # seconds between two questions where the ranks are
_STILL = 0.3  # share of a core below which a rank that has called a collective waits in it
_AGAIN = (
    "the process group was made again, and all variables are there. What holds the old one must be made again: DDP and"
    " FSDP models, device meshes, and groups of new_group()"
)
_CLEAR = "\x1b[2J"  # `clear_output` of a rank prints it
_LOST = "the ranks were restarted, and their variables are lost"


class RanksRestarted(RanksGone):
    """New ranks are there in their place; the message says why."""


class CellFailed(Exception):
    """A cell failed on a rank or was interrupted, which stops the cells that are queued after it. What happened is
    shown already."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


# ---- one cell


@dataclass
class _Rank:
    """One rank in one cell: what it said at its end, where it was when it was asked last, and since when it has not
    moved."""

    done: dict[str, Any] | None = None
    pictures: tuple[tuple[str, bytes], ...] = ()
    pages: tuple[tuple[str, bytes], ...] = ()
    where: dict[str, Any] = field(default_factory=dict)
    asked: float = 0.0
    still: float | None = None
    was_cut: bool = False

    def moves_to(self, where: dict[str, Any], now: float) -> None:
        """The rank is there now."""
        before, cpu = self.where, where["cpu"]
        calls = bool(where["call"] or where["pending"])
        same = all(before.get(name) == where[name] for name in ("cell", "line", "call", "pending"))
        rests = cpu - before.get("cpu", cpu) < _STILL * (now - self.asked)
        if not (calls and same and rests):
            self.still = None
        elif self.still is None:
            self.still = now
        self.where, self.asked = where, now

    @property
    def waits(self) -> bool:
        """Whether it waits in a collective, and has not ended the cell."""
        return self.done is None and self.still is not None

    @property
    def call(self) -> str:
        """`all_reduce #3`: what it waits in."""
        if self.where["pending"]:
            oldest = self.where["pending"][0]
            return oldest["op"] + (f" #{oldest['seq']}" if oldest.get("seq") else "")
        return self.where["call"]

    def needs(self, everyone: range) -> set[int]:
        """The ranks without which it cannot continue, among others."""
        needed: set[int] = set()
        for op in self.where["pending"][:1]:
            needed |= set(op["ranks"]) | ({op["peer"]} if op.get("peer") is not None else set())
        return needed or set(everyone)


class KeptCell:
    """One cell on some of the ranks. `draw` is called with the output whenever it changes. Its code begins at the line
    of the cell at which `body` begins. With `up`, it runs in a frame of their last exception, see `probe/cells.py`.
    After `limit` seconds it is interrupted."""

    def __init__(
        self,
        group: Group,
        ranks: Sequence[int],
        body: str,
        draw: Callable[[Shown], None],
        patient: bool,
        *,
        name: str,
        up: int | None = None,
        limit: float = math.inf,
    ):
        self._group, self._numbers, self._draw, self._patient = group, ranks, draw, patient
        self._name, self._body, self._up, self._limit = name, body, up, limit
        self._ranks = {rank: _Rank() for rank in ranks}
        group.forget()
        self._begun = time.monotonic()
        self._interrupted: float | None = None
        self._cut: float | None = None
        self._why = ""
        self._drawn, self._looked = 0.0, 0.0
        self._before = {}
        for key, tail in group.tails.items():
            while tail.poll():
                pass
            self._before[key] = tail.count, tail.partial

    def go(self) -> bool:
        """Runs the cell to its end; returns whether it succeeded on all ranks. Raises `RanksGone` if the ranks are
        gone afterwards."""
        fields = {"cell": self._name, "code": self._body, "up": self._up, "asks": _someone_answers()}
        self._group.tell(self._numbers, "run", **fields)
        try:
            while self._open:
                try:
                    self._follow()
                except KeyboardInterrupt:
                    self._interrupt()
            hint = self._repair()
        except KeyboardInterrupt:
            restarted = RanksRestarted(self._restarted("interrupted while it was stopping"))
            self._show("bad", str(restarted))
            raise restarted from None
        except RanksRestarted as restarted:
            self._show("bad", str(restarted))
            raise
        except RanksGone as gone:
            self._show("bad", f"{gone}. {self._start_again}")
            raise
        self._show_end(hint)
        failed = {number for number in self._numbers if self._has_failed(number)}
        if self._up is None:
            self._group.raised = self._group.raised.difference(self._numbers) | failed
        return not failed

    @property
    def _start_again(self) -> str:
        return f"%%torchrun {self._group.spec.nproc} {KEEP} starts new ones"

    @property
    def _open(self) -> list[int]:
        """The ranks that have not ended the cell."""
        return [number for number, rank in self._ranks.items() if rank.done is None]

    # ---- while it runs

    def _follow(self) -> None:
        now = time.monotonic()
        self._group.hear(0.02 if now - self._begun < 1 else 0.1, done=self._ended, where=self._moved, asks=self._asked)
        if now - max(self._looked, self._begun) > _LOOK:
            self._looked = now
            self._group.tell(self._open, "where")
        self._act(now)
        if now - max(self._drawn, self._begun) > _REDRAW:
            self._drawn = now
            words, tone = ("stopping", "waiting") if self._interrupted or self._cut else ("running on", "busy")
            self._show(tone, f"{words} {ranks_text(self._open)} · {now - self._begun:.0f} s", self._waiting())

    def _ended(self, message: Message) -> None:
        rank = self._ranks[message.rank]
        rank.done = message.fields
        kinds = message.fields.get("pictures") or []
        made = list(zip(kinds, message.data))
        rank.pictures = tuple((kind, content) for kind, content in made if kind in PICTURES)
        rank.pages = tuple((kind, content) for kind, content in made if kind in PAGES)

    def _moved(self, message: Message) -> None:
        rank = self._ranks.get(message.rank)  # None of an earlier cell
        if rank is not None and not rank.was_cut:  # it is said where it waited, not where it went from there
            rank.moves_to(message.fields, time.monotonic())

    def _asked(self, message: Message) -> None:
        """A rank calls `input`, or its debugger asks for a command."""
        text = None
        if self._interrupted is None and self._cut is None:
            self._show("waiting", f"rank {message.rank} asks", self._waiting())
            with suppress(EOFError):
                text = input(f"rank {message.rank}: {message.fields['prompt']}")
        self._group.tell([message.rank], "answer", number=message.fields["number"], text=text)

    def _act(self, now: float) -> None:
        waits = self._open and all(self._ranks[number].waits for number in self._open)
        since = max((self._ranks[number].still or now for number in self._open), default=now)
        if self._cut is not None:
            if now - self._cut > _LIMIT:
                raise RanksRestarted(self._restarted(f"{ranks_text(self._open)} did not return from the collective"))
        elif self._interrupted is not None:
            if waits and now - self._interrupted > _SOON:
                self._end_collectives(now)
            elif now - self._interrupted > _LIMIT:
                raise RanksRestarted(self._restarted(f"{ranks_text(self._open)} did not return to Python"))
        elif waits and now - since > PATIENCE and any(self._absent(number) for number in self._open):
            self._end_collectives(now)
        elif now - self._begun > self._limit or (waits and now - since > _HOPELESS and not self._patient):
            self._interrupt()

    def _absent(self, number: int) -> set[int]:
        """The ranks that a waiting rank needs, and that are not in this cell any more."""
        return self._ranks[number].needs(self._group.ranks) - set(self._open)

    def _end_collectives(self, now: float) -> None:
        self._cut, self._why = now, self._waiting(past=True)
        for number in self._open:
            self._ranks[number].was_cut = True
        self._group.cut(self._open)

    def _interrupt(self) -> None:
        if self._interrupted is not None:  # the second time
            raise RanksRestarted(self._restarted("interrupted twice"))
        self._interrupted = time.monotonic()
        self._why = self._waiting(past=True)
        self._group.tell(self._open, "interrupt")

    def _waiting(self, past: bool = False) -> str:
        """Who waits where, and for whom; in the `past`, who waited."""
        places: dict[tuple[str, str], list[int]] = {}
        for number in self._open:
            rank = self._ranks[number]
            if rank.waits:
                places.setdefault((rank.call, self._line(rank.where)), []).append(number)
        parts = []
        for (call, line), numbers in places.items():
            verb = "waited" if past else "waits" if len(numbers) == 1 else "wait"
            parts.append(f"{ranks_text(numbers)} {verb} in {call} at {line}")
        absent = {other for number in self._open if self._ranks[number].waits for other in self._absent(number)}
        for said, numbers in (
            ("raised an exception", [number for number in absent if self._has_failed(number)]),
            ("ended the cell", [number for number in absent if number in self._ranks and not self._has_failed(number)]),
            ("did not run the cell", [number for number in absent if number not in self._ranks]),
        ):
            if numbers:
                parts.append(f"{ranks_text(numbers)} {said}")
        return "; ".join(parts)

    def _line(self, where: dict[str, Any]) -> str:
        line = f"line {where['line']}"
        return line if where["cell"] == self._name else f"{where['cell']}, {line}"

    def _has_failed(self, number: int) -> bool:
        rank = self._ranks.get(number)
        return rank is not None and rank.done is not None and rank.done["error"] is not None

    # ---- at its end

    def _repair(self) -> str:
        """Makes the process group again if a collective was ended, or if the ranks have called different numbers of
        them; returns what to say."""
        done = [rank.done for rank in self._ranks.values() if rank.done is not None]
        calls = {message["calls"] for message in done}
        failed = any(message["error"] for message in done)
        if self._cut is None and not (failed and len(calls) > 1):
            return ""
        why = self._why or "the ranks have called different numbers of collectives"
        if problem := self._group.regroup():
            raise RanksRestarted(self._restarted(f"{why}, and the process group could not be made again ({problem})"))
        return f"{why}. So {_AGAIN}."

    def _restarted(self, why: str) -> str:
        """Restarts the ranks, and says so."""
        self._show("waiting", "restarting the ranks", why)
        _restart(self._group, lambda words: self._show("waiting", words, why))
        return f"{why}: {_LOST}"

    def _show_end(self, hint: str) -> None:
        took = max((rank.done["seconds"] for rank in self._ranks.values() if rank.done), default=0.0)
        errors = {
            number: rank.done["error"]
            for number, rank in self._ranks.items()
            if rank.done and rank.done["error"] and not rank.was_cut
        }
        interrupted = [number for number, error in errors.items() if error["type"] == "KeyboardInterrupt"]
        if self._interrupted is not None and len(interrupted) == len(errors):
            self._show("quiet", f"interrupted after {seconds_text(took)}", hint, final=True)
        elif errors:
            first = next(iter(errors.values()))
            said = first["type"] + (f": {first['message']}" if first["message"] else "")
            alike = [
                number
                for number, error in errors.items()
                if (error["type"], error["message"]) == (first["type"], first["message"])
            ]
            where = f" at line {first['line']}" if first["line"] else ""
            self._show("bad", f"{ranks_text(alike)} failed{where}: {said}", hint, final=True)
        elif self._cut is not None:
            self._show("bad", f"{ranks_text(self._numbers)} could not complete the cell", hint, final=True)
        else:
            self._show("good", f"ran on {ranks_text(self._numbers)} in {seconds_text(took)}", hint, final=True)

    # ---- output

    @property
    def pages(self) -> list[dict[str, Any]]:
        """What is shown below the output, by MIME type."""
        return page_bundles(merged([self._output(number) for number in self._numbers]))

    def _show(self, tone: str, title: str, hint: str = "", final: bool = False) -> None:
        for tail in self._group.tails.values():
            while tail.poll() and final:
                pass
        outputs = [self._output(number) for number in self._numbers]
        reports = {
            number: rank.done["reports"] for number, rank in self._ranks.items() if rank.done and rank.done["reports"]
        }
        self._draw(Shown(title, tone, merged(outputs) if final else outputs, reports, hint))

    def _output(self, number: int) -> RankOutput:
        rank, texts, passed = self._ranks[number], {}, 0
        for stream in STREAMS:
            tail = self._group.tails[number, stream]
            count, partial = self._before[number, stream]
            first, lines = tail.since(count)
            lines = [*lines, *filter(None, [tail.partial])]
            if first == count and lines:
                lines[0] = lines[0].removeprefix(partial)
            passed += first - count
            texts[stream] = self._named("\n".join(lines)).rstrip("\n")
            if stream == STREAMS[0]:
                texts[stream] = texts[stream].rpartition(_CLEAR)[2]
        fate, value, measured = "", "", ()
        if rank.done is not None:
            error, value = rank.done["error"], rank.done["value"]
            measured = (Measured(rank.done["seconds"], rank.done["peak"], rank.done["sent"]),)
            if rank.was_cut and error:
                fate = f"waited in {rank.call} at {self._line(rank.where)}"
            elif error and error["type"] == "KeyboardInterrupt":
                fate = "interrupted" + (f" at line {error['line']}" if error["line"] else "")
            elif error:
                fate = "failed"
            if error and fate == "failed":
                texts["stderr"] = "\n".join(filter(None, (texts["stderr"], self._named(error["traceback"]))))
        made = {"pictures": rank.pictures, "pages": rank.pages, "measured": measured}
        return RankOutput(number, texts["stdout"], texts["stderr"], passed, fate, value=self._named(value), **made)

    def _named(self, text: str) -> str:
        """Names of cells without quotes, as IPython has them."""
        return re.sub(r'File "(Cell In\[\d+\])", line', r"\1, line", text)


def _someone_answers() -> bool:
    """Whether `input` can ask someone: not in a notebook that is executed without a person."""
    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    return shell is not None and (kernel is None or getattr(kernel, "_allow_stdin", False))


# ---- the magics

_group: Group | None = None
_all_cells = False  # whether cells without a first line run on the ranks, too
_AUTO = "auto"
_NOTHING = {"text/html": "", "text/plain": ""}
_NO_RANKS = f"no ranks stay here; %%torchrun 4 {KEEP} starts them"
_DEBUG = re.compile(r"debug(?:\s+(?P<ranks>[\d,-]+))?(?P<above>\s+up(?:\s+(?P<up>\d{1,3}))?)?\s*", re.ASCII)  # 1,3 up 2
_USAGE = (
    "%ranks, %ranks stop, %ranks restart, %ranks auto, %ranks auto off, %ranks debug [RANKS] [up N],"
    " %ranks pull NAME [RANKS] and %ranks push NAME [RANKS]"
)


def register(ipython: Any) -> None:
    """Registers `%%ranks` and `%ranks` with this IPython, and completion and Shift-Tab for names that ranks hold."""
    ipython.register_magic_function(ranks, "line_cell", "ranks")
    if _to_ranks not in ipython.input_transformers_cleanup:
        ipython.input_transformers_cleanup.append(_to_ranks)
    if _complete not in ipython.Completer.custom_matchers:
        ipython.Completer.custom_matchers.append(_complete)
        if (kernel := getattr(ipython, "kernel", None)) is not None:
            kernel.do_inspect = _inspecting(kernel.do_inspect)


def begin_with(line: str, body: str) -> None:
    """`%%torchrun N --keep`: starts ranks that stay, unless they are there, and runs the first cell on them."""
    first = shlex.join(word for word in words_of(line) if word != KEEP)
    body = _python(body)
    cell = Cell.read(first, body, Machine.here(), PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if cell.name is not None:
        raise CellError(f"--as is for ranks that end with their cell; with {KEEP}, use %ranks pull NAME")
    place = _Place()
    before = _group
    group = _group_for(cell, line, lambda words: place.draw(Shown(words, "waiting")))
    if group is not before:
        place.then(script_bundle(group.source))
    _run(group, group.ranks, f"\n{body}", place)


def _group_for(cell: Cell, line: str, draw: Callable[[str], None]) -> Group:
    """The ranks that stay, started unless they are there. Raises `CellError`."""
    global _group, _all_cells
    if _group is not None and not _group.run.state.over:
        here = _group.spec
        if (here.nproc, here.device) != (cell.spec.nproc, cell.spec.device):
            raise CellError(
                f"{_group.name} stay here already; use %%ranks, or end them first with %ranks stop, got {shown(line)}"
            )
    else:
        _group, _all_cells = None, False
        _group = _started(replace(cell.spec, script="ranks.py"), draw)
    return _group


_answered = count(1)


def answer(line: str, some: str, body: str, limit: float) -> tuple[bool, str, str]:
    """Runs a cell for a caller who has no notebook, such as an assistant: whether it succeeded, what it showed as text,
    and the name of the run of its ranks. `line` is that of `%%torchrun`, `some` are ranks such as `0,2`, or all.

    Raises `CellError` if it cannot be started, `RanksGone` if the ranks are gone afterwards.
    """
    global _group
    cell = Cell.read(line, body, Machine.here(), PyCF_ALLOW_TOP_LEVEL_AWAIT, first=1)
    newest: deque[Shown] = deque(maxlen=1)
    group = _group_for(cell, line, lambda words: None)
    kept = KeptCell(
        group, _chosen(some, group), body, newest.append, False, name=f"Cell {next(_answered)}", limit=limit
    )
    succeeded = False
    try:
        succeeded = kept.go()
    except RanksRestarted:
        pass
    except RanksGone:
        _group = None
        raise
    return succeeded, newest[0].text(), (_group or group).run.name


def ranks(line: str, body: str | None = None) -> None:
    """%%ranks [RANKS] runs the cell on the ranks that `%%torchrun N --keep` has started, or on some of them, such as
    `%%ranks 0,2` or `%%ranks 0-1`. `%%ranks debug [RANKS] [up N]` runs it with the variables of the place at which the
    last cell raised an exception there, or N callers above; as `%ranks debug` it lists these places.

    %ranks shows them and their variables; `%ranks stop` ends them; `%ranks restart` starts new ones, without variables;
    after `%ranks auto` cells without a first line run on all ranks, too, until `%ranks auto off`;
    `%ranks pull NAME [RANKS]` makes NAME in the notebook the list of their values (of one rank: its value), and
    `%ranks push NAME [RANKS]` sets it on ranks: numbers, strings, tensors and arrays, and lists of them.
    """
    global _group
    sign = "%%ranks" if body is not None else "%ranks"
    try:
        if _group is None:
            raise CellError(_NO_RANKS)
        if body is None:
            _do(_group, words_of(line))
            return
        whole = line.strip() == _AUTO  # the first line was added here
        chosen, up = _debugged(line.strip(), _group)
        if up is None:
            chosen = _chosen("" if whole else line.strip(), _group)
        body = _python(body)
        check_body(body, body, 0, PyCF_ALLOW_TOP_LEVEL_AWAIT, first=1 if whole else 2)
        _group.check()
        _run(_group, chosen, body if whole else f"\n{body}", _Place(), up)
    except CellError as error:
        raise UsageError(f"{sign}: {error}") from None
    except RanksGone as gone:
        nproc, _group = _group.spec.nproc, None
        raise UsageError(f"{sign}: {gone}; %%torchrun {nproc} {KEEP} starts new ones") from None


def _is_for_ranks(code: str) -> bool:
    """Whether a cell without a first line runs on the ranks; those that begin with a magic or a shell command run in
    the notebook."""
    return _all_cells and _group is not None and bool(code.strip()) and not code.lstrip().startswith(("%", "!", "?"))


def _to_ranks(lines: list[str]) -> list[str]:
    """The lines of a cell as IPython transforms them: with the first line of those for ranks."""
    return [f"%%ranks {_AUTO}\n", *lines] if _is_for_ranks("".join(lines)) else lines


def _python(body: str) -> str:
    """The cell as Python: magics, `!` and `?` are calls of IPython, which each rank makes when it needs it. Lines stay
    where they are."""
    try:
        compile(body, "cell", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):
        text = body.lstrip("\n")
        if text.strip():
            with _in_notebook():
                return "\n" * (len(body) - len(text)) + get_ipython().transform_cell(text)
    return body


@contextmanager
def _in_notebook() -> Iterator[None]:
    """Leaves what is transformed here where it is."""
    global _all_cells
    before, _all_cells = _all_cells, False
    try:
        yield
    finally:
        _all_cells = before


class _Place:
    """The output of one cell: updated in a notebook that someone watches, otherwise only what it is at the end."""

    def __init__(self) -> None:
        self.live = in_notebook() and not headless()
        self._newest: deque[Shown] = deque(maxlen=1)
        self._then: list[dict[str, Any]] = []
        self._handle = display(_NOTHING, raw=True, display_id=True) if self.live else None

    def draw(self, output: Shown) -> None:
        """Shows an output, if it has changed."""
        if self._newest and self._newest[0] == output:
            return
        self._newest.append(output)
        if self._handle is not None:
            self._handle.update(output.bundle, raw=True)

    def then(self, bundle: dict[str, Any]) -> None:
        """Something to be shown below."""
        self._then.append(bundle)

    def close(self) -> None:
        if self._handle is None and self._newest:
            display(self._newest[0].bundle, raw=True)
        for bundle in self._then:
            display(bundle, raw=True)


def _started(spec: Spec, draw: Callable[[str], None]) -> Group:
    try:
        group = Group(spec)
    except (LaunchError, OSError) as error:
        raise CellError(str(error)) from None
    try:
        group.connect(draw)
    except RanksGone as gone:
        raise CellError(str(gone)) from None
    except BaseException:
        group.run.stop()
        raise
    return group


def _restart(group: Group, draw: Callable[[str], None]) -> None:
    """Ends the ranks without asking them, and starts new ones in their place."""
    global _group
    _group = None
    group.run.stop()
    _group = _started(group.spec, draw)


def _run(group: Group, chosen: Sequence[int], body: str, place: _Place, up: int | None = None) -> None:
    global _group
    succeeded = False
    name = f"Cell In[{execution_count()}]"
    cell = KeptCell(group, chosen, body, place.draw, place.live, name=name, up=up)
    try:
        succeeded = cell.go()
        for bundle in cell.pages:
            place.then(bundle)
    except RanksRestarted:
        pass
    except RanksGone:
        _group = None
    finally:
        place.close()
    if not succeeded:
        raise CellFailed("the cell did not complete, so cells that were queued after it did not run")


def _chosen(text: str, group: Group) -> list[int]:
    """The ranks that a text such as `0,2` or `0-1` names; all if it is empty. Raises `CellError`."""
    if not text:
        return list(group.ranks)
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        if not found:
            raise CellError(f"ranks are numbers and ranges, as in %%ranks 0,2 or %%ranks 0-1, got {shown(text)}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last >= group.spec.nproc:
            raise CellError(f"the ranks here are {ranks_text(group.ranks).split()[1]}, got {shown(part.strip())}")
        numbers += range(first, last + 1)
    return sorted(set(numbers))


def _debugged(text: str, group: Group) -> tuple[list[int], int | None]:
    """The ranks and the number of callers above that `debug 1 up 2` names; None for another text. Without ranks, those
    whose last cell raised an exception. Raises `CellError`."""
    found = _DEBUG.fullmatch(text)
    if found is None:
        return [], None
    if not group.raised:
        raise CellError("no rank raised an exception in its last cell, so there is no place to look at")
    chosen = _chosen(found["ranks"], group) if found["ranks"] else sorted(group.raised)
    if without := [rank for rank in chosen if rank not in group.raised]:
        raise CellError(f"{ranks_text(without)} raised no exception in the last cell; {ranks_text(group.raised)} did")
    return chosen, int(found["up"] or 1) if found["above"] else 0


# ---- `%ranks`


def _do(group: Group, words: Sequence[str]) -> None:
    global _group, _all_cells
    match list(words):
        case []:
            group.check()
            display(_Held(group).bundle, raw=True)
        case ["stop"]:
            _group = None
            words = group.end()
            print(
                f"{ranks_text(group.ranks)} ended ({words}); their variables are lost, and the run is in"
                f" {visible(group.run.name)}"
            )
        case ["auto"]:
            _all_cells = True
            print(f"cells run on {group.name}; those that begin with % or ! run here. %ranks auto off ends this")
        case ["auto", "off"]:
            _all_cells = False
            print("cells run in the notebook; %%ranks runs one on the ranks")
        case ["restart"]:
            place = _Place()
            _restart(group, lambda words: place.draw(Shown(words, "waiting")))
            place.draw(Shown(f"{group.name} are there again", "good", hint=f"{_LOST}."))
            place.close()
        case ["debug", *_]:
            chosen, up = _debugged(" ".join(words), group)
            if up is None:
                raise CellError(f"{shown(' '.join(words))} is not known; write %ranks debug, or %ranks debug 1 up 2")
            group.check()
            _run(group, chosen, "", _Place(), up)
        case ["pull", name, *some]:
            _pull(group, _identifier(name), some)
        case ["push", name, *some]:
            _push(group, _identifier(name), some)
        case _:
            raise CellError(f"{shown(' '.join(words))} is not known; there are {_USAGE}")


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise CellError(f"the name of a variable is needed, got {shown(name)}")
    return name


def _pull(group: Group, name: str, some: Sequence[str]) -> None:
    from labkit.probe.values import NoValue, unpacked  # here, because it imports torch

    chosen = _chosen("".join(some), group)
    values = {}
    for rank, message in group.ask(chosen, "pull", "pulled", name=name).items():
        if message.fields["error"]:
            raise CellError(f"{name} {message.fields['error']} on rank {rank}")
        try:
            values[rank] = unpacked(message.fields["tree"], message.data)
        except NoValue as error:
            raise CellError(f"{name} {error} on rank {rank}") from None
    one = len(chosen) == 1 and bool(some)
    get_ipython().push({name: values[chosen[0]] if one else list(values.values())})
    what = f"the value of {ranks_text(chosen)}" if one else f"a list of the values of {ranks_text(chosen)}"
    print(f"{name} is {what}")


def _push(group: Group, name: str, some: Sequence[str]) -> None:
    from labkit.probe.values import NoValue, packed

    chosen = _chosen("".join(some), group)
    variables = get_ipython().user_ns
    if name not in variables:
        raise CellError(f"the notebook has no variable {name}")
    try:
        tree, data = packed(variables[name])
    except NoValue as error:
        raise CellError(f"{name} {error}") from None
    for rank, message in group.ask(chosen, "push", "pushed", data, name=name, tree=tree).items():
        if message.fields["error"]:
            raise CellError(f"{name} {message.fields['error']} on rank {rank}")
    print(f"{name} is set on {ranks_text(chosen)}")


class _Held:
    """What each rank holds, as two tables: the ranks, and their variables."""

    _COLUMNS = ("name", "ranks", "type", "shape or value", "dtype", "device", "memory")

    def __init__(self, group: Group):
        answers = group.ask(group.ranks, "variables", "variables")
        state = group.run.state
        self._title = f"{group.name}: {state.words}"
        pids = state.status.ranks or {}
        self._ranks: list[tuple[str, ...]] = []
        rows: dict[tuple[str, ...], list[int]] = {}
        for rank, message in answers.items():
            pid = str(pids.get(rank, pids.get(str(rank), "–")))
            device = message.fields.get("device", group.spec.device)
            self._ranks.append((str(rank), pid, device, _memory(message.fields)))
            for row in message.fields["rows"]:
                known = (row["name"], row["type"], *(row.get(key, "") for key in ("shape", "dtype", "device")))
                rows.setdefault((*map(str, known), _size(row.get("bytes"))), []).append(rank)
        self._variables = [
            (name, ranks_text(holders).split(" ", 1)[1], *rest)
            for (name, *rest), holders in sorted(rows.items(), key=lambda row: (row[0][0], row[1]))
        ]

    @property
    def bundle(self) -> dict[str, str]:
        """Both forms, by MIME type."""
        parts = [(("rank", "pid", "device", "memory"), self._ranks)]
        if self._variables:
            parts.append((self._COLUMNS, self._variables))
        nothing = "" if self._variables else "no variables yet"
        page = "".join(table_html(heads, rows, heads) for heads, rows in parts)
        text = "\n\n".join(table_text(heads, rows, heads) for heads, rows in parts)
        return {
            "text/html": f'<div class="labkit-ranks"><b>{escape(self._title)}</b>{page}{nothing}</div>',
            "text/plain": visible("\n".join(filter(None, (self._title, text, nothing)))),
        }


def _memory(fields: dict[str, Any]) -> str:
    """`1.2 GiB`, on a GPU with what torch has reserved and what there is."""
    more = f" ({size(fields['reserved'])} reserved) of {size(fields['total'])}" if "total" in fields else ""
    return _size(fields["memory"]) + more


def _size(count: float | None) -> str:
    return "" if count is None else size(count)


# ---- completion and Shift-Tab, in cells for ranks


@context_matcher()
def _complete(context: Any) -> dict[str, Any]:
    """The variables of rank 0, and after a dot the attributes of one of them."""
    fields = _from_rank_0(context.full_text, "complete", "completed", text=context.token) if context.token else {}
    names = fields.get("names", [])
    return {"completions": [SimpleCompletion(name, type="rank") for name in names], "suppress": False}


def _inspecting(inspect: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A kernel's `inspect` that also knows what rank 0 holds."""

    @wraps(inspect)
    def inspect_on_ranks(code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        name = token_at_cursor(code, cursor_pos)
        text = _from_rank_0(code, "inspect", "inspected", name=name).get("text") if name else ""
        if not text:
            return inspect(code, cursor_pos, *args, **kwargs)
        return {"status": "ok", "found": True, "data": {"text/plain": f"On rank 0\n{text}"}, "metadata": {}}

    return inspect_on_ranks


def _from_rank_0(code: str, do: str, answer: str, **fields: Any) -> dict[str, Any]:
    """What rank 0 answers for a cell that runs on ranks; nothing for others, or without ranks."""
    first = code.lstrip().partition("\n")[0]
    of_ranks = first.startswith("%%ranks") or (first.startswith("%%torchrun") and KEEP in first) or _is_for_ranks(code)
    if _group is not None and not _group.run.state.over and of_ranks:
        with suppress(RanksGone):
            return _group.ask([0], do, answer, **fields)[0].fields
    return {}
