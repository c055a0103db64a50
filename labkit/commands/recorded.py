"""Runs: to start one, and everything that is done with those that were recorded."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
from typing import Any

from labkit import terminal
from labkit.commands.shared import WIDE, Refused, console, find, interrupts, is_over, summary
from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.state import OVER
from labkit.summary import summarise

_CODES = {"finished": 0, "failed": 1, "stopped": 130}


def run(args: argparse.Namespace) -> int:
    """Starts a run and watches it to its end; Ctrl-C stops it."""
    from labkit.api import run as start
    from labkit.launch.job import LaunchError

    with interrupts() as interrupted:
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

        state = terminal.watch(Follower(job.folder), job.folder, console(args), stop_once)
        job.wait()  # the state is there before the last process has left
    if args.json:
        print(json.dumps(summarise(state, job.name)))
    return _CODES[state.status["state"]]


def runs(args: argparse.Namespace) -> int:
    """The recorded runs, oldest first."""
    rows = [summary(folder) for folder in RunFolder.all()]
    if args.json:
        print(json.dumps({"runs": rows}))
    elif rows:
        console(args, WIDE).print(terminal.runs_table(rows))
    else:
        print("no run is recorded yet; start one with: labkit run ddp")
    return 0


def show(args: argparse.Namespace) -> int:
    """One run as it is now; with --follow, until it is over."""
    folder = find(args.name)
    if args.json:
        print(json.dumps(summary(folder)))
        return 0
    source = Follower(folder)
    with interrupts() as interrupted:
        terminal.watch(source, folder, console(args), leave=interrupted.is_set if args.follow else lambda: True)
    return 0


def stop(args: argparse.Namespace) -> int:
    """Ends a run; one that is over is left as it is."""
    from labkit.launch.job import Job, LaunchError

    job = Job.attach(find(args.name))
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

    folder = find(args.name)
    try:
        step = Run.attach(folder.path).capture(args.snapshot)
    except LookupError as error:
        raise Refused(str(error), code=1) from None
    print(f"step {step} of {folder.name} will be looked at; see it with: labkit show {folder.name}")
    return 0


def trace(args: argparse.Namespace) -> int:
    """Writes the sampled steps."""
    from labkit.api import Run

    run = Run.attach(find(args.name).path)
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

    folder = find(args.name)
    if args.speed <= 0:
        raise Refused(f"the speed was {args.speed:g}; it takes a number above 0")
    if not is_over(folder):
        raise Refused(f"{folder.name} is not over yet; watch it with: labkit show {folder.name} --follow")
    with interrupts() as interrupted:
        terminal.watch(Recording(folder, args.speed), folder, console(args), leave=interrupted.is_set)
    return 130 if interrupted.is_set() else 0


def clean(args: argparse.Namespace) -> int:
    """Deletes runs that are over, after asking."""
    if args.keep < 0:
        raise Refused(f"keep was {args.keep}; it takes a whole number of at least 0")
    over = [folder for folder in RunFolder.all() if is_over(folder)]
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
        folders = [find(name) for name in args.runs] or comparison.alike(RunFolder.all())
        if not folders:
            raise Refused("no run is recorded yet; compare some with: labkit compare --strategies single,ddp")
        found, left_out = comparison.recorded(folders), {}
        console(args, WIDE).print(terminal.comparison(found, left_out))
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

    with interrupts() as interrupted:
        stopping = threading.Thread(target=comparing.stop, daemon=True)

        def stop_once() -> None:
            if interrupted.is_set() and not stopping.ident:
                stopping.start()

        found = terminal.watch_comparison(comparing.start(), console(args, WIDE), stop_once)
        if stopping.ident:
            stopping.join()
        try:
            comparing.wait()
        except (LaunchError, OSError) as error:
            raise Refused(str(error), code=1) from None
    return found


def _detached(name: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": name, "state": "running"}))
    else:
        print(f"{name} has begun; watch it with: labkit show {name} --follow, end it with: labkit stop {name}")
