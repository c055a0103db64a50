"""The wording of all text that a person reads: no words and phrases that `wording.RULES` replaces by standard terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from wording import PAGES, RULES, offences

from labkit.setup.environment import CLONE

CODE = (
    *(
        "labkit/analysis",
        "labkit/cli",
        "labkit/common",
        "labkit/course",
        "labkit/figures",
        "labkit/frontends",
        "labkit/launch",
    ),
    *(
        "labkit/plan",
        "labkit/prediction",
        "labkit/runs",
        "labkit/setup",
        "labkit/training/faults",
        "labkit/training/strategies",
    ),
    *("labkit/training/workloads", "labkit/training/options.py", "labkit/training/request.py", "labkit/api.py"),
    *("labkit/training/rows.py", "labkit/training/shapes.py"),
)

# Words that are right in one place: (file, words as they stand there), and the reason.
EXCEPTIONS = {
    ("labkit/launch/warm/__init__.py", "wire"): "the name of a module: the wire protocol of the warm server",
    ("labkit/analysis/theory/collectives.py", "pieces"): "the name of a field",
    ("labkit/course/pictures/data_parallel.py", "wires"): "the name of a public picture",
    ("labkit/course/pictures/mesh.py", "wires"): "the name of a public picture",
}


def test_rules_find_what_they_are_for_and_nothing_else():
    said = {
        words
        for _, words, _ in offences("They were told anew, whoever it was; 3 ms a step, in all. A piece of the wire.")
    }
    assert said == {"told", "anew", "whoever", "ms a step", "in all", "piece", "wire"}
    assert not offences("The interface prefaces a wireless, meantime overall untold retold dearth; in all ranks.")
    assert all(instead for instead in RULES.values())


def said_in_code(text: str) -> Iterator[tuple[int, int, str]]:
    """The string literals of a Python file with their first and last lines; fields of an f-string become `{}`."""
    inside = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, node.end_lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.end_lineno, node.value


def said_in_lab(text: str) -> Iterator[tuple[int, int, str]]:
    """The markdown cells of a lab with their first and last lines."""
    cells = re.compile(r"^# %% \[markdown\][^\n]*\n((?:#[^\n]*\n?)*)", re.MULTILINE)
    for cell in cells.finditer(text):
        lines = [line.removeprefix("#").removeprefix(" ") for line in cell[1].splitlines()]
        first = text.count("\n", 0, cell.start(1)) + 1
        yield first, first + len(lines) - 1, "\n".join(lines)


def said_on_page(text: str) -> Iterator[tuple[int, int, str]]:
    """A page of markdown without its code."""
    prose = re.sub(r"```.*?```|`[^`]*`", lambda code: re.sub(r"[^\n]", "_", code[0]), text, flags=re.DOTALL)
    yield 1, text.count("\n") + 1, prose


def files(places: tuple[str, ...], pattern: str = "*.py") -> list[Path]:
    return [path for place in places for path in sorted((CLONE / place).rglob(pattern)) or [CLONE / place]]


def line_of(lines: list[str], first: int, last: int, text: str, at: int) -> int:
    """The line of a file with what is at `at` in a text that stands on the lines `first` to `last`."""
    if text.count("\n") == last - first:
        return first + text.count("\n", 0, at)
    words = text[at:].split(maxsplit=1)[
        0
    ]  # literals that are joined, or that hold escapes: the first line with the words
    return next((line for line in range(first, last + 1) if words in lines[line - 1]), first)


def all_offences(path: Path) -> list[str]:
    """The offences in a file of code, a lab or a page, as lines `file:line: words → what to write instead`."""
    source, name = path.read_text(encoding="utf-8"), path.relative_to(CLONE).as_posix()
    said = said_on_page if path.suffix == ".md" else said_in_lab if path.parent.name == "labs" else said_in_code
    lines = source.splitlines()
    return [
        f"{name}:{line_of(lines, first, last, text, at)}: {' '.join(words.split())} → {instead}"
        for first, last, text in said(source)
        for at, words, instead in offences(text)
        if (name, words) not in EXCEPTIONS
    ]


TEXTS = [*files(CODE), *files(("labs",)), *(CLONE / page for page in PAGES)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(CLONE).as_posix())
def test_text_uses_standard_terms(path):
    wrong = all_offences(path)
    assert not wrong, "\n" + "\n".join(wrong)


def test_each_exception_is_needed():
    for name, words in EXCEPTIONS:
        assert re.search(rf"\b{re.escape(words)}\b", (CLONE / name).read_text(encoding="utf-8"), re.IGNORECASE), (
            name,
            words,
        )
