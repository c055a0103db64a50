"""The commands advise and atlas."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from labkit.cli.parser import options_of
from labkit.cli.shared import WIDE, Refused, console, say
from labkit.common.atomic import write_atomically
from labkit.figures.advice import Advised
from labkit.frontends.terminal import advice_tables, atlas_table, estimate_tables, scaling_tables
from labkit.plan.spec import SpecError
from labkit.prediction.scale.asked import WHOLE

_ASKED = (
    *("params", "config", "workload", "devices", "machine", "memory", "batch", "sequence", "precision", "attention"),
    *("layout", "check"),
)
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
        raise Refused(f"{'--' * (str(error).partition(' ')[0].rstrip(':') in _ASKED)}{error}") from None
    if args.scaling:
        scaled = found.scaling()
        shown, document = scaling_tables(scaled), scaled.to_json()
    else:
        shown = advice_tables(found) if isinstance(found, Advised) else estimate_tables(found)
        document = found.to_json()
    if args.json:
        print(json.dumps(document))
    else:
        console(args, _WIDER).print(shown)
    return 0


_WANTED = ("model", "gpu_type", "layout", "source")


def atlas(args: argparse.Namespace) -> int:
    """Prints published runs, or writes their chart."""
    from labkit.api import atlas as atlas_of

    wanted = {name: getattr(args, name) for name in _WANTED if getattr(args, name) is not None}
    if args.gpus is not None:
        wanted["gpus"] = [WHOLE["devices"].from_text(number.strip()) for number in args.gpus.split(",")]
    if args.by is not None and args.output is None:
        raise Refused("--by colours the chart; add -o FILE.html, or remove --by")
    try:
        found = atlas_of(**wanted)
        page = None if args.output is None else found.page(args.by or "model")
    except (LookupError, ValueError) as error:
        raise Refused(error.args[0]) from None
    if page is not None:
        _write(Path(args.output), page, args)
    if args.json:
        print(json.dumps(found.to_json()))
    elif page is None:
        console(args, _WIDER).print(atlas_table(found, args.limit))
    return 0


def _write(path: Path, page: str, args: argparse.Namespace) -> None:
    if path.is_dir():
        raise Refused(f"{path} is a folder; give the name of the file with -o")
    try:
        write_atomically(path, page)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    say(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
