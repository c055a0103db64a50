"""What the commands do: one thin function each, named as the command, from parsed arguments to the exit code."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from labkit import terminal
from labkit.bootstrap import become
from labkit.environment import CLONE
from labkit.exercises import my_progress
from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.launch.status import current
from labkit.machine import Machine
from labkit.progress import Progress
from labkit.spec import Spec
from labkit.state import OVER
from labkit.summary import summarise

_FIRST_LAB = "labs/00_start_here.py"
_CODES = {"finished": 0, "failed": 1, "stopped": 130}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WIDE = 160  # columns of a table that is written to a file
_YOUNG = 60.0  # seconds in which a folder without a status may be that of a run which is just being made


class Refused(Exception):
    """A command that cannot do what it was asked: one sentence, and the exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


# ---- the environment


def setup(args: argparse.Namespace) -> int:
    """The environment is there by now."""
    print(f"ready: {sys.executable}")
    return 0


def lab(args: argparse.Namespace) -> int:
    """Goes on as JupyterLab."""
    if not (CLONE / _FIRST_LAB).is_file():
        raise Refused(f"there is no {_FIRST_LAB} in {CLONE}; start the lab from a clone of the project")
    os.environ.update(lab_environment())
    become(lab_command(args), folder=CLONE)
    return 0


def lab_command(args: argparse.Namespace) -> list[str]:
    """JupyterLab's command line: its token stays on, and it listens on this machine alone unless told otherwise."""
    return [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={CLONE}", f"--ServerApp.ip={args.ip}"),
        f"--LabApp.default_url=/lab/tree/{_FIRST_LAB}",
        *([f"--ServerApp.port={args.port}"] if args.port else []),
        *(["--no-browser"] if args.no_browser else []),
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *args.rest,
    ]


def lab_environment() -> dict[str, str]:
    """What JupyterLab and its kernels get to know: the lab's settings, the place of the runs, and where labkit is."""

    def in_front(variable: str, path: Path) -> str:
        return os.pathsep.join(part for part in (str(path), os.environ.get(variable)) if part)

    return {
        "JUPYTER_CONFIG_PATH": in_front("JUPYTER_CONFIG_PATH", CLONE / "labkit" / "jupyter"),
        "LABKIT_RUNS": os.environ.get("LABKIT_RUNS") or str(CLONE / "runs"),
        "PYTHONPATH": in_front("PYTHONPATH", CLONE),
    }


def test(args: argparse.Namespace) -> int:
    """Goes on as pytest, from the clone's root: two tests at a time, since much of a test is waiting for processes to start."""
    _see_to_browser()
    become([sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *args.rest], folder=CLONE)
    return 0


def _see_to_browser() -> None:
    if any(shutil.which(name) for name in _BROWSERS):
        return
    may_install = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get")
    if may_install:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, "check": False}
        settings = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        with Progress() as progress:
            progress.step("installing Chromium for the tests in a browser (apt-get install chromium fonts-dejavu-core)")
            subprocess.run(["apt-get", "update", "-qq"], env=settings, **quiet)
            subprocess.run(
                ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core"], env=settings, **quiet
            )
    if not shutil.which("chromium"):
        print("labkit: there is no Chromium on the PATH; the tests in a browser are skipped until one is installed", file=sys.stderr)


# ---- runs


def run(args: argparse.Namespace) -> int:
    """Starts a run and watches it to its end; Ctrl-C stops it."""
    from labkit.api import run as start
    from labkit.launch.job import LaunchError

    with _interrupts() as interrupted:
        try:
            job = start(args.specs[0], detached=args.detach)
        except (LaunchError, OSError) as error:
            raise Refused(str(error), code=1) from None
        if args.detach:
            _detached(job.name, args.json)
            return 0
        stopping = threading.Thread(target=job.stop, daemon=True)

        def stop_once() -> bool:
            if interrupted.is_set() and not stopping.ident:
                stopping.start()
            return False

        state = terminal.watch(Follower(job.folder), job.folder, _console(args), stop_once)
        job.wait()  # the state is there before the last process has left
    if args.json:
        print(json.dumps(summarise(state, job.name)))
    return _CODES[state.status["state"]]


