"""The command runs: the recorded runs, and the devices that runs of all users hold."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from labkit.analysis.summary import summary_or_reason
from labkit.cli.shared import WIDE, Refused, console, say
from labkit.frontends import terminal
from labkit.record.documents import plain
from labkit.record.folder import RunFolder
from labkit.setup.progress import Reading


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

    try:
        found = tickets()
    except LeaseError as error:
        raise Refused(str(error), code=1) from None
    if args.json:
        print(json.dumps({"leases": [asdict(ticket) for ticket in found]}))
    elif found:
        console(args, WIDE).print(terminal.leases_table(found))
    else:
        say("no run holds a GPU or a CPU slot of this machine")
    return 0
