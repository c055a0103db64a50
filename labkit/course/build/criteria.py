"""How a solution is judged: its source, its launch on real ranks, and the criteria."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from labkit.common.arguments import shown
from labkit.common.units import size
from labkit.course.build.record import BACKWARD, COMPUTE, FORWARD, OUTSIDE, WAIT, Record
from labkit.course.exercises import Wrong
from labkit.course.pictures.pipeline import order
from labkit.launch.job import LaunchError
from labkit.plan.spec import Spec, SpecError
from labkit.runs.handle import begin
from labkit.setup.machine import Machine

# ---- the source code of an answer


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


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
    found = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return found.union(*(_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def solution(module: str, *names: str) -> str:
    """The reference solution for teachers (markdown): these definitions of `solutions/<module>.py`, after the imports
    and constants that they use."""
    text = (Path(__file__).parent / "solutions" / f"{module}.py").read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    chosen = [node for node in nodes if getattr(node, "name", None) in names]
    used = {part.id for node in chosen for part in ast.walk(node) if isinstance(part, ast.Name)}
    before = [node for node in nodes if _bound(node) & used]
    pieces = ["\n".join(ast.unparse(node) for node in before)]
    pieces += [ast.get_source_segment(text, node) or "" for node in chosen]
    return "```python\n" + "\n\n\n".join(filter(None, pieces)) + "\n```"


def _bound(node: ast.AST) -> set[str]:
    """The names that an import or an assignment defines."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return {target.id for target in targets if isinstance(target, ast.Name)}


# ---- runs an answer on CPU ranks, as an ordinary run with its own folder, and reads what the ranks recorded


_LIMIT = 180.0  # seconds after which a run is stopped
_SCRIPT = """\
# An answer on {nproc} ranks: torchrun --standalone --nproc-per-node={nproc} train.py FOLDER
import sys

from labkit.course.build.ranks.entry import graded

# ---- the answer
{source}

# ---- runs it, and writes what each rank recorded to FOLDER
if __name__ == "__main__":
    graded("{module}", "{trial}", {answer}, sys.argv[1])
"""


def check_class(answer: Any, what: str, parameters: Sequence[str]) -> None:
    """Raises `Wrong` unless the answer is a class whose objects are created with these parameters; `what` completes
    "the answer must be a class …"."""
    if not isinstance(answer, type):
        raise Wrong(f"the answer must be a class {what}, got {shown(answer)}")
    _check_parameters(answer, parameters)


def check_function(answer: Any, parameters: Sequence[str]) -> None:
    """Raises `Wrong` unless the answer is a function that takes these parameters."""
    if not inspect.isfunction(answer):
        raise Wrong(f"the answer must be a function of ({', '.join(parameters)}), got {shown(answer)}")
    _check_parameters(answer, parameters)


def _check_parameters(answer: Any, parameters: Sequence[str]) -> None:
    try:
        inspect.signature(answer).bind(*parameters)
    except (TypeError, ValueError):
        raise Wrong(f"the answer must take ({', '.join(parameters)}), as in the starter code") from None


def script_of(module: str, trial: str, answer: Any, nproc: int) -> str:
    """The script that every rank runs. Raises `Wrong` if the source of the answer cannot be found."""
    return _SCRIPT.format(nproc=nproc, source=source_of(answer), module=module, trial=trial, answer=answer.__name__)


def records_of(module: str, trial: str, answer: Any, nproc: int) -> list[Record | None]:
    """What each rank recorded; None for a rank that wrote nothing. All processes have ended when it returns."""
    text = script_of(module, trial, answer, nproc)
    with tempfile.TemporaryDirectory(prefix="labkit-answer-") as folder:
        launch(text, nproc, Path(folder))
        return [Record.read(Path(folder), rank) for rank in range(nproc)]


def launch(text: str, nproc: int, folder: Path) -> None:
    """Runs a script on `nproc` CPU ranks with `folder` as its argument, to its end. Its text is in the run folder."""
    spec = Spec(script="answer.py", nproc=nproc, device="cpu", args=(str(folder),))
    try:
        run = begin(spec.on(Machine.here()), source=text, guesses=())
    except (SpecError, LaunchError) as error:
        raise Wrong(f"this machine cannot start the ranks of this exercise: {error}") from None
    if not run.wait(_LIMIT).state.over:
        run.stop()


# ---- what is required of an answer, as functions of the records of its ranks


TOLERANCE = 1e-5  # of a loss or gradient, against the reference on a single device; relative if that is larger than 1
SLACK = 0.02  # of a number of bytes: padding, and numbers that are not part of the exercise

Bytes = Callable[[Record], float]


