"""Recorded runs in the place of new ones, inside the kernel of a lab that becomes a handout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from labkit.launch.folder import RunFolder, runs_root
from labkit.launch.job import Job
from labkit.launch.status import current
from labkit.spec import Spec
from labkit.state import OVER

_OF_A_MACHINE = ("device", "precision", "data_dir")  # what a Spec gets from the machine that it is settled for


class Shelf:
    """The runs of a folder that are over, each to be taken once."""

    def __init__(self, root: Path):
        self._root = root
        self._runs = [folder for folder in reversed(RunFolder.all(root)) if current(folder).get("state") in OVER]
        self._asked = {folder.name: _asked(RunFolder.read_json(folder.spec), _text(folder)) for folder in self._runs}

    def take(self, spec: Spec, source: str | None = None) -> RunFolder:
        """The newest run of the same Spec that was not taken yet; where there is none, one of the same but for device and precision.

        `source` is the text of a script that was written for this run alone. Raises `LookupError` where that was never recorded.
        """
        exact = _asked(spec.to_json(), source)
        for wanted in (exact, _anywhere(exact)):
            for folder in self._runs:
                has = self._asked[folder.name]
                if wanted in (has, _anywhere(has)):
                    self._runs.remove(folder)
                    return folder
        raise LookupError(
            f"no run of {spec.name} with these settings is left in {self._root}; "
            f"run the lab once with LABKIT_RUNS={self._root}, or make the handout without --recorded"
        )


def stand_in(folder: str) -> None:
    """From now on a run that is started in this process is a copy of a recorded one from `folder`."""
    shelf = Shelf(Path(folder))

    def start(cls: type[Job], spec: Spec, *, detached: bool = False, root: Path | None = None, source: str | None = None) -> Job:
        found = shelf.take(spec, source)
        copy = RunFolder((root or runs_root()) / found.name)
        shutil.copytree(found.path, copy.path)
        return cls(copy)

    Job.start = classmethod(start)


def _asked(spec: dict[str, Any], text: str | None) -> dict[str, Any]:
    """What was asked for, without where it lay: checkpoints by their run's name, a script by its text, or by its file's name."""
    script, resume = spec.get("script"), spec.get("resume")
    return spec | {"script": script and (text or Path(script).name), "resume": resume and Path(resume).parent.name}


def _text(folder: RunFolder) -> str | None:
    try:
        return folder.script.read_text(encoding="utf-8")
    except OSError:
        return None


def _anywhere(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in _OF_A_MACHINE}
