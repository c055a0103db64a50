"""The learner's own record of exercises: how often each was tried, and whether it is done; one small file beside the run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.launch.folder import RunFolder, runs_root


class Book:
    """The record in one file. A file that cannot be read counts as empty and is kept under another name."""

    def __init__(self, path: Path):
        self._path = path

    @classmethod
    def here(cls) -> Book:
        """The record of this runs folder."""
        return cls(runs_root() / "exercises.json")

    def read(self) -> dict[str, dict[str, Any]]:
        """By exercise: `tries` and `done`."""
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
            return {name: {"tries": int(each["tries"]), "done": bool(each["done"])} for name, each in noted.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError):
            self._path.replace(self._path.with_suffix(".unreadable.json"))
            return {}

    def note(self, name: str, done: bool) -> None:
        """Counts one try; what was done once stays done."""
        noted = self.read()
        before = noted.get(name, {"tries": 0, "done": False})
        noted[name] = {"tries": before["tries"] + 1, "done": before["done"] or done}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder.write_json(self._path, noted)
