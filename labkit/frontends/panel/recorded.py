"""Runs that are over, and files of jobs that ran anywhere: the list of recorded runs, the time line that plays them,
the tab that explains files, and the button that installs what is missing.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from labkit.analysis.foreign import Page
from labkit.analysis.moments import Course, course
from labkit.common.arguments import check_path, shown
from labkit.common.text import escape, visible, visible_line
from labkit.common.units import counted
from labkit.figures.tables import Explained
from labkit.frontends.panel import widgets
from labkit.frontends.panel.widgets import HandshakeWidget, program, sentence_html, state_html
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import SpecFields, Status
from labkit.record.files import NotPlain
from labkit.record.folder import RunFolder
from labkit.record.follow import Recording, current_status, is_recorded, recorded_words
from labkit.record.packed import shipped, shipped_documents, shipped_like
from labkit.setup import environment
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

# ---- the list of recorded runs

_NEWEST = 20  # runs in the list
_NONE = "a recorded run …"
_ALONE = "no other run"


class Recorded:
    """The lists of recorded runs, one of which is opened and another one shown in step with it, and the description of
    the open one, which `widget` shows.

    `on_choice` is called with the path of the selected run, empty for none.
    """

    def __init__(self, on_choice: Callable[[str], None]):
        self._on_choice = on_choice
        self._listing = False
        hint = "Open and replay a recorded run"
        self.which = widgets.dropdown(
            "Recorded", [(_NONE, "")], "", tooltip=hint, layout={"width": "132px"}, css="labkit-recorded-runs"
        )
        self.which.observe(self._chosen, "value")
        self.close_button = widgets.button(
            "✕ Close", "Back to the configuration", lambda: self.choose(""), css="labkit-close"
        )
        hint = "Show another run below, always after as many steps"
        self.beside = widgets.dropdown(
            "In step with", [(_ALONE, "")], "", tooltip=hint, layout={"width": "240px"}, css="labkit-field"
        )
        self.beside.observe(lambda _: self._listing or self._on_choice(self.which.value), "value")
        self.title, self._said = widgets.HTML(), widgets.HTML()
        row = widgets.HBox([self.title, self.beside, self.close_button], css="labkit-row")
        self.widget = widgets.VBox([row, self._said], layout=widgets.HIDDEN)
        self.refresh()

    def refresh(self) -> None:
        """Lists the newest runs that are over, and keeps the selection."""
        lines = [(f"{_line(name, *shipped_documents(name))} · comes with the lab", name) for name in shipped()]
        self._list([(_NONE, ""), *_told_apart(newest_over(_NEWEST)), *lines])

    def choose(self, path: str, beside: str = "") -> None:
        """Selects a run by its path, and one beside it, and calls `on_choice`; an empty path clears the selection."""
        options = list(self.which.options)
        for chosen in (path, beside):
            if chosen not in [value for _, value in options]:
                options.append((label(RunFolder.find(chosen)), chosen))
        self._list(options)
        self._listing = True
        self.beside.value = beside
        self._listing = False
        self.which.value = path

    def _list(self, options: list[tuple[str, str]]) -> None:
        chosen = self.which.value
        if chosen not in [path for _, path in options]:
            options.append((label(RunFolder.find(chosen)), chosen))
        self._listing = True  # setting the options selects the first one for a moment
        try:
            beside = self.beside.value
            self.which.options = options
            self.which.value = chosen
            self.beside.options = [(_ALONE, ""), *((text, path) for text, path in options if path)]
            self.beside.value = beside
        finally:
            self._listing = False

    def _chosen(self, change: dict[str, Any]) -> None:
        if not self._listing:
            self._on_choice(change["new"])

    def describe(self, folder: RunFolder) -> None:
        """Shows which run is open, and when and where it was recorded."""
        self.title.value = (
            f'<div class="labkit-recording" role="status"><b>{escape(what(folder))}</b>'
            f" {escape(recorded_words(folder))}</div>"
        )
        imported = folder.read_imported()
        if imported is None:
            about = f"Replay of run {folder.name} with its recorded timing; nothing is training now."
        else:
            files = counted(len(imported.sources), "file")
            about = f"Imported from {files}, not launched here: run {folder.name}, with the timing of its files."
        self._said.value = (
            f'<div class="labkit-explanation"><div>{escape(about)}</div>'
            "<div>Play it, or point at any moment of its time line below.</div></div>"
        )


def find_all(names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> list[RunFolder]:
    """A recorded run, or a pair of them, as `find` does; none for None."""
    if names is None or isinstance(names, (str, os.PathLike)):
        return [] if names is None else [find(names)]
    if not isinstance(names, (list, tuple)) or not 1 <= len(names) <= 2:
        raise SpecError("recorded", f"recorded must be a run or a pair of runs, got {shown(names)}")
    return [find(name) for name in names]


def find(name: str | os.PathLike[str]) -> RunFolder:
    """Finds a recorded run by `name` as in `RunFolder.find`. Raises `SpecError` if there is none or it is not over."""
    try:
        folder = RunFolder.find(check_path("recorded", name))
        folder.require_readable()
    except (LookupError, TypeError, ValueError) as error:
        raise SpecError("recorded", error.args[0]) from None
    if not is_recorded(folder):
        raise SpecError("recorded", f"{folder.name} is still running; watch it with show({folder.name!r})")
    return folder


def under_way() -> str:
    """What trains on this machine already, in a sentence; empty if nothing does."""
    folders = [folder for folder in RunFolder.all()[: -_NEWEST - 1 : -1] if not folder.trouble()]
    names = [folder.name for folder in folders if current_status(folder).state in ("starting", "running")]
    if not names:
        return ""
    return f"{names[0]} is under way, and would share the cores with another run; show({names[0]!r}) shows it"


def spec_of(folder: RunFolder) -> Spec | None:
    """The Spec of a run; None if a newer version wrote fields that are unknown here."""
    try:
        return folder.read_spec().to_spec()
    except SpecError:
        return None


def what(folder: RunFolder) -> str:
    """Describes a run: `DDP: CNN on digits, 2 ranks`."""
    asked = folder.read_spec()
    strategy, workload = STRATEGIES.get(asked.strategy), WORKLOADS.get(asked.workload)
    what = strategy.title if strategy else Path(str(asked.script or folder.name)).name
    on = f": {workload.title.partition(':')[0]} on {asked.data or workload.data[0]}" if workload else ""
    return f"{what}{on}, {_ranks(asked)}"


def newest_over(count: int) -> list[tuple[str, str]]:
    """Those of the newest `count` runs that are over, or cannot be read: the line of each, and its path."""
    there = [folder for folder in RunFolder.all()[: -count - 1 : -1] if folder.trouble() or is_recorded(folder)]
    return [(label(folder), str(folder.path)) for folder in there]


def _told_apart(options: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The options, with the name of the run where several have the same line."""
    counts = Counter(line for line, _ in options)
    return [(f"{line} · {Path(path).name}" if counts[line] > 1 else line, path) for line, path in options]


