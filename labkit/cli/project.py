"""The commands progress, claims, schema, doctor and bench."""

from __future__ import annotations

import argparse
import json

from labkit.cli.shared import WIDE, Refused, console, say
from labkit.course.exercises import my_progress
from labkit.setup.progress import Progress


def progress(args: argparse.Namespace) -> int:
    """Prints the progress of the exercises, and how near the predictions were."""
    page = my_progress()
    if args.json:
        print(json.dumps(page.to_json()))
    else:
        say(*str(page).splitlines())
    return 0


def claims(args: argparse.Namespace) -> int:
    """Tests claims and prints the verdicts."""
    from labkit.course.claims import on_trial
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
        console(args, WIDE).print(verdicts)
    return 0


def schema(args: argparse.Namespace) -> int:
    """Prints the JSON Schemas of events and of the summary, as one JSON object."""
    from labkit.record.documents import schemas

    print(json.dumps(schemas(), indent=None if args.json else 2))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Prints what this machine supports, with `--calibrate` after measuring its communication."""
    from labkit.frontends.doctor import main

    if args.calibrate:
        _calibrate(args.nproc)
    elif args.nproc is not None:
        raise Refused("--nproc is the number of ranks for --calibrate; add --calibrate, or omit --nproc")
    return main(json=args.json)


def _calibrate(nproc: int | None) -> None:
    from labkit.prediction.link_table import store
    from labkit.runs.calibration import CalibrationError, calibrate, plan

    try:
        planned = plan(nproc)
    except ValueError as error:
        raise Refused(f"--{error}") from None
    try:
        with Progress() as progress:
            progress.step(f"measuring communication between {planned.ranks} {planned.backend} ranks")
            table = calibrate(planned, progress.detail)
    except CalibrationError as error:
        raise Refused(str(error), code=1) from None
    try:
        store(table)
    except OSError as error:
        raise Refused(f"the measured times cannot be stored: {error}", code=1) from None


def bench(args: argparse.Namespace) -> int:
    """Measures the performance of the lab itself."""
    from labkit.benchmarks.bench import main

    try:
        return main(
            args.json, args.only, rounds=args.rounds, minutes=args.minutes, ranks=args.ranks, results=args.results
        )
    except ValueError as error:
        raise Refused(str(error), code=2) from None