def runs(args: argparse.Namespace) -> int:
    """The recorded runs, oldest first."""
    rows = [_summary(folder) for folder in RunFolder.all()]
    if args.json:
        print(json.dumps({"runs": rows}))
    elif rows:
        _console(args, _WIDE).print(terminal.runs_table(rows))
    else:
        print("no run is recorded yet; start one with: labkit run ddp")
    return 0


def progress(args: argparse.Namespace) -> int:
    """The learner's page of exercises."""
    page = my_progress()
    print(json.dumps(page.to_json()) if args.json else page)
    return 0


def show(args: argparse.Namespace) -> int:
    """One run as it is now; with --follow, until it is over."""
    folder = _find(args.name)
    if args.json:
        print(json.dumps(_summary(folder)))
        return 0
    source = Follower(folder)
    with _interrupts() as interrupted:
        terminal.watch(source, folder, _console(args), leave=interrupted.is_set if args.follow else lambda: True)
    return 0


def stop(args: argparse.Namespace) -> int:
    """Ends a run; one that is over is left as it is."""
    from labkit.launch.job import Job, LaunchError

    job = Job.attach(_find(args.name))
    before = job.state
    try:
        state = job.stop()
    except LaunchError as error:
        raise Refused(str(error), code=1) from None
    print(f"{job.folder.name}: {'already ' if before in OVER else ''}{state}")
    return 0


def capture(args: argparse.Namespace) -> int:
    """Asks the ranks to look closely at a step."""
    from labkit.api import Run

    folder = _find(args.name)
    try:
        step = Run.attach(folder.path).capture(args.snapshot)
    except LookupError as error:
        raise Refused(str(error), code=1) from None
    print(f"step {step} of {folder.name} will be looked at; see it with: labkit show {folder.name}")
    return 0


def trace(args: argparse.Namespace) -> int:
    """Writes the sampled steps."""
    from labkit.api import Run

    run = Run.attach(_find(args.name).path)
    if not any(rank.timelines for rank in run.state.ranks.values()):
        raise Refused(f"{run.name} has no sampled step; run with --sample-every 50, or ask a running one with: labkit capture")
    try:
        print(f"{run.trace(args.output)}: open it at https://ui.perfetto.dev")
    except OSError as error:
        raise Refused(f"{args.output} cannot be written: {error.strerror}") from None
    return 0


def replay(args: argparse.Namespace) -> int:
    """Plays a run again in the same view."""
    from labkit.replay import Recording

    folder = _find(args.name)
    if args.speed <= 0:
        raise Refused(f"the speed was {args.speed:g}; it takes a number above 0")
    if not _is_over(folder):
        raise Refused(f"{folder.name} is not over yet; watch it with: labkit show {folder.name} --follow")
    with _interrupts() as interrupted:
        terminal.watch(Recording(folder, args.speed), folder, _console(args), leave=interrupted.is_set)
    return 130 if interrupted.is_set() else 0


