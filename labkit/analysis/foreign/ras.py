"""Reports of NCCL's RAS service (`ncclras -v`, `echo verbose status | nc localhost 28028`), as text or JSON: which
ranks of which communicator did not answer, report an error, or launched fewer collectives than the others.

The formats are those of NCCL 2.24 (text) and 2.28.7 (JSON) up to 2.30, as in `src/ras/client_support.cc`. The text
names ranks only if they are few; JSON has all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labkit.analysis.diagnose.finding import Finding
from labkit.analysis.diagnose.hang import (
    STATUS,
    differing,
    launched,
    members,
    part_in_words,
    ranks_say,
    title_of,
)
from labkit.analysis.foreign import ForeignError, Page, Table
from labkit.analysis.foreign.reading import as_dict, as_list, as_number, whole_content
from labkit.common.units import counted, some_ranks
from labkit.record.events import Communicator, RasAlike, RasRank, parse

_LARGEST = 64 << 20  # bytes of a report
_MOST_COMMUNICATORS, _MOST_RANKS = 16_384, 1 << 20
_MOST_ROWS = 16
_LONGEST = 120  # characters of a name
_DEAD, _SILENT = "did not answer and is considered dead", "did not answer"
# ncclResult_t in nccl.h; 0 is success and 7 in progress
_RESULTS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
    8: "Timeout",
}
_FINE = (0, 7)
_BOTH = ("ranks", "missing_ranks")  # the lists of a communicator in JSON


@dataclass(frozen=True)
class Report:
    """One report. `processes` has pids by rank, by the name of the communicator. `healthy` counts the communicators, by
    size, of which the text only says that they are fine; `unnamed` are the numbers of missing ranks, by communicator,
    that it does not name. `timeouts` counts answers that RAS waited for in vain, and `cut` is true if the report ends
    early."""

    path: Path
    version: str = ""
    time: str = ""
    communicators: list[Communicator] = field(default_factory=list)
    healthy: dict[int, int] = field(default_factory=dict)
    unnamed: dict[str, int] = field(default_factory=dict)
    processes: dict[str, dict[int, int]] = field(default_factory=dict)
    timeouts: int = 0
    cut: bool = False


# ---- the readers


def read_report(path: Path) -> Report:
    """Reads one file. Raises `ForeignError` if it is no report, and `OSError` as `open_regular`."""
    return parsed(whole_content(path, _LARGEST, ", which no report of NCCL's RAS has; name another file"), path)


def parsed(data: bytes, path: Path) -> Report:
    """A report from its bytes. Raises `ForeignError` if it is none."""
    return _of_json(data, path) if data.lstrip().startswith(b"{") else _of_text(data.decode(errors="replace"), path)


def _of_json(data: bytes, path: Path) -> Report:
    try:
        report = as_dict(parse(data))
    except ValueError:
        raise ForeignError(f"{path} is no complete JSON, so it was cut off or damaged; ask RAS again") from None
    if not isinstance(report.get("communicators"), list):
        raise ForeignError(f"{path} has no list communicators, so it is no report of NCCL's RAS; name such reports")
    described = [as_dict(fields) for fields in report["communicators"][:_MOST_COMMUNICATORS]]
    return Report(
        path,
        _text(report.get("nccl_version")),
        _text(report.get("timestamp")),
        [_communicator(fields) for fields in described],
        processes={_text(fields.get("hash")): _processes(fields) for fields in described},
        timeouts=max(0, as_number(as_dict(report.get("ras")).get("timeouts_count"))),
    )


def _processes(fields: dict[str, Any]) -> dict[int, int]:
    ranks = [as_dict(rank) for name in _BOTH for rank in as_list(fields.get(name))[:_MOST_RANKS]]
    return {_number(rank.get("rank")): pid for rank in ranks if (pid := _pid(as_number(rank.get("pid"))))}


def _communicator(fields: dict[str, Any]) -> Communicator:
    there, absent = ([as_dict(rank) for rank in as_list(fields.get(name))[:_MOST_RANKS]] for name in _BOTH)
    missing: list[RasRank] = []
    failed: list[RasRank] = []
    status: dict[int, str] = {}
    for rank in absent:
        state = as_dict(rank.get("status"))
        if state.get("considered_dead") is True or state.get("unresponsive") is not False:
            missing.append(_rank(rank, _DEAD if state.get("considered_dead") is True else _SILENT))
        else:  # it answered, and is not or no longer a member
            status[_number(rank.get("rank"))] = "NOCOMM"
    values: dict[str, dict[int, str]] = {STATUS: status}
    for rank in there:
        number, state = _number(rank.get("rank")), as_dict(rank.get("status"))
        status[number] = _status(state)
        for name in ("init_state", "async_error"):
            result = as_number(state.get(name, 0))
            if result not in _FINE:
                failed.append(_rank(rank, f"reported {_RESULTS.get(result, f'error {result}')}"))
                break
        for op, count in list(as_dict(rank.get("collective_counts")).items())[:64]:
            values.setdefault(_text(op), {})[number] = str(_number(count))
    ranks = max(_number(fields.get("size")), len(there) + len(missing))
    return Communicator(_text(fields.get("hash")), ranks, missing, failed, list(_differing(values)))


def _differing(values: dict[str, dict[int, str]]) -> Iterator[RasAlike]:
    """The ranks by value of what is not the same on all of them."""
    for what, by_rank in values.items():
        alike: dict[str, list[int]] = {}
        for rank, value in sorted(by_rank.items()):
            alike.setdefault(value, []).append(rank)
        if len(alike) > 1:
            yield from (RasAlike(what, value, len(ranks), ranks) for value, ranks in alike.items())


def _status(state: dict[str, Any]) -> str:
    """The word that the text format has for it."""
    if state.get("abort_flag") is True:
        return "ABORT"
    if state.get("finalize_called") is True or state.get("destroy_flag") is True:
        return "FINALIZE"
    return "RUNNING" if as_number(state.get("init_state", 0)) == 0 else "INIT"


def _rank(fields: dict[str, Any], says: str) -> RasRank:
    pid, gpu = as_number(fields.get("pid")), as_number(fields.get("cuda_dev"))
    return RasRank(
        _number(fields.get("rank")), says, _pid(pid), _text(fields.get("host")), str(gpu) if gpu >= 0 else ""
    )


def _number(value: Any) -> int:
    return min(max(0, as_number(value)), 1 << 53)


def _pid(value: int) -> int | None:
    return value if 0 < value < 1 << 31 else None


def _text(value: Any) -> str:
    return value[:_LONGEST].replace("\0", "") if isinstance(value, str) else ""


_VERSION = re.compile(r"^NCCL version (\S{1,40}) compiled", re.MULTILINE)
# a row of the table: group, communicators, nodes, ranks per node, ranks per communicator, in total, status, errors
_GROUP = re.compile(r"^ {0,8}(\d{1,9}) +(\d{1,9}) +\d{1,9} +[\d-]{1,20} +(\d{1,9}) +\d{1,9} +\w+ +(\w+)\s*$")
_ABOUT = re.compile(r"^#(\d{1,9})-(\d{1,9}) \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)\s*$")
_PROCESS = re.compile(r"^  Process (\d{1,10}) on node (\S{1,100}) managing GPUs? ([\d,]{1,200})")
_WHAT = re.compile(r"^  Communicator ranks have different (?:(\w{1,40}) operation counts|status)\s*$")
_SEVERAL = re.compile(
    r"^  (\d{1,9}) ranks (?:have launched up to operation (\d{1,19})|have not launched|have status (\w+)"
    r"|reported (.{1,60}))"
)
_RANK = re.compile(
    r"^  Rank (\d{1,9})(?: has launched up to operation (?P<calls>\d{1,19})| (?P<none>has not launched any operations)"
    r"| has status (?P<status>\w+)| reported (?P<error>.{1,60}?))? -- "
    r"(?:GPU (?P<gpu>\d{1,4}).{0,20} managed by process (?P<pid>\d{1,10}) on node (?P<host>\S{1,100})|\[)"
)
_MISSING = re.compile(r"^  The missing ranks?: ([\d,]{1,1024})")
_UNNAMED = re.compile(r"^  Missing communicator data from (\d{1,9}) ranks?")
_TIMEOUTS = re.compile(r"^  Encountered (\d{1,9}) communication timeout")


class _Text:
    """What has been read of a text, line by line: about which communicator the last lines are, and in what respect."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}  # ranks of each communicator of a group, by the number of the group
        self.communicators: dict[str, Communicator] = {}
        self.healthy: dict[int, int] = {}
        self.unnamed: dict[str, int] = {}
        self.processes: dict[int, RasRank] = {}
        self.pids: dict[str, dict[int, int]] = {}
        self.timeouts = 0
        self._section = self._kind = self._what = self._error = ""
        self._about: Communicator | None = None
        self._part: RasAlike | None = None

    def line(self, line: str) -> None:
        """Takes one line."""
        if line in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            self._section, self._about = line, None
        elif group := _GROUP.match(line):
            self.sizes[group[1]] = int(group[3])
            if group[4] == "OK":
                ranks = int(group[3])
                self.healthy[ranks] = self.healthy.get(ranks, 0) + int(group[2])
        elif about := _ABOUT.match(line):
            self._begin(about[1], about[3], about[4])
        elif process := _PROCESS.match(line):
            self._process(int(process[1]), process[2], process[3])
        elif timeouts := _TIMEOUTS.match(line):
            self.timeouts = int(timeouts[1])
        elif self._about is not None:
            self._detail(self._about, line)

    def _process(self, number: int, host: str, gpus: str) -> None:
        if pid := _pid(number):
            says = _DEAD if self._section == "DEAD" else _SILENT
            self.processes[pid] = RasRank(0, says, pid, host, gpus)

    def _begin(self, group: str, name: str, kind: str) -> None:
        if name not in self.communicators and len(self.communicators) >= _MOST_COMMUNICATORS:
            self._about = None
            return
        self._about = self.communicators.setdefault(name, Communicator(name, self.sizes.get(group, 0), [], [], []))
        self._kind, self._what, self._error, self._part = kind, "", "", None

    def _detail(self, about: Communicator, line: str) -> None:
        if what := _WHAT.match(line):
            # up to NCCL 2.25 there is one count for all operations
            named = what[1] if what[1] != "collective" else "collectives"
            self._what, self._part = named or STATUS, None
        elif unnamed := _UNNAMED.match(line):
            self.unnamed[about.name] = int(unnamed[1])
        elif missing := _MISSING.match(line):
            numbers = [int(number) for number in missing[1].split(",") if number and len(number) < 10]
            about.missing += [RasRank(number, _SILENT) for number in numbers]
        elif several := _SEVERAL.match(line):
            if several[4]:
                self._error = f"reported {several[4].strip()}"
            elif self._what:
                self._part = RasAlike(self._what, several[3] or several[2] or "0", int(several[1]), [])
                about.differ.append(self._part)
        elif rank := _RANK.match(line):
            self._rank(about, rank)

    def _rank(self, about: Communicator, line: re.Match[str]) -> None:
        number, pid = int(line[1]), _pid(int(line["pid"] or 0))
        known = pid, line["host"] or "", line["gpu"] or ""
        value = line["calls"] or line["status"] or ("0" if line["none"] else "")
        if pid:
            self.pids.setdefault(about.name, {})[number] = pid
        if self._kind == "INCOMPLETE":
            process = self.processes.get(pid or 0)
            about.missing.append(RasRank(number, process.says if process else _SILENT, *known))
        elif self._kind == "ERROR":
            says = f"reported {line['error']}" if line["error"] else self._error
            about.failed.append(RasRank(number, says, *known))
        elif value and self._what:
            about.differ.append(RasAlike(self._what, value, 1, [number]))
        elif self._part is not None and len(self._part.ranks) < self._part.count:
            self._part.ranks.append(number)

    def complete(self) -> None:
        """Adds what follows from the lines: the process of a single missing rank, which the text up to NCCL 2.25 names
        elsewhere, and the ranks of the most frequent value, which are those that have no other one."""
        budget = _MOST_RANKS
        for about in self.communicators.values():
            self.unnamed[about.name] = max(0, self.unnamed.get(about.name, 0) - len(about.missing))
            if len(about.missing) == len(self.processes) == 1 and about.missing[0].pid is None:
                about.missing = [replace(process, rank=about.missing[0].rank) for process in self.processes.values()]
            for parts in differing(about):
                unlisted = [part for part in parts if not part.ranks and part.count]
                others = {rank for part in parts for rank in part.ranks} | {rank.rank for rank in about.missing}
                budget -= len(others) + about.size
                if budget > 0 and len(unlisted) == 1 and unlisted[0].count + len(others) == about.size:
                    unlisted[0].ranks.extend(rank for rank in range(about.size) if rank not in others)


