"""Ranks that stay: runs the cells of a notebook one after another, each with the variables of those before it.

The script of such a run (`frontends/magic/kept.py` writes it) initialises the process group and calls `serve`. A rank
listens on a socket in the run's folder for sockets, which only this user can enter, and the notebook connects. Messages
are objects of JSON, and bytes of tensors (`values.py`), pictures and pages; nothing is unpickled. The main thread runs
cells, and a second thread answers questions meanwhile: where the rank is, which variables it has.

| asked (`do`) | answered |
| --- | --- |
| `run`: `cell`, `code`, `up`, `asks` | `done`: `seconds`, `peak`, `sent`, `calls`, `value`, `pictures`, `error`, … |
| `answer`: `number`, `text` | nothing; before, a rank sent `asks`: `number`, `prompt`. Without a text nobody answers |
| `where` | `cell` and `line`, what it waits in (`call`, `pending`), seconds in which it was busy (`cpu`) |
| `variables` | `rows`: name, type, shape, dtype, device, bytes of each |
| `complete`: `text` | `completed`: `names` of variables, or of attributes, that begin with it |
| `inspect`: `name` | `inspected`: `text` on what it names, empty if that does not exist |
| `pull`: `name`; `push`: `name`, `tree` | `tree` or `error`, and the bytes of tensors |
| `comm`: `id`, `content` | a message of a widget's view; both send them at any time, with `kind` from a rank |
| `interrupt` | nothing: the cell gets KeyboardInterrupt, unless it is in C code |
| `ends` | `ends`: the own ends of this rank's TCP connections |
| `cut`: `peers` | nothing: the cell gets an error from the collective in which it waits |
| `regroup`: `number` | `regrouped`: `error`, empty if the process group was made again |
| `end` | the script continues after `serve` |

A cell asks by `input()`, and `breakpoint()` starts Python's debugger, which asks for its commands, if `asks` says that
someone is there to answer.

If a cell raises an exception, the frames of the script in it are kept until the next cell. A cell with a number `up` is
evaluated in one of them, with its variables: 0 is the innermost one. Without code, its value is a list of them.

A rank that waits in a collective is in C++ and notices no signal. gloo returns from it with an error when a connection
to another rank is closed, so `cut` shuts down those to the other ranks; NCCL is aborted. After that the process group
is of no use, and `regroup` makes a new one, for which all ranks meet through a new file.
"""

from __future__ import annotations

import ast
import asyncio
import bdb
import builtins
import inspect
import io
import json
import linecache
import os
import pdb
import pprint
import queue
import rlcompleter
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.probe.runner import clean, steps_of_this_rank, text_of
from labkit.probe.torch_private import SEQUENCE_NUMBER, WORLD
from labkit.probe.values import NoValue, packed, unpacked
from labkit.record.channel import receive, send, socket_name
from labkit.record.stacks import LIBRARIES, MESSAGE_LIMIT, clipped, frame_of, of_script
from labkit.record.writer import REPORT, sent

_VALUE = 1 << 14  # characters of the value of a cell
_ITEMS = 1_000  # of a container that are written out
_WIDTH = 100
_ROWS = 500  # variables that are listed
_PICTURES = 16  # of one cell
_LARGEST = 4 << 20  # bytes of a picture
_DOCUMENTED = 4_000  # characters of a docstring
_SHOWING = ("IPython", "ipywidgets", "anywidget", "tqdm")  # with these in a cell, IPython is there before it runs
_WRAPPERS = ("wrapper", "_fn")  # functions of torch around a collective


def serve(namespace: dict[str, Any]) -> None:
    """Runs cells in `namespace` until the notebook ends the ranks."""
    folder = os.environ.get("LABKIT_TEMPORARY")
    if folder is None:
        sys.exit("this script runs the cells of a notebook: start it there with %%torchrun 4 --keep")
    with Listener(f"{folder}/{socket_name(int(os.environ['RANK']))}", "AF_UNIX") as listener:
        connection = listener.accept()
    with connection:
        Cells(connection, namespace).run()