def label(folder: RunFolder) -> str:
    """A line for a list of runs: `03 Mar 14:05 · DDP · CNN, 40 steps · 2 ranks · finished`."""
    if why := folder.trouble():
        return visible_line(f"{folder.name} · unreadable: {why}")
    return _line(folder.name, folder.read_spec(), current_status(folder))


def _line(name: str, asked: SpecFields, status: Status) -> str:
    when = time.strftime("%d %b %H:%M", time.localtime(status.started)) if status.started else name
    strategy = STRATEGIES.get(asked.strategy)
    what = strategy.title if strategy else Path(str(asked.script or name)).name
    workload = WORKLOADS.get(asked.workload)
    trained = [workload.title.partition(":")[0]] if workload else []
    trained += [f"{asked.steps} steps"] if asked.steps else []
    state = "over" if status.state == "ready" else status.state
    return visible_line(" · ".join(filter(None, (when, what, ", ".join(trained), _ranks(asked), state))))


def _ranks(asked: SpecFields) -> str:
    return counted(asked.nproc or 1, "rank")


def text_of(folder: RunFolder, path: Path) -> str:
    """The text of a file of a run, for display; a comment if it cannot be shown."""
    try:
        return visible(folder.text(path))
    except NotPlain as error:
        return f"# not shown: {error}\n"
    except OSError:
        if folder.read_imported() is not None:
            return "# imported, not launched here: the files it was made from have no script\n"
        return f"# {path.name} is missing from the folder of this run\n"


# ---- the button that opens a recorded run instead of one that failed