def _of_text(text: str, path: Path) -> Report:
    version = _VERSION.search(text)
    if version is None:
        raise ForeignError(f"{path} does not say which NCCL wrote it, so it is no report of RAS; name such reports")
    content = _Text()
    for line in text.splitlines():
        content.line(line.rstrip())
    content.complete()
    return Report(
        path,
        version[1],
        "",
        [*content.communicators.values()],
        content.healthy,
        {name: count for name, count in content.unnamed.items() if count},
        content.pids,
        content.timeouts,
        cut="\nWarnings\n" not in text.replace("\r\n", "\n"),
    )


# ---- findings


def _missing(about: Communicator, elsewhere: int) -> Finding:
    pids = [rank.pid for rank in about.missing if rank.pid]
    host = next((rank.host for rank in about.missing if rank.host), "")
    also = f"; the same processes are missing in {counted(elsewhere, 'other communicator')}" if elsewhere else ""
    return Finding(
        name="ras_no_answer",
        title=f"{some_ranks([rank.rank for rank in about.missing])} of {title_of(about)} did not answer NCCL's RAS",
        evidence=ranks_say(about.missing) + also,
        cause="the process ended or is stopped, its node is down, or the network between the nodes is; RAS considers a"
        " process dead after 60 s",
        fix=f"look for the process{f' {pids[0]}' if pids else ''}{f' on {host}' if host else ''}: its log, the kernel's"
        " messages (dmesg), whether it is stopped (kill -CONT); then end the job, because the others wait for it",
        ranks=tuple(rank.rank for rank in about.missing),
    )