class _Debugger(pdb.Pdb):
    """Python's debugger, for which a cell is no file in the working folder."""

    def canonic(self, filename: str) -> str:
        return filename if filename in linecache.cache else super().canonic(filename)


class Cells:
    """The cells of one rank, and its connection to the notebook."""

    def __init__(self, connection: Connection, namespace: dict[str, Any]):
        self._connection, self._namespace = connection, namespace
        namespace["display"], namespace["get_ipython"] = self._display, self._ipython
        self._given = dict(namespace)
        self._sending = threading.Lock()
        self._asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._steps = steps_of_this_rank()
        self._cell = ""  # the name of the cell that runs
        self._cells: set[str] = set()
        # frames and lines of the last exception, the innermost first
        self._raised: list[tuple[types.FrameType, int]] = []
        self._reports: dict[str, Any] = {}
        self._pictures: list[tuple[str, bytes]] = []
        self._places: dict[str, int] = {}  # by display id: the index of a picture
        self._loop: asyncio.AbstractEventLoop | None = None  # of cells with `await`
        self._shell: Any = None  # IPython, which runs magics and shell commands
        self._asks = False  # whether someone is there to answer
        self._questions = 0
        self._answers: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._backend = dist.get_backend()
        builtins.input, sys.breakpointhook = self._input, self._break
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # plt.show(): the notebook shows it
        torch.monitor.register_event_handler(self._hear)

    def run(self) -> None:
        """Runs what is asked until the notebook ends the ranks, or has ended itself."""
        threading.Thread(target=self._listen, daemon=True, name="labkit cells").start()
        self._idle()
        self._send(did="ready", pid=os.getpid())
        while (message := self._asked.get())["do"] != "end":
            if message["do"] == "run":
                self._run(message["cell"], message["code"], message["up"], message["asks"])
            elif message["do"] == "comm":
                self._hear_view(message["id"], message["content"], message["buffers"])
            else:
                self._send(did="regrouped", error=self._regroup(message["number"]))

    # ---- messages

    def _send(self, data: Sequence[bytes] = (), **fields: Any) -> None:
        with self._sending, suppress(OSError):  # the notebook has ended, and so will this rank
            send(self._connection, fields, data)

    def _listen(self) -> None:
        """The thread that answers while a cell runs."""
        try:
            while True:
                message, data = receive(self._connection)
                if message["do"] in ("run", "regroup", "end", "comm"):
                    self._asked.put(message | {"buffers": data})
                else:
                    self._answer(message, data)
        except (EOFError, OSError):
            self._asked.put({"do": "end"})

    def _answer(self, message: dict[str, Any], data: list[bytes]) -> None:
        match message["do"]:
            case "interrupt":
                if self._cell:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            case "answer":
                self._answers.put((message["number"], message["text"]))
            case "where":
                self._send(did="where", **self._where())
            case "variables":
                self._send(did="variables", rows=self._rows(), memory=_resident(), **_device())
            case "complete":
                self._send(did="completed", names=self._completions(message["text"]))
            case "inspect":
                self._send(did="inspected", text=self._inspected(message["name"]))
            case "ends":
                self._send(did="ends", ends=[own for _, own, _ in _connections()])
            case "cut":
                _cut({tuple(peer) for peer in message["peers"]})
            case "pull":
                self._pull(message["name"])
            case "push":
                self._push(message["name"], message["tree"], data)

    def _pull(self, name: str) -> None:
        if name not in self._namespace:
            self._send(did="pulled", error="does not exist")
            return
        try:
            tree, data = packed(self._namespace[name])
        except NoValue as error:
            self._send(did="pulled", error=str(error))
        else:
            self._send(data, did="pulled", error="", tree=tree)

    def _push(self, name: str, tree: Any, data: list[bytes]) -> None:
        error = ""
        try:
            self._namespace[name] = unpacked(tree, data)
        except NoValue as reason:
            error = str(reason)
        self._send(did="pushed", error=error)

    # ---- a cell

    def _interrupted(self, number: int, frame: types.FrameType | None) -> None:
        if self._cell:
            raise KeyboardInterrupt

    def _idle(self) -> None:
        self._cell = ""
        if self._steps:
            self._steps.cell_ends()

    def _run(self, name: str, code: str, up: int | None, asks: bool) -> None:
        self._cells.add(name)
        if up is None:
            self._raised.clear()  # and with it what its variables hold
        self._reports.clear()
        self._clears()
        linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
        if self._steps:
            self._steps.cell_begins()
        signal.signal(signal.SIGINT, self._interrupted)  # an earlier cell may have set another handler
        messages = self._bytes_of_messages()
        _forget_peak()
        begun, since = time.perf_counter(), time.time_ns()
        value, error = "", None
        try:
            try:
                self._cell, self._asks = name, asks
                if "IPython" in sys.modules or any(package in code for package in _SHOWING):
                    self._ipython()
                value = self._execute(name, code, self._namespace) if up is None else self._debug(name, code, up)
                self._pictures += _figures()
                _synchronize()
            finally:
                sys.settrace(None)  # of a debugger
                self._cell, self._asks = "", False
        except BaseException as raised:
            error = _described(clean(raised), name)
            if up is None:
                self._raised = _own_frames(raised)
        seconds = time.perf_counter() - begun
        self._idle()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        pictures = self._pictures[:_PICTURES]
        self._send(
            [content for _, content in pictures],
            did="done",
            pictures=[kind for kind, _ in pictures],
            seconds=seconds,
            peak=_peak(),
            sent=self._sent(since, messages),
            value=value,
            error=error,
            reports=self._reports,
            calls=_calls(),
        )

    def _input(self, prompt: object = "") -> str:
        """`input` of a cell: the notebook asks."""
        if not self._asks or threading.current_thread() is not threading.main_thread():
            raise RuntimeError("input() can ask nobody here: set a variable in the notebook, and %ranks push it")
        self._questions += 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._is_idle(True)
        try:
            self._send(did="asks", number=self._questions, prompt=str(prompt))
            answered, text = self._answers.get()
            while answered != self._questions:  # of an input that was interrupted
                answered, text = self._answers.get()
        finally:
            self._is_idle(False)
        if text is None:
            raise EOFError("the cell was interrupted")
        return text

    def _is_idle(self, idle: bool) -> None:
        """Who waits for a person does not hang."""
        if self._steps:
            self._steps.progress, self._steps.idle = time.monotonic(), idle

    def _break(self, *_: object, **__: object) -> None:
        """`breakpoint` of a cell: Python's debugger, which asks for its commands in the notebook."""
        if not self._asks:
            raise RuntimeError(
                "breakpoint() can ask nobody here, so it ends the cell; %%ranks debug runs cells with the variables of"
                " this place"
            )
        _Debugger(nosigint=True, skip=["labkit.*"]).set_trace(sys._getframe(1))

    def _debug(self, name: str, code: str, up: int) -> str:
        """Runs a cell with the variables of a frame of the last exception; without code, the value is all frames."""
        if not self._raised:
            raise LookupError("the exception has no place in the script")
        if up >= len(self._raised):
            raise LookupError(f"there are {len(self._raised)} places; the last one is up {len(self._raised) - 1}")
        if not code.strip():
            return clipped("\n".join(_frame_text(number, *frame) for number, frame in enumerate(self._raised)), _VALUE)
        frame, _ = self._raised[up]
        return self._execute(name, code, {**frame.f_globals, **frame.f_locals})

    def _execute(self, name: str, code: str, namespace: dict[str, Any]) -> str:
        """Runs a cell in `namespace`, and returns the value of its last expression as text; empty if there is none, or
        if it is a picture. A table or a chart is both: what a browser shows, and text."""
        tree = ast.parse(code, name)
        is_shown = tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";")
        last = tree.body.pop() if is_shown else None
        self._evaluate(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True), namespace)
        if not isinstance(last, ast.Expr):
            return ""
        flags = _flags(tree) | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        value = self._evaluate(compile(ast.Expression(last.value), name, "eval", flags, dont_inherit=True), namespace)
        if value is None:
            return ""
        namespace["_"] = value
        if picture := _picture(value):
            self._pictures.append(picture)
            return ""
        if page := _page(value):
            self._pictures.append(page)
            if type(value).__repr__ is object.__repr__:  # only an address
                return ""
        return _text(value)

    def _evaluate(self, code: types.CodeType, namespace: dict[str, Any]) -> Any:
        value = eval(code, namespace)
        if not code.co_flags & inspect.CO_COROUTINE:
            return value
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(value)

    def _display(self, *values: Any, **options: Any) -> Any:
        """`display` of a notebook: pictures, HTML, charts of plotly and widgets, and everything else as text."""
        if options or self._shell is not None:
            self._ipython()
            from IPython.display import display

            return display(*values, **options)
        for value in values:
            if picture := _picture(value) or _page(value):
                self._pictures.append(picture)
            else:
                print(_text(value))
        return None

    def _shows(self, kind: str, content: bytes, place: str) -> None:
        """Something that IPython displays, in its place if that was displayed before in this cell."""
        if (shown := _bounded(kind, content)) is None:
            return
        if place in self._places:
            self._pictures[self._places[place]] = shown
            return
        if place:
            self._places[place] = len(self._pictures)
        self._pictures.append(shown)

    def _clears(self) -> None:
        self._pictures.clear()
        self._places.clear()

    def _hear_view(self, name: str, content: Any, buffers: list[bytes]) -> None:
        from labkit.probe.displays import hear_view

        try:
            hear_view(name, content, buffers)
        except Exception:  # of a function that observes a widget
            traceback.print_exc()

    def _ipython(self) -> Any:
        """IPython with the variables of the cells, made by the first cell that has a magic. It writes no history."""
        if self._shell is None:
            from IPython.core.interactiveshell import InteractiveShell
            from traitlets.config import Config

            from labkit.probe.displays import Publisher, connect_widgets

            before = dict(self._namespace)
            self._shell = InteractiveShell.instance(
                config=Config({"HistoryManager": {"enabled": False}}),
                ipython_dir=os.environ["LABKIT_TEMPORARY"],
                user_module=sys.modules["__main__"],
                user_ns=self._namespace,
            )
            self._shell.display_pub = Publisher(self._shell, self._shows, self._clears)
            connect_widgets(self._shell.display_pub, self._send)
            self._given |= {name: value for name, value in self._namespace.items() if before.get(name) is not value}
        return self._shell

    def _hear(self, event: Any) -> None:
        if event.name == REPORT:
            self._reports.update(json.loads(event.data["values"]))

    def _bytes_of_messages(self) -> int:
        return self._steps.traffic.bytes_of_messages if self._steps and self._steps.traffic else 0

    def _sent(self, since: int, messages: int) -> float | None:
        """Bytes sent since a time (Unix ns); None if torch's recorder no longer has all collectives since then."""
        if not self._steps or not dist.is_initialized():
            return None
        calls = self._steps.recorder.since(since)
        if calls is None:
            return None
        collectives = sum(sent(call["op"], call["bytes"], len(call["ranks"])) for call in calls)
        return collectives + self._bytes_of_messages() - messages

    # ---- where it is

    def _where(self) -> dict[str, Any]:
        """The line of a cell that the rank is in, the function of torch.distributed that it has called there, and the
        collectives and messages that are not over."""
        thread = self._steps.thread if self._steps else None
        frames = of_script(thread.frame() if thread else frame_of(threading.main_thread()))
        inside = [index for index, frame in enumerate(frames) if frame.filename in self._cells]
        if not self._cell or not inside:
            return {"cell": "", "line": 0, "call": "", "pending": [], "cpu": _busy()}
        place = frames[inside[-1]]
        calls = [
            frame.name
            for frame in frames[inside[-1] + 1 :]
            if "/torch/distributed/" in frame.filename and frame.name not in _WRAPPERS
        ]
        pending = [op for op in self._steps.recorder.newest() if not op["over"]] if self._steps else []
        return {
            "cell": place.filename,
            "line": place.lineno,
            "call": calls[0] if calls else "",
            "pending": pending,
            "cpu": _busy(),
        }

    # ---- variables

    def _variables(self) -> list[tuple[str, Any]]:
        """What cells have defined: not modules, and not what the script has given them."""
        return [
            (name, value)
            for name, value in list(self._namespace.items())
            if not name.startswith("_")
            and not isinstance(value, types.ModuleType)
            and self._given.get(name, self) is not value
        ]

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, value in self._variables()[:_ROWS]:
            row: dict[str, Any] = {"name": name, "type": type(value).__name__}
            with suppress(Exception):  # a class may do anything when it is asked
                row |= _facts(value)
            rows.append(row)
        return rows

    def _completions(self, text: str) -> list[str]:
        if "." not in text:
            return [name for name, _ in self._variables() if name.startswith(text)]
        try:
            return [name.rstrip("()") for name in rlcompleter.Completer(self._namespace).attr_matches(text)]
        except Exception:  # a class may do anything when it is asked
            return []

    def _inspected(self, name: str) -> str:
        """What Shift-Tab shows of a variable, function or attribute: its type, value or signature, and docstring."""
        try:
            first, *attributes = name.split(".")
            value = self._namespace[first] if first in self._namespace else getattr(builtins, first)
            for attribute in attributes:
                value = getattr(value, attribute)
            lines = [f"Type: {type(value).__name__}"]
            facts = _facts(value)
            lines += [f"{fact}: {facts[fact]}" for fact in ("shape", "dtype", "device") if fact in facts]
            if callable(value):
                with suppress(ValueError, TypeError):  # a builtin that tells none
                    lines.insert(0, f"Signature: {name}{inspect.signature(value)}")
            else:
                lines.append(f"Value: {_text(value)}")
            document = inspect.getdoc(value) if callable(value) or isinstance(value, types.ModuleType) else None
            return clipped("\n".join([*lines, *([f"\n{document}"] if document else [])]), _DOCUMENTED)
        except Exception:  # it does not exist, or a class may do anything when it is asked
            return ""

    # ---- after a collective that could not complete

    def _regroup(self, number: int) -> str:
        """Makes the process group again, through a file that all ranks share; the reason if that fails."""
        device = self._namespace.get("device")
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(
                self._backend,
                init_method=f"file://{Path(os.environ['LABKIT_TEMPORARY'], f'group{number}')}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                device_id=device if self._backend == "nccl" else None,
            )
        except Exception as error:
            return str(error).strip() or type(error).__name__
        return ""


