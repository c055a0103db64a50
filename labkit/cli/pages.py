"""The commands that print or write text: predict, script, diff, handout, notebook, advise, atlas, explain and
glossary."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.syntax import Syntax

from labkit.cli.parser import options_of
from labkit.cli.shared import WIDE, Refused, console, file_to_write, find, refusing, refusing_files, say
from labkit.common.files import write_atomically
from labkit.course import glossary as terms
from labkit.frontends.console import Console
from labkit.frontends.terminal import explanation, prediction_table, tables_of
from labkit.plan.spec import SpecError
from labkit.prediction.scale.advice import WHOLE
from labkit.prediction.tracer import TraceFailed
from labkit.record.folder import RunFolder
from labkit.record.packed import SHIPPED
from labkit.runs.handle import with_ranks
from labkit.setup.environment import CLONE
from labkit.setup.progress import Progress

# ---- the commands advise and atlas


_ASKED = (
    "params", "config", "workload", "devices", "machine", "memory", "batch", "sequence", "precision", "attention",
    "layout", "check",
)  # fmt: skip
_WIDER = WIDE + 20  # columns: the table of scaling has one for each number of devices


def advise(args: argparse.Namespace) -> int:
    """Prints which strategies fit and how fast they are; with --scaling, how they scale; with --layout, the estimate of
    one layout; with --check, how well estimates agree with published runs."""
    from labkit.api import advise as advice_of

    given = {name: getattr(args, name) for name in _ASKED if getattr(args, name) is not None}
    given |= {name: bounds.from_text(given[name]) for name, bounds in WHOLE.items() if name in given}
    options = options_of(args)
    if options:
        given["options"] = options
    if args.scaling and (args.layout or args.check):
        raise Refused("--scaling shows all strategies; remove --layout and --check")
    try:
        found = advice_of(**given)
    except SpecError:
        raise
    except OSError as error:
        raise Refused(f"--check: {args.check} cannot be read: {error.strerror}") from None
    except ValueError as error:
        names_an_option = str(error).partition(" ")[0].rstrip(":") in _ASKED
        raise Refused(f"--{error}" if names_an_option else str(error)) from None
    if args.scaling:
        found = found.scaling()
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        console(args, _WIDER).print(tables_of(found))
    return 0


_WANTED = ("model", "gpu_type", "layout", "source")


def atlas(args: argparse.Namespace) -> int:
    from labkit.api import atlas as atlas_of

    wanted = {name: getattr(args, name) for name in _WANTED if getattr(args, name) is not None}
    if args.gpus is not None:
        wanted["gpus"] = [WHOLE["devices"].from_text(number.strip()) for number in args.gpus.split(",")]
    if args.by is not None and args.output is None:
        raise Refused("--by colours the chart; add -o FILE.html, or remove --by")
    with refusing(LookupError, ValueError):
        found = atlas_of(**wanted)
        page = None if args.output is None else found.page(args.by or "model")
    if page is not None:
        path = file_to_write(args.output, "")
        try:
            write_atomically(path, page)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror}") from None
        say(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if args.json:
        print(json.dumps(found.to_json()))
    elif page is None:
        found.limit = args.limit
        console(args, _WIDER).print(tables_of(found))
    return 0


# ---- the command explain


def explain(args: argparse.Namespace) -> int:
    """Prints what files of a job say that ran anywhere."""
    from labkit.analysis.foreign.reading import watched
    from labkit.api import explain as explained

    with Progress() as progress, refusing(ValueError, code=1), refusing_files("written", code=1):
        progress.step("reading the files")
        with watched(lambda path, share: progress.detail(f"{path.name}: {share:.0%}")):
            found = explained(*args.paths, keep=args.keep)
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        console(args, WIDE).print(explanation(found))
        if found.run:
            say("", f"kept as the run {found.run}; show it with: labkit show {found.run}")
    return 0


# ---- the command glossary


def glossary(args: argparse.Namespace) -> int:
    """Prints the definition of a term and its related terms, or the list of all terms."""
    if not args.term:
        if args.json:
            print(json.dumps({"terms": [term.to_json() for term in terms.TERMS]}))
        else:
            say(*(term.title for term in terms.TERMS))
        return 0
    with refusing(LookupError):
        term = terms.find(" ".join(args.term))
    if args.json:
        print(json.dumps(term.to_json()))
    else:
        console(args, WIDE).print(term.title, term.definition, f"Related: {', '.join(term.related)}", sep="\n")
    return 0


# ---- the commands predict, script, diff, handout and notebook


def script(args: argparse.Namespace) -> int:
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
    from labkit.plan.script import diff_scripts

    _print_code(diff_scripts(*map(with_ranks, args.specs)), "diff")
    return 0


def _print_code(text: str, language: str) -> None:
    if sys.stdout.isatty():
        Console().print(Syntax(text, language, background_color="default", word_wrap=False))
    else:
        sys.stdout.write(text)


def handout(args: argparse.Namespace) -> int:
    from labkit.frontends.handout import LabError, RunError

    if args.all and args.name:
        raise Refused(f"--all and a name ({args.name!r}) exclude each other; give one of them")
    if not (args.all or args.name):
        raise Refused("nothing to write was given; name a lab (labs/NAME.py) or a run, or use --all")
    try:
        with refusing(LabError, code=1), refusing_files("written", args.output):
            pages, failed = _pages(args)
    except RunError as error:
        raise Refused(str(error), code=2 if error.unfinished else 1) from None
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
        return [run_page(folder).write(file_to_write(args.output, f"{folder.name}.html"))], []
    settings = {"audience": reader, "recorded": _runs_folder(args.recorded)}
    with Progress() as progress:
        if args.all:
            return course(
                sorted((CLONE / "labs").glob("[0-9]*.py")),
                Path(args.output or "site"),
                **settings,
                report=progress.step,
            )
        path = file_to_write(args.output, f"{Path(args.name).stem}.html")
        return [lab_page(Path(args.name), **settings, report=progress.step).write(path)], []


def notebook(args: argparse.Namespace) -> int:
    """Writes a lab as an .ipynb file, and what Kaggle needs to know about it."""
    from labkit.frontends.handout import LabError, for_kaggle, to_import

    lab = Path(args.name)
    path = file_to_write(args.output, str(lab.parent / f"{lab.stem}.ipynb"))
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


def _runs_folder(given: str | None) -> Path | None:
    if given == "shipped":
        return SHIPPED
    if given is not None and not RunFolder.all(Path(given)):
        raise Refused(
            f"there is no recorded run in {given}; --recorded needs a folder of runs, such as runs/, or shipped"
        )
    return Path(given) if given else None