def ended(records: Sequence[Record | None]) -> list[Record]:
    """The records, if every rank ran to its end and called no finished implementation."""
    known = [value for value in records if value is not None]
    for record in known:
        if record.finished_api:
            raise Wrong(
                f"no finished API: rank {record.rank} calls {record.finished_api}; write it yourself with the functions"
                " of torch.distributed"
            )
    failed = [record for record in known if record.error and not record.stuck]
    if failed:
        first = min(failed, key=lambda record: record.at)
        raise Wrong(f"the answer must run: rank {first.rank} raised {first.error}")
    stuck = [record for record in known if record.stuck]
    if stuck:
        others = [f"rank {record.rank} has returned" for record in known if not record.stuck]
        waits = [f"rank {record.rank} {record.stuck}" for record in stuck]
        raise Wrong(f"the answer hangs: {'; '.join(waits + others)}")
    missing = [rank for rank, record in enumerate(records) if record is None]
    if missing:
        raise Wrong(f"the answer must run: rank {missing[0]} ended without a result; see Run.attach('last').logs")
    return known


def losses(records: Sequence[Record]) -> None:
    """Every rank has the losses of the reference on a single device."""
    for record in records:
        if len(record.losses) != len(record.expected):
            raise Wrong(f"losses: rank {record.rank} has {len(record.losses)} losses, expected {len(record.expected)}")
    for step in records[0].steps() if records else ():
        for record in records:
            expected, got = record.expected[step], record.losses[step]
            if not abs(got - expected) <= TOLERANCE * max(1.0, abs(expected)):
                raise Wrong(
                    f"losses: in step {step}, rank {record.rank} has {got:.6f}, expected {expected:.6f} as on a single"
                    f" device; {'the steps before are right' if step else 'this is before the first update'}"
                )


def sent_per_step(records: Sequence[Record], expected: Bytes, why: str) -> None:
    """Every rank sends `expected(record)` bytes in each step; `why` says what that number consists of."""
    for record in records:
        for step in record.steps():
            wanted, got = expected(record), record.sent(step)
            if abs(got - wanted) > SLACK * wanted:
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(got)}, expected {size(wanted)} ({why})"
                    f"; it calls {calls_in_words(record, step)}"
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


def overlap(records: Sequence[Record], fraction: float) -> None:
    """At least this fraction of a step's bytes is sent by calls that start before the last matrix product of backward,
    and that are not waited for before it."""
    for record in records:
        for step in record.steps():
            ends = max(
                index
                for index, event in enumerate(record.events)
                if event.op == COMPUTE and event.step == step and event.phase == "backward"
            )
            waits = [
                event
                for event in record.events[:ends]
                if event.op == WAIT and event.step == step and event.of is not None
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


def calls_in_words(record: Record, step: int) -> str:
    """`4 × all_reduce, 1 × broadcast`; `nothing` without communication."""
    names = [event.op for event in record.of_step(step) if event.op not in (COMPUTE, WAIT) and event.sent]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "nothing"


def sent_at_most(records: Sequence[Record], most: Bytes, why: str) -> None:
    """No rank sends more than `most(record)` bytes in a step; `why` says what that number consists of."""
    for record in records:
        for step in record.steps():
            if record.sent(step) > (1 + SLACK) * most(record):
                raise Wrong(
                    f"bytes sent: in step {step}, rank {record.rank} sends {size(record.sent(step))}, expected at most"
                    f" {size(most(record))} ({why}); it calls {calls_in_words(record, step)}"
                )


def gradients(records: Sequence[Record]) -> None:
    """The gradients of an answer's arguments are those of a single device: `figures["gradients"]` has, by step, the
    largest difference by name."""
    for record in records:
        for step, differences in enumerate(record.figures["gradients"]):
            for name, difference in differences.items():
                if not difference <= TOLERANCE:
                    raise Wrong(
                        f"gradients: in step {step}, rank {record.rank} has a gradient of {name} that differs by"
                        f" {difference:.2g} from that of a single device, expected at most {TOLERANCE:g}"
                    )


def flops(record: Record, step: int, *phases: str) -> int:
    """The operations of all matrix products of a rank in some phases of a step."""
    return sum(event.flops for event in record.of_step(step, *phases))


def computed(records: Sequence[Record], phases: Sequence[str], most: Bytes, why: str) -> None:
    """In these phases of a step, the matrix products of a rank take at most `most(record)` operations."""
    for record in records:
        for step in record.steps():
            made, expected = flops(record, step, *phases), most(record)
            if made > (1 + SLACK) * expected:
                raise Wrong(
                    f"computation: in {' and '.join(phases)} of step {step}, the matrix products of rank {record.rank}"
                    f" take {made:,} operations, expected at most {expected:,.0f} ({why})"
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
            if event.step == OUTSIDE or event.op in (COMPUTE, WAIT, FORWARD, BACKWARD):
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
                    f"order: in step {step}, rank {rank} of {n} computes {' '.join(got)} with {_live(got)} live"
                    f" activations, expected {' '.join(expected)} with {_live(expected)}"
                )


def schedule(record: Record, step: int) -> list[str]:
    """The forwards and backwards of a stage in a step, in order: `F0`, `F1`, `B0`, …"""
    return [f"{event.op}{event.of}" for event in record.of_step(step) if event.op in (FORWARD, BACKWARD)]


def _live(order: Sequence[str]) -> int:
    """The largest number of micro-batches between forward and backward."""
    return max(accumulate((1 if action.startswith(FORWARD) else -1 for action in order), initial=0))
