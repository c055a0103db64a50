"""A class as HTML, for the panel and for a page of its own; every text is escaped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.common.text import escape
from labkit.common.units import counted
from labkit.course.classroom.overview import CLOSE, Asked, Hand, Histogram, Overview, Row

HEADS = ("learner", "labs done", "exercises", "attempts", "grade", "active", "newest run")
ASKED_HEADS = ("exercise or guess", "lab, section", "not right", "attempts")
WORDS = ("learner", "newest run", "exercise or guess", "lab, section")  # columns that are aligned left
EMPTY = "No learner is here yet: each needs a folder, or a zip that labkit progress --zip has written."
NO_HANDS = "No run has failed in the last {}, or a later one has ended well."


def style() -> str:
    """The style sheet, for JupyterLab's themes and for the page of a handout."""
    return f"<style>{(Path(__file__).parent / 'class.css').read_text(encoding='utf-8')}</style>"


def title(overview: Overview) -> str:
    """`Class of autumn: 20 learners`."""
    return f"Class{' of ' + overview.folder if overview.folder else ''}: {counted(len(overview.rows), 'learner')}"


def about(overview: Overview) -> str:
    """When the class was read, and what is missing."""
    when = time.strftime("%d %B %Y, %H:%M:%S", time.localtime(overview.at)).lstrip("0")
    return " · ".join((f"read on {when}", *overview.notes))


def fragment(overview: Overview, most: int | None = None) -> str:
    """The whole class; with `most`, as many exercises and guesses as fit on one screen."""
    if not overview.rows:
        return f'<div class="labkit-class"><p>{EMPTY}</p></div>'
    asked = [entry for entry in overview.asked if entry.wrong][:most]
    guesses = sorted(overview.guesses, key=lambda group: -group.count)[:most] if most else overview.guesses
    sections = (
        _section("Hands up", _hands(overview), "hands"),
        _section("Learners", _learners(overview), "learners"),
        _section("What most got wrong", _asked(asked), "asked"),
        _section("Guesses against the measured value", _guesses(guesses), "guesses"),
    )
    return f'<div class="labkit-class"><div class="sections">{"".join(sections)}</div></div>'


def _section(heading: str, inner: str, name: str) -> str:
    return f'<section class="{name}"><h3>{heading}</h3>{inner}</section>'


# ---- hands up


def _hands(overview: Overview) -> str:
    minutes = overview.minutes
    since = counted(int(minutes), "minute") if minutes >= 1 else f"{60 * minutes:.0f} seconds"
    cards = "".join(_hand(hand, overview.at) for hand in overview.hands)
    return f"<ul>{cards}</ul>" if cards else f"<p>{NO_HANDS.format(since)}</p>"


def _hand(hand: Hand, now: float) -> str:
    facts = [ago(hand.when, now), hand.run, *([f"{hand.failed} runs failed"] if hand.failed > 1 else [])]
    fix = f"<div><b>Fix</b> {escape(hand.fix)}</div>" if hand.fix else ""
    return (
        f"<li><b>{escape(hand.learner)}</b> <small>{escape(' · '.join(facts))}</small>"
        f"<div>{escape(hand.title)}</div>{fix}</li>"
    )


def ago(when: float | None, now: float) -> str:
    """`3 min ago`; a dash if it is not known."""
    if when is None:
        return "–"
    seconds = max(0.0, now - when)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length):,} {unit} ago"
    return "just now"


# ---- tables


def cells(row: Row, overview: Overview) -> tuple[str, ...]:
    """The cells of a learner below `HEADS`."""
    if row.trouble and not (row.attempts or row.run):
        return (row.learner, *["–"] * (len(HEADS) - 2), row.trouble)
    run = f"{row.run}: {row.state}" if row.run else ""
    figures = (f"{row.done} of {row.begun}", f"{row.passed}/{overview.exercises}", str(row.attempts), row.grade or "–")
    return (row.learner, *figures, ago(row.active, overview.at), "; ".join(filter(None, (run, row.trouble))) or "–")


def asked_cells(entry: Asked) -> tuple[str, ...]:
    """The cells of an exercise or a guess below `ASKED_HEADS`."""
    place = ", ".join(filter(None, (entry.lab, entry.section)))
    attempts = "–" if entry.attempts is None else f"{entry.attempts:g}"
    return (entry.what, place, f"{entry.wrong} of {entry.tried}", attempts)


def _learners(overview: Overview) -> str:
    rows = []
    for row in overview.rows:
        kind = "trouble" if row.trouble else row.state
        rows.append((f' class="is-{kind}"' if kind else "", cells(row, overview)))
    return _table(HEADS, rows)


def _asked(asked: Sequence[Asked]) -> str:
    if not asked:
        return "<p>Nobody was wrong yet.</p>"
    return _table(ASKED_HEADS, [("", asked_cells(entry)) for entry in asked])


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    left = [' class="words"' if head in WORDS else "" for head in heads]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(left, heads))
    lines = []
    for kind, row in rows:
        inner = "".join(f"<td{of}><span>{escape(cell)}</span></td>" for of, cell in zip(left, row))
        lines.append(f"<tr{kind}>{inner}</tr>")
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="{escape(heads[0])}">' + (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


# ---- guesses


def _guesses(groups: Sequence[Histogram]) -> str:
    drawn = "".join(map(_histogram, groups))
    return f'<div class="histograms">{drawn}</div>' if drawn else "<p>No guess was measured yet.</p>"


def _histogram(group: Histogram) -> str:
    most = max(map(len, group.groups))
    place = ", ".join(filter(None, (group.lab, group.section)))
    bars, far = [], []
    for number, (word, learners) in enumerate(zip(group.words, group.groups)):
        height = 100 * len(learners) / most
        kind = "close" if number == CLOSE else "off"
        count = len(learners) or ""
        bars.append(
            f'<div title="{escape("; ".join(learners), quote=True)}"><span>{count}</span>'
            f'<i class="{kind}" style="height:{height:.0f}%"></i><small>{escape(word)}</small></div>'
        )
        far += learners if number != CLOSE else []
    said = f"<p>{escape('; '.join(far))}</p>" if far else ""
    return (
        f"<figure><figcaption><b>{escape(group.what)}</b> measured {escape(group.measured)}"
        f' <small>{escape(place)}</small></figcaption><div class="bars">{"".join(bars)}</div>{said}</figure>'
    )
