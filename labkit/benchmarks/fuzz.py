"""Fuzzing of recorded runs: every reader of run folders must neither raise nor hang on a corrupted run."""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import figures
from labkit.analysis import comparison
from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.analysis.summary import summarise, summary_or_reason
from labkit.analysis.trace import trace
from labkit.benchmarks.figure import Figure
from labkit.benchmarks.mutations import mutated
from labkit.figures.as_plotly import parts
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.frontends import terminal
from labkit.frontends.console import Console
from labkit.frontends.handout.run import RunError, run_page
from labkit.frontends.panel.charts import Feed
from labkit.frontends.panel.recorded import label
from labkit.frontends.panel.words import finding_html, progress_html, state_html
from labkit.launch.job import Job
from labkit.record.documents import plain
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording, recorded_words
from labkit.record.state import RunState
from labkit.record.status import is_over
from labkit.record.writer import steps_path

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


def hostile() -> list[Figure]:
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
    return [Figure(f"crashes in {report.mutations:,} mutations of run folders", crashes, "", "0", (crashes,), note)]
