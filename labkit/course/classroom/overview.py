"""What a teacher looks at: the learners of a folder, what most got wrong, guesses, and whose run has just failed."""

from __future__ import annotations

import csv
import hmac
import io
import os
import re
import secrets
import stat
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from labkit.analysis.guess import FIGURES, Guessable
from labkit.analysis.metrics import median
from labkit.common.arguments import Number, check_flag, check_path, shown
from labkit.common.files import is_folder, read_regular, user_cache, write_atomically
from labkit.common.text import visible_line
from labkit.course.classroom.learners import (
    AHEAD,
    Damaged,
    Failure,
    GuessMade,
    Learner,
    Ran,
    Record,
    known_exercises,
    take_in,
)
from labkit.course.exercises import LABS, judged
from labkit.record.files import names_below
from labkit.setup.environment import CLONE

MINUTES = Number(float, 0.1, 1440.0)  # after which a failed run is no longer shown
LEARNERS = 500  # of one class
_GRADES = 16 << 20  # bytes of the file with grades
_ROUNDS = 50  # refreshes after which the rest of what learners have left is not read any more

# How far a guess was from the measured value: words, and the error at which the next group begins (`Guessable.error`).
RATIOS = ("less than ¼", "¼ to ½", "too low", "close", "too high", "2 to 4 times", "over 4 times")
POINTS = (
    "over 50 too low",
    "25 to 50 too low",
    "too low",
    "close",
    "too high",
    "25 to 50 too high",
    "over 50 too high",
)
_RATIO_EDGES, _POINT_EDGES = (-0.75, -0.5, -0.1, 0.1, 1.0, 3.0), (-0.5, -0.25, -0.1, 0.1, 0.25, 0.5)
CLOSE = RATIOS.index("close")
_NAMELESS = "a failure that the lab has no name for"


@dataclass(frozen=True)
class Row:
    """A learner: labs begun and done, exercises passed, attempts, the last activity in Unix seconds, the grade, and the
    newest run. `trouble` says what cannot be read."""

    learner: str
    begun: int = 0
    done: int = 0
    passed: int = 0
    attempts: int = 0
    active: float | None = None
    grade: str = ""
    run: str = ""
    state: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Hand:
    """A learner whose newest run that ended has failed: `failed` runs since one ended well, the newest at `when`."""

    learner: str
    run: str
    failed: int
    when: float
    title: str
    fix: str


@dataclass(frozen=True)
class Asked:
    """An exercise or a guess: of the learners who tried it, how many were right; for exercises the median of their
    attempts."""

    lab: str
    section: str
    what: str
    right: int
    tried: int
    attempts: float | None = None

    @property
    def wrong(self) -> int:
        """Learners who were not right yet."""
        return self.tried - self.right


@dataclass(frozen=True)
class Histogram:
    """The first guesses of all learners about one figure of the same run: what was measured, in words, and by group of
    `words` the learners and their guesses."""

    lab: str
    section: str
    what: str
    measured: str
    words: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """How many learners guessed."""
        return sum(map(len, self.groups))


@dataclass(frozen=True)
class Overview:
    """The class at a moment (`at`, Unix seconds); `folder` is its name, empty without names."""

    folder: str
    at: float
    minutes: float
    rows: tuple[Row, ...]
    hands: tuple[Hand, ...]
    asked: tuple[Asked, ...]
    guesses: tuple[Histogram, ...]
    exercises: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        guesses = [
            {name: value for name, value in asdict(guess).items() if name not in ("words", "groups")}
            | {"learners": dict(zip(guess.words, guess.groups))}
            for guess in self.guesses
        ]
        return asdict(self) | {"guesses": guesses}


# ---- the class, as it changes


