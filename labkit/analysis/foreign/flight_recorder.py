"""Dumps of torch's flight recorder (`TORCH_FR_DUMP_*`, `torch._C._distributed_c10d._dump_fr_trace`): which rank is
missing in which collective of which process group, which calls do not match, and in which state they are.

A dump is a pickle or JSON with `entries` (one for each collective that the rank called, the newest last), `pg_config`
(the ranks of each group) and `pg_status`; the layout is that of version 2. Calls of a group are compared by
`collective_seq_id`, with the rules of torch's own analyser (`torch.distributed.flight_recorder`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from labkit.analysis.diagnose.finding import Finding
from labkit.analysis.foreign import ForeignError, Page, Table, present
from labkit.analysis.foreign.reading import as_dict, as_list, as_number, plain_value, whole_content
from labkit.analysis.foreign.trace import operation
from labkit.common.units import counted, listed, ranks_in_words, some_ranks
from labkit.record.events import RANKS, Call, OfRank, Timeline

# ---- the reader

_LARGEST = 256 << 20  # bytes of a file
_MOST_ENTRIES = 100_000
_MOST_GROUPS = 16_384
_MOST_TENSORS, _MOST_DIMENSIONS, _MOST_FRAMES = 1024, 8, 256
_MOST_RANKS = 1 << 20
_LONGEST = 300  # characters of a name
_RANK = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|pt|bin))?(?:\.gz)?$")
_LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages|torch[/\\]distributed|lib[/\\]python3[^/\\]*)[/\\]|^<")

Shapes = tuple[tuple[int, ...], ...]


class Entry(NamedTuple):
    """One call of a collective on one rank. `state` is scheduled, started or completed; `where` is the user's line that
    called it, empty if it was not recorded; `created` and `ended` are in nanoseconds since 1970, not positive if they
    are not known. `ended` is when torch noticed that the call had completed."""

    group: str
    description: str
    group_id: str
    number: int
    op: str
    state: str
    inputs: Shapes
    outputs: Shapes
    input_types: tuple[str, ...]
    output_types: tuple[str, ...]
    p2p: bool
    record: int
    created: int
    ended: int
    where: str
    backend: str

    @property
    def says(self) -> tuple[Any, ...]:
        """What the calls of two ranks are compared by."""
        return self.op, self.state, self.inputs, self.outputs, self.input_types, self.output_types

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.state == "completed"

    @property
    def words(self) -> str:
        """`all_reduce #57`."""
        return f"{self.op} #{self.number}"


@dataclass(frozen=True)
class Dump:
    """The dump of one rank: its entries in order, the ranks of each group by its name, and by the id of a group the
    number of the last collective that was called."""

    path: Path
    rank: int
    version: str
    entries: list[Entry]
    groups: Mapping[str, tuple[int, ...]]
    called: Mapping[str, int]


def read_dump(path: Path) -> Dump:
    """Reads one file; nothing in it is executed. Raises `ForeignError` if it is no dump, and `OSError` as
    `open_regular`."""
    data = whole_content(path, _LARGEST, "; record fewer calls: set TORCH_FR_BUFFER_SIZE to 20000 or less")
    dump = plain_value(data, path, "the file of the flight recorder")
    if isinstance(dump, list) and "record_id" in as_dict(next(iter(dump), None)):  # torch 2.1 and 2.2
        dump = {"entries": dump}
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list):
        raise ForeignError(f"{path} has no list entries, so it is no dump of torch's flight recorder; name such dumps")
    config, status = (
        dict(islice(as_dict(dump.get(name)).items(), _MOST_GROUPS)) for name in ("pg_config", "pg_status")
    )
    once = _Once()
    members = {_text(name): once(_ranks, as_dict(group).get("ranks")) for name, group in config.items()}
    return Dump(
        path,
        _rank(path, dump.get("rank")),
        _text(dump.get("version")),
        [_entry(entry, once) for entry in entries[-_MOST_ENTRIES:] if isinstance(entry, dict)],
        {name: ranks for name, ranks in members.items() if ranks},
        {_text(name): as_number(as_dict(group).get("last_enqueued_collective")) for name, group in status.items()},
    )


class _Once:
    """Converts a value once, although many entries of a pickle share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Callable[[Any], Any], int], Any] = {}

    def __call__(self, convert: Callable[[Any], Any], value: Any) -> Any:
        key = convert, id(value)
        if key not in self._known:
            self._known[key] = convert(value)
        return self._known[key]


