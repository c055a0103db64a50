"""The flags of the commands for jobs that leave this lab. Standard library only, as `labkit.cli.flags`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from labkit.common.arguments import Number

_NODES = Number(int, 1, 65_536)
_NODE_RANK = Number(int, 0, 65_535)


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

    submit = add("submit", "submit a run to Slurm, or write the job file of Kubeflow or SkyPilot", json=True)
    submit.add_argument("what", metavar="STRATEGY|PATH.py", nargs="?", help="a strategy or your own script")
    submit.add_argument("-m", dest="module", metavar="MODULE", help="submit your own module, like python -m")
    submit.add_argument(
        "--engine",
        metavar="E",
        default="slurm",
        help="slurm, kubeflow or skypilot; the last two only write a file (default: slurm)",
    )
    submit.add_argument("-o", "--output", metavar="FILE.yaml", help="output file (default: NAME-ENGINE.yaml)")
    _placed(submit, number)
    add_fields(submit)

    unpack = add("unpack", "unpack a job into a new folder, after checking that nothing in it can do harm there")
    unpack.add_argument("name", metavar="FILE.zip")
    unpack.add_argument("-o", "--output", metavar="DIR", help="new folder (default: the name of the file)")

    gather = add("gather", "put the run folders of the nodes of one run together in a new one")
    gather.add_argument("names", metavar="RUN", nargs="+", help="the folder of each node, a name or a path")
    gather.add_argument("-o", "--output", metavar="DIR", required=True, help="new run folder")


def add_nodes(run: argparse.ArgumentParser, number: Callable[[str, Number], Callable[[str], Any]]) -> None:
    """Adds the flags of a run on several machines; `nodes` is (least, most), with `least` None for a fixed number."""
    count = number("--nodes", _NODES)

    def counts(text: str) -> tuple[int | None, int]:
        least, colon, most = text.rpartition(":")
        return (count(least) if colon else None), count(most)

    run.add_argument(
        "--nodes",
        type=counts,
        default=(None, 1),
        metavar="N|MIN:MAX",
        help="nodes among which the ranks of --nproc are divided; with MIN:MAX, the run continues when nodes leave and"
        " join (default: 1)",
    )
    run.add_argument(
        "--node-rank", type=number("--node-rank", _NODE_RANK), metavar="K", help="this node, from 0 to N - 1"
    )
    run.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="an address and a free port of node 0")


def _nodes(command: argparse.ArgumentParser, number: Callable[[str, Number], Callable[[str], Any]]) -> None:
    command.add_argument(
        "--nodes",
        type=number("--nodes", _NODES),
        default=1,
        metavar="N",
        help="nodes among which the ranks of --nproc are divided (default: 1)",
    )


def _placed(command: argparse.ArgumentParser, number: Callable[[str, Number], Callable[[str], Any]]) -> None:
    _nodes(command, number)
    command.add_argument(
        "--profile", metavar="NAME", default="default", help="settings of a site, from labkit.conf (default: default)"
    )