class Class:
    """The learners of a folder; `refresh` reads what has changed. `grades` is the CSV of `labkit grade`.

    Raises `ValueError` for a folder that is none.
    """

    def __init__(self, folder: Any, *, grades: Any = None, minutes: float = 10.0, hide_names: bool = False):
        self._folder = Path(check_path("folder", folder)).absolute()
        if not is_folder(self._folder):
            raise ValueError(f"{shown(str(folder))} is not a folder; name the one that has all learners")
        self._grades = grades_of(self._folder) if grades is None else Path(check_path("grades", grades))
        self._must_have_grades = grades is not None
        self.minutes = float(MINUTES.check("minutes", minutes))
        self.hide_names = check_flag("hide_names", hide_names)
        self._learners: dict[str, Learner] = {}
        self._numbers: dict[str, int] = {}

    @property
    def complete(self) -> bool:
        """Whether the newest refresh has read everything."""
        return all(learner.complete for learner in self._learners.values())

    def read(self) -> Overview:
        """Refreshes until everything is read, or so much of it that the rest is not worth waiting for."""
        overview = self.refresh()
        for _ in range(_ROUNDS):
            if self.complete:
                break
            overview = self.refresh()
        return overview

    def refresh(self) -> Overview:
        """Reads what has changed. Raises `ValueError` if the folder is gone or a file of grades was named and cannot be
        read."""
        if not self._folder.is_dir():
            raise ValueError(f"{visible_line(str(self._folder))} is gone")
        names = [name for name in names_below(self._folder, self._folder) if self._is_learner(name)]
        notes = [f"the first {LEARNERS} of {len(names):,} learners are read"] if len(names) > LEARNERS else []
        names = names[:LEARNERS]
        self._learners = {name: self._learners.get(name) or Learner(self._folder, name) for name in names}
        for learner in self._learners.values():
            learner.refresh()
        notes += [] if self.complete else ["older runs are still being read"]
        records = {name: learner.record for name, learner in self._learners.items()}
        folder = "" if self.hide_names else visible_line(self._folder.name)
        return overview(folder, records, self._shown(names), self._graded(), self.minutes, self.hide_names, notes)

    def take_in(self, files: Iterable[tuple[str, bytes]]) -> tuple[int, list[str]]:
        """Puts zips that were uploaded, by name and content, into the folder; returns how many, and about each of the
        others why not."""
        added, refused = 0, []
        for name, content in files:
            try:
                take_in(self._folder, name, content)
                added += 1
            except Damaged as why:
                refused.append(f"{'a file' if self.hide_names else visible_line(name)}: {why}")
        return added, refused

    def _is_learner(self, name: str) -> bool:
        if name.startswith((".", "_")):
            return False
        try:
            mode = os.lstat(self._folder / name).st_mode
        except OSError:  # it has just been removed
            return False
        return name.lower().endswith(".zip") or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)

    def _shown(self, names: Sequence[str]) -> dict[str, str]:
        """By the name of a folder or zip, what is shown for it: its name, or a number that stays the same."""
        if not self.hide_names:
            return {name: visible_line(plain_name(name)) for name in names}
        self._numbers = {name: self._numbers[name] for name in names if name in self._numbers}
        for name in names:
            if name not in self._numbers:
                self._numbers[name] = _free_number(name, set(self._numbers.values()))
        return {name: f"learner {self._numbers[name]}" for name in names}

    def _graded(self) -> dict[str, set[str]] | None:
        try:
            return graded(read_regular(self._grades, _GRADES).decode("utf-8-sig"))
        except (OSError, ValueError, csv.Error) as error:
            if self._must_have_grades:
                why = error.strerror if isinstance(error, OSError) else "it is no CSV of labkit grade"
                raise ValueError(f"grades: {visible_line(str(self._grades))} cannot be read: {why}") from None
            return None


def plain_name(name: str) -> str:
    """The learner of a folder or zip: its name without `.zip`."""
    return name[:-4] if name.lower().endswith(".zip") else name


def grades_of(folder: Path) -> Path:
    """Where `labkit grade` writes the grades of a folder, if nothing else is asked for."""
    return folder.absolute().with_name(f"{folder.absolute().name}-grades.csv")


