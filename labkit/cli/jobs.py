"""The commands pack and unpack: jobs that leave this lab."""

from __future__ import annotations

import argparse
from pathlib import Path

from labkit.cli.parser import fields_of
from labkit.cli.shared import Refused, find, say
from labkit.common.units import counted, size
from labkit.engines import archive, portable, profiles
from labkit.runs.settling import with_ranks
from labkit.setup.config import ConfigError


def pack(args: argparse.Namespace) -> int:
    """Writes a job as a zip."""
    job = portable_of(args)
    path = Path(args.output or f"{job.name}.zip")
    if path.is_dir():
        raise Refused(f"{path} is a folder; give the name of the file with -o")
    try:
        archive.pack(job, profile_of(args), path)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    say(f"{path} ({size(path.stat().st_size)}): unpack it with labkit unpack or unzip, and read README.md")
    return 0


def unpack(args: argparse.Namespace) -> int:
    """Unpacks a job after checking it."""
    path = Path(args.name)
    folder = Path(args.output or path.stem)
    try:
        names = archive.unpack(path, folder)
    except archive.BadArchive as error:
        raise Refused(str(error), code=1) from None
    except OSError as error:
        raise Refused(f"{error.filename or path} cannot be used: {error.strerror}", code=1) from None
    say(f"{folder}: {counted(len(names), 'file')}; read README.md, and look at the script before you run it")
    return 0


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


def profile_of(args: argparse.Namespace) -> profiles.Profile:
    """The profile of the arguments."""
    try:
        return profiles.profile(args.profile)
    except ConfigError as error:
        raise Refused(str(error)) from None
