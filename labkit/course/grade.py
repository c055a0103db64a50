"""Grades a folder of submissions: `labkit grade FOLDER` reads each file without running it, judges each answer in it by
running it in a sandbox, and writes a CSV."""

from __future__ import annotations

import ast
import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

from labkit.course.answers import Unanswered, Wrong
from labkit.course.build import criteria
from labkit.course.build.criteria import Answer
from labkit.course.build.record import Record
from labkit.course.build.sandbox import Limits, run_sandboxed
from labkit.course.exercises import LEARNER, Learner, exercise, judged, judged_labs, learner_of, tasks_of

SUFFIXES = (".py", ".ipynb")


@dataclass(frozen=True)
class Row:
    """One exercise of one submission. `verdict` is right, wrong, empty or missing. Of the ranks the largest figure
    counts; bytes sent and operations are those of the first step. `difference` is that of the final results, relative;
    it is missing if a result has no value."""

    name: str
    exercise: str
    verdict: str
    difference: float | None = None
    sent_bytes: float | None = None
    zero_bytes: float | None = None
    store_bytes: float | None = None
    product_operations: int | None = None
    other_elements: int | None = None
    tensor_bytes: float | None = None
    process_growth_bytes: float | None = None
    cpu_seconds: float | None = None
    message: str = ""


def submissions(folder: Path) -> list[Path]:
    """The files of a folder, and of folders in it, that can hold answers."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def grade(folder: Path, chosen: Sequence[str], limits: Limits, report: Callable[[Row], None]) -> list[Row]:
    """A row for each answer in each submission, or for each of the `chosen` exercises; `report` gets them one by one.

    Nothing of a submission is executed in this process. Raises `LookupError` for an unknown exercise, and
    for one whose answers do not run.
    """
    for name in chosen:
        if not exercise(name).runs:
            raise LookupError(f"{name} is not graded, because its answer does not run on ranks: check(…) judges it")
    rows = []
    whose: dict[int, str] = {}  # by the number that tasks are drawn from, the first learner with it
    for path in submissions(folder):
        for row in _rows(path.relative_to(folder), folder, chosen, limits, whose):
            report(row)
            rows.append(row)
    return rows


def write(rows: Sequence[Row], path: Path) -> None:
    """Writes rows as CSV, with a header. A message that a spreadsheet would take for a formula gets an apostrophe."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        for row in rows:
            writer.writerow(_cell(getattr(row, field.name)) for field in fields(Row))


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def _rows(below: Path, folder: Path, chosen: Sequence[str], limits: Limits, whose: dict[int, str]) -> Iterator[Row]:
    name, path = below.as_posix(), folder / below
    try:
        tree = ast.parse(text_of(path))
    except (SyntaxError, ValueError, OSError) as error:
        yield Row(name, ", ".join(chosen) or "-", "wrong", message=f"the file cannot be read: {error}")
        return
    answers = answers_in(tree)
    for wanted in chosen or answers or ("-",):
        if wanted not in answers:
            what = f'check("{wanted}", …)' if chosen else f"check(…) of a graded exercise (labs {judged_labs()})"
            yield Row(name, wanted, "missing", message=f"the file has no call of {what}")
        elif (answer := answers[wanted]) is ...:
            yield Row(name, wanted, "empty", message="not answered yet: the answer still is the three dots")
        elif answer is None:
            is_code = exercise(wanted).runs == "code"
            what = "a function or class of the file" if is_code else "a script in the same folder"
            yield Row(name, wanted, "wrong", message=f"the answer must be the name of {what}")
        elif isinstance(answer, str):
            yield _graded(name, wanted, path.parent / answer, limits)
        elif criteria.is_unanswered(tree, answer.name):
            words = f"not answered yet: {answer.name} still has the three dots of the starter code"
            yield Row(name, wanted, "empty", message=words)
        elif exercise(wanted).task is None:
            yield _graded(name, wanted, answer, limits)
        elif (learner := _learner(below, folder)) is None:
            words = f"the task is drawn from the learner's {LEARNER}: hand it in, in a folder with the answer"
            yield Row(name, wanted, "missing", message=words)
        else:
            with tasks_of(learner):
                row = _graded(name, wanted, answer, limits)
            first = whose.setdefault(learner.seed, below.parts[0])
            if first != below.parts[0]:
                words = f"{row.message}; {LEARNER}, from which the task is drawn, is a copy of that of {first}, or the"
                row = replace(row, message=f"{words} other way round")
            yield row


