"""The command line: what can be asked, and the answer to what cannot be meant. Standard library only, so that it answers before
there is an environment; what the commands do stands in `labkit.commands`.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or invalid Spec, 130 stopped.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json as jsonlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from labkit.faults import FAULTS
from labkit.spec import DEVICES, PRECISIONS, SCALINGS, Spec, SpecError
from labkit.strategies import STRATEGIES
from labkit.workloads import DATA, WORKLOADS

_EXTRAS = {"setup": ("lab",), "lab": ("lab",), "handout": ("handout",), "test": ("lab", "test", "deepspeed")}
_AFTER_DASHES = ("run", "lab", "test")  # what stands after `--` is the script's, JupyterLab's, pytest's


class UsageError(Exception):
    """Wrong usage, in one sentence."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments, with the `extras` of pyproject.toml that it needs; exits with 2 where they cannot be meant.

    For the commands that speak of strategies, `specs` holds what was asked for.
    """
    head, rest = _split(argv)
    try:
        args = _parsed(head, rest)
        args.specs = [_spec(args, what) for what in _whats(args)]
    except UsageError as error:
        sys.exit(refuse(str(error), json="--json" in head, code=2))
    except SpecError as error:
        sys.exit(refuse(str(error), json="--json" in head, code=2, field=error.field))
    return args


def _parsed(head: list[str], rest: list[str]) -> argparse.Namespace:
    parser, commands = _parser()
    if not head:
        parser.print_help(sys.stderr)
        sys.exit(2)
    name = head[0]
    if not name.startswith("-") and name not in commands:
        raise UsageError(_unknown("command", name, commands))
    passed_on = []
    if name == "test" and not {"-h", "--help"} & set(head):
        head, passed_on = head[:1], head[1:]  # all of it is pytest's
    args = parser.parse_args(head, argparse.Namespace(json=False, extras=_EXTRAS.get(name, ())))
    if rest and name not in _AFTER_DASHES:
        raise UsageError(f"{name} takes nothing after --, and {' '.join(rest)!r} was given")
    args.rest = [*passed_on, *rest]
    return args


def act(args: argparse.Namespace) -> int:
    """Does what was parsed, in an environment that has what it needs; gives the exit code."""
    commands = importlib.import_module("labkit.commands")
    try:
        code = getattr(commands, args.command)(args)
        sys.stdout.flush()
        return code
    except SpecError as error:
        return refuse(str(error), json=args.json, code=2, field=error.field)
    except commands.Refused as error:
        return refuse(str(error), json=args.json, code=error.code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read has seen enough (| head)
        return 0


def refuse(message: str, *, json: bool, code: int, field: str | None = None) -> int:
    """Says in one sentence on stderr why nothing is done, with `json` also as one object on stdout; gives back `code`."""
    print(f"labkit: {message}", file=sys.stderr)
    if json:
        print(jsonlib.dumps({"error": message, "field": field}))
    return code


_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "workload": {"metavar": "W", "help": f"what is trained: {', '.join(WORKLOADS)}"},
    "nproc": {"metavar": "N", "type": int, "help": "ranks: one a GPU, or CPU ranks where there is none"},
    "steps": {"metavar": "N", "type": int, "help": "steps of the whole run"},
    "epochs": {"metavar": "N", "type": int, "help": "epochs, one if nothing is said"},
    "batch_size": {"metavar": "B", "type": int, "help": "samples in a step, per rank (weak scaling) or in all (strong)"},
    "scaling": {"metavar": "S", "help": " or ".join(SCALINGS)},
    "device": {"metavar": "D", "help": ", ".join(DEVICES)},
    "precision": {"metavar": "P", "help": ", ".join(PRECISIONS)},
    "seed": {"metavar": "S", "type": int, "help": "of model and shuffling"},
    "data": {"metavar": "D", "help": f"what it learns from: {', '.join(DATA)}"},
    "data_dir": {"metavar": "DIR", "help": "where the data lie, or are downloaded to"},
    "samples": {"metavar": "N", "type": int, "help": "samples of one epoch"},
    "save_every": {"metavar": "N", "type": int, "help": "write a checkpoint every N steps, and go on from the newest after a restart"},
    "resume": {"metavar": "RUN|DIR", "help": "go on from the newest checkpoint of a run, or of a folder"},
    "fault": {"metavar": "F", "help": f"go wrong on purpose: {', '.join(FAULTS)}"},
    "sample_every": {"metavar": "N", "type": int, "help": "look closely at one step in N (50 if nothing is said; 0: an early one only)"},
    "hang_after": {"metavar": "S", "type": int, "help": "seconds without progress after which a rank is told of (30)"},
    "max_restarts": {"metavar": "N", "type": int, "help": "how often torchrun brings the ranks back when one has died"},
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> tuple[argparse.ArgumentParser, Iterable[str]]:
    parser = _Parser(prog="labkit", description="An interactive lab for PyTorch distributed training.")
    commands = _Commands(parser)
    commands.add("setup", "make the environment, and nothing else")

    lab = commands.add("lab", "JupyterLab, opened on the first lab (what follows -- is JupyterLab's)")
    lab.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    lab.add_argument("--port", type=int, metavar="N", help="8888, or the next that is free")
    lab.add_argument("--ip", default="127.0.0.1", metavar="ADDRESS", help="where it listens; only this machine if nothing is said")

    commands.add("test", "everything that the tests need, then the tests (what follows is pytest's)")

    run = commands.add("run", "run a strategy, or a script of your own: run train.py --nproc 2 -- its arguments", json=True)
    run.add_argument("what", metavar="STRATEGY|PATH.py", help=", ".join(STRATEGIES))
    _add_fields(run)
    run.add_argument("--detach", action="store_true", help="return at once; the run goes on when this terminal is closed")

    script = commands.add("script", "print the script that a strategy would run")
    script.add_argument("what", metavar="STRATEGY", help=", ".join(STRATEGIES))
    _add_fields(script)

    diff = commands.add("diff", "what changes from one strategy's script to another's")
    diff.add_argument("what", metavar="A", help=", ".join(STRATEGIES))
    diff.add_argument("other", metavar="B")
    _add_fields(diff)

    compare = commands.add("compare", "strategies side by side: the same training by each, or recorded runs", json=True)
    compare.add_argument("runs", metavar="RUN", nargs="*", help="recorded runs; none: the newest of each strategy that trained the same")
    compare.add_argument(
        "--strategies", metavar="A,B,…", help=f"run these one after another, single first; all, or of {', '.join(STRATEGIES)}"
    )
    _add_fields(compare)

    commands.add("runs", "the recorded runs", json=True)
    show = commands.add("show", "one run's figures", json=True)
    show.add_argument("--follow", action="store_true", help="until it is over; Ctrl-C leaves it running")
    stop = commands.add("stop", "end a run and everything that belongs to it")
    capture = commands.add("capture", "look closely at a step of a run that is under way")
    capture.add_argument("--snapshot", action="store_true", help="record CUDA's allocator too, for torch's memory viewer")
    trace = commands.add("trace", "write a run's sampled steps for Perfetto or chrome://tracing")
    trace.add_argument("-o", "--output", metavar="FILE.json", help="in the run folder if nothing is said")
    replay = commands.add("replay", "play a recorded run again in this terminal")
    replay.add_argument("--speed", type=float, default=1.0, metavar="X", help="times its own speed")
    for command in (show, stop, capture, trace, replay):
        command.add_argument("name", metavar="RUN", nargs="?", default="last", help="a run's name, an end of it, or last")

    clean = commands.add("clean", "delete recorded runs, those that are over")
    clean.add_argument("--keep", type=int, default=0, metavar="N", help="all but the newest N")
    clean.add_argument("--yes", action="store_true", help="do not ask")
    commands.add("progress", "the labs' exercises: open, tried or done", json=True)
    claims = commands.add("claims", "what is commonly said of distributed training, each run or computed here", json=True)
    claims.add_argument("names", metavar="NAME", nargs="*", help="some of the claims, by name; all if nothing is said")
    claims.add_argument("--quick", action="store_true", help="only those that need no run")
    claims.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each run is made (3)")
    handout = commands.add("handout", "a lab, a run or the course as pages of one file each, which open with the network off")
    handout.add_argument("name", metavar="LAB.py|RUN", nargs="?", help="a lab, which is executed for it, or a recorded run")
    handout.add_argument("-o", "--output", metavar="FILE|DIR", help="NAME.html if nothing is said; with --all the folder of the pages")
    handout.add_argument("--all", action="store_true", help="every lab, with an index")
    readers = handout.add_mutually_exclusive_group()
    readers.add_argument("--student", action="store_true", help="leave answers and verdicts out")
    readers.add_argument("--teacher", action="store_true", help="with the key of every exercise")
    handout.add_argument("--recorded", metavar="DIR", help="take the runs from this folder of runs and start none")
    notebook = commands.add("notebook", "a lab as .ipynb, to be imported by Kaggle, Colab or another Jupyter")
    notebook.add_argument("name", metavar="LAB.py")
    notebook.add_argument("-o", "--output", metavar="FILE.ipynb", help="beside the lab if nothing is said")
    notebook.add_argument(
        "--source", metavar="URL", help="where its first cell clones the project from; this clone's origin if nothing is said"
    )
    commands.add("doctor", "what this machine can and cannot do, and how to mend it", json=True)
    commands.add("bench", "the project's own figures, measured side by side", json=True)
    return parser, commands.names


class _Commands:
    """Adds commands of one form."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._adder = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    @property
    def names(self) -> Iterable[str]:
        return self._adder.choices

    def add(self, name: str, help: str, json: bool = False) -> argparse.ArgumentParser:
        command = self._adder.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        if json:
            command.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else there")
        return command


