"""The commands predict, script, diff, handout and notebook."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.syntax import Syntax

from labkit.cli.shared import WIDE, Refused, console, find, say
from labkit.frontends.console import Console
from labkit.frontends.terminal import prediction_table
from labkit.plan.spec import SpecError
from labkit.prediction.tracer import TraceFailed
from labkit.record.folder import RunFolder
from labkit.runs.settling import with_ranks
from labkit.setup.environment import CLONE
from labkit.setup.progress import Progress


def script(args: argparse.Namespace) -> int:
    """Prints the script of a strategy."""
    from labkit.plan.script import write_script

    _print_code(write_script(with_ranks(args.specs[0])), "python")
    return 0


def predict(args: argparse.Namespace) -> int:
    """Prints the predicted memory and traffic of each rank, and the time of a step if it is asked for."""
    from labkit.api import predict as prediction_of

    with Progress() as progress:
        progress.step("tracing the script")
        try:
            found = prediction_of(args.specs[0], machine=args.machine)
        except SpecError:
            raise
        except (ValueError, LookupError, TraceFailed) as error:
            raise Refused(str(error)) from None
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        console(args, WIDE).print(prediction_table(found))
    return 0


def diff(args: argparse.Namespace) -> int:
    """Prints the diff of two scripts."""
    from labkit.plan.script import diff_scripts

    _print_code(diff_scripts(*map(with_ranks, args.specs)), "diff")
    return 0


def _print_code(text: str, language: str) -> None:
    if sys.stdout.isatty():
        Console().print(Syntax(text, language, background_color="default", word_wrap=False))
    else:
        sys.stdout.write(text)


def handout(args: argparse.Namespace) -> int:
    """Writes the HTML files."""
    from labkit.frontends.handout import LabError, RunError

    if args.all and args.name:
        raise Refused(f"--all and a name ({args.name!r}) exclude each other; give one of them")
    if not (args.all or args.name):
        raise Refused("nothing to write was given; name a lab (labs/NAME.py) or a run, or use --all")
    try:
        pages, failed = _pages(args)
    except RunError as error:
        raise Refused(str(error), code=2 if error.unfinished else 1) from None
    except LabError as error:
        raise Refused(str(error), code=1) from None
    except OSError as error:
        raise Refused(f"{error.filename or args.output} cannot be written: {error.strerror}") from None
    for page in pages:
        say(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    if failed:
        raise Refused("; ".join(failed), code=1)
    return 0


def _pages(args: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """The files that were written, and one sentence per lab that failed."""
    from labkit.frontends.handout import course, lab_page, run_page

    reader = "student" if args.student else "teacher" if args.teacher else ""
    if not args.all and not args.name.endswith((".py", ".ipynb")):
        if reader or args.recorded:
            raise Refused(
                f"{'--' + reader if reader else '--recorded'} applies only to labs, and {args.name!r} is a run; leave"
                " it out"
            )
        folder = find(args.name)
        return [run_page(folder).write(_output(args.output, f"{folder.name}.html"))], []
    settings = {"audience": reader, "recorded": _runs_folder(args.recorded)}
    with Progress() as progress:
        if args.all:
            return course(
                sorted((CLONE / "labs").glob("[0-9]*.py")),
                Path(args.output or "site"),
                **settings,
                report=progress.step,
            )
        path = _output(args.output, f"{Path(args.name).stem}.html")
        return [lab_page(Path(args.name), **settings, report=progress.step).write(path)], []


def notebook(args: argparse.Namespace) -> int:
    """Writes a lab as an .ipynb file, and what Kaggle needs to know about it."""
    from labkit.common.atomic import write_atomically
    from labkit.frontends.handout import LabError, for_kaggle, to_import

    lab = Path(args.name)
    path = _output(args.output, str(lab.parent / f"{lab.stem}.ipynb"))
    try:
        metadata = None if args.kaggle is None else for_kaggle(path, args.kaggle)
        say(str(to_import(lab, path, source=args.source)))
        if metadata:
            write_atomically(*metadata)
            say(str(metadata[0]))
    except LabError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    return 0


def _output(given: str | None, default: str) -> Path:
    path = Path(given or default)
    if path.is_dir():
        raise Refused(f"{path} is a folder; give the name of the file with -o")
    return path


def _runs_folder(given: str | None) -> Path | None:
    """A folder of recorded runs."""
    if given is not None and not RunFolder.all(Path(given)):
        raise Refused(f"there is no recorded run in {given}; --recorded needs a folder of runs, such as runs/")
    return Path(given) if given else None