def clean(args: argparse.Namespace) -> int:
    """Deletes runs that are over, after asking."""
    if args.keep < 0:
        raise Refused(f"keep was {args.keep}; it takes a whole number of at least 0")
    over = [folder for folder in RunFolder.all() if _is_over(folder)]
    old = over[: len(over) - args.keep]
    if not old:
        print("nothing to delete")
        return 0
    if not args.yes:
        if not sys.stdin.isatty():
            raise Refused(f"{len(old)} runs would be deleted, and nobody can be asked here; say --yes")
        if input(f"Delete {len(old)} of {len(over)} ended runs under {old[0].path.parent}? [y/N] ").strip().lower() not in ("y", "yes"):
            return 0
    for folder in old:
        shutil.rmtree(folder.path)
    print(f"deleted {len(old)}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Runs strategies side by side, or shows recorded runs so."""
    from labkit import comparison
    from labkit.cli import fields_of

    fields = fields_of(args)
    stopped = False
    if args.strategies is None:
        given = [name for name, value in fields.items() if value is not None and value != {}]
        if given:
            raise Refused(f"--{given[0].replace('_', '-')} goes with --strategies; recorded runs are compared as they are")
        folders = [_find(name) for name in args.runs] or comparison.alike(RunFolder.all())
        if not folders:
            raise Refused("no run is recorded yet; compare some with: labkit compare --strategies single,ddp")
        found, left_out = comparison.recorded(folders), {}
        _console(args, _WIDE).print(terminal.comparison(found, left_out))
    else:
        if args.runs:
            raise Refused(f"{args.runs[0]!r} is a recorded run, and --strategies makes new ones; give one of the two")
        names = "all" if args.strategies == "all" else [name.strip() for name in args.strategies.split(",") if name.strip()]
        specs, left_out = comparison.plan(names, **fields)
        found = _compared(comparison.Comparing(specs, left_out), args)
        stopped = any(row.words in ("stopped", "not started") for row in found)
    if args.json:
        print(json.dumps(comparison.document(found, left_out)))
    if stopped:
        return 130
    return 1 if any(row.failed for row in found) else 0


def _compared(comparing: Any, args: argparse.Namespace) -> tuple:
    """The rows of a comparison that was run to its end; Ctrl-C ends the run that is under way, and the rest does not begin."""
    from labkit.launch.job import LaunchError

    with _interrupts() as interrupted:
        stopping = threading.Thread(target=comparing.stop, daemon=True)

        def stop_once() -> None:
            if interrupted.is_set() and not stopping.ident:
                stopping.start()

        found = terminal.watch_comparison(comparing.start(), _console(args, _WIDE), stop_once)
        if stopping.ident:
            stopping.join()
        try:
            comparing.wait()
        except (LaunchError, OSError) as error:
            raise Refused(str(error), code=1) from None
    return found


# ---- scripts


def script(args: argparse.Namespace) -> int:
    """Prints the script."""
    from labkit.script import write_script

    _print_code(write_script(_with_ranks(args.specs[0])), "python")
    return 0


def diff(args: argparse.Namespace) -> int:
    """Prints what changes."""
    from labkit.script import diff_scripts

    _print_code(diff_scripts(*map(_with_ranks, args.specs)), "diff")
    return 0


def _with_ranks(spec: Spec) -> Spec:
    """A script may be for another machine than this one: only the number of ranks is taken from here, where none was said."""
    if spec.nproc is not None or spec.script is not None:
        return spec
    machine = Machine.here()
    device = spec.device if spec.device != "auto" else "cuda" if machine.gpus else "cpu"
    return replace(spec, nproc=machine.default_nproc(device) or 2)


def _print_code(text: str, language: str) -> None:
    if sys.stdout.isatty():
        Console().print(Syntax(text, language, background_color="default", word_wrap=False))
    else:
        sys.stdout.write(text)


# ---- handouts


def handout(args: argparse.Namespace) -> int:
    """Makes the pages."""
    from labkit.handout import LabError, RunError

    if args.all and args.name:
        raise Refused(f"--all is every lab, and {args.name!r} was named; give one of the two")
    if not (args.all or args.name):
        raise Refused("nothing was named; give a lab (labs/NAME.py), a run, or --all")
    try:
        pages, failed = _pages(args)
    except RunError as error:
        raise Refused(str(error), code=2 if error.unfinished else 1) from None
    except LabError as error:
        raise Refused(str(error), code=1) from None
    except OSError as error:
        raise Refused(f"{error.filename or args.output} cannot be written: {error.strerror}") from None
    for page in pages:
        print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    if failed:
        raise Refused("; ".join(failed), code=1)
    return 0


def _pages(args: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """The files that were written, and a sentence for each lab that failed."""
    from labkit.handout import course, lab_page, run_page

    reader = "student" if args.student else "teacher" if args.teacher else ""
    if not args.all and not args.name.endswith((".py", ".ipynb")):
        if reader or args.recorded:
            raise Refused(f"{'--' + reader if reader else '--recorded'} goes with a lab, and {args.name!r} is a run; leave it out")
        folder = _find(args.name)
        return [run_page(folder).write(_output(args.output, f"{folder.name}.html"))], []
    settings = {"audience": reader, "recorded": _runs_folder(args.recorded)}
    with Progress() as progress:
        if args.all:
            return course(sorted((CLONE / "labs").glob("[0-9]*.py")), Path(args.output or "site"), **settings, told=progress.step)
        path = _output(args.output, f"{Path(args.name).stem}.html")
        return [lab_page(Path(args.name), **settings, told=progress.step).write(path)], []


def notebook(args: argparse.Namespace) -> int:
    """Writes a lab as a notebook to be imported."""
    from labkit.handout import LabError, to_import

    path = _output(args.output, str(Path(args.name).with_suffix(".ipynb")))
    try:
        print(to_import(Path(args.name), path, source=args.source))
    except LabError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    return 0


def _output(given: str | None, otherwise: str) -> Path:
    path = Path(given or otherwise)
    if path.is_dir():
        raise Refused(f"{path} is a folder; name the file with -o")
    return path


def _runs_folder(given: str | None) -> Path | None:
    """A folder of recorded runs."""
    if given is not None and not RunFolder.all(Path(given)):
        raise Refused(f"there is no recorded run in {given}; --recorded takes a folder of runs, such as runs/")
    return Path(given) if given else None


# ---- the machine and the project


def claims(args: argparse.Namespace) -> int:
    """Tries what is commonly said, and gives the verdicts."""
    from labkit.claims import on_trial
    from labkit.launch.job import LaunchError

    try:
        verdicts = on_trial(*args.names, quick=args.quick, rounds=args.rounds)
    except (LookupError, ValueError) as error:
        raise Refused(error.args[0]) from None
    except (LaunchError, OSError) as error:
        raise Refused(str(error), code=1) from None
    if args.json:
        print(json.dumps({"claims": [one.to_json() for one in verdicts]}))
    else:
        _console(args, _WIDE).print(verdicts)
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Says what this machine can do."""
    from labkit.doctor import main

    return main(json=args.json)


def bench(args: argparse.Namespace) -> int:
    """Measures the project's own figures."""
    from labkit.bench import main

    return main(as_json=args.json)


# ---- what several commands share


def _console(args: argparse.Namespace, width: int | None = None) -> Console:
    """Where people read: stdout, or stderr where stdout is for a program; `width` is for where there is no terminal to fit."""
    stream = sys.stderr if args.json else sys.stdout
    return Console(stderr=args.json, highlight=False, width=None if stream.isatty() else width)


def _find(name: str) -> RunFolder:
    try:
        return RunFolder.find(name)
    except LookupError as error:
        raise Refused(error.args[0]) from None


def _summary(folder: RunFolder) -> dict[str, Any]:
    """The figures as they were written when the run was over; of one that is not, as they are now."""
    recorded = RunFolder.read_json(folder.summary)
    if recorded:
        return recorded
    follower = Follower(folder)
    follower.poll()
    return summarise(follower.state, folder.name)


def _is_over(folder: RunFolder) -> bool:
    status = current(folder)
    if status:
        return status.get("state") in OVER
    return time.time() - folder.path.stat().st_mtime > _YOUNG


def _detached(name: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": name, "state": "running"}))
    else:
        print(f"{name} has begun; watch it with: labkit show {name} --follow, end it with: labkit stop {name}")


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking off whatever is being read or drawn."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