def _rank(path: Path, inside: Any) -> int:
    named = _RANK.search(path.name)
    if named:
        return int(named[1])
    if type(inside) is int and 0 <= inside < _MOST_RANKS:
        return inside
    raise ForeignError(f"{path} does not say of which rank it is; rename it so that it ends with the rank, such as _0")


def _entry(entry: dict[str, Any], once: _Once) -> Entry:
    group = entry.get("process_group")
    name, description = group if isinstance(group, (list, tuple)) and len(group) == 2 else (entry.get("pg_id"), "")
    p2p = entry.get("is_p2p") is True
    done = entry.get("state") == "completed" or entry.get("retired") is True
    backend, _, op = _text(entry.get("profiling_name")).rpartition(":")
    return Entry(
        group=_text(name),
        description=_text(description),
        group_id=_text(entry.get("pg_id")),
        number=as_number(entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id"))),  # before 2.1
        op=op or "unknown operation",
        state="completed" if done else _text(entry.get("state")) or "unknown",
        inputs=once(_shapes, entry.get("input_sizes")),
        outputs=once(_shapes, entry.get("output_sizes")),
        input_types=once(_texts, entry.get("input_dtypes")),
        output_types=once(_texts, entry.get("output_dtypes")),
        p2p=p2p,
        record=as_number(entry.get("record_id")),
        created=as_number(entry.get("time_created_ns")),
        ended=as_number(entry.get("time_discovered_completed_ns")),
        where=once(_where, entry.get("frames")),
        backend=backend,
    )


def _where(frames: Any) -> str:
    """The innermost frame outside of libraries, `train.py:88`; the innermost frame if there is no other."""
    innermost = ""
    for frame in as_list(frames)[:_MOST_FRAMES]:
        filename, line = _text(as_dict(frame).get("filename")), as_number(as_dict(frame).get("line"))
        name, library = _file(filename)
        if name and not library:
            return f"{name}:{line}"
        innermost = innermost or (f"{name}:{line}" if name else "")
    return innermost


@lru_cache(maxsize=4096)
def _file(path: str) -> tuple[str, bool]:
    """The name of a file, and whether it is one of a library."""
    return PurePath(path).name, _LIBRARY.search(path) is not None


def _text(value: Any) -> str:
    return str(value)[:_LONGEST] if isinstance(value, str) or (type(value) is int and abs(value) < 1 << 63) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, as_list(value)[:_MOST_TENSORS]))


def _shapes(value: Any) -> Shapes:
    tensors = [as_list(tensor)[:_MOST_DIMENSIONS] for tensor in as_list(value)[:_MOST_TENSORS]]
    return tuple(tuple(map(as_number, tensor)) for tensor in tensors)


def _ranks(value: Any) -> tuple[int, ...]:
    """The ranks of a group, which the file has as a list or as text such as `[0, 1]`."""
    numbers = [int(text) for text in re.findall(r"\d{1,7}", value[: 8 * _MOST_RANKS])] if isinstance(value, str) else []
    numbers = numbers or [rank for rank in as_list(value) if type(rank) is int and 0 <= rank < _MOST_RANKS]
    return tuple(sorted(set(numbers)))


# ---- calls that do not match

Kind = Literal["missing", "unmatched", "operation", "size", "dtype", "state", "stuck", "undecided"]


@dataclass(frozen=True)
class Group:
    """A process group: its members, whether they are `recorded`, those of them without a dump, and the calls of each
    rank by their number. `first` is the oldest number that all ranks still have in their buffers."""

    name: str
    description: str
    members: tuple[int, ...]
    recorded: bool = True
    without_dump: tuple[int, ...] = ()
    calls: Mapping[int, Mapping[int, Sequence[Entry]]] = field(default_factory=dict)
    first: int = 0

    @property
    def words(self) -> str:
        """`group 3 (tp)`."""
        described = f" ({self.description})" if self.description not in ("", "undefined", self.name) else ""
        return f"group {self.name or 'without a name'}{described}"


