"""Scripts under the probe, and what it recorded of them: on a warm rank, or in a process without the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from conftest import warm_run
from folded import events_in
from places import ROOT

from labkit.runs.handle import Run

PROBE = [sys.executable, "-m", "labkit.probe"]


def environment(run: Path | None, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    place = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"LABKIT_RUN_DIR": str(run)} if run else {})
    return inherited | place | more


def launch(argv: list[object], run: Path | None, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(a) for a in argv], env=environment(run, **more), capture_output=True, text=True, timeout=240
    )


def watched(script: Path, *arguments: object, root: Path | None = None, **fields: object) -> tuple[Run, Told]:
    """A script that has run on one warm rank, and what was recorded of it; `fields` are the Spec's."""
    handle = warm_run(script, root, nproc=1, device="cpu", args=[str(one) for one in arguments], **fields)
    return handle, Told(handle.folder.path)


class Told:
    """One rank's events; those of a style are the ones between its name and the next."""

    def __init__(self, run: Path, rank: int = 0):
        self.events = events_in(run / "events" / f"rank{rank}.jsonl")
        self.styles: dict[str, list[dict]] = defaultdict(list)
        style = ""
        for event in self.events:
            if event["kind"] == "metric" and event["name"] == "style":
                style = event["value"]
            self.styles[style].append(event)

    def of(self, kind: str, style: str | None = None) -> list[dict]:
        return [event for event in (self.events if style is None else self.styles[style]) if event["kind"] == kind]

    def metric(self, name: str, style: str) -> list[object]:
        return [event["value"] for event in self.of("metric", style) if event["name"] == name]

    def owners(self, style: str) -> dict[str, int]:
        return self.of("memory", style)[-1]["owners"]