class Instead:
    """A button that opens the run of the same strategy that comes with the lab, visible only while it is offered;
    `choose` is called with its name."""

    def __init__(self, choose: Callable[[str], None]):
        self._name = ""
        self.button = widgets.button(
            "Open a recorded run", None, lambda: choose(self._name), layout=widgets.HIDDEN, css="labkit-instead"
        )

    def offer(self, asked: SpecFields | None) -> None:
        """Offers a run of the strategy that was asked for, if there is one; None: nothing is offered any longer."""
        name = shipped_like(asked.strategy or "", asked.nproc or 1) if asked else None
        widgets.show(self.button, name is not None)
        if name:
            self._name, self.button.description = name, f"Open a recorded {STRATEGIES[asked.strategy].title} run"


# ---- the time line: it plays recorded runs, stops at any moment, and goes to a step, a finding or the peak of memory

_PICTURE = 0.25  # seconds between two pictures while it plays


class _ReplayWidget(HandshakeWidget):
    """The browser side: sends "ready", "seek", "step", "play" and "speed"."""

    _esm = program("replay.js")


class Replay:
    """The time line of one recorded run, or of several in step: whenever the first one has finished a step, so have the
    others.

    Display `widget`, which is hidden until a run is opened. `show` is called with the recordings and whether they play,
    in a thread that holds `lock`.
    """

    def __init__(self, show: Callable[[Sequence[Recording], bool], None], lock: AbstractContextManager[Any]) -> None:
        self.page = _ReplayWidget()
        self.page.on_msg(self._heard)
        self.widget = self.page.box
        self._show, self._lock = show, lock
        self._recordings: tuple[Recording, ...] = ()
        self._courses: tuple[Course, ...] = ()
        self._position, self._speed = 0.0, 1.0
        self._playing = False
        self._changed = threading.Event()  # wakes the thread that moves what is open
        self._answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "seek": lambda message: self.seek(float(message["position"])),
            "step": lambda message: self.to_step(int(message["step"])),
            "play": lambda message: self.play(bool(message["playing"])),
            "speed": lambda message: self.set_speed(float(message["speed"])),
        }

    @property
    def playing(self) -> bool:
        """Whether time passes in the recordings."""
        return self._playing

    def open(self, *folders: RunFolder, at_end: bool = False, wanted: Callable[[], bool] = lambda: True) -> None:
        """Offers runs that are over, and shows their beginning, or, if `at_end`, nothing: their end is shown already.

        All of their events are read first; if they are not `wanted` any longer then, nothing changes.
        """
        courses = tuple(course(folder) for folder in folders)
        recordings = tuple(Recording(folder) for folder in folders)
        with self._lock:
            if not wanted():
                return
            self.close()
            self._recordings, self._courses = recordings, courses
            self._position = courses[0].seconds if at_end else 0.0
            self._changed = threading.Event()
            if not at_end:
                self._draw()
            self._send_all()
            changed = self._changed
        widgets.in_thread("replay", self._work, recordings, changed)

    def close(self) -> None:
        """Offers no run any longer."""
        with self._lock:
            self._recordings, self._courses, self._playing = (), (), False
            self._changed.set()
            self._send_all()

    def play(self, playing: bool = True) -> None:
        """Plays from where the replay is, from the beginning if it is at the end; or pauses."""
        courses = self._courses
        if not courses:
            return
        if playing and self._position >= courses[0].seconds:
            self._position = 0.0
        self._playing = playing
        self._changed.set()

    def seek(self, position: float) -> None:
        """Goes to a moment, in seconds since the first run began."""
        courses = self._courses
        if courses:
            self._position = min(max(0.0, position), courses[0].seconds)
            self._changed.set()

    def to_step(self, step: int) -> None:
        """Goes to the moment at which all ranks had finished a step."""
        courses = self._courses
        if courses:
            self.seek(courses[0].end_of(step))

    def set_speed(self, speed: float) -> None:
        """How many seconds of the first run pass in a second."""
        self._speed = speed

    # ---- the thread that moves

    def _work(self, recordings: tuple[Recording, ...], changed: threading.Event) -> None:
        """Shows what is wanted, and goes on while the replay plays."""
        before = time.monotonic()
        while True:
            woken = changed.wait(_PICTURE if self._playing else None)
            changed.clear()
            with self._lock:
                if self._recordings is not recordings:
                    return
                before, passed = time.monotonic(), time.monotonic() - before
                if self._playing and not woken:
                    self._position += passed * self._speed
                if self._position >= self._courses[0].seconds:
                    self._position, self._playing = self._courses[0].seconds, False
                self._draw()

    def _draw(self) -> None:
        for recording, position in zip(self._recordings, self._positions()):
            recording.seek(position)
        self._show(self._recordings, self._playing)
        self._say()

    def _positions(self) -> list[float]:
        """Where each run is: the first one at the position, and the others after as many steps."""
        first, *others = self._courses
        positions = [self._position]
        for other in others:
            shared = min(len(first.steps), len(other.steps))
            moments = [0.0, *first.steps[:shared], first.seconds]
            theirs = [0.0, *other.steps[:shared], other.seconds]
            positions.append(float(numpy.interp(self._position, moments, theirs)))
        return positions

    # ---- the page

    def _heard(self, _, message, buffers) -> None:
        kind = message.get("kind")
        if kind == "ready":  # in a thread: the lock may be held while a long run is drawn, and the kernel must not wait
            widgets.in_thread("answer to a page", self._send_all)
        elif kind in self._answers:
            self._answers[kind](message)

    def _send_all(self) -> None:
        with self._lock:
            if not self._courses:
                self.page.send({"kind": "course", "course": None})
                return
            first = self._courses[0]
            moments = [asdict(moment) for moment in first.moments]
            self.page.send(
                {"kind": "course", "course": {"seconds": first.seconds, "steps": len(first.steps), "moments": moments}}
            )
            self._say()

    def _say(self) -> None:
        step = self._courses[0].step_at(self._position)
        self.page.send({"kind": "at", "position": self._position, "step": step, "playing": self._playing})


