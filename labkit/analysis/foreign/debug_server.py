"""What torch's debug server writes to its `dump_dir` (`torch.distributed.debug`, torch 2.13): the stacks of all ranks
(`stacks_<time>.txt`) and their wait counters (`wait_counters_<time>.txt`).

A file has a section for each rank, with a traceback of faulthandler's form or JSON. Stacks are only of Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.analysis.diagnose.finding import Finding, shorter
from labkit.analysis.foreign import Page, Table
from labkit.analysis.foreign.reading import as_dict, as_number, whole_content
from labkit.common.units import counted, some_ranks
from labkit.record.events import parse
from labkit.record.stacks import place

_LARGEST = 64 << 20  # bytes of a file
_MOST_RANKS, _MOST_ROWS, _SHOWN = 16_384, 64, 8
_HEAD = re.compile(r"^=== Rank (\d{1,6}): \S{1,300} ===\r?$", re.MULTILINE)
_TIME = re.compile(r"_(\d{4})(\d\d)(\d\d)_(\d\d)(\d\d)(\d\d)\.txt$")
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_CALL = re.compile(r'^  File "[^"\n]*/distributed/distributed_c10d\.py", line \d+ in (\w+)', re.MULTILINE)


@dataclass(frozen=True)
class Stack:
    """Where a rank was: its line, `train.py:88 in step`, and the collective it was in; `why` it has no stack."""

    at: str = ""
    collective: str = ""
    why: str = ""

    @property
    def words(self) -> str:
        """`in all_reduce (train.py:88 in step)`."""
        at = self.at or "an unknown line"
        return f"in {self.collective} ({at})" if self.collective else f"at {at}"


@dataclass(frozen=True)
class Dump:
    """One file: `stacks` or `counters` of the ranks. `time` is that of its name, `13:06:53`, and `key` orders dumps."""

    path: Path
    key: str
    time: str
    stacks: dict[int, Stack]
    counters: dict[int, dict[str, dict[str, Any]]]


def read_dump(path: Path) -> Dump:
    """Reads one file. Raises `ForeignError` if it is too large, and `OSError` as `open_regular`."""
    text = whole_content(path, _LARGEST, ", which no dump of torch's debug server has").decode(errors="replace")
    heads = list(_HEAD.finditer(text))[:_MOST_RANKS]
    stacks: dict[int, Stack] = {}
    counters: dict[int, dict[str, dict[str, Any]]] = {}
    for head, following in zip(heads, [*heads[1:], None]):
        section = text[head.end() : following.start() if following else len(text)].strip("\r\n")
        if section.startswith("{"):
            counters[int(head[1])] = _counters(section)
        else:
            stacks[int(head[1])] = _stack(section)
    named = _TIME.search(path.name)
    key, time = ("".join(named.groups()), f"{named[4]}:{named[5]}:{named[6]}") if named else ("", "")
    return Dump(path, key, time, stacks, counters)


def _stack(section: str) -> Stack:
    """The stack of the main thread, which faulthandler writes last, the innermost frame first."""
    threads = [thread for thread in _THREAD.split(section)[1:] if '  File "' in thread]
    if not threads:
        return Stack(why=shorter(section, 120) or "no stack")
    frames = threads[-1].strip("\r\n").splitlines()
    collectives = _CALL.findall(threads[-1])
    return Stack(place("\n".join(reversed(frames))), collectives[-1] if collectives else "")


def _counters(section: str) -> dict[str, dict[str, Any]]:
    try:
        return {str(name): as_dict(counter) for name, counter in as_dict(parse(section.encode())).items()}
    except ValueError:
        return {}


# ---- findings


def _findings(newest: Dump, earlier: Sequence[Dump]) -> Iterator[Finding]:
    silent = [rank for rank, stack in newest.stacks.items() if stack.why]
    inside = [rank for rank, stack in newest.stacks.items() if stack.collective]
    away = [rank for rank, stack in newest.stacks.items() if not stack.collective and not stack.why]
    if silent:
        yield _without(newest, silent)
    if inside and away:
        yield _apart(newest, earlier, inside, away)


def _without(newest: Dump, silent: Sequence[int]) -> Finding:
    return Finding(
        name="no_stack",
        kind="unseen",
        title=f"{some_ranks(silent)} gave the debug server no stack",
        evidence="; ".join(f"rank {rank}: {newest.stacks[rank].why}" for rank in silent[:_SHOWN]),
        cause="the process has ended or is stopped, or a C call holds the GIL, without which it cannot answer",
        fix="look for the process (ps), and at its log; py-spy dump --native --pid PID also shows C++ frames, and needs"
        " no GIL",
        ranks=tuple(silent),
    )


def _apart(newest: Dump, earlier: Sequence[Dump], inside: Sequence[int], away: Sequence[int]) -> Finding:
    since = _unchanged(newest, earlier, inside)
    evidence = _by_place(newest, [*inside, *away]) if len({newest.stacks[rank] for rank in away}) > 1 else ""
    still = (
        f"the stacks of {some_ranks(inside)} are the same in {since}"
        if since
        else "one dump, no earlier one is the same"
    )
    return Finding(
        name="outside_of_collective",
        kind="wrong" if since else "unseen",
        title=f"{_common(newest, inside)}; {_common(newest, away)}",
        evidence="; ".join(filter(None, (evidence, still))),
        cause="a collective completes only when every rank of its group calls it, and these ranks are elsewhere: they"
        " took a different branch, wait for something else, or only need longer",
        fix=f"look at the line of {some_ranks(away)}"
        + ("" if since else ", and take a second dump: ranks that have moved on do not hang"),
        ranks=(*away, *inside),
    )


def _unchanged(newest: Dump, earlier: Sequence[Dump], ranks: Sequence[int]) -> str:
    """`the last 3 dumps, since 13:06:53`: those in which these ranks have the same stacks as in the newest."""
    since, dumps = "", 1
    for dump in reversed(earlier):
        if any(dump.stacks.get(rank) != newest.stacks[rank] for rank in ranks):
            break
        since, dumps = dump.time, dumps + 1
    return f"the last {dumps} dumps, since {since or dump.path.name}" if dumps > 1 else ""


def _verb(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _common(dump: Dump, ranks: Sequence[int]) -> str:
    """`rank 1 is at train.py:9 in step`, of ranks that may be at several lines."""
    places = {dump.stacks[rank].words for rank in ranks}
    return f"{some_ranks(ranks)} {_verb(ranks)} {places.pop() if len(places) == 1 else f'at {len(places)} lines'}"


def _by_place(dump: Dump, ranks: Sequence[int]) -> str:
    by_words: dict[str, list[int]] = {}
    for rank in ranks:
        by_words.setdefault(dump.stacks[rank].words, []).append(rank)
    return "; ".join(f"{some_ranks(those)} {_verb(those)} {words}" for words, those in list(by_words.items())[:_SHOWN])


# ---- the page


def explain(dumps: Sequence[Dump]) -> Page:
    """What the newest dump of stacks says, with what has not changed since earlier ones, and the newest counters."""
    ordered = sorted(dumps, key=lambda dump: (dump.key, str(dump.path)))
    with_stacks = [dump for dump in ordered if dump.stacks]
    with_counters = [dump for dump in ordered if dump.counters]
    newest = with_stacks[-1] if with_stacks else None
    ranks = {rank for dump in ordered for rank in (*dump.stacks, *dump.counters)}
    when = f" · {ordered[-1].time}" if ordered[-1].time else ""
    tables = [_stack_table(newest)] if newest else []
    tables += [_counter_table(with_counters[-1])] if with_counters else []
    return Page(
        title=f"{counted(len(dumps), 'dump')} of torch's debug server · {counted(len(ranks), 'rank')}{when}",
        findings=list(_findings(newest, with_stacks[:-1])) if newest else [],
        tables=[table for table in tables if table.rows],
        notes=list(_notes(with_stacks, with_counters)),
        figures={
            "kind": "debug_server",
            "ranks": [
                {"rank": rank, "at": stack.at or None, "collective": stack.collective or None, "why": stack.why or None}
                for rank, stack in sorted(newest.stacks.items() if newest else ())
            ],
            "counters": {str(rank): values for dump in with_counters[-1:] for rank, values in dump.counters.items()},
        },
    )


def _stack_table(dump: Dump) -> Table:
    rows = [
        (str(rank), stack.at or "–", stack.collective or stack.why or "–")
        for rank, stack in sorted(dump.stacks.items())[:_MOST_ROWS]
    ]
    return Table("Where each rank is", ("rank", "line", "collective"), tuple(rows), ("line", "collective"))


def _counter_table(dump: Dump) -> Table:
    """The waits that last."""
    rows = []
    for rank, counters in sorted(dump.counters.items()):
        for name, counter in counters.items():
            active, calls = as_number(counter.get("active_count")), as_number(counter.get("total_calls"))
            if active > 0:
                rows.append((str(rank), name.removeprefix("pytorch.wait_counter."), str(active), f"{calls:,}"))
    heads = ("rank", "waits in", "times now", "times before")
    return Table("Wait counters that are active", heads, tuple(rows[:_MOST_ROWS]), ("waits in",))


def _notes(with_stacks: Sequence[Dump], with_counters: Sequence[Dump]) -> Iterator[str]:
    if with_stacks:
        yield "Stacks of the debug server have Python frames only."
    if with_stacks and len(with_stacks[-1].stacks) > _MOST_ROWS:
        yield f"The table has {_MOST_ROWS} of {len(with_stacks[-1].stacks):,} ranks."
    if with_counters and not _counter_table(with_counters[-1]).rows:
        yield "No wait counter is active: they count waits for the store and for compilation, not those in collectives."