@dataclass(frozen=True)
class Problem:
    """The first collective of a group that cannot complete, or a message between its two members. `ranks` are those
    that miss it or differ from the others, all if every rank is stuck in it, those without a dump if it cannot be
    decided: none if its members are not recorded. `entries` are the calls of the ranks that have it, and `difference`
    says how two of them differ."""

    kind: Kind
    group: Group
    entry: Entry
    ranks: tuple[int, ...]
    entries: Mapping[int, Entry]
    difference: str = ""


def groups(dumps: Sequence[Dump]) -> list[Group]:
    """The process groups of all dumps. If the ranks of a group are not recorded, as on gloo, those that called a
    collective of it are its members, or all ranks with a dump if it is the default group."""
    here = {dump.rank for dump in dumps}
    wrapped = {dump.rank for dump in dumps if dump.entries and dump.entries[0].record > 0}
    called: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, list[Entry]]]] = defaultdict(dict)
    for dump in dumps:
        for entry in dump.entries:
            if not entry.p2p:
                by_number = called[entry.group, dump.groups.get(entry.group, ())].setdefault(dump.rank, {})
                by_number.setdefault(entry.number, []).append(entry)
    found = []
    for (name, recorded), calls in called.items():
        description = next(iter(next(iter(calls.values())).values()))[0].description
        members = recorded or tuple(sorted(here if description == "default_pg" else calls))
        first = max((min(numbers) for rank, numbers in calls.items() if rank in wrapped), default=0)
        missing = tuple(rank for rank in members if rank not in here)
        found.append(Group(name, description, members, bool(recorded), missing, calls, first))
    return found


_PENDING = ("state", "stuck", "undecided")  # they may follow from another problem


def problems_of(group: Group, dumps: Mapping[int, Dump]) -> list[Problem]:
    """The first collective of the group that cannot complete, and before it the first one that has not; empty if all
    have completed."""
    numbers = sorted({number for calls in group.calls.values() for number in calls if number >= group.first})
    pending: list[Problem] = []
    for number in numbers:
        entries = {rank: calls[number] for rank, calls in sorted(group.calls.items()) if number in calls}
        found = _problem_of(group, number, entries, dumps)
        if found is not None and found.kind not in _PENDING:
            return [*(first for first in pending if first.kind == "state"), found]
        if found is not None and found.kind not in [first.kind for first in pending]:
            pending.append(found)
    return pending[:1]


def _problem_of(
    group: Group, number: int, entries: Mapping[int, Sequence[Entry]], dumps: Mapping[int, Dump]
) -> Problem | None:
    usual = _usual(entries)
    last = {rank: calls[-1] for rank, calls in entries.items()}

    def found(kind: Kind, ranks: Sequence[int], difference: str = "") -> Problem:
        return Problem(kind, group, last[usual], tuple(ranks), last, difference)

    missing = [
        rank
        for rank in group.members
        if rank not in entries
        and rank in dumps
        and dumps[rank].called.get(last[usual].group_id, -1) < number  # otherwise its buffer has overwritten the call
    ]
    if missing:
        return found("missing", missing)
    alike: dict[tuple[Any, ...], _Difference | None] = {}  # by what the calls say, which most ranks have in common
    differences: dict[int, _Difference] = {}
    for rank, calls in entries.items():
        says = tuple(entry.says for entry in calls)
        if says not in alike:
            alike[says] = _difference(entries[usual], calls, len(group.members))
        if (difference := alike[says]) is not None and rank != usual:
            differences[rank] = difference
    if differences:
        kinds = [kind for kind, _ in differences.values()]
        kind = next(kind for kind in _KINDS if kind in kinds)
        rank = next(rank for rank in differences if differences[rank][0] == kind)
        words = f"rank {usual}: {differences[rank][1][0]}; rank {rank}: {differences[rank][1][1]}"
        return found(kind, [rank for rank in differences if differences[rank][0] == kind], words)
    if last[usual].op.startswith("all_to_all") and not group.without_dump:
        sent, received = (
            sum(_elements(shapes) for shapes in sizes)
            for sizes in ([entry.inputs for entry in last.values()], [entry.outputs for entry in last.values()])
        )
        if sent != received:
            words = f"the ranks send {counted(sent, 'element')} in total and receive {received:,}"
            return found("size", group.members, words)
    if last[usual].done:
        return None
    decided = not group.without_dump and (group.recorded or group.description == "default_pg")
    return found("stuck", group.members) if decided else found("undecided", group.without_dump)