# ---- the tab Open…: files of a job that ran anywhere

_HINT = (
    "Name the logs, profiles of torch.profiler or dumps of the flight recorder of a job that ran anywhere, or their "
    "folder. Files of another computer: drop them into the list of files at the left first."
)
_MOST = 500  # names that are offered


class OpenTab:
    """A field for paths, separated by spaces as in a shell, and what the files say. Files are read in a thread. If they
    are to be kept as a run, `on_kept` is called with its path."""

    def __init__(self, on_kept: Callable[[str], None]) -> None:
        self._on_kept = on_kept
        self.paths = widgets.Combobox(
            description="Files",
            placeholder="logs/  slurm-1234.out  trace_*.json.gz",
            continuous_update=False,
            css="labkit-paths",
        )
        self.button = widgets.button("Open", "Read the files and say what happened", self.open)
        hint = "Make a run of them, which has a time line and can be compared and exported"
        self.kept = widgets.Checkbox(
            value=False, description="Keep as a run", indent=False, tooltip=hint, css="labkit-kept"
        )
        self._said = widgets.HTML()
        self.page = widgets.HTML(
            f'<p class="labkit-empty">{escape(_HINT)}</p>', css="labkit-comparison labkit-explained"
        )
        self.page.tabbable = True  # it is scrolled with the keyboard, too
        bar = widgets.HBox([self.paths, self.button, self.kept, self._said], css="labkit-bar")
        self.widget = widgets.VBox([bar, self.page], css="labkit-opened")
        self.paths.observe(lambda _: self.open(), "value")  # when Enter is pressed, or a name is chosen
        self._thread: threading.Thread | None = None
        self._kept: tuple[Any, RunFolder] | None = None  # the files that were kept last, with their times, and the run

    def opened(self) -> None:
        """The tab is shown: offers the names of the folder of the notebook."""
        try:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir() if entry.name[0] not in "._")
        except OSError:
            names = []
        self.paths.options = tuple(names[:_MOST])

    def open(self) -> None:
        """Reads the files that are named, unless it does so already."""
        if not self.paths.value.strip() or (self._thread is not None and self._thread.is_alive()):
            return
        self.button.disabled = True
        self._said.value = state_html("reading the files", "busy")
        self._thread = widgets.in_thread("open", self._read, self.paths.value)

    def _read(self, text: str) -> None:
        from labkit.analysis.foreign.opening import explain

        try:
            paths = _paths(text)
            pages = explain(paths)
            self.page.value = Explained(pages)._repr_html_()
            folder = self._keep(pages, paths[0]) if self.kept.value else None
        except ValueError as error:
            self._said.value = sentence_html(str(error))
        except OSError as error:
            self._said.value = sentence_html(f"{error.filename} cannot be written: {error.strerror}")
        except Exception as error:
            self._said.value = sentence_html(f"these files cannot be explained: {type(error).__name__}: {error}")
        else:
            self._said.value = state_html(f"kept as the run {folder.name}", "good") if folder else ""
            if folder:
                self._on_kept(str(folder.path))
        finally:
            self.button.disabled = False

    def _keep(self, pages: Sequence[Page], path: Path) -> RunFolder:
        """The run of these files. A click on Open also leaves the field with the paths, which opens them already: the
        same files become one run."""
        from labkit.runs.gathering import keep_files, name_for

        files = [(file, file.stat().st_mtime_ns) for page in pages for file in page.files]
        if self._kept is None or self._kept[0] != files or not self._kept[1].path.is_dir():
            self._kept = files, keep_files(pages, name_for(path))
        return self._kept[1]


