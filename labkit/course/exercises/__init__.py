"""Self-grading exercises: `check("ddp.steps", answer)` says what is right or wrong; `my_progress()` lists the results,
and how near the learner's predictions were.

An exercise is called `topic.name`. The exercises of a lab have one topic, and `_PLACES` says which module of this
package has them in its table `EXERCISES`; labs of one subject follow each other in a module. Answers that run on ranks
are judged with `course/build/`. The lessons contain no answers. The solution for teachers (`key`) goes into the handout
that is made with `--teacher`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from labkit.analysis.guess import FIGURES
from labkit.analysis.metrics import median
from labkit.common.arguments import check_type, shown
from labkit.common.text import escape
from labkit.common.units import counted
from labkit.course.answers import Unanswered, Wrong, require_number
from labkit.figures.tables import marked_html
from labkit.record.documents import Unreadable, decoded
from labkit.record.events import Count, Recorded, parse
from labkit.record.files import NotPlain, read_below
from labkit.record.folder import RunFolder, runs_root

_PLACES = {  # by topic its lab, and the module with its exercises
    "start": ("00_start_here", "data_parallel"),
    "collectives": ("01_collectives", "collectives"),
    "data_parallel": ("02_data_parallel", "data_parallel"),
    "ddp": ("03_ddp", "data_parallel"),
    "zero": ("04_zero", "data_parallel"),
    "fsdp": ("05_fsdp", "data_parallel"),
    "tensor_parallel": ("06_tensor_parallel", "model_parallel"),
    "pipeline_parallel": ("07_pipeline_parallel", "model_parallel"),
    "combine": ("08_combine", "model_parallel"),
    "input_pipeline": ("09_input_pipeline", "input_pipeline"),
    "failover": ("10_failover", "failures"),
    "choose": ("11_choose", "layouts"),
    "troubleshooting": ("12_troubleshooting", "failures"),
    "build_data_parallel": ("13_build_ddp_and_zero", "build_strategies"),
    "build_model_parallel": ("14_build_model_parallel", "build_strategies"),
    "mixture_of_experts": ("15_mixture_of_experts", "model_parallel"),
    "long_context": ("16_long_context", "model_parallel"),
    "capstone": ("17_capstone", "layouts"),
    "one_device": ("18_one_device", "one_device"),
    "clusters": ("19_clusters", "layouts"),
    "profiles": ("20_profiles", "one_device"),
    "dtensor": ("21_dtensor", "build_strategies"),
    "precision": ("22_precision_and_memory", "one_device"),
    "without_restart": ("23_without_restart", "failures"),
    "batch_size": ("24_batch_size", "batch_size"),
    "inference": ("25_inference_and_rl", "inference"),
}
LABS = {topic: lab for topic, (lab, _) in _PLACES.items()}
_STARTERS = Path(__file__).parents[1] / "build" / "starters"


@dataclass(frozen=True)
class Question:
    """A question whose answer is a number (`what`: of what): the `task` in words, the numbers of `mistakes`, with
    words, the `hint` for any other number, and `why` the right one is right."""

    task: str
    right: float
    mistakes: tuple[tuple[float, str], ...]
    what: str
    hint: str
    why: str

    def told_apart(self) -> bool:
        """Whether no mistake has a number that counts as right."""
        return not any(self.is_near(self.right, number) for number, _ in self.mistakes)

    def judge(self, answer: Any) -> str:
        """Why the answer is right, up to 1 %; raises `Wrong`."""
        require_number(answer, self.what)
        if not self.is_near(answer, self.right):
            raise Wrong(next((words for number, words in self.mistakes if self.is_near(answer, number)), self.hint))
        return self.why

    @staticmethod
    def is_near(number: float, other: float) -> bool:
        """Whether two numbers differ by 1 % at most, as by rounding; whole numbers must be equal."""
        return number == other if isinstance(other, int) else math.isclose(number, other, rel_tol=0.01)


def draw_number(name: str, draw: Callable[[random.Random], Question]) -> Question:
    """What `draw` draws for this learner and the exercise called `name`; again until its mistakes are told apart."""
    source = drawn(name)
    while not (question := draw(source)).told_apart():
        pass
    return question


@dataclass(frozen=True)
class Exercise:
    """An exercise. `check(answer)` returns why the answer is right, or raises `Wrong`; `key` is the solution
    (markdown), and `given` the file to start from, in `build/starters/`. `task` says what is drawn for this
    learner, if anything is: the verdict on an empty answer shows it. `runs` is what of an answer runs in processes
    of its own, if anything does: its code, or a script whose name it is. Such answers `labkit grade` judges as well."""

    title: str
    check: Callable[[Any], str]
    key: str
    given: str = ""
    task: Callable[[], str] | None = None
    runs: Literal["", "code", "script"] = ""


def drawn_exercise(name: str, title: str, draw: Callable[[random.Random], Question], key: str) -> Exercise:
    """The exercise called `name` whose question is drawn for each learner."""
    return Exercise(
        title,
        lambda answer: draw_number(name, draw).judge(answer),
        f"{key} The numbers differ between learners.",
        task=lambda: draw_number(name, draw).task,
    )


@dataclass(frozen=True)
class Grade:
    """The result of a check. `state` is right, wrong or empty. It can be displayed in a notebook and in a terminal."""

    name: str
    title: str
    state: str
    words: str

    def __repr__(self) -> str:
        return f"{_MARKS[self.state]} {self.title}: {self.words}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        html = marked_html("verdict", self.state, f"{_MARKS[self.state]} {self.title}", self.words)
        return {"text/html": html, "text/plain": repr(self)}, {"labkit": {"exercise": self.name, "state": self.state}}


_MARKS = {"right": "✓ right", "wrong": "✗ not yet", "empty": "○ not answered"}


def exercise(name: str) -> Exercise:
    """The exercise called `topic.name`; `LookupError` if there is none."""
    check_type("the name of an exercise", name, str, "a string such as 'ddp.steps'")
    topic = _topic(name)
    if topic not in LABS:
        raise LookupError(f"there is no exercise {shown(name)}; its topic must be one of {', '.join(LABS)}")
    table = exercises(topic)
    if name not in table:
        raise LookupError(f"there is no exercise {shown(name)}; its name must be one of {', '.join(table)}")
    return table[name]


def _topic(name: str) -> str:
    return name.partition(".")[0]


def exercises(topic: str) -> dict[str, Exercise]:
    """The exercises of a topic, by name."""
    _, module = _PLACES[topic]
    table: dict[str, Exercise] = importlib.import_module(f"{__name__}.{module}").EXERCISES
    return {name: exercise for name, exercise in table.items() if _topic(name) == topic}


def judged() -> dict[str, Exercise]:
    """By name, the exercises that `labkit grade` judges."""
    return {name: exercise for topic in LABS for name, exercise in exercises(topic).items() if exercise.runs}


def judged_labs() -> str:
    """The numbers of the labs with such exercises: `9, 13 and 14`."""
    *others, last = dict.fromkeys(str(int(LABS[_topic(name)][:2])) for name in judged())
    return f"{', '.join(others)} and {last}"


def check(name: str, answer: Any) -> Grade:
    """The verdict on an answer to the exercise called `name`. Any answer except an empty one counts as an attempt.

    Never raises because of an answer; raises `LookupError` if there is no such exercise.
    """
    asked = exercise(name)
    if is_empty(answer):
        task = f". {asked.task()}" if asked.task else ""
        return Grade(name, asked.title, "empty", f"not answered yet: replace the three dots with your answer{task}")
    try:
        state, words = "right", asked.check(answer)
    except Unanswered as unanswered:
        return Grade(name, asked.title, "empty", str(unanswered))
    except Wrong as wrong:
        state, words = "wrong", str(wrong)
    except Exception as error:
        state, words = "wrong", f"this is not a valid answer: {type(error).__name__}: {error}"
    Book.here().note(name, state == "right")
    return Grade(name, asked.title, state, words)


def starter(name: str) -> Path:
    """Writes the file that the exercise called `name` starts from, mostly a script, into the current folder, and
    returns its path. A file that is already there stays as it is.

    Raises `LookupError` if there is no such exercise, or if it starts from no file.
    """
    given = exercise(name).given
    if not given:
        raise LookupError(f"the exercise {name} starts from no file; its lab has the code to begin with")
    path = Path(given)
    with suppress(FileExistsError), path.open("xb") as file:
        file.write((_STARTERS / given).read_bytes())
    return path


def is_empty(answer: Any) -> bool:
    """Whether there is no answer yet: `...`, None, an empty string or collection, a function without a body, or a class
    of such functions."""
    if answer is None or answer is ... or (isinstance(answer, (str, bytes, list, tuple, dict, set)) and not answer):
        return True
    if isinstance(answer, type):
        functions = [value for value in vars(answer).values() if inspect.isfunction(value)]
        return bool(functions) and all(is_empty(inspect.unwrap(function)) for function in functions)
    return inspect.isfunction(answer) and answer.__code__.co_code == _empty_like(answer)


def _blank(): ...


def _documented_blank():
    """Only a docstring."""


def _empty_like(function: Callable) -> bytes:
    return (_documented_blank if function.__doc__ else _blank).__code__.co_code


def my_progress() -> Progress:
    """Every exercise, by lab: not answered, attempted or done; and the error of the predictions, by lab."""
    return Progress.here()


@dataclass(frozen=True)
class Progress:
    """The progress page: for each lab its exercises, as (name, title, attempts, done); and by lab, or `ELSEWHERE`, the
    predictions."""

    labs: tuple[tuple[str, tuple[tuple[str, str, int, bool], ...]], ...]
    predictions: tuple[tuple[str, Score], ...] = ()

    @classmethod
    def here(cls) -> Progress:
        """The progress recorded in this runs folder."""
        book, labs = Book.here().read(), []
        for topic, lab in LABS.items():
            rows = []
            for name, exercise in exercises(topic).items():
                noted = book.get(name, Noted(tries=0, done=False))
                rows.append((name, exercise.title, noted.tries, noted.done))
            labs.append((lab, tuple(rows)))
        by_lab = scores(LABS.values())
        return cls(tuple(labs), tuple((lab, by_lab[lab]) for lab in (*LABS.values(), ELSEWHERE) if lab in by_lab))

    @property
    def done(self) -> int:
        """Number of exercises that are done."""
        return sum(row[3] for _, rows in self.labs for row in rows)

    @property
    def words(self) -> str:
        """`3 of 28 exercises done`."""
        return f"{self.done} of {sum(len(rows) for _, rows in self.labs)} exercises done"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        rows = [
            {"lab": lab, "name": name, "title": title, "tries": tries, "done": done}
            for lab, entries in self.labs
            for name, title, tries, done in entries
        ]
        predictions = [{"lab": lab, **score.to_json()} for lab, score in self.predictions]
        return {"done": self.done, "exercises": rows, "predictions": predictions}

    def __repr__(self) -> str:
        lines = [self.words]
        for lab, rows in self.labs:
            lines += [
                lab,
                *(f"  {_MARKS[_state(tries, done)]:14}  {title} ({name})" for name, title, tries, done in rows),
            ]
        lines += ["your predictions"] if self.predictions else []
        lines += [f"  {lab}: {score.words}" for lab, score in self.predictions]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for lab, entries in self.labs:
            for name, title, tries, done in entries:
                cells = (lab, title, name, _MARKS[_state(tries, done)], str(tries or "–"))
                rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        heads = "".join(f"<th>{head}</th>" for head in ("lab", "exercise", "name", "state", "attempts"))
        predicted = "".join(
            f"<p>{escape(f'Your predictions, {lab}: {score.words}')}</p>" for lab, score in self.predictions
        )
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        return f"<p><b>{self.words}</b></p>{table}{predicted}"


def _state(tries: int, done: bool) -> str:
    return "right" if done else "wrong" if tries else "empty"


# ---- the learner's record: a small file next to the run folders


_MAX_BYTES = 1 << 20


class Noted(Recorded):
    """An exercise: the number of attempts, and whether it is done."""

    tries: Count
    done: bool


_Document = TypeVar("_Document")


def _stored(path: Path, kind: type[_Document]) -> _Document | None:
    """A document of the learner's; None if there is none. A file that cannot be read is renamed, to a new name."""
    try:
        document: _Document = decoded(parse(read_below(path.parent, path, _MAX_BYTES)), kind)
        return document
    except (NotPlain, ValueError):
        aside = (path.with_suffix(f".unreadable{number or ''}.json") for number in count())
        path.rename(next(path for path in aside if not os.path.lexists(path)))
    except OSError:  # there is no such file, or no such folder
        pass
    return None