def graded(text: str) -> dict[str, set[str]]:
    """By learner, the exercises that `labkit grade` found right. A submission belongs to the learner whose name its
    folder has, or else the file itself. Raises `ValueError` for another table."""
    right: dict[str, set[str]] = defaultdict(set)
    rows = csv.DictReader(io.StringIO(text))
    if not {"name", "exercise", "verdict"} <= set(rows.fieldnames or ()):
        raise ValueError("it has other columns")
    for row in rows:
        path = PurePosixPath(row["name"] or "-")
        learner = path.parts[0] if len(path.parts) > 1 else path.stem
        right[learner] |= {row["exercise"]} if row["verdict"] == "right" else set()
    return dict(right)


def _free_number(name: str, taken: set[int]) -> int:
    """A number from 100 to 999 for a name: the same in every session of this user, and known to nobody else, unless two
    learners would have the same."""
    digest = hmac.digest(_key(), name.encode(errors="replace"), "sha256")
    number = int.from_bytes(digest[:8], "big") % 900
    return next(free for free in (100 + (number + more) % 900 for more in range(900)) if free not in taken)


@cache
def _key() -> bytes:
    """The user's key for numbers in place of names, in the cache folder; of this process only if it cannot be kept."""
    path = user_cache() / "labkit" / "class-key"
    with suppress(OSError):
        return read_regular(path, 32)
    made = secrets.token_bytes(32)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, made, private=True)
    return made


# ---- from what the learners have left to what a teacher looks at


def overview(
    folder: str,
    records: Mapping[str, Record],
    shown: Mapping[str, str],
    grades: Mapping[str, set[str]] | None,
    minutes: float,
    hide_names: bool,
    notes: Sequence[str] = (),
) -> Overview:
    """The class from its records, by the name of a folder or zip; `shown` is what is written in place of that name."""
    now, titles = time.time(), known_exercises()
    order = sorted(records, key=lambda name: shown[name].casefold())
    rows = [
        _row(shown[name], records[name], None if grades is None else grades.get(plain_name(name)), now)
        for name in order
    ]
    asking = [_hand(shown[name], records[name].runs, minutes, now, hide_names) for name in order]
    hands = [hand for hand in asking if hand]
    groups = _guesses([(shown[name], records[name]) for name in order])
    asked = [*_exercises(records.values()), *(_asked(group) for group in groups)]
    asked.sort(key=lambda entry: (-entry.wrong, entry.right, entry.lab))
    hands.sort(key=lambda hand: -hand.when)
    return Overview(
        folder, now, minutes, tuple(rows), tuple(hands), tuple(asked), tuple(groups), len(titles), tuple(notes)
    )


def _row(learner: str, record: Record, right: set[str] | None, now: float) -> Row:
    if record.damaged:
        return Row(learner, trouble=record.damaged)
    titles, done = known_exercises(), {name for name, noted in record.exercises.items() if noted.done}
    begun = {titles[name][0] for name in record.exercises} | {run.lab for run in record.runs if run.lab}
    of_lab: dict[str, set[str]] = defaultdict(set)
    for name, (lab, _) in titles.items():
        of_lab[lab].add(name)
    times = [record.answered, *(when for run in record.runs for when in (run.began, run.ended))]
    known = [when for when in times if when is not None]
    past = [when for when in known if when <= now + AHEAD]
    trouble = [*record.notes, *(["its clock is ahead"] if len(past) < len(known) else [])]
    newest = record.runs[-1] if record.runs else None
    return Row(
        learner,
        begun=len(begun),
        done=sum(names <= done for names in of_lab.values()),
        passed=len(done),
        attempts=sum(noted.tries for noted in record.exercises.values()),
        active=min(max(past), now) if past else None,
        grade=_grade(done, right),
        run=newest.what if newest else "",
        state=newest.state if newest else "",
        trouble="; ".join(trouble),
    )


def _grade(done: set[str], right: set[str] | None) -> str:
    """`3/8` of the answers that are code, as `labkit grade` judged them; otherwise by the learner's own record."""
    names = judged().keys()
    if right is not None:
        return f"{len(right & names)}/{len(names)}"
    return f"{len(done & names)}/{len(names)} own" if done & names else ""