def _usual(entries: Mapping[int, Sequence[Entry]]) -> int:
    """The first of the most ranks that call the same, with which the others are compared."""
    signature = {
        rank: tuple((entry.op, entry.inputs, entry.input_types, entry.state) for entry in calls)
        for rank, calls in entries.items()
    }
    most = Counter(signature.values()).most_common(1)[0][0]
    return next(rank for rank, called in signature.items() if called == most)


_KINDS: tuple[Kind, ...] = ("operation", "size", "dtype", "state")
_Difference = tuple[Kind, tuple[str, str]]


def _difference(calls: Sequence[Entry], others: Sequence[Entry], ranks: int) -> _Difference | None:
    """How the calls of two ranks differ: the kind, and both in words. Several calls are those that were coalesced."""
    if len(calls) != len(others):
        return "operation", (counted(len(calls), "coalesced call"), counted(len(others), "coalesced call"))
    return next(filter(None, (_differs(*pair, ranks) for pair in zip(calls, others))), None)


def _differs(entry: Entry, other: Entry, ranks: int) -> _Difference | None:
    op = entry.op
    if op != other.op:
        return "operation", (op, other.op)
    apart = [] if op in ("all_to_all", "scatter") else [(entry.inputs, other.inputs)]
    apart += [] if op in ("all_to_all", "gather") else [(entry.outputs, other.outputs)]
    apart += [(entry.inputs, other.outputs)] if op in ("all_reduce", "allreduce_coalesced") else []
    for ours, theirs in apart:
        if ours != theirs:
            return "size", (f"{op} of {_in_words(ours)}", f"{op} of {_in_words(theirs)}")
    if op in _GATHERS and _elements(other.outputs[:1]) != ranks * _elements(entry.inputs[:1]):
        return "size", (f"input {_in_words(entry.inputs)}", f"output {_in_words(other.outputs)}, of {ranks} ranks")
    if op in _SCATTERS and _elements(other.inputs[:1]) != ranks * _elements(entry.outputs[:1]):
        return "size", (f"output {_in_words(entry.outputs)}", f"input {_in_words(other.inputs)}, of {ranks} ranks")
    for our_types, their_types, shapes, rank_dependent in (
        (entry.input_types, other.input_types, (entry.inputs, other.inputs), ("scatter", "broadcast")),
        (entry.output_types, other.output_types, (entry.outputs, other.outputs), ("gather",)),
        (entry.input_types, entry.output_types, (entry.inputs, entry.outputs), ("scatter", "gather", "broadcast")),
    ):
        compared = op not in rank_dependent and all(shape and shape[0] for shape in shapes)
        if compared and set(our_types) != set(their_types):
            return "dtype", (f"{op} of {', '.join(our_types)}", f"{op} of {', '.join(their_types)}")
    if entry.state != other.state:
        return "state", (f"{op} is {entry.state}", f"{op} is {other.state}")
    return None


_GATHERS = ("all_gather", "all_gather_base", "all_gather_into_tensor_coalesced")
_SCATTERS = ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced")


_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")


