"""The command-line parser: the commands and their flags, from arguments to Specs, and errors for wrong usage. Standard
library only."""

from __future__ import annotations

import argparse
import difflib
import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

from labkit.common.arguments import ROUNDS, Number, check_address, check_choice, shown
from labkit.common.text import visible_line
from labkit.plan.spec import Spec, SpecError, about, bounds_of
from labkit.prediction.devices import ACCELERATED, DEFAULT_MACHINE
from labkit.setup.environment import OPTIONAL, TEXT_ONLY
from labkit.training.strategies import BASELINE, STRATEGIES

# ---- the commands and their flags, for argparse


FLAGS = tuple(flag for flag in fields(Spec) if about(flag).on_command_line)
_WITH_HELP = f"also install an extra: {', '.join(OPTIONAL)}"
STREAMS = ("stdout", "stderr")
_COLD = (
    "start the ranks with torchrun, even if the warm server of an open notebook could fork them (default: fork if"
    " possible)"
)
_TOOLS = "tensorboard, trackio, wandb, mlflow, perfetto, csv, parquet"
_RANK = Number(int, 0, 65_535)
_NODES = Number(int, 1, 65_536)
_CALIBRATED = Number(int, 2, 65_536)


class UsageError(Exception):
    """Wrong usage: the message is one sentence."""


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


def _add_number(
    command: argparse.ArgumentParser, flag: str, bounds: Number, help: str, default: Any = None, metavar: str = "N"
) -> None:
    """Adds a flag that takes a number within bounds."""
    command.add_argument(flag, type=_number(flag, bounds), default=default, metavar=metavar, help=help)


