"""The commands for runs: starting one, the list of recorded ones, and everything for a recorded run."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from labkit import jobs
from labkit.analysis.summary import recorded_summary, summarise, summary_or_reason
from labkit.cli.parser import fields_of
from labkit.cli.shared import (
    WIDE,
    Refused,
    console,
    file_to_write,
    find,
    find_followed,
    interrupts,
    refusing,
    refusing_files,
    say,
)
from labkit.common.arguments import shown
from labkit.common.text import visible_line, visible_log
from labkit.common.units import counted, size
from labkit.exports.exporting import ExportError, check_tools
from labkit.exports.exporting import export as exported
from labkit.frontends import terminal
from labkit.plan.nodes import Node
from labkit.record import packed
from labkit.record.documents import Unreadable, plain
from labkit.record.files import whole
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, is_over, is_recorded
from labkit.record.state import OVER
from labkit.runs.handle import with_ranks
from labkit.setup.limits import ConfigError
from labkit.setup.machine import Machine
from labkit.setup.progress import Progress, Reading

# ---- the command runs


def runs(args: argparse.Namespace) -> int:
    """Lists the recorded runs, oldest first; or the devices that runs of all users hold, and the queue."""
    if args.all_users:
        return _leases(args)
    rows = [summary_or_reason(folder, Reading(folder.name)) for folder in RunFolder.all()]
    if args.json:
        print(json.dumps({"runs": [plain(row) for row in rows]}))
    elif rows:
        console(args, WIDE).print(terminal.runs_table(rows))
    else:
        say("there are no recorded runs; start one with: labkit run ddp")
    return 0


def _leases(args: argparse.Namespace) -> int:
    from labkit.launch.leases import LeaseError, tickets

    with refusing(LeaseError, code=1):
        waiting = tickets()
    if args.json:
        print(json.dumps({"leases": [asdict(ticket) for ticket in waiting]}))
    elif waiting:
        console(args, WIDE).print(terminal.leases_table(waiting))
    else:
        say("no run holds a GPU or a CPU slot of this machine")
    return 0


# ---- the commands for runs


_LONGEST_LINE = 1 << 16  # characters of a line that has not ended, such as a progress bar's
_POLL_INTERVAL = 0.2  # seconds between two checks for more output
_CODES = {"finished": 0, "failed": 1, "lost": 1, "stopped": 130}


def run(args: argparse.Namespace) -> int:
    """Starts a run and displays it until it is over; Ctrl-C stops the run."""
    from labkit.launch.job import LaunchError, draw_data, undrawn
    from labkit.runs.handle import Run, exported_live, settle, start, start_node

    with refusing(ValueError):
        tools = exported_live(args.export or (), args.detach)
    node = node_of(args)
    spec = settle(args.specs[0], nodes=node.nodes if node else 1)
    starting = partial(start_node, spec, node) if node else partial(start, spec)
    if args.specs[0].device == "auto" and (why := Machine.here().unused_cuda):
        print(visible_line(f"labkit: {why}"), file=sys.stderr)
    if undrawn(spec):
        with Progress() as progress:
            progress.step(f"drawing {spec.data}, once on this machine")
            draw_data(spec)

    with interrupts() as interrupted:
        with refusing(LaunchError, OSError, code=1):
            job = Run(starting(detached=args.detach, cold=args.cold, stdin=None if args.detach else _stdin()), tools)
        if args.detach:
            _detached(job.name, args.json)
            return 0
        stopping = threading.Thread(target=job.stop, daemon=True)

        def stop_once() -> bool:
            if interrupted.is_set() and not stopping.ident:
                stopping.start()
            return False

        state = terminal.watch(Follower(job.folder), job.folder, console(args), stop_once)
        job.wait()  # the state is final before the last process has exited
    for live in job.exports:
        print(visible_line(f"labkit: export to {live.words}"), file=sys.stderr)
    if args.json:
        print(json.dumps(plain(summarise(state, job.name))))
    return _CODES[state.status.state]


def _stdin() -> int | None:
    """Standard input for the ranks if it is a file or a pipe; a terminal is not passed on, because of Ctrl-C."""
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError):  # closed, or replaced by an object without a descriptor
        return None
    return None if os.isatty(descriptor) else descriptor


def logs(args: argparse.Namespace) -> int:
    """Prints all output of one rank: unchanged into a file or pipe, without control characters on a terminal."""
    from labkit.runs.handle import Run

    run = Run.attach(find(args.name).path)
    if run.folder.read_imported() is not None:
        raise Refused(f"{run.name} was imported, not launched here, so it has no output; read the job's own logs")
    try:
        run.check_rank(args.rank)
    except Unreadable:
        raise
    except LookupError as error:
        raise Refused(str(error)) from None
    paths = partial(run.log_paths, args.rank, args.stream)
    terminal_of = _for_a_terminal if sys.stdout.isatty() else lambda blocks: blocks
    with interrupts() as interrupted:
        blocks = whole(
            paths, lambda: args.follow and not (interrupted.is_set() or is_over(run.folder)), run.folder.open
        )
        for block in terminal_of(blocks):
            sys.stdout.buffer.write(block)
            if not block:
                sys.stdout.flush()
                interrupted.wait(_POLL_INTERVAL)
    return 0


def _for_a_terminal(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Converts blocks of a log line by line with `visible_log`; an incomplete last line is printed at the end."""
    decode, rest = codecs.getincrementaldecoder("utf-8")(errors="replace").decode, ""
    for block in blocks:
        lines, newline, rest = (rest + decode(block)).rpartition("\n")
        if not block or len(rest) > _LONGEST_LINE:
            lines, newline, rest = lines + newline + rest, "", ""
        shown = visible_log(lines + newline).encode()
        if shown:
            yield shown
        if not block:
            yield b""
    if rest:
        yield visible_log(rest).encode()