def unmatched(dumps: Mapping[int, Dump]) -> list[Problem]:
    """Messages that wait for a peer which has not called the other side, or expects another size."""
    waiting: dict[tuple[str, str, int, int], dict[str, list[Entry]]] = {}
    for dump in dumps.values():
        finished = {(entry.group, entry.number) for entry in dump.entries if entry.op == "coalesced" and entry.done}
        for entry in dump.entries:
            message = _MESSAGE.fullmatch(entry.op) if entry.p2p else None
            if message and not entry.done and (entry.group, entry.number) not in finished:
                members = dump.groups.get(entry.group, ())
                ends = [members[end] if end < len(members) else end for end in (int(message[2]), int(message[3]))]
                source, target = ends if message[1] == "send" else reversed(ends)
                by_op = waiting.setdefault((entry.group, entry.description, source, target), {"send": [], "recv": []})
                by_op[message[1]].append(entry)
    found = []
    for (group, description, source, target), by_op in waiting.items():
        sends, receives = by_op["send"], by_op["recv"]
        both = min(len(sends), len(receives))
        caller, peer, calls = (source, target, sends) if len(sends) > both else (target, source, receives)
        pair = Group(group, description, (source, target))
        wrong = next((two for two in zip(sends, receives) if two[0].inputs != two[1].outputs), None)
        if wrong:
            words = (
                f"rank {source} sends {_in_words(wrong[0].inputs)}, rank {target} expects {_in_words(wrong[1].outputs)}"
            )
            found.append(Problem("size", pair, wrong[0], (target,), dict(zip(pair.members, wrong)), words))
        elif len(calls) > both and peer in dumps:
            entry = calls[both]
            found.append(Problem("unmatched", pair, entry, (peer,), {caller: entry}))
    return found


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _in_words(shapes: Shapes) -> str:
    return listed([str([*shape]) for shape in shapes], 3)


# ---- findings


def _ranks_in_words(ranks: Sequence[int], of: Sequence[int] = ()) -> str:
    return ranks_in_words(ranks, len(of)) if len(ranks) == len(of) else some_ranks(ranks)


def _call(entry: Entry) -> str:
    return entry.words + (f" ({entry.where})" if entry.where else "")


def _missing(found: Problem, dumps: Mapping[int, Dump]) -> Finding:
    ranks = _ranks_in_words(found.ranks, found.group.members)
    called = _call(found.entry)
    if found.kind == "unmatched":
        called = f"{'recv' if found.entry.op.startswith('send') else 'send'} for {called}"
    before = {rank: dumps[rank].entries[-1] for rank in found.ranks if dumps[rank].entries}
    busy = [rank for rank in found.ranks if rank not in before or before[rank].done]  # they wait for no other rank
    first = busy[0] if busy else found.ranks[0]
    elsewhere = not busy
    last = before.get(first)
    newest = f"; rank {first} called {_call(last)} of group {last.group} last, {last.state}" if last else ""
    states = ", ".join(f"{count} {state}" for state, count in Counter(e.state for e in found.entries.values()).items())
    return Finding(
        name="missing_in_collective",
        title=f"{ranks} never called {called} of {found.group.words}",
        evidence=f"{_ranks_in_words([*found.entries], found.group.members)} called it ({states}){newest}",
        cause=f"rank {first} waits in a collective of another group, which its peers call in a different order"
        if elsewhere
        else f"rank {first} took a different branch, failed, exited, or is still busy before this call",
        fix="call the collectives of all groups in the same order on every rank"
        if elsewhere
        else f"look at what rank {first} does after that call (its log, py-spy dump); remove what depends on the rank:"
        " an `if rank ==`, fewer batches, an early `return`",
        ranks=found.ranks,
    )


_DIFFERENT = {
    "operation": ("a different operation", "ranks take different branches, so their collectives are in another order"),
    "size": ("another size", "a shape depends on the rank: a smaller last batch, or another number of elements"),
    "dtype": ("another dtype", "a dtype depends on the rank: autocast or a conversion on some ranks only"),
}


