"""The command-line parser: commands, flags, and errors for wrong usage. It uses only the standard library, because it
runs before the environment is set up. The functions of the commands are in `labkit.cli.commands`.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or invalid Spec, 130 stopped.
"""

from __future__ import annotations

import argparse
import difflib
import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from labkit.common.arguments import ROUNDS, Number, check_address, check_choice, shown
from labkit.common.text import visible_line
from labkit.plan.spec import DEVICES, PRECISIONS, SCALINGS, Spec, SpecError, bounds_of
from labkit.setup.environment import OPTIONAL
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import DATA, WORKLOADS

_EXTRAS = {"setup": ("lab",), "lab": ("lab",), "handout": ("handout",), "test": ("lab", "test", "deepspeed")}
_AFTER_DASHES = ("run", "lab", "test")  # arguments after `--` go to the script, JupyterLab or pytest
_WITH_HELP = f"also install an extra: {', '.join(OPTIONAL)}"


class UsageError(Exception):
    """Wrong usage: the message is one sentence."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments, with the `extras` of pyproject.toml that it needs; exits with code 2 if they are
    invalid.

    For commands that take strategies or scripts, `specs` is the list of their Specs.
    """
    head, rest = _split(argv)
    try:
        args = _parsed(head, rest)
        args.specs = [_spec(args, what) for what in _whats(args)]
        args.extras = _extras(args)
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


_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "workload": {"metavar": "W", "help": f"model to train: {', '.join(WORKLOADS)} (default: cnn)"},
    "nproc": {"metavar": "N", "help": "ranks: one per GPU, or CPU ranks (default: all GPUs, or 2 CPU ranks)"},
    "steps": {"metavar": "N", "help": "optimizer steps of the whole run (default: all steps of the epochs)"},
    "epochs": {"metavar": "N", "help": "epochs (default: 1)"},
    "batch_size": {
        "metavar": "B",
        "help": "samples per step, per rank (weak scaling) or global (strong scaling) (default: depends on W)",
    },
    "scaling": {"metavar": "S", "help": f"{' or '.join(SCALINGS)} (default: weak)"},
    "device": {"metavar": "D", "help": f"{', '.join(DEVICES)} (default: auto)"},
    "precision": {"metavar": "P", "help": f"{', '.join(PRECISIONS)} (default: fp32; fp16 on a T4)"},
    "seed": {"metavar": "S", "help": "seed of the initial weights and of shuffling (default: 0)"},
    "data": {"metavar": "D", "help": f"data set: {', '.join(DATA)} (default: the workload's first)"},
    "data_dir": {"metavar": "DIR", "help": "folder of the data set, also for downloads (default: data)"},
    "samples": {"metavar": "N", "help": "training samples per epoch (default: the whole data set)"},
    "save_every": {
        "metavar": "N",
        "help": "write a checkpoint every N steps, from which a restart resumes (default: no checkpoints)",
    },
    "resume": {
        "metavar": "RUN|DIR",
        "help": "resume from the newest checkpoint of a run (name or path), or from one checkpoint",
    },
    "fault": {"metavar": "F", "help": f"inject a fault: {', '.join(FAULTS)} (default: none)"},
    "sample_every": {"metavar": "N", "help": "profile every Nth step (default: 50; 0: only one early step)"},
    "hang_after": {
        "metavar": "S",
        "help": "seconds without progress after which a rank is reported as hanging (default: 30)",
    },
    "max_restarts": {
        "metavar": "N",
        "help": "maximum number of restarts by torchrun after a rank has failed (default: 0)",
    },
}
STREAMS = ("stdout", "stderr")
_COLD = (
    "start the ranks with torchrun, even if the warm server of an open notebook could fork them (default: fork if"
    " possible)"
)
_SPEED = Number(float, 0.01, 10_000.0)
_KEEP = Number(int, 0, 1_000_000)
_PORT = Number(int, 1, 65_535)
_RANK = Number(int, 0, 65_535)


