"""What the tests of the panel share: machines, a run, and the messages sent to a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fabricate import FakeRun


def sent_by(page, monkeypatch) -> list[dict]:
    """Collects the messages sent to a page."""
    messages: list[dict] = []
    monkeypatch.setattr(
        page,
        "send",
        lambda message, buffers=None: messages.append(json.loads(json.dumps(message)) | {"buffers": buffers}),
    )
    return messages


def lines_of(messages: list[dict]) -> list[tuple[int, str, str]]:
    return [tuple(line[:3]) for message in messages for line in message["lines"]]


def started_run(runs: Path) -> Iterator[FakeRun]:
    """A fabricated run of two ranks that has just started."""
    run = FakeRun(runs)
    run.start()
    yield run
    run.close()


def reading(lab):
    """The panel with the tab of its script open."""
    lab._tabs.selected_index = 1
    return lab
