"""Recorded runs with mutations, read in every way: damaged values, lines, files and folders."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
import signal
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.results import Result
from labkit import figures
from labkit.analysis import comparison
from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.analysis.profiled import trace
from labkit.analysis.summary import summarise, summary_or_reason
from labkit.figures.as_plotly import parts
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.frontends import terminal
from labkit.frontends.console import Console
from labkit.frontends.handout.page import RunError, run_page
from labkit.frontends.panel.charts import Feed
from labkit.frontends.panel.recorded import label
from labkit.frontends.panel.widgets import finding_html, progress_html, state_html
from labkit.launch.job import Job
from labkit.record.documents import plain
from labkit.record.events import parse
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording, is_over, recorded_words
from labkit.record.state import RunState
from labkit.record.writer import steps_path

# ---- mutations of a recorded file


class _Raw(str):
    """Verbatim JSON that `json.dumps` would not write."""


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "x", "two", "0", "999999999", 0, 1, -1, 3, 7, 0.5, -0.5, 1e18, 1e308, -1e308, 5e-324),
    *(1_000_000, 2**31, 2**53, 2**63, 2**64, float("nan"), float("inf"), float("-inf")),
    *(
        _Raw("1e400"),
        _Raw("9" * 400),
        _Raw("9" * 10_000),
        _Raw("[" * 100_000 + "]" * 100_000),
        _Raw('{"x":' * 500 + "1" + "}" * 500),
    ),
    *(
        [],
        {},
        [[]],
        {"x": {}},
        [None],
        [1, 2, 3],
        ["x"],
        {"0": 1},
        {"0": None},
        {"-1": {}},
        {"1e9": 1},
        [[1, 2], [3]],
        [0.0] * 2_000,
    ),
    *(
        "\x1b]52;c;aGk=\x07",
        "\x1b]8;;http://x\x1b\\",
        "\u202etxt.exe",
        "\ud800",
        "\0",
        "../../../etc/passwd",
        "<script>x</script>",
    ),
    *("a" * 20_000, "\n\n", "cuda:1", "cuda:x", "cpu", "٣", "NaN", "%s%n{0}{x!r}"),
)

_NUMBERS = (
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    -1.0,
    0.5,
    1e18,
    1e308,
    -1e308,
    5e-324,
    2.0**53,
    2.0**63,
    2.0**64,
    3e10,
    1e11,
)


# ---- mutations


def mutated(content: bytes, suffix: str, chance: random.Random) -> bytes:
    """A file with one to four mutations: a value, a name, bytes, a truncated, repeated or moved line, or a missing end.

    A document (`suffix` .json) is one line, a step file is one line and its records.
    """
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        lines = content.split(b"\n", {".json": 0, ".steps": 1}.get(suffix, -1))
        at = chance.randrange(len(lines))
        if suffix == ".steps" and at:
            how = chance.choice((_column, _column, _column, _bytes, _cut))
        else:
            how = chance.choice((_value, _value, _value, _value, _name, _bytes, _cut, _doubled, _moved, _end))
        content = b"\n".join(how(lines, at, chance))
    return content


def _value(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    """A hostile value instead of any value."""
    value = _parsed(lines[at])
    places = list(_places(value))
    if places:
        holder, key = chance.choice(places)
        holder[key] = chance.choice(HOSTILE)
        lines[at] = _dumped(value)
    return lines


def _name(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    """A field that is missing or renamed."""
    value = _parsed(lines[at])
    places = [(holder, key) for holder, key in _places(value) if isinstance(holder, dict)]
    if places:
        holder, key = chance.choice(places)
        found = holder.pop(key)
        if chance.random() < 0.5:
            holder[chance.choice(("x", "", "0", "-1", "rank", "\x1b[2J"))] = found
        lines[at] = _dumped(value)
    return lines


def _column(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    """A hostile number in a record of a step file."""
    data, number = bytearray(lines[at]), struct.pack("<d", chance.choice(_NUMBERS))
    # also misaligned: a different number if a column has four bytes
    place = 4 * chance.randrange(max(1, len(data) // 4 - 1))
    data[place : place + 8] = number
    return [*lines[:at], bytes(data)]


def _bytes(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    line = bytearray(lines[at] or b" ")
    for _ in range(chance.randint(1, 4)):
        line[chance.randrange(len(line))] = chance.randrange(256)
    return [*lines[:at], bytes(line), *lines[at + 1 :]]


def _cut(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    return [*lines[:at], lines[at][: chance.randrange(len(lines[at]) + 1)], *lines[at + 1 :]]


def _doubled(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    return [*lines[:at], *[lines[at]] * chance.randint(2, 50), *lines[at + 1 :]]


def _moved(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    rest = [*lines[:at], *lines[at + 1 :]]
    to = chance.randrange(len(rest) + 1)
    return [*rest[:to], lines[at], *rest[to:]]


def _end(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    return lines[:at]


def _parsed(line: bytes) -> Any:
    """The value of a line; None if an earlier mutation made it invalid."""
    try:
        return parse(line)
    except ValueError:
        return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every position inside a value that can be replaced, as container and key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _dumped(value: Any) -> bytes:
    raw: list[str] = []

    def kept(one: Any) -> Any:
        if isinstance(one, _Raw):
            raw.append(one)
            return f"@raw{len(raw) - 1}@"
        if isinstance(one, dict):
            return {name: kept(each) for name, each in one.items()}
        return [kept(each) for each in one] if isinstance(one, list) else one

    text = json.dumps(kept(value))
    return re.sub(r'"@raw(\d+)@"', lambda match: raw[int(match[1])], text).encode()


# ---- fuzzing of recorded runs


_SECONDS = 120  # time limit for reading one run

_RUNS = (
    ("ddp", {"nproc": 2}),
    ("dp", {"nproc": 2}),
    ("ddp", {"nproc": 2, "fault": "killed_rank", "max_restarts": 1, "save_every": 3}),
)

_SLOW = 25  # every 25th mutation is also rendered as a handout, which draws every figure with plotly


@dataclass
class Report:
    """The result: `crashes` counts by site (exception and innermost line of this project), with one example each."""

    mutations: int = 0
    refused: int = 0
    crashes: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, error: BaseException, what: str) -> None:
        """Counts a crash."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "labkit" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        site = f"{type(error).__name__} at {where}"
        self.crashes[site] = self.crashes.get(site, 0) + 1
        self.examples.setdefault(site, f"{what}\n{''.join(traceback.format_exception(error)[-6:])}")