def _add_switch(command: argparse._ActionsContainer, flag: str, help: str) -> None:
    """Adds a flag without a value."""
    command.add_argument(flag, action="store_true", help=help)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser_of_commands() -> tuple[argparse.ArgumentParser, Iterable[str]]:
    parser = _Parser(prog="labkit", description="An interactive lab for PyTorch distributed training.")
    commands = _Commands(parser)
    setup = commands.add("setup", "create the environment, or complete the active one")
    setup.add_argument("--with", dest="extras_asked", action="append", metavar="EXTRA", default=[], help=_WITH_HELP)

    lab = commands.add("lab", "start JupyterLab on the first lab (arguments after -- go to JupyterLab)")
    _add_switch(lab, "--no-browser", "print the address instead of opening a browser")
    _add_number(lab, "--port", Number(int, 1, 65_535), "port (default: 8888, or the next free one)")
    lab.add_argument(
        "--ip",
        type=_checked_by(partial(check_address, "--ip")),
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )

    commands.add(
        "test",
        "install the dependencies of the tests, then run them; with --cuda-stand-in those for CUDA, on a machine that"
        " needs no GPU; with --gpu, measure what only GPUs can show, in 25 minutes (--minutes MINUTES,"
        " --results FOLDER, --only PART;…); other arguments go to pytest",
    )

    run = commands.add("run", "run a strategy, or your own script: run train.py --nproc 2 -- ARGUMENTS", json=True)
    own_or_strategy = f"your own script, or one of {', '.join(STRATEGIES)}"
    _add_what(run, "run your own module as a script, like python -m", own_or_strategy)
    _add_fields(run)
    _add_switch(run, "--detach", "return at once; the run continues after this terminal is closed")
    _add_switch(run, "--cold", _COLD)
    run.add_argument("--export", metavar="TOOL,…", help=f"also export it while it runs, to one or several of {_TOOLS}")
    _add_nodes(run)

    predict = commands.add(
        "predict", "predict the memory and traffic of each rank, without running anything and without a GPU", json=True
    )
    _add_what(predict, "predict your own module, like python -m", own_or_strategy)
    predict.add_argument(
        "--machine",
        metavar="NAME",
        help=f"add the time of a step: measured on this machine (here), or modelled for {', '.join(ACCELERATED)}",
    )
    _add_fields(predict)

    _add_advise(commands)
    _add_atlas(commands)

    explain = commands.add(
        "explain", "say what happened in a job that ran anywhere, from the files that it left", json=True
    )
    explain.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="traces of torch.profiler, dumps of the flight recorder or of torch's debug server, reports of NCCL's RAS,"
        " memory snapshots, logs, or their folder",
    )
    explain.add_argument(
        "--keep", metavar="NAME", help="make a run of them, for show, compare, export, handout and the panel"
    )

    _add_jobs(commands)

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
    _add_switch(compare, "--cold", _COLD)
    _add_fields(compare)

    runs = commands.add("runs", "list the recorded runs", json=True)
    _add_switch(runs, "--all-users", "list who holds the GPUs and CPU slots of this machine")
    show = commands.add("show", "show the figures of a run", json=True)
    _add_switch(show, "--follow", "update until the run is over; Ctrl-C leaves it running")
    stop = commands.add("stop", "stop a run and all of its processes")
    logs = commands.add("logs", "print the complete output of one rank, all attempts in order")
    _add_number(logs, "--rank", _RANK, "the rank (default: 0)", default=0)
    logs.add_argument(
        "--stream",
        type=_checked_by(lambda text: check_choice("--stream", text, STREAMS)),
        default="stdout",
        metavar="S",
        help=f"{' or '.join(STREAMS)} (default: stdout)",
    )
    _add_switch(logs, "--follow", "continue until the run is over; Ctrl-C leaves it running")
    capture = commands.add("capture", "profile a step of a run in progress")
    _add_switch(capture, "--snapshot", "also record a snapshot of the CUDA allocator for torch's memory viewer")
    export = commands.add(
        "export", "export a run to TensorBoard, trackio, Weights & Biases, MLflow or Perfetto, or as tables"
    )
    export.add_argument("--to", required=True, metavar="TOOL,…", help=f"one or several of {_TOOLS}")
    export.add_argument(
        "--out",
        metavar="DIR",
        help="folder for the export (default: exports/TOOL; of trackio, wandb and mlflow, where they keep their runs)",
    )
    replay = commands.add("replay", "replay a recorded run in this terminal")
    _add_number(
        replay, "--speed", Number(float, 0.01, 10_000.0), "speed-up factor (default: 1)", default=1.0, metavar="X"
    )
    for command in (show, stop, logs, capture, export, replay):
        command.add_argument(
            "name",
            metavar="RUN",
            nargs="?",
            default="last",
            help="a run: its name, the start or end of it, or last (default)",
        )

    clean = commands.add("clean", "delete recorded runs that are over")
    _add_number(clean, "--keep", Number(int, 0, 1_000_000), "keep the newest N (default: 0)", default=0)
    _add_switch(clean, "--yes", "do not ask for confirmation")
    progress = commands.add(
        "progress", "show your exercises (open, tried or done) and the error of your predictions", json=True
    )
    progress.add_argument(
        "--zip", metavar="FILE|DIR", help="write what a teacher's class page reads; in a folder, to NAME-OF-USER.zip"
    )
    _add_switch(progress, "--follow", "with --zip: write it again when it changes, until Ctrl-C")
    classroom = commands.add(
        "class",
        "show a class: progress, guesses, grades, what most got wrong, and runs that have just failed",
        json=True,
    )
    classroom.add_argument("folder", metavar="FOLDER", help="a folder with a subfolder or zip for each learner")
    classroom.add_argument("--grades", metavar="FILE.csv", help="grades of labkit grade (default: FOLDER-grades.csv)")
    _add_number(
        classroom,
        "--minutes",
        Number(float, 0.1, 1440.0),
        "show runs that have failed in the last N minutes (default: 10)",
        default=10.0,
    )
    _add_switch(classroom, "--hide-names", "put numbers in place of names everywhere")
    classroom.add_argument("--html", metavar="FILE.html", help="write one page that works offline")
    grade = commands.add("grade", "judge submitted answers that are code, each in a sandbox, and write a CSV")
    grade.add_argument("folder", metavar="FOLDER", help="notebooks (.ipynb) and Python files with calls of check(…)")
    grade.add_argument(
        "--exercise",
        action="append",
        default=[],
        metavar="NAME",
        help="an exercise such as build_data_parallel.naive; may be repeated (default: all that a file answers)",
    )
    grade.add_argument("-o", "--output", metavar="FILE.csv", help="output file (default: FOLDER-grades.csv)")
    _add_number(
        grade,
        "--timeout",
        Number(float, 5.0, 3600.0),
        "seconds after which the ranks of one answer are killed (default: 120)",
        default=120.0,
        metavar="S",
    )
    glossary = commands.add("glossary", "define a term of distributed training, or list all terms", json=True)
    glossary.add_argument(
        "term", metavar="TERM", nargs="*", help="for example: reduce-scatter (default: list all terms)"
    )
    mcp = commands.add("mcp", "serve the lab to assistants in an editor or JupyterLab, over MCP on stdin and stdout")
    _add_switch(mcp, "--allow-run", "assistants may also start and stop runs (default: they only read)")
    commands.add("schema", "print the JSON Schemas of the recorded events and of the summary", json=True)
    claims = commands.add("claims", "test common claims about distributed training on this machine", json=True)
    claims.add_argument("names", metavar="NAME", nargs="*", help="claims to test (default: all)")
    _add_switch(claims, "--quick", "only claims that can be decided without a run")
    _add_number(claims, "--rounds", ROUNDS, "repetitions of each run (default: 3)", default=3)
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
    _add_switch(handout, "--all", "all labs, with an index page")
    readers = handout.add_mutually_exclusive_group()
    _add_switch(readers, "--student", "leave out answers and verdicts")
    _add_switch(readers, "--teacher", "include the solution of every exercise")
    handout.add_argument(
        "--recorded",
        metavar="DIR",
        help="use the recorded runs of this folder instead of starting runs; shipped: those that come with the lab",
    )
    notebook = commands.add("notebook", "write a lab as .ipynb, to import into Kaggle, Colab or another Jupyter")
    notebook.add_argument("name", metavar="LAB.py")
    notebook.add_argument("-o", "--output", metavar="FILE.ipynb", help="output file (default: next to the lab)")
    notebook.add_argument(
        "--source", metavar="URL", help="repository that the first cell clones (default: origin of this clone)"
    )
    notebook.add_argument(
        "--kaggle",
        metavar="USER",
        help="also write kernel-metadata.json, so that `kaggle kernels push` uploads it for this user, on two T4",
    )
    doctor = commands.add("doctor", "check what this machine supports, and how to fix what is missing", json=True)
    _add_switch(
        doctor,
        "--calibrate",
        "first measure how long collectives take between ranks, for predictions (less than 30 s for 2 ranks)",
    )
    _add_number(
        doctor, "--nproc", _CALIBRATED, "ranks for --calibrate (default: all GPUs, or 2 CPU ranks)", metavar="RANKS"
    )
    bench = commands.add("bench", "measure the performance of the lab itself", json=True)
    bench.add_argument("--only", metavar="NAME", help="only one benchmark, such as training_kills (default: all)")
    for name, bounds, help in (
        ("--rounds", ROUNDS, "rounds of the kill matrices at each moment (default: a few)"),
        ("--minutes", Number(int, 1, 1440), "minutes of memory_growth (default: 15); limit for training_kills"),
        ("--ranks", _CALIBRATED, "CPU ranks of memory_growth (default: 8)"),
    ):
        _add_number(bench, name, bounds, help)
    bench.add_argument("--results", metavar="FILE", help="JSON lines to append to; training_kills continues them")
    _add_switch(bench, "--save", "keep the figures, and write them into MEASUREMENTS.md")
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
            _add_switch(command, "--json", "print exactly one JSON object on stdout")
        return command