def _different(found: Problem, dumps: Mapping[int, Dump]) -> Finding:
    what, cause = _DIFFERENT[found.kind]
    where = found.entries[found.ranks[0]].where if found.ranks[0] in found.entries else ""
    ranks = _ranks_in_words(found.ranks, found.group.members)
    return Finding(
        name="collective_mismatch",
        title=f"{ranks} called {_call(found.entry)} of {found.group.words} with {what}"
        if found.kind != "operation"
        else f"{ranks} called {what} than the others as {_call(found.entry)} of {found.group.words}",
        evidence=found.difference + (f"; rank {found.ranks[0]} called it at {where}" if where else ""),
        cause=f"collectives are matched only by their order; {cause}",
        fix="make operation, shape and dtype the same on every rank at that line; run again with"
        " TORCH_DISTRIBUTED_DEBUG=DETAIL to fail at the first mismatch",
        ranks=found.ranks,
    )


def _state(found: Problem, dumps: Mapping[int, Dump]) -> Finding:
    by_state: dict[str, list[int]] = defaultdict(list)
    for rank, entry in found.entries.items():
        by_state[entry.state].append(rank)
    waits = "scheduled" in by_state
    late = by_state["scheduled"] if waits else by_state.get("started", list(found.ranks))
    ranks, state = _ranks_in_words(late), "scheduled" if waits else "started"
    if waits:
        cause = f"the GPU of {ranks} has not reached it: earlier kernels still run, or block"
        fix = f"look at what the GPU of rank {late[0]} runs (nvidia-smi, cuda-gdb), such as another group's collective"
    else:
        cause = f"the transfer to {ranks} hangs although others completed it, or its dump was written earlier"
        fix = f"look at the next collective of rank {late[0]}, and at its links (NCCL_DEBUG=INFO)"
    return Finding(
        name="collective_in_different_states",
        title=f"{_call(found.entry)} of {found.group.words} is only {state} on {ranks}",
        evidence="; ".join(f"{name} on {_ranks_in_words(those)}" for name, those in by_state.items())
        + "; all called it with the same sizes",
        cause=cause,
        fix=fix,
        ranks=tuple(late),
    )


def _stuck(found: Problem, dumps: Mapping[int, Dump]) -> Finding:
    started = found.entry.state == "started"
    return Finding(
        name="collective_stuck",
        title=f"{_call(found.entry)} of {found.group.words} was {found.entry.state} on every rank and did not complete",
        evidence=f"{_ranks_in_words([*found.entries], found.group.members)} called it with the same sizes and dtypes",
        cause="the ranks agree, so the transfer itself does not progress: a link, a network card, or a GPU failed"
        if started
        else "the GPUs have not reached it: earlier kernels, or collectives of other groups, block their streams",
        fix="run again with NCCL_DEBUG=INFO, and test the links with nccl-tests (all_reduce_perf) on the same nodes"
        if started
        else "look at the collectives of other groups below, and at what the GPUs run (nvidia-smi, py-spy dump)",
        ranks=found.ranks,
    )


def _undecided(found: Problem, dumps: Mapping[int, Dump]) -> Finding:
    callers, absent = _ranks_in_words([*found.entries]), _ranks_in_words(found.ranks)
    alike = " with the same sizes and dtypes" if len(found.entries) > 1 else ""
    if found.ranks:
        why = f"{absent} left no dump"
        cause = f"{absent} may have failed before this call, or be killed before the dump was written"
        fix = f"look at the logs of {absent}, and add their dumps: each node writes them to TORCH_FR_DUMP_TEMP_FILE"
    else:
        why = "the dumps do not say which ranks are in this group"
        cause = "another rank of the group may not have called it; dumps of gloo do not record the ranks of groups"
        fix = "look at which other ranks are in the group, and what they called last, below"
    return Finding(
        name="collective_undecided",
        kind="unseen",
        title=f"{_call(found.entry)} of {found.group.words} did not complete, and {why}",
        evidence=f"{callers} called it{alike}",
        cause=cause,
        fix=fix,
        ranks=found.ranks,
    )


_WORDED: dict[str, Callable[[Problem, Mapping[int, Dump]], Finding]] = {
    **dict.fromkeys(("missing", "unmatched"), _missing),
    **dict.fromkeys(("operation", "size", "dtype"), _different),
    "state": _state,
    "stuck": _stuck,
    "undecided": _undecided,
}