LEARNER = "learner.json"  # in a runs folder


class Learner(Recorded):
    """The number that the tasks of this learner are drawn from."""

    seed: Count


def learner_of(folder: Path) -> Learner | None:
    """The learner of a runs folder; None without one, or if its file cannot be read."""
    try:
        learner: Learner = decoded(parse(read_below(folder, folder / LEARNER, _MAX_BYTES)), Learner)
        return learner
    except (NotPlain, OSError, ValueError):
        return None


_GRADED: ContextVar[Learner | None] = ContextVar("_GRADED", default=None)


@contextmanager
def tasks_of(learner: Learner) -> Iterator[None]:
    """Inside, tasks are those of this learner, and not of the one of this runs folder."""
    before = _GRADED.set(learner)
    try:
        yield
    finally:
        _GRADED.reset(before)


def drawn(name: str) -> random.Random:
    """What the task of the exercise called `name` is drawn with: the same values each time in this runs folder."""
    path = runs_root() / LEARNER
    learner = _GRADED.get() or _stored(path, Learner)
    if learner is None:
        learner = Learner(secrets.randbits(32))
        path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder.write_json(path, learner)
    return random.Random(f"{learner.seed} {name}")


class Book:
    """The record in one file. A file that cannot be read counts as empty."""

    def __init__(self, path: Path):
        self._path = path

    @classmethod
    def here(cls) -> Book:
        """The record of this runs folder."""
        return cls(runs_root() / "exercises.json")

    def read(self) -> dict[str, Noted]:
        """By exercise, what is noted."""
        return _stored(self._path, dict[str, Noted]) or {}

    def note(self, name: str, done: bool) -> None:
        """Counts one attempt. An exercise that was done once stays done."""
        noted = self.read()
        before = noted.get(name, Noted(tries=0, done=False))
        noted[name] = Noted(before.tries + 1, before.done or done)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder.write_json(self._path, noted)


