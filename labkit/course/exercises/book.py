"""The learner's record of exercises, a small file next to the run folders: attempts per exercise, and whether it is
done."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from labkit.record.documents import decoded
from labkit.record.events import Count, Recorded, parse
from labkit.record.files import NotPlain, read_below
from labkit.record.folder import RunFolder, runs_root

_MAX_BYTES = 1 << 20


class Noted(Recorded):
    """An exercise: the number of attempts, and whether it is done."""

    tries: Count
    done: bool


class Book:
    """The record in one file. A file that cannot be read counts as empty and is renamed, to a new name."""

    def __init__(self, path: Path):
        self._path = path

    @classmethod
    def here(cls) -> Book:
        """The record of this runs folder."""
        return cls(runs_root() / "exercises.json")

    def read(self) -> dict[str, Noted]:
        """By exercise, what is noted."""
        try:
            noted: dict[str, Noted] = decoded(
                parse(read_below(self._path.parent, self._path, _MAX_BYTES)), dict[str, Noted]
            )
            return noted
        except FileNotFoundError:
            return {}
        except (NotPlain, ValueError):
            aside = (self._path.with_suffix(f".unreadable{number or ''}.json") for number in count())
            self._path.rename(next(path for path in aside if not os.path.lexists(path)))
            return {}

    def note(self, name: str, done: bool) -> None:
        """Counts one attempt. An exercise that was done once stays done."""
        noted = self.read()
        before = noted.get(name, Noted(tries=0, done=False))
        noted[name] = Noted(before.tries + 1, before.done or done)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder.write_json(self._path, noted)
