"""The report of a session: JSON lines, each written when it is known, and a page made of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import results

from labkit.common.files import write_atomically
from labkit.common.text import visible_line
from labkit.common.units import counted

# Verdicts of a case. Measured figures have no expectation; an impossible case needs what this machine does not have.
OK, WRONG, MEASURED, IMPOSSIBLE = "ok", "wrong", "measured", "impossible"


class Report:
    """The lines of a session, in `report.jsonl` of its folder. Kinds: `session` (the machine and the settings), `part`
    (its cases, before the first one runs), `case` and `end` (how a part ended).
    """

    def __init__(self, folder: Path):
        self.lines = folder / "report.jsonl"
        self.page = folder / "report.md"

    def add(self, kind: str, **fields: Any) -> None:
        """Appends one line."""
        results.append(self.lines, {"kind": kind, "t": round(time.time(), 3), **fields})

    def read(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind, in order."""
        return [line for line in results.read(self.lines) if line["kind"] == kind]

    def cases(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The cases that are known, by part and name."""
        return {(line["part"], line["case"]): line for line in self.read("case")}

    def ends(self) -> dict[str, dict[str, Any]]:
        """How each part ended last, by name."""
        return {line["part"]: line for line in self.read("end")}

    def not_reached(self, parts: Iterable[str]) -> dict[str, list[str]]:
        """By part, the cases that were planned and are not known; for a part that has planned none, its own name."""
        planned, known = {line["part"]: line["cases"] for line in self.read("part")}, self.cases()
        left = {part: [case for case in planned.get(part, [part]) if (part, case) not in known] for part in parts}
        return {part: cases for part, cases in left.items() if cases}

    def write_page(self, parts: Mapping[str, str]) -> None:
        """Writes the page; `parts` are the titles of all parts by name."""
        write_atomically(self.page, "\n".join(self._page(parts)) + "\n")

    def _page(self, parts: Mapping[str, str]) -> Iterable[str]:
        sessions, cases = self.read("session"), list(self.cases().values())
        ends = self.ends()
        left = self.not_reached(parts)
        wrong = [one for one in cases if one["verdict"] == WRONG]
        counts = {verdict: sum(one["verdict"] == verdict for one in cases) for verdict in (OK, MEASURED, IMPOSSIBLE)}
        yield "# Session on GPUs"
        for session in sessions:
            began = time.strftime("%Y-%m-%d %H:%M", time.gmtime(session["began"]))
            machine, software = _cell(session["machine"]), _cell(session["software"])
            yield f"\n{began} UTC, {session['minutes']:g} minutes: {machine}. {software}."
        yield (
            f"\n{counted(len(cases), 'case')}: {counts[OK]} ok, {len(wrong)} wrong, {counts[MEASURED]} measured,"
            f" {counts[IMPOSSIBLE]} impossible on this machine; {sum(map(len, left.values()))} not reached."
        )
        yield "\n## Wrong\n"
        yield from _bullets((f"{one['part']}, {one['case']}: {one['says']}" for one in wrong), "Nothing.")
        yield "\n## Not reached\n"
        yield from _bullets((f"{part}: {', '.join(names)}" for part, names in left.items()), "Everything was reached.")
        yield "\n## Parts\n"
        yield from _table(
            ("part", "what it shows", "seconds", "end"),
            (
                (name, title, f"{ends[name]['seconds']:.0f}" if name in ends else "", _end(ends.get(name)))
                for name, title in parts.items()
            ),
        )
        for part in parts:
            own = [one for one in cases if one["part"] == part]
            if own:
                yield f"\n## {parts[part]}\n"
                yield from _table(
                    ("case", "verdict", "", "seconds"),
                    ((one["case"], one["verdict"], one["says"], f"{one['seconds']:.1f}") for one in own),
                )


def _end(line: Mapping[str, Any] | None) -> str:
    return "not begun" if line is None else f"{line['how']}: {line['says']}" if line["says"] else line["how"]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterable[str]:
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _bullets(lines: Iterable[str], otherwise: str) -> Iterable[str]:
    lines = list(lines)
    yield from (f"- {_cell(line)}" for line in lines) if lines else [otherwise]


def _cell(text: str) -> str:
    """A text on one line that Markdown shows as it is."""
    for sign in "\\`*_<>|[]":
        text = text.replace(sign, f"\\{sign}")
    return visible_line(" ".join(text.split()))
