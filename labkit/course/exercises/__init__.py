"""Exercises that check themselves: `check("ddp.steps", answer)` says what is right or what is wrong, and counts into `my_progress()`.

A topic is a module of this room with `EXERCISES`, a table of them by name; the lessons hold no answer. What a teacher needs (`key`) goes
into the handout that is made with `--teacher`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.common.arguments import check_type, shown
from labkit.common.text import escape
from labkit.course.exercises.book import Book

LABS = {
    "start": "00_start_here",
    "collectives": "01_collectives",
    "data_parallel": "02_data_parallel",
    "ddp": "03_ddp",
    "zero": "04_zero",
    "fsdp": "05_fsdp",
    "tensor_parallel": "06_tensor_parallel",
    "pipeline_parallel": "07_pipeline_parallel",
    "combine": "08_combine",
    "input_pipeline": "09_input_pipeline",
    "failover": "10_failover",
    "choose": "11_choose",
    "troubleshooting": "12_troubleshooting",
}


class Wrong(Exception):
    """What is wrong about an answer, in words that help and do not give it away."""


@dataclass(frozen=True)
class Exercise:
    """An exercise. `check(answer)` gives what is right about it, in words, or raises `Wrong`; `key` is the teacher's, in markdown."""

    title: str
    check: Callable[[Any], str]
    key: str


@dataclass(frozen=True)
class Verdict:
    """What became of an answer: `state` is right, wrong or empty. It shows itself in a notebook and in a terminal."""

    name: str
    title: str
    state: str
    words: str

    def __repr__(self) -> str:
        return f"{_MARKS[self.state]} {self.title}: {self.words}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        mark, colour = _MARKS[self.state], _COLOURS[self.state]
        style = f"border-left:4px solid {colour};padding:4px 10px"
        told = f"<b>{mark} {escape(self.title)}</b> {escape(self.words)}"
        html = f'<div role="status" class="labkit-verdict labkit-{self.state}" style="{style}">{told}</div>'
        return {"text/html": html, "text/plain": repr(self)}, {"labkit": {"exercise": self.name, "state": self.state}}


_MARKS = {"right": "✓ right", "wrong": "✗ not yet", "empty": "○ open"}
_COLOURS = {"right": "#009E73", "wrong": "#D55E00", "empty": "#8C8C8C"}


def exercise(name: str) -> Exercise:
    """The exercise called `topic.name`; `LookupError` for one that there is not."""
    check_type("the name of an exercise", name, str, "a string such as 'ddp.steps'")
    topic, _, own = name.partition(".")
    if topic not in LABS:
        raise LookupError(f"there is no exercise {shown(name)}; its topic must be one of {', '.join(LABS)}")
    table = exercises(topic)
    if own not in table:
        raise LookupError(f"there is no exercise {shown(name)}; there is {', '.join(f'{topic}.{each}' for each in table)}")
    return table[own]


def exercises(topic: str) -> dict[str, Exercise]:
    """The exercises of a topic, by name."""
    return importlib.import_module(f"{__name__}.{topic}").EXERCISES


def check(name: str, answer: Any) -> Verdict:
    """The verdict on an answer to the exercise called `name`; what is not `...` counts as a try.

    Never raises for an answer, whatever it is; `LookupError` for an exercise that does not exist.
    """
    asked = exercise(name)
    if is_empty(answer):
        return Verdict(name, asked.title, "empty", "not answered yet: put your answer in the place of the three dots")
    try:
        state, words = "right", asked.check(answer)
    except Wrong as wrong:
        state, words = "wrong", str(wrong)
    except Exception as error:
        state, words = "wrong", f"this could not be read as an answer: {type(error).__name__}: {error}"
    Book.here().note(name, state == "right")
    return Verdict(name, asked.title, state, words)


def is_empty(answer: Any) -> bool:
    """Whether nothing was answered: `...`, None, an empty text or collection, or a function that has no body yet."""
    if answer is None or answer is ... or (isinstance(answer, (str, bytes, list, tuple, dict, set)) and not answer):
        return True
    return inspect.isfunction(answer) and answer.__code__.co_code == _empty_like(answer)


def _blank(): ...


def _told_blank():
    """Only a docstring."""


def _empty_like(function: Callable) -> bytes:
    return (_told_blank if function.__doc__ else _blank).__code__.co_code


def my_progress() -> Progress:
    """Every exercise, by lab: open, tried or done."""
    return Progress.here()


@dataclass(frozen=True)
class Progress:
    """The progress page: for each lab its exercises, as (name, title, tries, done)."""

    labs: tuple[tuple[str, tuple[tuple[str, str, int, bool], ...]], ...]

    @classmethod
    def here(cls) -> Progress:
        """What was done in this runs folder."""
        book, labs = Book.here().read(), []
        for topic, lab in LABS.items():
            rows = []
            for own, each in exercises(topic).items():
                name = f"{topic}.{own}"
                noted = book.get(name, {})
                rows.append((name, each.title, noted.get("tries", 0), noted.get("done", False)))
            labs.append((lab, tuple(rows)))
        return cls(tuple(labs))

    @property
    def done(self) -> int:
        """How many exercises are done."""
        return sum(row[3] for _, rows in self.labs for row in rows)

    @property
    def words(self) -> str:
        """`3 of 28 exercises done`."""
        return f"{self.done} of {sum(len(rows) for _, rows in self.labs)} exercises done"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        rows = [
            {"lab": lab, "name": name, "title": title, "tries": tries, "done": done}
            for lab, each in self.labs
            for name, title, tries, done in each
        ]
        return {"done": self.done, "exercises": rows}

    def __repr__(self) -> str:
        lines = [self.words]
        for lab, rows in self.labs:
            lines += [lab, *(f"  {_MARKS[_state(tries, done)]:9}  {title} ({name})" for name, title, tries, done in rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for lab, each in self.labs:
            for name, title, tries, done in each:
                cells = (lab, title, name, _MARKS[_state(tries, done)], str(tries or "–"))
                rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        heads = "".join(f"<th>{head}</th>" for head in ("lab", "exercise", "name", "state", "tries"))
        return f"<p><b>{self.words}</b></p><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _state(tries: int, done: bool) -> str:
    return "right" if done else "wrong" if tries else "empty"
