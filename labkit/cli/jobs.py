"""The commands submit, pack and unpack: jobs for other engines, and jobs that leave this lab."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from labkit.cli.parser import fields_of
from labkit.cli.shared import Refused, find, say
from labkit.common import zips
from labkit.common.arguments import shown
from labkit.common.units import counted, size
from labkit.jobs import archive, job_files, portable
from labkit.plan.nodes import Node
from labkit.record.follow import is_recorded
from labkit.runs.handle import with_ranks
from labkit.setup.limits import ConfigError


def submit(args: argparse.Namespace) -> int:
    """Submits a run to Slurm, or writes the file of another engine."""
    from labkit.launch.job import LaunchError
    from labkit.runs.gathering import ENGINES, FILES
    from labkit.runs.gathering import submit as submitted

    if args.engine not in ENGINES:
        raise Refused(f"--engine must be one of {', '.join(ENGINES)}, got {shown(args.engine)}")
    if args.output and args.engine not in FILES:
        raise Refused(f"-o {args.output} has no effect with --engine {args.engine}, which writes to the run folder")
    try:
        placed = {"engine": args.engine, "nodes": args.nodes, "profile_name": args.profile, "output": args.output}
        found = submitted(args.specs[0], **placed)
    except ConfigError as error:
        raise Refused(str(error)) from None
    except LaunchError as error:
        raise Refused(str(error), code=1) from None
    except OSError as error:
        raise Refused(f"{error.filename} cannot be written: {error.strerror}", code=1) from None
    if isinstance(found, Path):
        if args.json:
            print(json.dumps({"file": str(found)}))
        else:
            say(f"{found}: nothing was submitted; submit it with: {FILES[args.engine][1]} {found}")
    elif args.json:
        print(json.dumps({"run": found.name, "job": found.folder.read_launch().batch_job}))
    else:
        job = found.folder.read_launch().batch_job
        say(
            f"submitted {found.name} as job {job} of Slurm; watch it with: labkit show {found.name} --follow, cancel it"
            f" with: labkit stop {found.name}"
        )
    return 0


def pack(args: argparse.Namespace) -> int:
    """Writes a job as a zip."""
    job = portable_of(args)
    run = None if args.specs else find(args.name)
    path = Path(args.output or f"{job.name}.zip")
    if os.path.isdir(path):  # noqa: PTH112 a name that is too long is no folder
        raise Refused(f"{path} is a folder; give the name of the file with -o")
    try:
        archive.pack(job, profile_of(args), path, run if run and is_recorded(run) else None)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    shows = f"; show its recording with: labkit show {path}" if run and is_recorded(run) else ""
    say(f"{path} ({size(path.stat().st_size)}): unpack it with labkit unpack or unzip, and read README.md{shows}")
    return 0


def unpack(args: argparse.Namespace) -> int:
    """Unpacks a job after checking it."""
    path = Path(args.name)
    folder = Path(args.output or path.stem)
    try:
        names = zips.unpack(path, folder)
    except zips.BadArchive as error:
        raise Refused(str(error), code=1) from None
    except OSError as error:
        raise Refused(f"{error.filename or path} cannot be used: {error.strerror}", code=1) from None
    say(f"{folder}: {counted(len(names), 'file')}; read README.md, and look at the script before you run it")
    return 0


def gather(args: argparse.Namespace) -> int:
    """Puts the run folders of the nodes of one run together."""
    from labkit.runs.gathering import GatherError
    from labkit.runs.gathering import gather as gathered

    try:
        whole = gathered([find(name) for name in args.names], Path(args.output))
    except GatherError as error:
        raise Refused(str(error), code=1) from None
    except OSError as error:
        raise Refused(f"{error.filename} cannot be copied: {error.strerror}", code=1) from None
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


def portable_of(args: argparse.Namespace) -> portable.Portable:
    """The job of the arguments: of a strategy or script with its flags, or of a recorded run."""
    if args.specs:
        return portable.of_spec(with_ranks(args.specs[0]), args.nodes)
    given = [name for name, value in fields_of(args).items() if value is not None and value != {}]
    if given:
        raise Refused(
            f"--{given[0].replace('_', '-')} has no effect on a recorded run, {args.name}; name a strategy or a script"
        )
    return portable.of_run(find(args.name), args.nodes)


def profile_of(args: argparse.Namespace) -> job_files.Profile:
    """The profile of the arguments."""
    try:
        return job_files.profile(args.profile)
    except ConfigError as error:
        raise Refused(str(error)) from None
