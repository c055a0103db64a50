"""How a solution is judged: its source, its launch on real ranks, and the criteria."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import inspect
import json
import linecache
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import labkit
from labkit.common.arguments import shown
from labkit.common.units import size
from labkit.course.answers import Unanswered, Wrong
from labkit.course.build.record import BACKWARD, COMPUTE, FORWARD, OUTSIDE, STORE, WAIT, Event, Record
from labkit.course.build.sandbox import run_to_end
from labkit.course.pictures.pipeline import order
from labkit.launch.job import LaunchError
from labkit.plan.spec import Spec, SpecError
from labkit.record.files import read_below
from labkit.runs.handle import begin
from labkit.setup.machine import Machine

# ---- the source code of an answer


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_SCRIPT = 1 << 20  # bytes


def source_of(answer: Any) -> str:
    """A Python text that defines `answer` under its own name.

    Definitions from the same notebook or module are copied; modules, and names imported from them, are imported.
    Raises `Wrong` if the answer uses a value that cannot be written down, such as a tensor of the notebook.
    """
    pieces: dict[str, str] = {}
    _add(answer.__name__, answer, answer.__module__, pieces)
    return "\n\n".join(pieces.values()) + "\n"


def _add(name: str, value: Any, home: str, pieces: dict[str, str]) -> None:
    """Adds what defines `name`, after everything that it uses."""
    if name in pieces:
        return
    if isinstance(value, ModuleType):
        pieces[name] = f"import {value.__name__} as {name}"
    elif _is_plain(value):
        pieces[name] = f"{name} = {value!r}"
    elif isinstance(value, (FunctionType, type)) and value.__module__ == home:
        text = _definition(value)
        pieces[name] = ""  # reserves the name: a function may call itself
        names = vars(sys.modules[home])
        for used in sorted(_global_names(compile(text, "answer", "exec", dont_inherit=True)) & names.keys()):
            if not hasattr(builtins, used):
                _add(used, names[used], home, pieces)
        del pieces[name]
        pieces[name] = text if value.__name__ == name else f"{text}\n\n\n{name} = {value.__name__}"
    elif _is_importable(value):
        pieces[name] = f"from {value.__module__} import {value.__name__} as {name}"
    else:
        raise Wrong(f"the answer uses {name}, a {type(value).__name__} of the notebook; create it inside the answer")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and getattr(module, getattr(value, "__name__", ""), None) is value


def _definition(value: Any) -> str:
    """The newest statement that defines a function or class, in the cell or file that it comes from."""
    lines = linecache.getlines(_code(value).co_filename)
    text = "".join(lines)
    try:
        definitions = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == value.__name__]
    except SyntaxError:  # a cell with magics, which IPython replaces before it compiles
        definitions = []
    definitions = [node for node in definitions if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if not definitions:
        raise Wrong(f"the source code of {value.__name__} was not found; define it with def or class in a cell")
    node = definitions[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()


def _code(value: Any) -> CodeType:
    """The code of a function, or of any function of a class."""
    if isinstance(value, FunctionType):
        return inspect.unwrap(value).__code__
    for attribute in vars(value).values():
        function = getattr(attribute, "__func__", attribute)
        if isinstance(function, FunctionType):
            return inspect.unwrap(function).__code__
    raise Wrong(f"the class {value.__name__} has no function; define its functions in the class itself")


def _global_names(code: CodeType) -> set[str]:
    """The names that a piece of code, or a function in it, looks up outside of itself."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return names.union(*(_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def written_script(answer: Any, name: str, example: str) -> Answer:
    """The text of the script at the path `answer`, which must define the class `name`; raises `Wrong` if there is none.
    `example` is such a path."""
    if not isinstance(answer, (str, os.PathLike)):
        raise Wrong(f"the answer must be the path of your script, such as {example!r}, got {shown(answer)}")
    path = Path(answer).absolute()
    try:
        text = read_below(path.parent, path, _MAX_SCRIPT).decode()
        tree = ast.parse(text)
    except FileNotFoundError:
        raise Wrong(f"there is no file {shown(str(answer))}; save your script under this name") from None
    except (OSError, ValueError) as error:  # no plain file; bytes that are no text
        raise Wrong(f"{shown(str(answer))} cannot be read: {error}") from None
    except SyntaxError as error:
        raise Wrong(f"{path.name} is not valid Python: {error.msg} in line {error.lineno}") from None
    if not any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        raise Wrong(f"{path.name} does not define the class {name}, which the judge creates and calls")
    if is_unanswered(tree, name):
        raise Unanswered(f"not answered yet: in {path.name}, {name} still has the three dots of the starter code")
    return Answer(name, text)