def _add_advise(commands: _Commands) -> None:
    advise = commands.add(
        "advise", "say which strategies fit a transformer on some devices, and how fast they are, modelled", json=True
    )
    for name, metavar, help in (
        ("params", "COUNT", "a model with about as many parameters, such as 7B"),
        ("config", "FILE", "or the model of a Hugging Face style config.json"),
        ("workload", "NAME", "or the model of a workload, with --option"),
        ("machine", "NAME", f"one of {', '.join(ACCELERATED)}, or a .json file (default: {DEFAULT_MACHINE})"),
        ("memory", "SIZE", "memory of a device, such as 24GB or 24GiB (default: that of the machine)"),
        ("batch", "SAMPLES", "samples per step, globally, or such as '4M tokens' (default: as published for the size)"),
        ("precision", "P", "precision of the computation (default: bf16, or fp16)"),
        ("attention", "A", "fused or eager, which stores the matrices of attention (default: fused)"),
        ("layout", "NAME=VALUE,…", "estimate one layout instead, such as dp=8,tp=4,pp=2,zero=1,micro_batch=2"),
        ("check", "FILE.csv", "compare the estimates with published runs instead"),
    ):
        advise.add_argument(f"--{name}", metavar=metavar, help=help)
    advise.add_argument("--devices", metavar="N", help="number of devices (default: one node)")
    advise.add_argument("--sequence", metavar="N", help="tokens of a sample (default: those of the model)")
    advise.add_argument("--option", action="append", metavar="NAME=VALUE", help="set an option of the workload")
    _add_switch(advise, "--scaling", "show strong and weak scaling from 1 to 4,096 devices instead")


