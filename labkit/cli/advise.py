"""The command advise."""

from __future__ import annotations

import argparse
import json

from labkit.cli.parser import options_of
from labkit.cli.shared import WIDE, Refused, console
from labkit.frontends.terminal import advice_tables, scaling_tables
from labkit.plan.spec import SpecError
from labkit.prediction.scale.asked import WHOLE

_ASKED = ("params", "config", "workload", "devices", "machine", "memory", "batch", "sequence", "precision", "attention")
_WIDER = WIDE + 20  # columns: the table of scaling has one for each number of devices


def advise(args: argparse.Namespace) -> int:
    """Prints which strategies fit and how fast they are, or, with --scaling, how they scale."""
    from labkit.api import advise as advice_of

    given = {name: getattr(args, name) for name in _ASKED if getattr(args, name) is not None}
    given |= {name: bounds.from_text(given[name]) for name, bounds in WHOLE.items() if name in given}
    try:
        found = advice_of(**given, options=options_of(args))
    except SpecError:
        raise
    except ValueError as error:
        raise Refused(f"{'--' * (str(error).partition(' ')[0] in _ASKED)}{error}") from None
    if args.scaling:
        scaled = found.scaling()
        shown, document = scaling_tables(scaled), scaled.to_json()
    else:
        shown, document = advice_tables(found), found.to_json()
    if args.json:
        print(json.dumps(document))
    else:
        console(args, _WIDER).print(shown)
    return 0