def is_unanswered(tree: ast.Module, name: str) -> bool:
    """Whether the newest definition of `name` has functions whose whole body is `...`, or a call with `...` in it."""
    definitions = [node for node in tree.body if name in bound(node)]
    parts = [part for part in ast.walk(definitions[-1]) if isinstance(part, (ast.FunctionDef, ast.Call))]
    return any(_is_dots(part) for part in parts)


def _is_dots(node: ast.FunctionDef | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return any(isinstance(argument, ast.Constant) and argument.value is ... for argument in node.args)
    body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    dots = [part for part in node.body if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)]
    return not body and any(part.value.value is ... for part in dots if isinstance(part.value, ast.Constant))


def solution(topic: str, *names: str) -> str:
    """The reference solution for teachers (markdown): these definitions of the module of `solutions/`, after the
    imports and constants that they use."""
    text = (Path(__file__).parent / "solutions" / f"{topic}.py").read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    chosen = [node for node in nodes if getattr(node, "name", None) in names]
    used = {part.id for node in chosen for part in ast.walk(node) if isinstance(part, ast.Name)}
    before = [node for node in nodes if bound(node) & used and getattr(node, "name", None) not in names]
    pieces = ["\n".join(ast.unparse(node) for node in before)]
    pieces += [ast.get_source_segment(text, node) or "" for node in chosen]
    return "```python\n" + "\n\n\n".join(filter(None, pieces)) + "\n```"


def bound(node: ast.AST) -> set[str]:
    """The names that an import, an assignment or a definition defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return {target.id for target in targets if isinstance(target, ast.Name)}


# ---- runs an answer on CPU ranks, as an ordinary run with its own folder, and reads what the ranks recorded


_LIMIT = 180.0  # seconds after which a run is stopped
_LIMIT_ALONE = 600.0  # of an answer that starts its ranks itself, in several runs
_SCRIPT = """\
# An answer on {nproc} ranks: torchrun --standalone --nproc-per-node={nproc} train.py FOLDER
# The first two lines read this file, and run what follows with the inputs that the examiner draws into FOLDER.
import sys

from labkit.course.build.ranks.entry import run_answer

