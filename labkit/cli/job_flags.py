"""The flags of the commands for jobs that leave this lab. Standard library only, as `labkit.cli.flags`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from labkit.common.arguments import Number

_NODES = Number(int, 1, 65_536)


def add_jobs(
    add: Callable[..., argparse.ArgumentParser],
    add_fields: Callable[[argparse.ArgumentParser], None],
    number: Callable[[str, Number], Callable[[str], Any]],
) -> None:
    """Adds the commands with `add(name, help)`; `add_fields` adds the flags of a Spec, `number` checks a number."""
    pack = add("pack", "write a job as a zip that runs without labkit: script, commands, batch files, requirements")
    pack.add_argument("name", metavar="RUN|STRATEGY|PATH.py", help="a recorded run, a strategy or your own script")
    pack.add_argument("-o", "--output", metavar="FILE.zip", help="output file (default: NAME.zip)")
    _placed(pack, number)
    add_fields(pack)

    unpack = add("unpack", "unpack a job into a new folder, after checking that nothing in it can do harm there")
    unpack.add_argument("name", metavar="FILE.zip")
    unpack.add_argument("-o", "--output", metavar="DIR", help="new folder (default: the name of the file)")


def _placed(command: argparse.ArgumentParser, number: Callable[[str, Number], Callable[[str], Any]]) -> None:
    command.add_argument(
        "--nodes",
        type=number("--nodes", _NODES),
        default=1,
        metavar="N",
        help="nodes among which the ranks of --nproc are divided (default: 1)",
    )
    command.add_argument(
        "--profile", metavar="NAME", default="default", help="settings of a site, from labkit.conf (default: default)"
    )