def _paths(text: str) -> list[Path]:
    """The paths in a line, with patterns such as `trace_*`. Raises `ValueError` for an open quotation mark."""
    paths: list[Path] = []
    for name in shlex.split(text):
        path = Path(name).expanduser()
        pattern = any(sign in name for sign in "*?[")
        matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))) if pattern else []
        paths += sorted(matches) or [path]
    return paths


# ---- the button that installs

_REDRAW = 0.5  # seconds between two updates of the progress line


def setup_command(extra: str) -> list[str]:
    """The command that installs an optional extra into this kernel's environment; installed packages keep their
    versions.
    """
    return [sys.executable, "-m", "labkit", "setup", "--with", extra]


class Install:
    """A button and a progress line, visible only while an extra is missing or being installed.

    `on_done` is called in a separate thread when this kernel can import the extra.
    """

    def __init__(self, on_done: Callable[[], None]):
        self._on_done = on_done
        self._extra: str | None = None
        self._thread: threading.Thread | None = None
        self._said = ""
        self.button = widgets.button("Install", None, self.start, layout=widgets.HIDDEN, css="labkit-install")
        self.progress = widgets.HTML()
        self.widget = widgets.HBox([self.button, self.progress])

    @property
    def busy(self) -> bool:
        """Whether an installation is running."""
        return self._thread is not None and self._thread.is_alive()

    def offer(self, extra: str | None) -> None:
        """Shows the button for an extra, or hides it for None; the progress of a running installation stays visible."""
        if self.busy:
            return
        if extra != self._extra:
            self.progress.value = ""
        self._extra = extra
        widgets.show(self.button, extra is not None)
        if extra is not None:
            self.button.description = f"Install {environment.OPTIONAL[extra]}"
            self.button.tooltip = " ".join(["python3", *setup_command(extra)[1:]])

    def start(self) -> None:
        """Starts the installation and returns immediately."""
        if self._extra is None or self.busy:
            return
        self.button.disabled = True
        self._said = "starting"
        self._thread = threading.Thread(target=self._work, args=(self._extra,), daemon=True, name="labkit install")
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a running installation."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self, extra: str) -> None:
        try:
            code = self._run(extra)
        except OSError as error:
            code, self._said = 1, str(error)
        importlib.invalidate_caches()  # folders were listed before the package existed
        self.button.disabled = False
        if environment.has(extra):
            self.progress.value = ""
            self._thread = None
            self._on_done()
        elif code == 0:
            self.progress.value = sentence_html(
                f"installed, but not for this kernel ({sys.executable}); restart the lab: python3 -m labkit lab"
            )
        else:
            self.progress.value = sentence_html(self._said)

    def _run(self, extra: str) -> int:
        began, shown = time.monotonic(), threading.Event()
        ticking = threading.Thread(target=self._tick, args=(began, shown), daemon=True)
        with subprocess.Popen(
            setup_command(extra),
            cwd=environment.CLONE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            ticking.start()
            for line in process.stdout:
                self._said = line.strip().removeprefix("labkit: ") or self._said
                self._show(began)
        shown.set()
        ticking.join()
        return process.returncode

    def _tick(self, began: float, over: threading.Event) -> None:
        """Updates the elapsed time while nothing is printed."""
        while not over.wait(_REDRAW):
            self._show(began)

    def _show(self, began: float) -> None:
        self.progress.value = state_html(f"{self._said} ({time.monotonic() - began:.0f} s)", "busy")