run_answer(__file__, "{module}", "{trial}", "{answer}", sys.argv[1])
sys.exit()
# ---- the answer
{source}
"""


@dataclass(frozen=True)
class Answer:
    """The text of an answer, and the name in it of the function or class that is judged."""

    name: str
    text: str


def check_class(answer: Any, what: str, parameters: Sequence[str]) -> None:
    """Raises `Wrong` unless the answer is a class whose objects are created with these parameters; `what` completes
    "the answer must be a class …"."""
    if isinstance(answer, Answer):
        return  # the ranks find out
    if not isinstance(answer, type):
        raise Wrong(f"the answer must be a class {what}, got {shown(answer)}")
    _check_parameters(answer, parameters)


def check_function(answer: Any, parameters: Sequence[str]) -> None:
    """Raises `Wrong` unless the answer is a function that takes these parameters."""
    if isinstance(answer, Answer):
        return
    if not inspect.isfunction(answer):
        raise Wrong(f"the answer must be a function of ({', '.join(parameters)}), got {shown(answer)}")
    _check_parameters(answer, parameters)


def _check_parameters(answer: Any, parameters: Sequence[str]) -> None:
    try:
        inspect.signature(answer).bind(*parameters)
    except (TypeError, ValueError):
        raise Wrong(f"the answer must take ({', '.join(parameters)}), as in the starter code") from None


def written_down(answer: Any) -> Answer:
    """The text of an answer, which may be one already. Raises `Wrong` if its source cannot be found."""
    return answer if isinstance(answer, Answer) else Answer(answer.__name__, source_of(answer))


def script_of(module: str, trial: str, answer: Any, nproc: int) -> str:
    """The script that every rank runs. Raises `Wrong` if the source of the answer cannot be found."""
    written = written_down(answer)
    return _SCRIPT.format(nproc=nproc, source=written.text, module=module, trial=trial, answer=written.name)


def records_of(module: str, trial: str, answer: Any, nproc: int, **settings: Any) -> list[Record | None]:
    """What each rank recorded in a `trial` of a `module` of `trials/`, and what was expected of it; None for a rank
    that wrote nothing. All processes have ended when it returns. `settings` are those of a task that is
    drawn for each learner, as plain values."""
    text = script_of(module, trial, answer, nproc)
    with tempfile.TemporaryDirectory(prefix="labkit-answer-") as folder, examiner() as examined:
        examined.draw(module, trial, nproc, Path(folder), settings)
        (_LAUNCH.get() or launch)(text, nproc, Path(folder))
        records = examined.records()
        _SEEN.get()([record for record in records if record is not None])
        return records


_LAUNCH: ContextVar[Callable[[str, int, Path], None] | None] = ContextVar("_LAUNCH", default=None)
_SEEN: ContextVar[Callable[[list[Record]], Any]] = ContextVar("_SEEN", default=lambda records: None)


@contextlib.contextmanager
def launched_by(launcher: Callable[[str, int, Path], None], seen: Callable[[list[Record]], Any]) -> Iterator[None]:
    """Inside, `launcher` runs the ranks of answers instead of `launch`, and `seen` gets what they recorded."""
    launching, seeing = _LAUNCH.set(launcher), _SEEN.set(seen)
    try:
        yield
    finally:
        _LAUNCH.reset(launching)
        _SEEN.reset(seeing)


class Examiner:
    """The process that draws the inputs, computes what is expected, and compares: see `ranks/examiner.py`."""

    def __enter__(self) -> Examiner:
        argv = [sys.executable, "-m", "labkit.course.build.ranks.examiner"]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), text=True, start_new_session=True
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def draw(self, module: str, trial: str, ranks: int, folder: Path, settings: Mapping[str, Any]) -> None:
        """Begins to draw; the ranks wait for their inputs."""
        exam = {"module": module, "trial": trial, "ranks": ranks, "folder": str(folder), "settings": {**settings}}
        self._say({"draw": exam})

    def records(self) -> list[Record | None]:
        """The record of each rank, after all of them have ended."""
        self._say({"judge": True})
        replies = [self._reply() for _ in ("drawn", "judged")]
        return [None if fields is None else Record.of(fields) for fields in json.loads(replies[-1])]

    def _say(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def _reply(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Wrong("the examiner has ended: this machine cannot judge the exercise, whatever the answer")
        return line


_PATHS = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


def _environment() -> dict[str, str]:
    """That of a process which imports this labkit."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(labkit.__file__).parents[1]), *_PATHS])}


def examiner() -> contextlib.AbstractContextManager[Examiner]:
    """A new process that examines one answer."""
    return Examiner()


def launch(text: str, nproc: int, folder: Path) -> None:
    """Runs a script on `nproc` CPU ranks with `folder` as its argument, to its end. Its text is in the run folder."""
    spec = Spec(script="answer.py", nproc=nproc, device="cpu", args=(str(folder),))
    try:
        run = begin(spec.on(Machine.here()), source=text, guesses=())
    except (SpecError, LaunchError) as error:
        raise Wrong(f"this machine cannot start the ranks of this exercise: {error}") from None
    if not run.wait(_LIMIT).state.over:
        run.stop()