def ordered(problems: Sequence[Problem]) -> list[Problem]:
    """The problem that causes the others first: one whose ranks do not wait in a collective themselves, then the one
    that was called first."""
    waiting = {rank for problem in problems for rank in problem.entries if problem.kind in ("missing", "unmatched")}

    def key(found: Problem) -> tuple[bool, bool, int]:
        return found.kind in _PENDING, bool(waiting & set(found.ranks)), found.entry.created

    return sorted(problems, key=key)


# ---- the page

_MOST_ROWS = 16


def explain(dumps: Sequence[Dump]) -> Page:
    """What the dumps of one job say, one per rank; of several dumps of a rank, the first counts."""
    by_rank: dict[int, Dump] = {}
    for dump in dumps:
        by_rank.setdefault(dump.rank, dump)
    by_rank = dict(sorted(by_rank.items()))
    found = groups([*by_rank.values()])
    problems = [first for group in found for first in problems_of(group, by_rank)]
    problems = ordered([*problems, *unmatched(by_rank)])
    members = sorted({rank for group in found for rank in group.members})
    version = next(iter(by_rank.values())).version
    title = f"{counted(len(by_rank), 'dump')} of the flight recorder · {_ranks_in_words([*by_rank], [*by_rank])}"
    title += f" of {len(members)}" if len(members) > len(by_rank) else ""
    tables = [_group_table(found, problems), _rank_table(by_rank, problems)]
    return Page(
        title=f"{title} · version {version or 'unknown'}",
        findings=[_WORDED[problem.kind](problem, by_rank) for problem in problems],
        tables=[table for table in tables if table.rows],
        notes=[*_notes(dumps, by_rank, found, members)],
        figures=_figures(by_rank, found, problems),
        events=partial(_events, by_rank),
        world_size=max(members, default=0) + 1,
    )


_MOST_CALLS = 5_000  # of a rank, the newest
_FIRST_DAY = 1_451_606_400_000_000_000  # 2016, before torch: an earlier time is none
_LONGEST_TIME = 10**17  # ns; no job runs for three years
_AFTER = 0.05  # of the recorded time: for how much longer a call that has not ended is drawn


def _events(dumps: Mapping[int, Dump]) -> Iterator[OfRank]:
    """The ranks, and the calls of each on one axis of time, which are all that is known of what it did."""
    on_cpu = any(entry.backend == "gloo" for dump in dumps.values() for entry in dump.entries[-1:])
    times = [time for dump in dumps.values() for entry in dump.entries for time in (entry.created, entry.ended)]
    last = max(times, default=0)
    oldest = max(_FIRST_DAY, last - _LONGEST_TIME)
    first = min((time for time in times if time >= oldest), default=0)
    seconds = (last - first) * 1e-9 * (1 + _AFTER)
    for start in present([*dumps], "cpu" if on_cpu else "cuda"):
        yield replace(start, t=first * 1e-9)
    for rank, dump in dumps.items():
        entries = [entry for entry in dump.entries if entry.created >= oldest and entry.op != "coalesced"]
        if entries:
            yield Timeline(
                t=last * 1e-9,
                rank=rank,
                step=1,
                t0=first * 1e-9,
                seconds=seconds,
                phases=[],
                comm=[_timed(entry, dump, rank, first, seconds) for entry in entries[-_MOST_CALLS:]],
                marks=[],
                busy=[],
                exposed={},
                device="cpu" if on_cpu else "cuda",
                backend=entries[-1].backend,
                calls_only=True,
            )


def _timed(entry: Entry, dump: Dump, rank: int, first: int, seconds: float) -> Call:
    members: Sequence[int] = [member for member in dump.groups.get(entry.group, ()) if member < RANKS]
    message = _MESSAGE.fullmatch(entry.op) if entry.p2p else None
    if message:
        other = int(message[3])
        members = [members[other]] if other < len(members) else ([other] if other < RANKS else [])
    start = (entry.created - first) * 1e-9
    ended = (entry.ended - first) * 1e-9 if entry.ended >= entry.created else start
    return Call(
        op=operation(entry.op),
        start=start,
        end=ended if entry.done else seconds,
        group=entry.description if entry.description not in ("", "undefined") else f"group {entry.group}",
        ranks=[*members] or None,
        seq=entry.number if entry.number >= 0 and not message else None,
    )