def show(args: argparse.Namespace) -> int:
    """Displays the current state of a run; with --follow, until it is over."""
    folder = find_followed(args.name)
    if args.json:
        print(json.dumps(plain(recorded_summary(folder, Reading(folder.name)))))
        return 0
    source = Follower(folder)
    with interrupts() as interrupted:
        terminal.watch(source, folder, console(args), leave=interrupted.is_set if args.follow else lambda: True)
    return 0


def stop(args: argparse.Namespace) -> int:
    from labkit.launch.job import Job, LaunchError

    try:
        job, trouble = Job.attach(find_followed(args.name)), ""
        before = job.state
    except Refused:
        if _stop_deleted(args.name):
            return 0
        raise
    except Unreadable as error:
        job, trouble, before = Job(RunFolder.find(args.name)), error.reason, ""
        if not job.has_processes:
            raise
    left = job.has_processes
    with refusing(LaunchError, code=1):
        words = job.stop()
    if trouble:
        words = f"its processes have been terminated; it cannot be read: {trouble}"
    elif before == "imported":
        words = "imported, not launched here, so there is nothing to stop"
    elif before in OVER:
        words = f"{before}; the processes that it has left have been terminated" if left else f"already {before}"
    if not trouble and words.endswith("lost"):
        words += f" ({job.status().message})"
    say(f"{job.folder.name}: {words}")
    return 0


def _stop_deleted(name: str) -> bool:
    """Terminates the processes of a run whose folder was deleted; False if no process carries the tag of such a run."""
    from labkit.launch.job import end_deleted

    with refusing(LookupError):
        path = end_deleted(name)
    if path:
        missing = RunFolder(path).spec if os.path.lexists(path) else path
        say(f"{missing} was deleted while its run was in progress; the processes of the run have been terminated")
    return bool(path)


def capture(args: argparse.Namespace) -> int:
    from labkit.runs.handle import Run

    folder = find(args.name)
    with refusing(LookupError, code=1):
        step = Run.attach(folder.path).capture(args.snapshot)
    say(f"step {step} of {folder.name} will be profiled; display it with: labkit show {folder.name}")
    return 0


def export(args: argparse.Namespace) -> int:
    try:
        tools = check_tools("--to", args.to)
        if args.out and len(tools) > 1:
            raise Refused(f"--out {args.out} needs one tool in --to, got {', '.join(tools)}")
        folder = find(args.name)
        for tool in tools:
            say(f"{tool}: {exported(folder, tool, args.out, Reading(folder.name))}")
    except ValueError as error:
        raise Refused(str(error), code=1 if isinstance(error, ExportError) else 2) from None
    return 0