def run_alone(text: str, folder: Path) -> None:
    """Runs a script that starts its ranks itself, with `folder` as its argument, to its end."""
    (_LAUNCH.get() or launch_alone)(text, 1, folder)


def launch_alone(text: str, nproc: int, folder: Path) -> None:
    """Runs a script as a plain process, to its end."""
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    run_to_end([sys.executable, str(script), str(folder)], folder, folder, _environment(), _LIMIT_ALONE)


# ---- what is required of an answer, as functions of the records of its ranks


TOLERANCE = 1e-5  # of a loss or gradient, against the reference on a single device; relative if that is larger than 1
SLACK = 0.02  # of a number of bytes: padding, and numbers that are not part of the exercise
RESULT = 2e-3  # relative difference of a final parameter, gradient or output; float32 rounds in another order
NORM = 0.01  # relative difference of the norm of what is reduced
_STORED = 4096  # bytes of keys and values: creating a group takes some hundred

Bytes = Callable[[Record], float]


def ended(records: Sequence[Record | None], finished_api: bool = False) -> list[Record]:
    """The records, if every rank ran to its end, kept to the rules, and called no finished implementation unless
    `finished_api` allows it."""
    known = [value for value in records if value is not None]
    for record in known:
        if record.finished_api and not finished_api:
            raise Wrong(
                f"no finished API: rank {record.rank} calls {record.finished_api}; write it yourself with the functions"
                " of torch.distributed"
            )
        if record.forbidden:
            raise Wrong(
                f"rules: the answer on rank {record.rank} {record.forbidden}; compute with tensors, and communicate"
                " with the functions of torch.distributed"
            )
    stuck = [record for record in known if record.stuck]
    gave_up = min((record.at for record in stuck), default=math.inf)  # what is raised later is the lost connection
    failed = [record for record in known if record.error and not record.stuck and record.at <= gave_up]
    if failed:
        first = min(failed, key=lambda record: record.at)
        raise Wrong(f"the answer must run: rank {first.rank} raised {first.error}")
    if stuck:
        others = [f"rank {record.rank} has returned" for record in known if not record.stuck and not record.error]
        waits = [f"rank {record.rank} {record.stuck}" for record in stuck]
        raise Wrong(f"the answer hangs: {'; '.join(waits + others)}")
    missing = [rank for rank, record in enumerate(records) if record is None]
    if missing:
        raise Wrong(f"the answer must run: rank {missing[0]} ended without a result; see Run.attach('last').logs")
    _stores(known)
    return known


def _stores(records: Sequence[Record]) -> None:
    """No rank moves data through a store: it is for rendezvous, and its server is one process."""
    for record in records:
        moved = record.stored()
        if moved > _STORED:
            raise Wrong(
                f"store: rank {record.rank} moves {size(moved)} through a store such as TCPStore, expected at most"
                f" {size(_STORED)}; send tensors with collectives, or with send and recv"
            )


def _each_step(records: Sequence[Record]) -> Iterator[tuple[Record, int]]:
    """The steps of each rank: its record, and the number of the step."""
    return ((record, step) for record in records for step in record.steps())


def results(records: Sequence[Record]) -> None:
    """Every rank has the losses of a single device, and ends with its parameters, gradients and outputs."""
    hint = next((f"; {record.hint}" for record in records if record.hint), "")
    for record in records:
        if len(record.losses) != len(record.expected):
            raise Wrong(f"losses: rank {record.rank} has {len(record.losses)} losses, expected {len(record.expected)}")
    for step in records[0].steps() if records else ():
        for record in records:
            expected, got = record.expected[step], record.losses[step]
            if not abs(got - expected) <= TOLERANCE * max(1.0, abs(expected)):
                before = "the steps before are right" if step else "this is before the first update"
                raise Wrong(
                    f"losses: in step {step}, rank {record.rank} has {got:.6f}, expected {expected:.6f} as on a single"
                    f" device; {before}{hint}"
                )
    for record in records:
        for name, difference in record.differences.items():
            if not difference <= RESULT:
                raise Wrong(
                    f"results: rank {record.rank} has a {name} that differs by {difference:.2g} (relative) from that of"
                    f" a single device, expected at most {RESULT:g}{hint}"
                )