def _failed(about: Communicator) -> Finding:
    return Finding(
        name="ras_error",
        title=f"{some_ranks([rank.rank for rank in about.failed])} of {title_of(about)} reported an error to NCCL",
        evidence=ranks_say(about.failed),
        cause="NCCL noticed an error there that the script has not seen yet, because collectives run asynchronously",
        fix="read the log of that rank, and run again with NCCL_DEBUG=INFO; TORCH_NCCL_ASYNC_ERROR_HANDLING=1, the"
        " default, ends the job at such an error",
        ranks=tuple(rank.rank for rank in about.failed),
    )


def _behind(about: Communicator, parts: Sequence[RasAlike]) -> Finding:
    rare = parts[0]
    if rare.what == STATUS:
        title = f"{members(rare)} of {title_of(about)} {'has' if rare.count == 1 else 'have'} status {rare.value}"
        cause = "these ranks create or destroy the communicator while the others use it, or wait there for the others"
        fix = "ask RAS again: if it stays, look at what these ranks do (py-spy dump, their logs)"
    else:
        behind = launched(parts[-1]) - launched(rare)
        title = (
            f"{members(rare)} of {title_of(about)} {'is' if rare.count == 1 else 'are'} {behind:,} {rare.what} behind"
        )
        cause = "these ranks took a different branch, are stuck before the call, or only slower; NCCL counts calls when"
        cause += " they are launched, so the others wait in a call that these have not made"
        fix = "ask RAS again: if the counts grow, the job makes progress; if not, look at what these ranks do (py-spy"
        fix += " dump, their logs), and at the flight recorder's dumps for the call"
    return Finding(
        name="ras_behind",
        title=title,
        evidence=part_in_words(parts),
        cause=cause,
        fix=fix,
        ranks=tuple(rare.ranks),
    )