def _add_atlas(commands: _Commands) -> None:
    atlas = commands.add(
        "atlas", "list published training runs on real GPUs, measured and modelled, failures included", json=True
    )
    for name, metavar, help in (
        ("model", "TEXT", "only models whose name contains a text, such as 8B"),
        ("gpus", "N,N,…", "only these numbers of GPUs"),
        ("gpu-type", "TEXT", "only GPUs or machines whose name contains a text, such as H100"),
        ("layout", "NAME=N,…", "only layouts with these degrees: dp, tp, pp, cp, zero, micro_batch"),
        ("source", "TEXT", "only sources whose name contains a text, such as Playbook"),
    ):
        atlas.add_argument(f"--{name}", metavar=metavar, help=help)
    _add_number(atlas, "--limit", Number(int, 1, 1_000_000), "rows of the table (default: 30)", default=30)
    atlas.add_argument(
        "--by", metavar="WHAT", help="what colours show: model (default), tp, pp, sharding, gpus or source"
    )
    atlas.add_argument("-o", "--output", metavar="FILE.html", help="write the chart as a page that works offline")


def _add_jobs(commands: _Commands) -> None:
    """The commands for jobs that leave this lab."""
    pack = commands.add(
        "pack", "write a job as a zip that runs without labkit: script, commands, batch files, requirements"
    )
    pack.add_argument("name", metavar="RUN|STRATEGY|PATH.py", help="a recorded run, a strategy or your own script")
    pack.add_argument("-o", "--output", metavar="FILE.zip", help="output file (default: NAME.zip)")
    _add_placement(pack)
    _add_fields(pack)

    submit = commands.add(
        "submit", "submit a run to Slurm or Kubeflow, or write a job file of Kubeflow or SkyPilot", json=True
    )
    _add_what(submit, "submit your own module, like python -m", "a strategy or your own script")
    submit.add_argument(
        "--engine",
        metavar="E",
        default="slurm",
        help="slurm, kubeflow or skypilot, which only writes a file (default: slurm)",
    )
    submit.add_argument(
        "-o",
        "--output",
        metavar="FILE.yaml",
        help="write the job file of kubeflow instead, or name that of skypilot (default: NAME-skypilot.yaml)",
    )
    _add_placement(submit)
    _add_fields(submit)

    unpack = commands.add(
        "unpack", "unpack a job into a new folder, after checking that nothing in it can do harm there"
    )
    unpack.add_argument("name", metavar="FILE.zip")
    unpack.add_argument("-o", "--output", metavar="DIR", help="new folder (default: the name of the file)")

    gather = commands.add("gather", "put the run folders of the nodes of one run together in a new one")
    gather.add_argument("names", metavar="RUN", nargs="+", help="the folder of each node, a name or a path")
    gather.add_argument("-o", "--output", metavar="DIR", required=True, help="new run folder")