def _learner(below: Path, folder: Path) -> Learner | None:
    """The learner of a submission in its own subfolder: from the file that its tasks are drawn from."""
    for parent in list(below.parents)[:-1]:
        for place in (folder / parent, folder / parent / "runs"):
            if learner := learner_of(place):
                return learner
    return None


def _graded(name: str, wanted: str, answer: Answer | Path, limits: Limits) -> Row:
    """Judges one answer in the sandbox. Never raises because of the answer."""
    seen: list[Record] = []
    with criteria.launched_by(partial(run_sandboxed, limits=limits), seen.extend):
        try:
            verdict, message = "right", exercise(wanted).check(answer)
        except Unanswered as unanswered:
            verdict, message = "empty", str(unanswered)
        except Wrong as wrong:
            verdict, message = "wrong", str(wrong)
        except Exception as error:
            verdict, message = "wrong", f"this is not a valid answer: {type(error).__name__}: {error}"
    return Row(name, wanted, verdict, **_figures(seen), message=message)


def _figures(records: Sequence[Record]) -> dict[str, Any]:
    """The measured figures of a row, by name; none without records."""
    if not records:
        return {}
    memory = [count for record in records for counts in record.memory.values() for count in counts]
    grown = [count for record in records for counts in record.process.values() for count in counts]
    differences = [value for record in records for value in record.differences.values()]
    return {
        "difference": max(differences) if differences and all(map(math.isfinite, differences)) else None,
        "sent_bytes": max(record.sent(0) for record in records),
        "zero_bytes": max(sum(event.zeros for event in record.of_step(0)) for record in records),
        "store_bytes": max(record.stored() for record in records),
        "product_operations": max(record.flops(0) for record in records),
        "other_elements": max(record.other_elements(0, *_phases(record)) for record in records),
        "tensor_bytes": max(memory, default=None),
        "process_growth_bytes": max(grown, default=None),
        "cpu_seconds": round(max(record.seconds for record in records), 2),
    }


def _phases(record: Record) -> set[str]:
    """The phases in which operators ran."""
    return {key.partition(" ")[2] for key in record.elements}


# ---- the answers of a file, which is read and not executed


def text_of(path: Path) -> str:
    """The Python text of a file: of a notebook its code cells, without lines of magics and shell commands."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n\n".join(
        "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
        for source in sources
        if not source.startswith("%%")
    )


def answers_in(tree: ast.Module) -> dict[str, Answer | str | EllipsisType | None]:
    """By exercise, the answer of each `check("topic.name", answer)`: its name, and what it uses of the file; or the
    name of a script, or the three dots of one. None if the answer is not a name that the file defines."""
    known = judged()
    found: dict[str, Answer | str | EllipsisType | None] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"):
            continue
        if len(node.args) != 2 or not isinstance(node.args[0], ast.Constant):
            continue
        name, answer = str(node.args[0].value), node.args[1]
        runs = known[name].runs if name in known else ""
        if runs == "script":
            found[name] = _file(tree, answer)
        elif runs == "code":
            found[name] = _answer(tree, answer.id) if isinstance(answer, ast.Name) else None
    return found


def _file(tree: ast.Module, value: ast.expr) -> str | EllipsisType | None:
    """The name of a file in the folder of the submission, written as it is, as Path("…"), or in a variable."""
    for _ in tree.body:  # a variable may be another one
        if isinstance(value, ast.Name):
            assigned = [
                node.value for node in tree.body if isinstance(node, ast.Assign) and value.id in criteria.bound(node)
            ]
            value = assigned[-1] if assigned else value
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "Path" and len(value.args) == 1:
        value = value.args[0]
    text = value.value if isinstance(value, ast.Constant) else None
    is_name = isinstance(text, str) and Path(text).name == text
    return text if text is ... or is_name else None


def _answer(tree: ast.Module, name: str) -> Answer | None:
    """The statements of the file that define `name` and what it uses, in the file's order."""
    used, before = {name}, set[str]()
    while used != before:
        before = set(used)
        for node in tree.body:
            if criteria.bound(node) & used and not isinstance(node, (ast.Import, ast.ImportFrom)):
                used |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    kept = [node for node in tree.body if criteria.bound(node) & used]
    if not any(name in criteria.bound(node) for node in kept):
        return None
    return Answer(name, "\n\n\n".join(map(ast.unparse, kept)) + "\n")