def _findings(report: Report) -> Iterator[Finding]:
    """Ranks without an answer first, because the others wait for them, each set of processes once."""
    yield from (_failed(about) for about in report.communicators if about.failed)
    gone: dict[tuple[int | None, ...], list[Communicator]] = {}
    for about in report.communicators:
        if about.missing:
            gone.setdefault(tuple(rank.pid for rank in about.missing), []).append(about)
    for abouts in gone.values():
        yield _missing(abouts[0], len(abouts) - 1)
    for about in report.communicators:
        yield from (_behind(about, parts) for parts in differing(about))


# ---- the page


def explain(reports: Sequence[Report]) -> Page:
    """What reports say, the newest last; findings are those of the newest one."""
    newest = max(reversed(reports), key=lambda report: report.time)
    many = counted(len(newest.communicators) + sum(newest.healthy.values()), "communicator")
    when = f" · {newest.time}" if newest.time else ""
    return Page(
        title=f"{counted(len(reports), 'report')} of NCCL's RAS · NCCL {newest.version or 'unknown'} · {many}{when}",
        findings=list(_findings(newest)),
        tables=[table for table in (_table(newest),) if table.rows],
        notes=[*_notes(reports, newest)],
        figures=_figures(newest),
    )


def _table(report: Report) -> Table:
    rows = []
    trouble = sorted(report.communicators, key=lambda about: not (about.missing or about.failed or about.differ))
    for about in trouble[:_MOST_ROWS]:
        differs = "; ".join(part_in_words(parts) for parts in differing(about)) or "–"
        rows.append((about.name, f"{about.size:,}", str(len(about.missing)), str(len(about.failed)), differs))
    heads = ("communicator", "ranks", "did not answer", "report an error", "what differs")
    return Table("Communicators", heads, tuple(rows), ("what differs",))