# ---- how near the learner's predictions were, by lab: from what the runs of this runs folder have stored


ELSEWHERE = "elsewhere"  # not in the notebook of a lab


@dataclass(frozen=True)
class Score:
    """`made` predictions; the `errors` of those that were measured, without sign, as a fraction of the measured value
    (percentages: the difference). Of several ranks, the one with the largest error counts."""

    made: int
    errors: tuple[float, ...]

    @property
    def error(self) -> float | None:
        """The median error; None if nothing was measured."""
        return median(self.errors) if self.errors else None

    @property
    def words(self) -> str:
        """`3 predictions, median error 12 % (2 measured)`."""
        said = counted(self.made, "prediction")
        if self.error is None:
            return f"{said}, not measured"
        far = f"{self.error:.0%}".replace("%", " %") if math.isfinite(self.error) else "without limit"
        measured = f" ({len(self.errors)} measured)" if len(self.errors) < self.made else ""
        return f"{said}, median error {far}{measured}"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values; an error without limit (nothing was expected to be measured) is None."""
        known = self.error is not None and math.isfinite(self.error)
        return {"made": self.made, "measured": len(self.errors), "median_error": self.error if known else None}


def scores(labs: Collection[str]) -> dict[str, Score]:
    """By the name of one of `labs`, or `ELSEWHERE`: the predictions that runs have stored, of figures of one run. A
    folder that cannot be read is left out; a run that is under way counts as not measured yet."""
    made: dict[str, int] = defaultdict(int)
    errors: dict[str, list[float]] = defaultdict(list)
    for folder in RunFolder.all():
        try:
            guess = folder.read_guess()
            summary = folder.read_summary()
        except Unreadable:
            continue
        if guess is None:
            continue
        outcomes = summary.guess if summary else []
        lab = guess.notebook if guess.notebook in labs else ELSEWHERE
        known = {name for name in guess.figures if name in FIGURES and not FIGURES[name].compared}
        made[lab] += len(known)
        for name in known:
            measured = [
                outcome.error for outcome in outcomes if outcome.figure == name and outcome.measured is not None
            ]
            if measured:
                errors[lab].append(max(math.inf if error is None else abs(error) for error in measured))
    return {lab: Score(number, tuple(errors[lab])) for lab, number in made.items() if number}
