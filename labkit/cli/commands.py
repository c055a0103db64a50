"""The table of commands, and the function that runs one: from parsed arguments to the exit code."""

from __future__ import annotations

import argparse
import os
import sys

from labkit.cli import pages, project, runs
from labkit.cli.parser import refuse
from labkit.cli.shared import Refused
from labkit.plan.spec import SpecError
from labkit.record.documents import Unreadable

COMMANDS = {
    command.__name__: command
    for command in (
        pages.advise,
        pages.atlas,
        project.bench,
        runs.capture,
        project.claims,
        runs.clean,
        runs.compare,
        pages.diff,
        project.doctor,
        pages.explain,
        runs.export,
        runs.gather,
        pages.glossary,
        project.grade,
        pages.handout,
        project.lab,
        runs.logs,
        project.mcp,
        pages.notebook,
        runs.pack,
        pages.predict,
        project.progress,
        runs.replay,
        runs.run,
        runs.runs,
        project.schema,
        pages.script,
        project.setup,
        runs.show,
        runs.stop,
        runs.submit,
        project.test,
        runs.unpack,
    )
} | {"class": project.classroom}  # the name of no function


def act(args: argparse.Namespace) -> int:
    """Runs the parsed command in an environment that has its dependencies; returns the exit code."""
    try:
        code = COMMANDS[args.command](args)
        sys.stdout.flush()
        return code
    except SpecError as error:
        return refuse(str(error), json=args.json, code=2, field=error.field)
    except Refused as error:
        return refuse(str(error), json=args.json, code=error.code)
    except Unreadable as error:
        return refuse(error.args[0], json=args.json, code=1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe (| head)
        return 0