def _notes(reports: Sequence[Report], newest: Report) -> Iterator[str]:
    if len(reports) > 1:
        yield f"Of {len(reports)} reports, the newest is explained: {newest.path.name}."
    if newest.healthy:
        sizes = ", ".join(f"{counted(count, 'communicator')} of {ranks}" for ranks, count in newest.healthy.items())
        yield f"RAS found nothing wrong with {sizes} ranks."
    if len(newest.communicators) > _MOST_ROWS:
        yield f"The table has {_MOST_ROWS} of {len(newest.communicators):,} communicators."
    for name, count in list(newest.unnamed.items())[:3]:
        missing = f"{counted(count, 'rank')} of communicator {name} did not answer"
        yield f"{missing}, which the report does not name: ask with ncclras -v."
    if newest.timeouts:
        yield f"RAS waited in vain for an answer {counted(newest.timeouts, 'time')}."
    if newest.cut:
        yield "The report ends before its section Warnings, so ranks that differ are not known."
    if any(about.differ for about in newest.communicators):
        yield "RAS asks the ranks one after the other: in a job that makes progress, counts may differ by a few calls."


def _figures(report: Report) -> dict[str, Any]:
    return {
        "kind": "ras",
        "nccl_version": report.version,
        "timestamp": report.time or None,
        "timeouts": report.timeouts,
        "communicators": [
            {
                "name": about.name,
                "ranks": about.size,
                "missing": [{"rank": rank.rank, "says": rank.says, "pid": rank.pid} for rank in about.missing],
                "failed": [{"rank": rank.rank, "says": rank.says, "pid": rank.pid} for rank in about.failed],
                "differ": [
                    {"what": part.what, "value": part.value, "count": part.count, "ranks": part.ranks}
                    for part in about.differ
                ],
            }
            for about in report.communicators
        ],
    }