def _hand(learner: str, runs: Sequence[Ran], minutes: float, now: float, hide_names: bool) -> Hand | None:
    """The newest run that has failed in the last minutes, unless a later one has ended well. Titles and fixes of
    findings have paths and messages in them: without names there is the finding's own name only."""
    failed: list[tuple[Ran, Failure, float]] = []
    for run in reversed(runs):
        if run.state == "finished":
            break
        if run.failure and run.ended is not None and -AHEAD <= now - run.ended <= 60 * minutes:
            failed.append((run, run.failure, run.ended))
    if not failed:
        return None
    newest, failure, when = failed[0]
    if hide_names:
        return Hand(learner, newest.what, len(failed), when, failure.name.replace("_", " ") or _NAMELESS, "")
    return Hand(learner, newest.what, len(failed), when, visible_line(failure.title), visible_line(failure.fix))


def _exercises(records: Iterable[Record]) -> list[Asked]:
    """The exercises that somebody has tried."""
    tries: dict[str, list[int]] = defaultdict(list)
    right: dict[str, int] = defaultdict(int)
    for record in records:
        for name, noted in record.exercises.items():
            tries[name].append(noted.tries)
            right[name] += noted.done
    titles = known_exercises()
    return [
        Asked(
            titles[name][0],
            ", ".join(section_of(titles[name][0], "check", name)),
            titles[name][1],
            right[name],
            len(made),
            median(made),
        )
        for name, made in tries.items()
    ]


def _asked(group: Histogram) -> Asked:
    return Asked(group.lab, group.section, f"guess: {group.what}", len(group.groups[CLOSE]), group.count)


def _guesses(records: Iterable[tuple[str, Record]]) -> list[Histogram]:
    """The first guess of each learner about each figure of each kind of run, in the order of the labs."""
    made: dict[tuple[str, str, str], list[tuple[str, GuessMade]]] = defaultdict(list)
    for learner, record in records:
        first: dict[tuple[str, str, str], GuessMade] = {}
        for run in record.runs:
            for guess in run.guesses:
                first.setdefault((guess.lab, run.what, guess.figure), guess)
        for key, guess in first.items():
            made[key].append((learner, guess))
    return [_group(*key, made[key]) for key in sorted(made)]


def _group(lab: str, run: str, figure: str, made: Sequence[tuple[str, GuessMade]]) -> Histogram:
    guessable = FIGURES[figure]
    points = guessable.unit == "%"
    groups: list[list[str]] = [[] for _ in RATIOS]
    for learner, guess in made:
        said = f"{learner}: {guessable.in_words(guess.guessed)}"
        far = "" if guess.error is None else f" ({guessable.error_in_words(guess.error)})"
        groups[group_of(guess.error, points)].append(said + far)
    return Histogram(
        lab or "elsewhere",
        " or ".join(section_of(lab, "guess", figure)),
        f"{guessable.label}, {run}",
        _range(guessable, [guess.measured for _, guess in made]),
        POINTS if points else RATIOS,
        tuple(map(tuple, groups)),
    )


def group_of(error: float | None, points: bool) -> int:
    """The group of RATIOS, or of POINTS, that an error belongs to; without a bound, the last one."""
    if error is None:
        return len(RATIOS) - 1
    edges = _POINT_EDGES if points else _RATIO_EDGES
    return bisect_right(edges[:CLOSE], error) + bisect_left(edges[CLOSE:], error)


def _range(figure: Guessable, values: Sequence[float]) -> str:
    low, high = figure.in_words(min(values)), figure.in_words(max(values))
    return low if low == high else f"{low} to {high}"


@cache
def section_of(lab: str, call: str, name: str) -> tuple[str, ...]:
    """The headings of a lab below which it calls `guess` or `check` with a name; none without the lab's file."""
    if lab not in LABS.values():
        return ()
    try:
        lines = (CLONE / "labs" / f"{lab}.py").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    headings, heading = [], ""
    for line in lines:
        if line.startswith("# ## "):
            heading = line[5:].strip()
        elif re.search(rf'\b{call}\("{re.escape(name)}"', line) and heading not in headings:
            headings.append(heading)
    return tuple(headings)