def _flags(tree: ast.Module) -> int:
    """The flags of the `from __future__` statements of a cell, which also hold for its last expression."""
    import __future__

    names = [
        alias.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        for alias in statement.names
    ]
    flags = 0
    for name in names:
        flags |= getattr(__future__, name).compiler_flag
    return flags


def _text(value: Any) -> str:
    """A value as IPython shows it, of bounded length."""
    if isinstance(value, (str, bytes)) and len(value) > _VALUE:
        value = value[:_VALUE]
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) > _ITEMS:
        return clipped(f"{pprint.pformat(list(islice(value, _ITEMS)), width=_WIDTH)}\n… {len(value):,} items", _VALUE)
    if isinstance(value, dict) and len(value) > _ITEMS:
        first = dict(islice(value.items(), _ITEMS))
        return clipped(f"{pprint.pformat(first, width=_WIDTH, sort_dicts=False)}\n… {len(value):,} items", _VALUE)
    return clipped(pprint.pformat(value, width=_WIDTH, sort_dicts=False), _VALUE)


def _picture(value: Any) -> tuple[str, bytes] | None:
    """The MIME type and content of a value that is a picture to notebooks, or a figure of matplotlib; otherwise None.
    A figure that is shown this way is closed."""
    with suppress(Exception):  # a class may do anything when it is asked
        figures = sys.modules.get("matplotlib.figure")
        if figures is not None and isinstance(value, figures.Figure):
            buffer = io.BytesIO()
            value.savefig(buffer, format="png", bbox_inches="tight")
            if pyplot := sys.modules.get("matplotlib.pyplot"):
                pyplot.close(value)
            return _bounded("image/png", buffer.getvalue())
        for kind, method in (("image/png", "_repr_png_"), ("image/svg+xml", "_repr_svg_")):
            made = None if isinstance(value, type) else getattr(value, method, None)
            content = made() if callable(made) else None
            if isinstance(content, tuple):  # with metadata
                content = content[0]
            if content:
                return _bounded(kind, content.encode() if isinstance(content, str) else bytes(content))
    return None