def _add_fields(command: argparse.ArgumentParser) -> None:
    for name, settings in _FIELDS.items():
        command.add_argument("--" + name.replace("_", "-"), **settings)
    command.add_argument("--option", action="append", metavar="NAME=VALUE", help="one of the strategy's or workload's own settings")


def _spec(args: argparse.Namespace, what: str) -> Spec:
    """What is asked for by `what`, a strategy or the path of a script, and by the other arguments."""
    fields = fields_of(args)
    if what.endswith(".py"):
        return Spec(script=what, args=tuple(args.rest), **fields)
    if what not in STRATEGIES:
        raise SpecError("strategy", f"{_unknown('strategy', what, STRATEGIES)}; a script of your own is named by its path, ending in .py")
    if args.rest:
        raise SpecError("args", f"{' '.join(args.rest)!r} after -- goes with a script of your own, and {what} is a strategy; see --option")
    if args.command == "diff" and STRATEGIES[what].default_nproc:
        fields["nproc"] = STRATEGIES[what].default_nproc  # --nproc is meant for the other of the two
    return Spec(strategy=what, **fields)


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of Spec that were given on the command line."""
    fields = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    return fields | {"options": _options(args.option or ())}


def _options(given: Iterable[str]) -> dict[str, str]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SpecError("options", f"option {text!r} has no value; write --option NAME=VALUE")
        options[name] = value
    return options


def _whats(args: argparse.Namespace) -> list[str]:
    return [value for value in (getattr(args, "what", None), getattr(args, "other", None)) if value is not None]


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--`, and after it."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _unknown(kind: str, name: str, there: Iterable[str]) -> str:
    names = list(there)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"{kind} {name!r} is not known{meant}; there is {', '.join(names[:-1])} and {names[-1]}"