def replay(args: argparse.Namespace) -> int:
    from labkit.record.follow import Recording

    folder = find(args.name)
    if not is_over(folder):
        raise Refused(f"{folder.name} is still in progress; watch it with: labkit show {folder.name} --follow")
    with interrupts() as interrupted:
        terminal.watch(Recording(folder, args.speed), folder, console(args), leave=interrupted.is_set)
    return 130 if interrupted.is_set() else 0


def clean(args: argparse.Namespace) -> int:
    folders, unreadable = RunFolder.readable(RunFolder.all())
    say(*(f"{name} is kept because it cannot be read ({why})" for name, why in unreadable.items()))
    say(*(f"{folder.name} is kept because it is no run: it has no events" for folder in folders if not folder.is_run))
    over = [folder for folder in folders if folder.is_run and is_over(folder)]
    old = over[: len(over) - args.keep]
    if not old:
        say("nothing to delete")
        return 0
    if not args.yes:
        if not sys.stdin.isatty():
            raise Refused(f"deleting {len(old)} runs needs confirmation, and there is no terminal; add --yes")
        if input(
            f"Delete {len(old)} of {len(over)} finished runs in {old[0].path.parent}? [y/N] "
        ).strip().lower() not in ("y", "yes"):
            return 0
    for folder in old:
        folder.delete()
    say(f"deleted {counted(len(old), 'run')}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Runs strategies and compares them, or compares recorded runs."""
    from labkit.analysis import changes, comparison
    from labkit.runs.comparing import Comparing, plan

    fields = fields_of(args)
    stopped, changed = False, None
    if args.strategies is None:
        if given := _first_field(fields):
            raise Refused(f"{given} has no effect on recorded runs; add --strategies to start new runs")
        folders, unreadable = [find(name) for name in args.runs], {}
        if not folders:
            there, unreadable = RunFolder.readable(RunFolder.all())
            folders = comparison.alike(there)
        if not folders:
            skipped = "".join(f"; {name} cannot be read: {why}" for name, why in unreadable.items())
            raise Refused(
                "there are no recorded runs to compare; start some with: labkit compare --strategies"
                f" single,ddp{skipped}"
            )
        found, left_out = comparison.recorded(folders), {}
        shown = console(args, WIDE)
        changed = changes.of_folders(*folders) if len(args.runs) == 2 else None
        shown.print(terminal.comparison(found, left_out, changed=changed))
        for name, why in unreadable.items():
            shown.print(f"  {name} is left out: it cannot be read ({why})", style="dim")
    else:
        if args.runs:
            raise Refused(f"a recorded run ({args.runs[0]!r}) and --strategies exclude each other; give one of them")
        names = (
            "all" if args.strategies == "all" else [name.strip() for name in args.strategies.split(",") if name.strip()]
        )
        specs, left_out = plan(names, **fields)
        found = _compared(Comparing(specs, left_out, cold=args.cold), args)
        stopped = any(row.words in ("stopped", "not started") for row in found)
    if args.json:
        print(json.dumps(comparison.document(found, left_out, changed)))
    if stopped:
        return 130
    return 1 if any(row.failed for row in found) else 0


def _compared(comparing: Any, args: argparse.Namespace) -> tuple:
    """The rows of a finished comparison; Ctrl-C stops the current run and skips the remaining ones."""
    from labkit.launch.job import LaunchError

    with interrupts() as interrupted:
        stopping = threading.Thread(target=comparing.stop, daemon=True)

        def stop_once() -> None:
            if interrupted.is_set() and not stopping.ident:
                stopping.start()

        found = terminal.watch_comparison(comparing.start(), console(args, WIDE), stop_once)
        if stopping.ident:
            stopping.join()
        with refusing(LaunchError, OSError, code=1):
            comparing.wait()
    return found


def _detached(name: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": name, "state": "running"}))
    else:
        say(f"started {name}; watch it with: labkit show {name} --follow, stop it with: labkit stop {name}")


# ---- jobs for other engines, and jobs that leave this lab


def submit(args: argparse.Namespace) -> int:
    """Submits a run to Slurm or Kubeflow, or writes the file of an engine."""
    from labkit.launch.job import LaunchError
    from labkit.runs.gathering import ENGINES, FILES
    from labkit.runs.gathering import submit as submitted

    if args.engine not in ENGINES:
        raise Refused(f"--engine must be one of {', '.join(ENGINES)}, got {shown(args.engine)}")
    if args.output and args.engine not in FILES:
        raise Refused(f"-o {args.output} has no effect with --engine {args.engine}, which writes to the run folder")
    placed = {"engine": args.engine, "nodes": args.nodes, "profile_name": args.profile, "output": args.output}
    with refusing(ConfigError), refusing(LaunchError, code=1), refusing_files("written", code=1):
        found = submitted(args.specs[0], **placed)
    if isinstance(found, Path):
        if args.json:
            print(json.dumps({"file": str(found)}))
        else:
            say(f"{found}: nothing was submitted; submit it with: {FILES[args.engine][1]} {found}")
        return 0
    plan = found.folder.read_launch()
    job = plan.batch_job if plan.trainjob is None else plan.trainjob.name
    if args.json:
        print(json.dumps({"run": found.name, "job": job}))
    else:
        say(
            f"submitted {found.name} as job {job} of {args.engine.title()}; watch it with: labkit show {found.name}"
            f" --follow, cancel it with: labkit stop {found.name}"
        )
    return 0


def pack(args: argparse.Namespace) -> int:
    job = portable_of(args)
    run = None if args.specs else find(args.name)
    recorded = run if run and is_recorded(run) else None
    path = file_to_write(args.output, f"{job.name}.zip")
    try:
        jobs.pack(job, profile_of(args), path, recorded)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    shows = f"; show its recording with: labkit show {path}" if recorded else ""
    say(f"{path} ({size(path.stat().st_size)}): unpack it with labkit unpack or unzip, and read README.md{shows}")
    return 0


def unpack(args: argparse.Namespace) -> int:
    path = Path(args.name)
    folder = Path(args.output or path.stem)
    with refusing(packed.BadArchive, code=1), refusing_files("used", path, code=1):
        names = packed.unpack(path, folder)
    say(f"{folder}: {counted(len(names), 'file')}; read README.md, and look at the script before you run it")
    return 0


def gather(args: argparse.Namespace) -> int:
    """Puts the run folders of the nodes of one run together."""
    from labkit.runs.gathering import GatherError
    from labkit.runs.gathering import gather as gathered

    with refusing(GatherError, code=1), refusing_files("copied", code=1):
        whole = gathered([find(name) for name in args.names], Path(args.output))
    say(f"{whole.path}: {counted(len(whole.event_files()), 'rank')}; display it with: labkit show {whole.path}")
    return 0


def node_of(args: argparse.Namespace) -> Node | None:
    """The place of this machine among several; None for a run on one machine."""
    least, nodes = args.nodes
    if nodes == 1 and least is None:
        if args.node_rank is not None or args.rdzv_endpoint is not None:
            raise Refused("--node-rank and --rdzv-endpoint need --nodes N, the number of nodes")
        return None
    if args.node_rank is None or args.rdzv_endpoint is None:
        given = nodes if least is None else f"{least}:{nodes}"
        raise Refused(
            f"--nodes {given} needs --node-rank (0 to {nodes - 1}) and --rdzv-endpoint HOST:PORT, an address"
            " and a free port of node 0"
        )
    return Node(nodes, args.node_rank, args.rdzv_endpoint, least)


def portable_of(args: argparse.Namespace) -> jobs.Portable:
    """The job of the arguments: of a strategy or script with its flags, or of a recorded run."""
    if args.specs:
        return jobs.of_spec(with_ranks(args.specs[0]), args.nodes)
    if given := _first_field(fields_of(args)):
        raise Refused(f"{given} has no effect on a recorded run, {args.name}; name a strategy or a script")
    return jobs.of_run(find(args.name), args.nodes)


def _first_field(fields: dict[str, Any]) -> str:
    """The first flag of a Spec that was given; empty if none was."""
    given = [name for name, value in fields.items() if value is not None and value != {}]
    return f"--{given[0].replace('_', '-')}" if given else ""


def profile_of(args: argparse.Namespace) -> jobs.Profile:
    with refusing(ConfigError):
        return jobs.profile(args.profile)