def _number(flag: str, bounds: Number) -> Callable[[str], Any]:
    return _checked_by(partial(bounds.read, flag))


def _checked_by(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for argparse whose ValueError is the whole message."""

    def convert(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise UsageError(str(error)) from None

    return convert


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> tuple[argparse.ArgumentParser, Iterable[str]]:
    parser = _Parser(prog="labkit", description="An interactive lab for PyTorch distributed training.")
    commands = _Commands(parser)
    setup = commands.add("setup", "create the environment, or complete the active one")
    setup.add_argument("--with", dest="extras_asked", action="append", metavar="EXTRA", default=[], help=_WITH_HELP)

    lab = commands.add("lab", "start JupyterLab on the first lab (arguments after -- go to JupyterLab)")
    lab.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    lab.add_argument(
        "--port", type=_number("--port", _PORT), metavar="N", help="port (default: 8888, or the next free one)"
    )
    lab.add_argument(
        "--ip",
        type=_checked_by(partial(check_address, "--ip")),
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )

    commands.add("test", "install the dependencies of the tests, then run them (all arguments go to pytest)")

    run = commands.add("run", "run a strategy, or your own script: run train.py --nproc 2 -- ARGUMENTS", json=True)
    run.add_argument(
        "what", metavar="STRATEGY|PATH.py", nargs="?", help=f"your own script, or one of {', '.join(STRATEGIES)}"
    )
    run.add_argument("-m", dest="module", metavar="MODULE", help="run your own module as a script, like python -m")
    _add_fields(run)
    run.add_argument(
        "--detach", action="store_true", help="return at once; the run continues after this terminal is closed"
    )
    run.add_argument("--cold", action="store_true", help=_COLD)

    script = commands.add("script", "print the script that a strategy runs")
    script.add_argument("what", metavar="STRATEGY", help=", ".join(STRATEGIES))
    _add_fields(script)

    diff = commands.add("diff", "print the differences between the scripts of two strategies")
    diff.add_argument("what", metavar="A", help=", ".join(STRATEGIES))
    diff.add_argument("other", metavar="B")
    _add_fields(diff)

    compare = commands.add(
        "compare", "compare strategies: run the same training with each, or show recorded runs", json=True
    )
    compare.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="recorded runs (default: the newest of each strategy with the same training)",
    )
    compare.add_argument(
        "--strategies",
        metavar="A,B,…",
        help=f"run these one after another, single first: all, or some of {', '.join(STRATEGIES)}",
    )
    compare.add_argument("--cold", action="store_true", help=_COLD)
    _add_fields(compare)

    commands.add("runs", "list the recorded runs", json=True)
    show = commands.add("show", "show the figures of a run", json=True)
    show.add_argument("--follow", action="store_true", help="update until the run is over; Ctrl-C leaves it running")
    stop = commands.add("stop", "stop a run and all of its processes")
    logs = commands.add("logs", "print the complete output of one rank, all attempts in order")
    logs.add_argument("--rank", type=_number("--rank", _RANK), default=0, metavar="N", help="the rank (default: 0)")
    logs.add_argument(
        "--stream",
        type=_checked_by(lambda text: check_choice("--stream", text, STREAMS)),
        default="stdout",
        metavar="S",
        help=f"{' or '.join(STREAMS)} (default: stdout)",
    )
    logs.add_argument("--follow", action="store_true", help="continue until the run is over; Ctrl-C leaves it running")
    capture = commands.add("capture", "profile a step of a run in progress")
    capture.add_argument(
        "--snapshot", action="store_true", help="also record a snapshot of the CUDA allocator for torch's memory viewer"
    )
    trace = commands.add("trace", "write the profiled steps of a run for Perfetto or chrome://tracing")
    trace.add_argument(
        "-o", "--output", metavar="FILE.json", help="output file (default: trace.json in the run folder)"
    )
    replay = commands.add("replay", "replay a recorded run in this terminal")
    replay.add_argument(
        "--speed", type=_number("--speed", _SPEED), default=1.0, metavar="X", help="speed-up factor (default: 1)"
    )
    for command in (show, stop, logs, capture, trace, replay):
        command.add_argument(
            "name",
            metavar="RUN",
            nargs="?",
            default="last",
            help="a run: its name, the start or end of it, or last (default)",
        )

    clean = commands.add("clean", "delete recorded runs that are over")
    clean.add_argument(
        "--keep", type=_number("--keep", _KEEP), default=0, metavar="N", help="keep the newest N (default: 0)"
    )
    clean.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    commands.add("progress", "show the exercises of the labs: open, tried or done", json=True)
    glossary = commands.add("glossary", "define a term of distributed training, or list all terms", json=True)
    glossary.add_argument(
        "term", metavar="TERM", nargs="*", help="for example: reduce-scatter (default: list all terms)"
    )
    commands.add("schema", "print the JSON Schemas of the recorded events and of the summary", json=True)
    claims = commands.add("claims", "test common claims about distributed training on this machine", json=True)
    claims.add_argument("names", metavar="NAME", nargs="*", help="claims to test (default: all)")
    claims.add_argument("--quick", action="store_true", help="only claims that can be decided without a run")
    claims.add_argument(
        "--rounds",
        type=_number("--rounds", ROUNDS),
        default=3,
        metavar="N",
        help="repetitions of each run (default: 3)",
    )
    handout = commands.add("handout", "write a lab, a run or all labs as self-contained HTML files that work offline")
    handout.add_argument(
        "name", metavar="LAB.py|RUN", nargs="?", help="a lab, which is executed first, or a recorded run"
    )
    handout.add_argument(
        "-o",
        "--output",
        metavar="FILE|DIR",
        help="output file (default: NAME.html); with --all, a folder (default: site)",
    )
    handout.add_argument("--all", action="store_true", help="all labs, with an index page")
    readers = handout.add_mutually_exclusive_group()
    readers.add_argument("--student", action="store_true", help="leave out answers and verdicts")
    readers.add_argument("--teacher", action="store_true", help="include the solution of every exercise")
    handout.add_argument(
        "--recorded", metavar="DIR", help="use the recorded runs of this folder instead of starting runs"
    )
    notebook = commands.add("notebook", "write a lab as .ipynb, to import into Kaggle, Colab or another Jupyter")
    notebook.add_argument("name", metavar="LAB.py")
    notebook.add_argument("-o", "--output", metavar="FILE.ipynb", help="output file (default: next to the lab)")
    notebook.add_argument(
        "--source", metavar="URL", help="repository that the first cell clones (default: origin of this clone)"
    )
    commands.add("doctor", "check what this machine supports, and how to fix what is missing", json=True)
    commands.add("bench", "measure the performance of the lab itself", json=True)
    return parser, commands.names


class _Commands:
    """Adds commands with a common format."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._adder = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    @property
    def names(self) -> Iterable[str]:
        return self._adder.choices

    def add(self, name: str, help: str, json: bool = False) -> argparse.ArgumentParser:
        command = self._adder.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        if json:
            command.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        return command


def _add_fields(command: argparse.ArgumentParser) -> None:
    for name, settings in _FIELDS.items():
        command.add_argument("--" + name.replace("_", "-"), **settings)
    command.add_argument(
        "--option", action="append", metavar="NAME=VALUE", help="set an option of the strategy or workload"
    )


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
    for name in _FIELDS:
        text, bounds = getattr(args, name), bounds_of(name)
        if text is not None:
            fields[name] = bounds.from_text(text) if bounds else text
    return fields | {"options": _options(args.option or ())}


def _extras(args: argparse.Namespace) -> tuple[str, ...]:
    """The extras of pyproject.toml that the command needs, and those of `setup --with`."""
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
    if args.command == "run" and (args.what is None) == (args.module is None):
        both = "a script and -m exclude each other" if args.what else "nothing to run was given"
        raise UsageError(f"{both}; name a strategy, the path of a script, or -m MODULE (see labkit run --help)")
    if args.command == "run" and args.module is not None:
        return [args.module]
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