def sent_per_step(records: Sequence[Record], expected: Bytes, why: str) -> None:
    """Every rank sends `expected(record)` bytes in each step, which are not zeros; `why` says what that number consists
    of."""
    for record, step in _each_step(records):
        wanted, got = expected(record), record.sent(step)
        if abs(got - wanted) > SLACK * wanted:
            raise Wrong(
                f"bytes sent: in step {step}, rank {record.rank} sends {size(got)}, expected {size(wanted)} ({why})"
                f"; it calls {calls_in_words(record, step)}"
            )
        _no_zeros(record, step)


def _no_zeros(record: Record, step: int) -> None:
    """At most half of the bytes that a rank sends in a step belong to zeros."""
    zeros, got = sum(event.zeros for event in record.of_step(step)), record.sent(step)
    if zeros > got / 2:
        raise Wrong(
            f"content: in step {step}, {size(zeros)} of the {size(got)} that rank {record.rank} sends are zeros; send"
            " what the other ranks need"
        )


def reduced(records: Sequence[Record]) -> None:
    """What a rank contributes to sums over the ranks in a step are the gradients of its own samples, whole or divided
    by the number of ranks: their norm is the one of a single device. Sends and receives are not compared."""
    for record, step in _each_step(records):
        events = [event for event in record.of_step(step) if event.op in ("all_reduce", "reduce_scatter", "reduce")]
        if sum(event.sent for event in events) < record.sent(step) / 4:
            continue
        expected = math.sqrt(record.figures["squares"][step])
        squares = sum(event.squares for event in events)
        got = math.sqrt(squares) if squares >= 0 else math.nan
        if not any(abs(got - expected / by) <= NORM * expected / by for by in (1, len(records))):
            raise Wrong(
                f"content: in step {step}, rank {record.rank} contributes tensors of norm {got:.4g} to the sums"
                f" over the ranks, expected {expected:.4g}, the norm of the gradients of its own samples"
            )


def memory(records: Sequence[Record], moment: str, most: Bytes, why: str) -> None:
    """At a moment, in every step that has it, no rank has more than `most(record)` bytes of tensors; `why` says what
    these are."""
    for record in records:
        counts = record.memory[moment]
        for step, count in enumerate(counts):
            if count > most(record) * (1 + SLACK):
                when = f"{moment} of step {step}" if len(counts) > 1 else moment
                raise Wrong(
                    f"memory: {when}, rank {record.rank} has {size(count)} of tensors, expected at most"
                    f" {size(most(record))} ({why})"
                )


def overlap(records: Sequence[Record], fraction: float) -> float:
    """At least this fraction of a step's bytes is sent by calls that start before the last matrix product of backward,
    and that are not waited for before it. Returns the smallest fraction."""
    least = 1.0
    for record, step in _each_step(records):
        ends = max(
            index
            for index, event in enumerate(record.events)
            if event.op == COMPUTE and event.step == step and event.phase == "backward"
        )
        waits = [
            event for event in record.events[:ends] if event.op == WAIT and event.step == step and event.of is not None
        ]
        if waits:
            raise Wrong(
                f"overlap: in step {step}, rank {record.rank} waits for a call of {record.events[waits[0].of].op}"
                " while backward still has layers to compute; start it with async_op=True and wait in finish()"
            )
        early = sum(event.sent for event in record.events[:ends] if event.step == step)
        if early < fraction * record.sent(step):
            raise Wrong(
                f"overlap: in step {step}, rank {record.rank} sends {early / record.sent(step):.0%} of its bytes by"
                f" calls that start before backward ends, expected at least {fraction:.0%}"
            )
        least = min(least, early / record.sent(step))
    return least