# ---- all readers of a run


def read(folder: RunFolder, slow: bool = False) -> None:
    """Reads a run as commands, panel and handout do; `slow` includes the handout. A run that is `Unreadable` is not a
    crash.
    """
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    console.print(terminal.runs_table([summary_or_reason(folder)]))
    label(folder)
    if folder.trouble():
        return
    is_over(folder)
    repr(Job.attach(folder))
    state = terminal.watch(Follower(folder), folder, console, leave=lambda: True)
    json.dumps(plain(summarise(state, folder.name)))
    _shown(folder, state)
    rows = comparison.recorded([folder, folder])
    console.print(terminal.comparison(rows, {}))
    json.dumps(comparison.document(rows, {}))
    comparison.alike([folder])
    if state.over:
        _played(folder)
    if slow:
        with suppress(RunError):
            run_page(folder).html()
    console.file.getvalue().encode()


def _shown(folder: RunFolder, state: RunState) -> None:
    found = findings(state)
    unjudged = [one.evidence for one in found if one.name == "not_judged"]
    if unjudged:
        raise AssertionError(unjudged[0])
    html = findings_html(found) + ledger_html(ledger(state)) + ranks_html(folder.name, state)
    html += finding_html(state) + progress_html(state) + state_html(state.words, "good") + recorded_words(folder)
    for name in figures.NAMES:
        html += figures.svg(name, state)
        json.dumps(parts(figures.chart(name, state).drawn()), allow_nan=False)
    html.encode()
    json.dumps(Feed(figures.CHARTS).message(state), allow_nan=False)
    json.dumps(trace(state))


def _played(folder: RunFolder) -> None:
    recording = Recording(folder, speed=1e15)
    recording.poll()
    while not recording.state.over:
        recording.poll()


# ---- the fuzzer


def fuzz(
    folder: RunFolder,
    count: int,
    seed: int,
    report: Report | None = None,
    read: Callable[[RunFolder, bool], None] = read,
) -> Report:
    """Reads a run `count` times, each time with one mutated file; the files alternate. The folder is restored
    afterwards.
    """
    report, chance = report or Report(), random.Random(seed)
    ranks = folder.event_files().values()
    targets = [
        folder.spec,
        folder.status,
        folder.summary,
        folder.system,
        *ranks,
        *filter(Path.exists, map(steps_path, ranks)),
    ]
    before = {path: path.read_bytes() for path in targets}
    for number in range(count):
        path = targets[number % len(targets)]
        path.write_bytes(mutated(before[path], path.suffix, chance))
        if path != folder.summary and chance.random() < 0.7:
            folder.summary.unlink()  # so that the summary is computed
        report.mutations += 1
        try:
            with time_limit():
                read(folder, number % _SLOW == 0)
                report.refused += bool(folder.trouble())
        except Exception as error:
            report.note(
                error, f"{path.name}, seed {seed}, mutation {number}: {_difference(before[path], path.read_bytes())}"
            )
        finally:
            path.write_bytes(before[path])
            folder.summary.write_bytes(before[folder.summary])
    return report


def _difference(before: bytes, after: bytes) -> str:
    at = next(
        (index for index, (one, other) in enumerate(zip(before, after)) if one != other), min(len(before), len(after))
    )
    return repr(after[max(0, at - 80) : at + 80])


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises `TimeoutError` in code that exceeds the time limit, if the system has such a timer."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def hostile() -> list[Result]:
    """Crashes of all readers in 10,000 mutations of recorded runs."""
    from labkit.runs.handle import run

    report, rounds = Report(), 10_000 // len(_RUNS) + 1
    with tempfile.TemporaryDirectory() as place:
        for number, (strategy, fields) in enumerate(_RUNS):
            made = run(strategy, steps=6, device="cpu", samples=256, **fields).wait().folder
            fuzz(made.copy(Path(place) / made.name), rounds, number, report)
            shutil.rmtree(Path(place) / made.name)
    note = f"{len(report.crashes)} sites; {report.refused} folders refused with a reason" + "".join(
        f"; {site}" for site in report.crashes
    )
    crashes = float(sum(report.crashes.values()))
    return [Result(f"crashes in {report.mutations:,} mutations of run folders", crashes, "", "0", (crashes,), note)]