def _page(value: Any) -> tuple[str, bytes] | None:
    """The MIME type and content of a chart of plotly, or of another value that has HTML, such as a table of pandas;
    otherwise None."""
    with suppress(Exception):  # a class may do anything when it is asked
        if "ipywidgets" in sys.modules:
            from labkit.probe.displays import view_of

            if view := view_of(value):
                return view
        plotly = sys.modules.get("plotly.basedatatypes")
        if plotly is not None and isinstance(value, plotly.BaseFigure):
            return _bounded("application/vnd.plotly.v1+json", value.to_json().encode())
        made = None if isinstance(value, type) else getattr(value, "_repr_html_", None)
        content = made() if callable(made) else None
        if content:
            return _bounded("text/html", str(content).encode())
    return None


def _bounded(kind: str, content: bytes) -> tuple[str, bytes] | None:
    return (kind, content) if len(content) <= _LARGEST else None


def _figures() -> list[tuple[str, bytes]]:
    """The figures of matplotlib that the cell has left open, which are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    open_figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    return [picture for figure in open_figures if (picture := _picture(figure))]


def _facts(value: Any) -> dict[str, Any]:
    """What the table of variables says of a value."""
    if isinstance(value, torch.Tensor):
        own = value.to_local() if hasattr(value, "to_local") else value  # a DTensor: the shard of this rank
        facts = {"shape": str(list(value.shape)), "dtype": str(value.dtype).removeprefix("torch.")}
        return facts | {"device": str(value.device), "bytes": own.numel() * own.element_size()}
    if isinstance(value, torch.nn.Module):
        parameters = list(value.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        devices = sorted({str(parameter.device) for parameter in parameters})
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        return {"shape": f"{count:,} parameters", "device": ", ".join(devices), "bytes": size}
    if hasattr(value, "nbytes") and hasattr(value, "dtype"):  # an array
        return {"shape": str(list(value.shape)), "dtype": str(value.dtype), "bytes": int(value.nbytes)}
    if isinstance(value, (bool, int, float, str)):
        return {"shape": clipped(repr(value[:80] if isinstance(value, str) else value), 80)}
    if isinstance(value, (list, tuple, dict, set)):
        return {"shape": f"{len(value):,} items"}
    return {}


# ---- errors


def _described(error: BaseException, cell: str) -> dict[str, Any]:
    """The type and message of an exception, its traceback without the frames of libraries, and its line in the cell."""
    short = traceback.TracebackException.from_exception(error)
    parts: list[traceback.TracebackException | None] = [short]
    while parts:
        part = parts.pop()
        if part is not None:
            own = [frame for frame in part.stack if not any(place in frame.filename for place in LIBRARIES)]
            part.stack = traceback.StackSummary.from_list(own or part.stack)
            parts += [part.__cause__, part.__context__]
    lines = [frame.lineno for frame in short.stack if frame.filename == cell]
    left = isinstance(error, bdb.BdbQuit)
    message = "the debugger was left, which ends the cell" if left else text_of(error)
    return {
        "type": type(error).__name__,
        "message": clipped(message, MESSAGE_LIMIT),
        "traceback": clipped("".join(short.format()).rstrip()),
        "line": lines[-1] if lines else 0,
    }


def _own_frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    """The frames of an exception outside of libraries with their lines, the innermost first; all if there is no other.
    A frame that is still running, such as that of a generator, has its present variables."""
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
    own = [frame for frame in frames if not any(place in frame[0].f_code.co_filename for place in LIBRARIES)]
    return own or frames


def _frame_text(number: int, frame: types.FrameType, line: int) -> str:
    """A frame with its variables, `up 1: step, line 3 of Cell In[4]`; of the cell itself, only those of functions."""
    code = frame.f_code
    lines = [f"up {number}: {code.co_name}, line {line} of {Path(code.co_filename).name}"]
    for name, value in frame.f_locals.items() if code.co_name != "<module>" else ():
        facts: dict[str, Any] = {}
        with suppress(Exception):  # a class may do anything when it is asked
            facts = _facts(value)
        said = " ".join(str(facts[fact]) for fact in ("shape", "dtype", "device") if fact in facts)
        lines.append(f"    {name}: {type(value).__name__} {said}".rstrip())
    return "\n".join(lines)


# ---- memory and collectives of a cell


def _resident() -> int | None:
    """Bytes of memory of this process now; on CUDA those that torch has allocated."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return _from_kernel("VmRSS")


