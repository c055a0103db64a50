"""The command glossary."""

from __future__ import annotations

import argparse
import json

from labkit.cli.shared import WIDE, Refused, console, say
from labkit.course.glossary import TERMS, find


def glossary(args: argparse.Namespace) -> int:
    """Prints the definition of a term and its related terms, or the list of all terms."""
    if not args.term:
        if args.json:
            print(json.dumps({"terms": [term.to_json() for term in TERMS]}))
        else:
            say(*(term.title for term in TERMS))
        return 0
    try:
        term = find(" ".join(args.term))
    except LookupError as error:
        raise Refused(error.args[0]) from None
    if args.json:
        print(json.dumps(term.to_json()))
    else:
        console(args, WIDE).print(term.title, term.definition, f"Related: {', '.join(term.related)}", sep="\n")
    return 0