def crossed(got: float, least: float, most: float, words: Callable[[float], str]) -> str:
    """`at least 3 MB` or `at most 4 MB`: the bound that a figure crosses by more than `SLACK`; empty if none."""
    if least * (1 - SLACK) <= got <= most * (1 + SLACK):
        return ""
    return f"at least {words(least)}" if got < least else f"at most {words(most)}"


def most_memory(records: Sequence[Record], moment: str) -> float:
    """The most bytes of tensors that any rank has at a moment of any step."""
    return max(count for record in records for count in record.memory[moment])


def sent_in_words(record: Record, step: int = 0) -> str:
    """`a rank sends 3 MB per step, by 4 × all_reduce`."""
    return f"a rank sends {size(record.sent(step))} per step, by {calls_in_words(record, step)}"


def calls_in_words(record: Record, step: int) -> str:
    """`4 × all_reduce, 1 × broadcast`; `nothing` without communication."""
    names = [event.op for event in record.of_step(step) if event.op not in (COMPUTE, WAIT) and event.sent]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "nothing"


def sent_between(records: Sequence[Record], least: Bytes, most: Bytes, why: str) -> None:
    """Every rank sends `least` to `most(record)` bytes in each step, not zeros in the first; `why` says what the larger
    number consists of."""
    for record in records:
        for step in record.steps():
            bound = crossed(record.sent(step), least(record), most(record), size)
            if bound:
                consists = f" ({why})" if why else ""
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(record.sent(step))}, expected {bound}"
                    f"{consists}; it calls {calls_in_words(record, step)}"
                )
        _no_zeros(record, 0)


