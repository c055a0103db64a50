"""Commands called in this process or as a separate one."""

from __future__ import annotations

from fabricate import FakeRun

from labkit.cli import parser as cli
from labkit.cli.commands import act


def called(*arguments: str) -> int:
    """Runs one command in this process and returns its exit code."""
    try:
        return act(cli.parse(arguments))
    except SystemExit as end:
        return end.code


def recorded_run(runs) -> FakeRun:
    """A run of two ranks that is over."""
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(30)
    run.say(0, "epoch 1: \x1b[31m91%\x1b[0m [bold]right[/bold]\n")
    run.end()
    return run
