"""`labkit doctor`: checks what this machine supports, line by line, and how to fix what is missing.

Each check is one small function of `CHECKS`. torch is probed in separate processes, so that a crash or hang does no
harm.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.text import Text

from labkit.frontends.console import Console
from labkit.frontends.doctor import links, machine, software
from labkit.frontends.doctor.check import Check
from labkit.prediction.link_table import stored
from labkit.setup.machine import Machine

LEVELS = ("fine", "degraded", "broken")
_STYLES = {"fine": "green", "degraded": "yellow", "broken": "bold red"}


def main(json: bool = False) -> int:
    """Runs every check and prints each result immediately, then the measured times of collectives; or all of it as one
    JSON object. Returns 1 if anything is broken.
    """
    done: list[Check] = []
    console = Console(stderr=json)
    for check in checks():
        done.append(check)
        if not json:
            _show(console, check)
    tables = stored(Machine.here()).tables
    for table in () if json else tables:
        console.print(links.as_table(table))
    worst = max((check.level for check in done), key=LEVELS.index)
    if json:
        measured = [links.figures(table) for table in tables]
        print(jsonlib.dumps({"level": worst, "checks": [asdict(check) for check in done], "links": measured}))
    return int(worst == "broken")


def checks() -> Iterator[Check]:
    """Yields the result of every check; an unexpected exception becomes a broken line and does not stop the others."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            yield Check(
                check.__name__, "broken", f"could not be checked: {type(error).__name__}: {error}", "please report this"
            )


def _show(console: Console, check: Check) -> None:
    mark = Text.assemble(
        ("● ", _STYLES[check.level]), (f"{check.name:<12}", "bold"), (f"{check.level:<9}", _STYLES[check.level])
    )
    console.print(mark, Text(check.says), soft_wrap=True)
    if check.fix:
        console.print(Text(f"{'':23}→ {check.fix}"), soft_wrap=True)


CHECKS: tuple[Callable[[], Check], ...] = (
    *(
        software.python,
        software.torch,
        software.devices,
        software.precision,
        software.backends,
        software.all_reduce,
        software.torchvision,
    ),
    *(software.jupyterlab, software.widgets),
    *(
        machine.loopback,
        machine.ports,
        machine.other_users,
        machine.shared_memory,
        machine.runs_folder,
        machine.limits,
        machine.digits,
        machine.warm_start,
        machine.communication,
        machine.compiler,
    ),
)