def axes(event: Event, rank: int, mesh: Mapping[str, int]) -> list[str]:
    """The axes of a mesh along which the ranks of a call differ. `mesh` has the number of ranks by axis, the last of
    which varies fastest."""
    everyone = range(math.prod(mesh.values()))
    members = (rank, event.peer) if event.op in ("send", "recv") and event.peer is not None else event.among or everyone
    differing, stride = [], 1  # the stride of an axis: how far apart neighbours along it are in the numbers of ranks
    for axis, count in reversed(mesh.items()):
        coordinates = {member // stride % count for member in members}
        if len(coordinates) > 1:
            differing.append(axis)
        stride *= count
    return differing[::-1]


def groups(records: Sequence[Record], mesh: Mapping[str, int], most: float) -> None:
    """In a step, no rank sends more than `most` bytes by calls whose ranks differ along several axes of a mesh."""
    for record, step in _each_step(records):
        crossing = [event for event in record.of_step(step) if len(axes(event, record.rank, mesh)) > 1]
        if sum(event.sent for event in crossing) > most:
            event = max(crossing, key=lambda event: event.sent)
            ranks = [record.rank, event.peer] if event.op in ("send", "recv") else event.among or ["all"]
            raise Wrong(
                f"groups: in step {step}, rank {record.rank} calls {event.op} with a group of the ranks"
                f" {', '.join(map(str, ranks))}, which differ along {' and '.join(axes(event, record.rank, mesh))};"
                " a group along one axis has ranks that differ along this axis only"
            )


def sent_along(
    records: Sequence[Record], mesh: Mapping[str, int], axis: str, least: Bytes, most: Bytes, why: str
) -> None:
    """Every rank sends `least` to `most(record)` bytes in each step to ranks that differ from it along one axis of a
    mesh; `why` says what these consist of."""
    for record, step in _each_step(records):
        got = sent_in(record, step, mesh, axis)
        bound = crossed(got, least(record), most(record), size)
        if bound:
            raise Wrong(
                f"bytes sent: in step {step}, rank {record.rank} sends {size(got)} along the {axis} axis, expected"
                f" {bound} ({why})"
            )


def sent_in(record: Record, step: int, mesh: Mapping[str, int], axis: str) -> float:
    """Bytes that a rank sends in a step along one axis of a mesh."""
    return sum(event.sent for event in record.of_step(step) if axes(event, record.rank, mesh) == [axis])


def process(records: Sequence[Record], moment: str, most: Bytes, why: str) -> None:
    """At a moment, the resident set of no process has grown more than `most(record)` bytes beyond its tensors."""
    for record in records:
        for grown in record.process.get(moment, ()):
            if grown > most(record):
                raise Wrong(
                    f"memory: {moment}, the process of rank {record.rank} has grown by {size(grown)} beyond its"
                    f" tensors, expected at most {size(most(record))} ({why}); arrays of NumPy and byte strings count"
                )


def computed(
    records: Sequence[Record], phases: Sequence[str], least: Bytes, most: Bytes, why: str, others: float = 1.0
) -> None:
    """In these phases of a step, the matrix products of a rank take `least` to `most(record)` operations, and all other
    operators at most `others` times as many as these compute elements."""
    named = " and ".join(phases)
    for record, step in _each_step(records):
        made = record.flops(step, *phases)
        bound = crossed(made, least(record), most(record), "{:,.0f}".format)
        if bound:
            raise Wrong(
                f"computation: in {named} of step {step}, the matrix products of rank {record.rank} take {made:,}"
                f" operations, expected {bound} ({why})"
            )
    elements(records, phases, most, why, others)


def elements(records: Sequence[Record], phases: Sequence[str], of: Bytes, why: str, times: float) -> None:
    """In these phases of a step, all operators but matrix products compute at most `times` × `of(record)` elements."""
    named = " and ".join(phases)
    for record, step in _each_step(records):
        made, high = record.other_elements(step, *phases), times * of(record)
        if made > high:
            raise Wrong(
                f"computation: in {named} of step {step}, rank {record.rank} computes {made:,} elements outside of"
                f" matrix products, expected at most {high:,.0f} ({why})"
            )


def neighbours(records: Sequence[Record], ring: bool) -> None:
    """Ranks only send to the next rank and receive from the previous one; without a `ring`, also the reverse, and the
    last and the first rank are no neighbours."""
    n = len(records)
    for record in records:
        rank = record.rank
        beside = {rank - 1, rank + 1}
        peers = {"send": {(rank + 1) % n}, "recv": {(rank - 1) % n}} if ring else {"send": beside, "recv": beside}
        for event in record.events:
            if event.step == OUTSIDE or event.op in (COMPUTE, WAIT, STORE, FORWARD, BACKWARD):
                continue
            if event.op not in peers:
                raise Wrong(
                    f"neighbours: in {event.phase} of step {event.step}, rank {rank} calls {event.op}, expected"
                    " send and recv only"
                )
            if event.peer not in peers[event.op]:
                who = f"rank {event.peer}" if event.peer is not None else "any rank"
                raise Wrong(
                    f"neighbours: in {event.phase} of step {event.step}, rank {rank} calls {event.op} with {who},"
                    f" expected {' or '.join(f'rank {peer}' for peer in sorted(peers[event.op]) if 0 <= peer < n)}"
                )


def one_f_one_b(records: Sequence[Record]) -> None:
    """Every stage computes forwards and backwards in the order of 1F1B (Narayanan et al. 2021), with at most n − r
    micro-batches between forward and backward on rank r of n."""
    n = len(records)
    for record in records:
        rank = record.rank
        expected = [f"{kind}{number}" for kind, _, number in order("1F1B", rank, n, record.figures["count"])]
        for step in record.steps():
            got = schedule(record, step)
            if got != expected:
                raise Wrong(
                    f"order: in step {step}, rank {rank} of {n} computes {' '.join(got)} with {live(got)} live"
                    f" activations, expected {' '.join(expected)} with {live(expected)}"
                )


def schedule(record: Record, step: int) -> list[str]:
    """The forwards and backwards of a stage in a step, in order: `F0`, `F1`, `B0`, …"""
    return [f"{event.op}{event.of}" for event in record.of_step(step) if event.op in (FORWARD, BACKWARD)]


def live(order: Sequence[str]) -> int:
    """The largest number of micro-batches between forward and backward."""
    return max(accumulate((1 if action.startswith(FORWARD) else -1 for action in order), initial=0))