def _add_placement(command: argparse.ArgumentParser) -> None:
    _add_number(
        command, "--nodes", _NODES, "nodes among which the ranks of --nproc are divided (default: 1)", default=1
    )
    command.add_argument(
        "--profile", metavar="NAME", default="default", help="settings of a site, from labkit.conf (default: default)"
    )


def _add_nodes(run: argparse.ArgumentParser) -> None:
    """The flags of a run on several machines; `nodes` is (least, most), with `least` None for a fixed number."""
    count = _number("--nodes", _NODES)

    def counts(text: str) -> tuple[int | None, int]:
        least, colon, most = text.rpartition(":")
        return (count(least) if colon else None), count(most)

    run.add_argument(
        "--nodes",
        type=counts,
        default=(None, 1),
        metavar="N|MIN:MAX",
        help="nodes among which the ranks of --nproc are divided; with MIN:MAX, the run continues when nodes leave and"
        " join (default: 1)",
    )
    _add_number(run, "--node-rank", _RANK, "this node, from 0 to N - 1", metavar="K")
    run.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="an address and a free port of node 0")


def _add_what(command: argparse.ArgumentParser, module: str, what: str) -> None:
    """What the command is about, with the help for it, and for a module."""
    command.add_argument("what", metavar="STRATEGY|PATH.py", nargs="?", help=what)
    command.add_argument("-m", dest="module", metavar="MODULE", help=module)


def _add_fields(command: argparse.ArgumentParser) -> None:
    for flag in FLAGS:
        name, help = "--" + flag.name.replace("_", "-"), about(flag).help
        if about(flag).switch:
            command.add_argument(name, action="store_const", const=True, help=help)
        else:
            command.add_argument(name, metavar=about(flag).flag, help=help)
    command.add_argument(
        "--option", action="append", metavar="NAME=VALUE", help="set an option of the strategy or workload"
    )


# ---- the command-line parser


_DEVELOPMENT = ("lab", "test", "deepspeed")
_ON_TEXT = (
    "advise", "atlas", "capture", "clean", "diff", "explain", "export", "gather", "glossary", "logs", "progress",
    "replay", "runs", "schema", "script", "show", "stop", "unpack",
)  # fmt: skip
_EXTRAS = {
    "setup": ("lab",),
    "lab": ("lab",),
    "handout": ("handout",),
    "mcp": ("mcp",),
    "test": _DEVELOPMENT,
    "bench": _DEVELOPMENT,
    "class": ("handout",),
    **dict.fromkeys(_ON_TEXT, (TEXT_ONLY,)),
}
# arguments after `--` go to the script, JupyterLab or pytest
_AFTER_DASHES = ("run", "predict", "pack", "submit", "lab", "test")


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
    for flag in FLAGS:
        text, bounds = getattr(args, flag.name), bounds_of(flag.name)
        if text is not None:
            fields[flag.name] = bounds.from_text(text) if bounds else text
    return fields | {"options": options_of(args)}


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """The options that were given as --option NAME=VALUE."""
    options = {}
    for text in args.option or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SpecError("options", f"option {shown(text)} has no value; write --option NAME=VALUE")
        options[name] = value
    return options


def _extras(args: argparse.Namespace) -> tuple[str, ...]:
    """The extras of pyproject.toml that the command needs, and those of `setup --with`."""
    if args.command == "compare" and args.strategies is None:
        return (TEXT_ONLY,)  # recorded runs
    if args.command == "class" and args.html is None:
        return (TEXT_ONLY,)
    asked = [name.strip() for text in getattr(args, "extras_asked", ()) for name in text.split(",")]
    for name in asked:
        if name not in OPTIONAL:
            raise UsageError(_unknown("extra", name, OPTIONAL))
    args.extras_asked = tuple(dict.fromkeys(asked))
    return tuple(dict.fromkeys((*args.extras, *asked)))


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