def _newest(calls: Mapping[int, Sequence[Entry]]) -> Entry:
    return calls[max(calls)][-1]


def _group_table(found: Sequence[Group], problems: Sequence[Problem]) -> Table:
    first = {(problem.group.name, problem.group.members): problem for problem in reversed(problems)}
    rows = []
    for group in found[: 4 * _MOST_ROWS]:
        newest = [max(calls) for calls in group.calls.values()]
        problem = first.get((group.name, group.members))
        rows.append(
            (
                group.words,
                str(len(group.members)),
                f"#{max(newest)}" if min(newest) == max(newest) else f"#{min(newest)} to #{max(newest)}",
                "all completed" if problem is None else f"{problem.entry.words}: {problem.kind}",
            )
        )
    return Table("Process groups", ("group", "ranks", "newest call", "first problem"), tuple(rows), ("first problem",))


def _rank_table(dumps: Mapping[int, Dump], problems: Sequence[Problem]) -> Table:
    concerned = [rank for problem in problems[:1] for rank in problem.ranks if rank in dumps]
    rows = []
    for rank in [*concerned, *(rank for rank in dumps if rank not in concerned)][:_MOST_ROWS]:
        entries = dumps[rank].entries
        if entries:
            newest = entries[-1]
            rows.append((str(rank), newest.words, f"group {newest.group}", newest.state, newest.where or "–"))
    return Table(
        "The newest call of each rank",
        ("rank", "call", "group", "state", "called at"),
        tuple(rows),
        ("call", "group", "state", "called at"),
    )


def _notes(
    dumps: Sequence[Dump], by_rank: Mapping[int, Dump], found: Sequence[Group], members: Sequence[int]
) -> Iterator[str]:
    absent = [rank for rank in members if rank not in by_rank]
    if absent:
        yield f"There is no dump of {_ranks_in_words(absent)}, so it is not known which collectives they called."
    for dump in dumps:
        if by_rank[dump.rank] is not dump:
            yield f"{dump.path.name} is left out: rank {dump.rank} has another dump, {by_rank[dump.rank].path.name}."
    if any(not dump.version.startswith("2.") for dump in by_rank.values()):
        yield "A dump is not of version 2, whose layout is known; what is said about it may be wrong."
    if any(not dump.groups.get(group.name) for group in found for dump in by_rank.values()):
        yield "The ranks of a group are not recorded in all dumps; those that called its collectives count as members."
    called = [entry for dump in by_rank.values() for entry in dump.entries]
    if not called:
        yield "No call is recorded: set TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE in an older torch)."
    elif all(entry.done for entry in called):
        yield "All recorded calls have completed: when the dumps were written, no rank waited in a collective."
    if called and not any(entry.where for dump in by_rank.values() for entry in dump.entries):
        yield "No dump has stacks, so lines of the script are not known; JSON dumps never have them."


def _figures(dumps: Mapping[int, Dump], found: Sequence[Group], problems: Sequence[Problem]) -> dict[str, Any]:
    return {
        "kind": "flight_recorder",
        "ranks": [
            {"rank": rank, "file": str(dump.path), "version": dump.version, "entries": len(dump.entries)}
            for rank, dump in dumps.items()
        ],
        "groups": [
            {"name": group.name, "description": group.description, "ranks": list(group.members)} for group in found
        ],
        "problems": [
            {
                "kind": problem.kind,
                "group": problem.group.name,
                "group_ranks": list(problem.group.members),
                "collective": problem.entry.op,
                "number": problem.entry.number,
                "ranks": list(problem.ranks),
                "called_at": problem.entry.where or None,
                "states": {str(rank): entry.state for rank, entry in problem.entries.items()},
                "difference": problem.difference or None,
            }
            for problem in problems
        ],
    }
