"""The command-line parser: from arguments to Specs, and errors for wrong usage. It uses only the standard library,
because it runs before the environment is set up. The flags are in `labkit.cli.flags`, the functions of the commands in
`labkit.cli.commands`.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or invalid Spec, 130 stopped.
"""

from __future__ import annotations

import argparse
import difflib
import json as jsonlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from labkit.cli.flags import FLAGS, UsageError, parser_of_commands
from labkit.common.arguments import shown
from labkit.common.text import visible_line
from labkit.plan.spec import Spec, SpecError, bounds_of
from labkit.setup.environment import OPTIONAL, TEXT_ONLY
from labkit.training.strategies import BASELINE, STRATEGIES

_DEVELOPMENT = ("lab", "test", "deepspeed")
_EXTRAS = {
    "setup": ("lab",),
    "lab": ("lab",),
    "handout": ("handout",),
    "test": _DEVELOPMENT,
    "bench": _DEVELOPMENT,
} | dict.fromkeys(
    (
        *(
            "advise",
            "atlas",
            "capture",
            "clean",
            "diff",
            "gather",
            "glossary",
            "logs",
            "progress",
            "replay",
            "runs",
            "schema",
        ),
        *("replay", "runs", "schema", "script", "show", "stop", "trace", "unpack"),
    ),
    (TEXT_ONLY,),
)
_AFTER_DASHES = (
    "run",
    "predict",
    "pack",
    "submit",
    "lab",
    "test",
)  # arguments after `--` go to the script, JupyterLab or pytest


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments, with the `extras` of pyproject.toml that it needs; exits with code 2 if they are
    invalid.

    For commands that take strategies or scripts, `specs` is the list of their Specs.
    """
    head, rest = _split(argv)
    try:
        args = _parsed(head, rest)
        args.specs = _specs(args, _whats(args))
        args.extras = _extras(args)
    except UsageError as error:
        sys.exit(refuse(str(error), json="--json" in head, code=2))
    except SpecError as error:
        sys.exit(refuse(str(error), json="--json" in head, code=2, field=error.field))
    return args


def _parsed(head: list[str], rest: list[str]) -> argparse.Namespace:
    parser, commands = parser_of_commands()
    if not head:
        parser.print_help(sys.stderr)
        sys.exit(2)
    name = head[0]
    if not name.startswith("-") and name not in commands:
        raise UsageError(_unknown("command", name, commands))
    passed_on = []
    if name == "test" and not {"-h", "--help"} & set(head):
        head, passed_on = head[:1], head[1:]  # all arguments go to pytest
    args = parser.parse_args(head, argparse.Namespace(json=False, extras=_EXTRAS.get(name, ())))
    if rest and name not in _AFTER_DASHES:
        raise UsageError(f"{name} takes no arguments after --, got {' '.join(rest)!r}")
    args.rest = [*passed_on, *rest]
    return args


def refuse(message: str, *, json: bool, code: int, field: str | None = None) -> int:
    """Prints the error on stderr, with `json` also as one object on stdout, and returns `code`."""
    print(f"labkit: {visible_line(message)}", file=sys.stderr)
    if json:
        print(jsonlib.dumps({"error": message, "field": field}))
    return code


def _specs(args: argparse.Namespace, whats: Sequence[str]) -> list[Spec]:
    """The Specs of all of `whats`. In a diff, that of the baseline is the other one's on one device, so that a fault or
    an option is part of the difference."""
    if args.command != "diff":
        return [_spec(args, what) for what in whats]
    compared = _spec(args, next((what for what in whats if what != BASELINE.name), BASELINE.name))
    return [compared.on_one_device if what == BASELINE.name else _spec(args, what) for what in whats]


def _spec(args: argparse.Namespace, what: str) -> Spec:
    """The Spec of `what` (a strategy, the path of a script or a module) and the other arguments."""
    fields = fields_of(args)
    if getattr(args, "module", None) is not None:
        return Spec(script=what, as_module=True, args=tuple(args.rest), **fields)
    if what.endswith(".py"):
        return Spec(script=what, args=tuple(args.rest), **fields)
    if what not in STRATEGIES:
        raise SpecError(
            "strategy", f"{_unknown('strategy', what, STRATEGIES)}; name your own script by its path, ending in .py"
        )
    if args.rest:
        raise SpecError(
            "args", f"arguments after -- apply only to your own script, got {shown(' '.join(args.rest))}; use --option"
        )
    if args.command == "diff" and STRATEGIES[what].default_nproc:
        fields["nproc"] = STRATEGIES[what].default_nproc  # --nproc applies to the other strategy
    return Spec(strategy=what, **fields)


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of Spec that were given on the command line; a text that is not a number is passed on, and Spec
    rejects it."""
    fields = {}
    for one in FLAGS:
        text, bounds = getattr(args, one.name), bounds_of(one.name)
        if text is not None:
            fields[one.name] = bounds.from_text(text) if bounds else text
    return fields | {"options": options_of(args)}


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """The options that were given as --option NAME=VALUE."""
    return _options(args.option or ())


def _extras(args: argparse.Namespace) -> tuple[str, ...]:
    """The extras of pyproject.toml that the command needs, and those of `setup --with`."""
    if args.command == "compare" and args.strategies is None:
        return (TEXT_ONLY,)  # recorded runs
    asked = [name.strip() for text in getattr(args, "extras_asked", ()) for name in text.split(",")]
    for name in asked:
        if name not in OPTIONAL:
            raise UsageError(_unknown("extra", name, OPTIONAL))
    args.extras_asked = tuple(dict.fromkeys(asked))
    return tuple(dict.fromkeys((*args.extras, *asked)))


def _options(given: Iterable[str]) -> dict[str, str]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SpecError("options", f"option {shown(text)} has no value; write --option NAME=VALUE")
        options[name] = value
    return options


def _whats(args: argparse.Namespace) -> list[str]:
    takes_module = hasattr(args, "module")
    if takes_module and (args.what is None) == (args.module is None):
        both = "a script and -m exclude each other" if args.what else f"nothing to {args.command} was given"
        help = f"see labkit {args.command} --help"
        raise UsageError(f"{both}; name a strategy, the path of a script, or -m MODULE ({help})")
    if takes_module and args.module is not None:
        return [args.module]
    if args.command == "pack":  # otherwise the name of a run
        return [args.name] if args.name in STRATEGIES or args.name.endswith(".py") else []
    return [value for value in (getattr(args, "what", None), getattr(args, "other", None)) if value is not None]


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first `--`, and those after it."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _unknown(kind: str, name: str, there: Iterable[str]) -> str:
    names = list(there)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{kind} must be one of {', '.join(names)}, got {shown(name)}{hint}"
