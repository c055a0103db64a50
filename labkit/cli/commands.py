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

_FUNCTIONS = (
    pages.advise, pages.atlas, pages.diff, pages.explain, pages.glossary, pages.handout, pages.notebook, pages.predict,
    pages.script, project.bench, project.claims, project.doctor, project.grade, project.lab, project.mcp,
    project.progress, project.schema, project.setup, project.test, runs.capture, runs.clean, runs.compare, runs.export,
    runs.gather, runs.logs, runs.pack, runs.replay, runs.run, runs.runs, runs.show, runs.stop, runs.submit, runs.unpack,
)  # fmt: skip
COMMANDS = {function.__name__: function for function in _FUNCTIONS}
COMMANDS["class"] = project.classroom  # the name of no function


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
