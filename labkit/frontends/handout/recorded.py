"""Recorded runs in the place of new ones, inside the kernel of a lab that becomes a handout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.launch.job import Job
from labkit.plan.spec import Spec, SpecError
from labkit.record.folder import RunFolder, runs_root
from labkit.record.state import OVER
from labkit.record.status import current

_OF_A_MACHINE = ("device", "precision", "data_dir")  # what a Spec gets from the machine that it is settled for


class Shelf:
    """The runs of a folder that are over, each to be taken once."""

    def __init__(self, root: Path):
        self._root = root
        runs, self._unreadable = RunFolder.readable(RunFolder.all(root))
        self._runs = [folder for folder in reversed(runs) if current(folder).get("state") in OVER]
        specs = {folder.name: _complete(RunFolder.read_json(folder.spec)) for folder in self._runs}
        self._asked = {folder.name: _asked(specs[folder.name], _text(folder)) for folder in self._runs}

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
            + "".join(f"; {name} cannot be read: {why}" for name, why in self._unreadable.items())
        )


def stand_in(folder: str) -> None:
    """From now on a run that is started in this process is a copy of a recorded one from `folder`."""
    shelf = Shelf(Path(folder))

    def start(
        cls: type[Job],
        spec: Spec,
        *,
        detached: bool = False,
        cold: bool = False,
        root: Path | None = None,
        source: str | None = None,
        stdin: int | None = None,
    ) -> Job:
        found = shelf.take(spec, source)
        return cls(found.copy((root or runs_root()) / found.name))

    Job.start = classmethod(start)


def _asked(spec: dict[str, Any], text: str | None) -> dict[str, Any]:
    """What was asked for, without its place: a checkpoint by the name of its run, a script by its text or its file's name."""
    script, resume = spec.get("script"), spec.get("resume")
    return spec | {"script": script and (text or Path(script).name), "resume": resume and run_of(Path(resume))}


def _complete(spec: dict[str, Any]) -> dict[str, Any]:
    """A recorded Spec with the defaults of what its version did not have; unchanged if this version refuses it."""
    try:
        return Spec.from_json(spec).to_json()
    except SpecError:
        return spec


def run_of(checkpoint: Path) -> str:
    """The name of the run that wrote a checkpoint, or of the folder that holds it if it is no run's."""
    folder = next((parent for parent in (checkpoint, *checkpoint.parents) if parent.name == "checkpoints"), None)
    return folder.parent.name if folder else checkpoint.name


def _text(folder: RunFolder) -> str | None:
    try:
        return folder.text(folder.script)
    except OSError:
        return None


def _anywhere(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in _OF_A_MACHINE}