def _device() -> dict[str, Any]:
    """The GPU of this process in words, its memory, and what torch has reserved of it; empty on a CPU."""
    if not torch.cuda.is_initialized():
        return {}
    number = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(number)
    return {
        "device": f"cuda:{number} {properties.name}",
        "reserved": torch.cuda.memory_reserved(),
        "total": properties.total_memory,
    }


def _forget_peak() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM: `proc(5)`


def _peak() -> int | None:
    """Most bytes since `_forget_peak`: resident, or allocated on CUDA; None if the system does not tell."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return _from_kernel("VmHWM")


def _from_kernel(name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None


def _synchronize() -> None:
    """Waits for what the cell has started on its GPU, whose time and errors are those of the cell."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _busy() -> float:
    """Seconds in which threads of this process computed, or were ready to while other processes had the cores: whoever
    is short of them does not wait for a rank. All threads count, because one of gloo's may be sending."""
    ready = 0.0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            ready += int(thread.read_text(encoding="ascii").split()[1]) / 1e9  # `proc-schedstat`: on a run queue
    return time.process_time() + ready


def _calls() -> int | None:
    """The number of collectives that this rank has called in the default group; None if unknown."""
    with suppress(Exception):
        return int(SEQUENCE_NUMBER.of(dist.group.WORLD)())
    return None


# ---- connections to other ranks


def _connections() -> Iterator[tuple[socket.socket, tuple[Any, ...], tuple[Any, ...]]]:
    """The TCP connections of this process, each with the addresses of its own and of its other end."""
    for path in list(Path("/dev/fd").iterdir()):
        try:
            copy = os.dup(int(path.name))
        except (OSError, ValueError):
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # not a socket
            os.close(copy)
            continue
        with connection, suppress(OSError):
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection, connection.getsockname()[:2], connection.getpeername()[:2]


def _cut(peers: set[tuple[Any, ...]]) -> None:
    """Aborts the process groups, and shuts down the connections whose other end is one of `peers`."""
    for group in reversed(list(WORLD.get().pg_names)):
        with suppress(Exception):  # a backend that cannot
            group.abort()
    for connection, _, other in _connections():
        if tuple(other) in peers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
