"""Substitutes recorded runs for new ones inside the kernel that executes a lab for a handout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.launch.job import Job
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import Guesses, SpecFields, plain
from labkit.record.folder import RunFolder, runs_root
from labkit.record.state import OVER
from labkit.record.status import current

_OF_A_MACHINE = ("device", "precision", "data_dir")  # fields that `Spec.on` sets for a machine


class RecordedRuns:
    """The finished runs of a folder; each can be taken once."""

    def __init__(self, root: Path):
        self._root = root
        runs, self._unreadable = RunFolder.readable(RunFolder.all(root))
        self._runs = [folder for folder in reversed(runs) if current(folder).state in OVER]
        specs = {folder.name: _complete(folder.read_spec()) for folder in self._runs}
        self._asked = {folder.name: _asked(specs[folder.name], _text(folder)) for folder in self._runs}

    def take(self, spec: Spec, source: str | None = None) -> RunFolder:
        """The newest run of the same Spec that was not taken yet; else one that differs only in device and precision.

        `source` is the text of a script generated for this run only. Raises `LookupError` if there is no such run.
        """
        exact = _asked(spec.to_json(), source)
        for wanted in (exact, _anywhere(exact)):
            for folder in self._runs:
                has = self._asked[folder.name]
                if wanted in (has, _anywhere(has)):
                    self._runs.remove(folder)
                    return folder
        raise LookupError(
            f"{self._root} has no further run of {spec.name} with these settings; "
            f"run the lab once with LABKIT_RUNS={self._root}, or create the handout without --recorded"
            + "".join(f"; {name} cannot be read: {why}" for name, why in self._unreadable.items())
        )


def stand_in(folder: str) -> None:
    """Makes every run started in this process a copy of a recorded one from `folder`, with the predictions of the
    lab that starts it."""
    recorded = RecordedRuns(Path(folder))

    def start(
        cls: type[Job],
        spec: Spec,
        *,
        root: Path | None = None,
        source: str | None = None,
        guess: Guesses | None = None,
        **_: object,
    ) -> Job:
        found = recorded.take(spec, source)
        copied = found.copy((root or runs_root()) / found.name)
        if guess is not None:
            RunFolder.write_json(copied.guess, guess)
        return cls(copied)

    Job.start = classmethod(start)


def _asked(spec: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The Spec without paths: a checkpoint by the name of its run, a script by its text or file name."""
    script, resume = spec.get("script"), spec.get("resume")
    return spec | {"script": script and (text or Path(script).name), "resume": resume and run_of(Path(resume))}


def _complete(spec: SpecFields) -> dict[str, Any]:
    """A recorded Spec with defaults for fields that its version did not have; unchanged if this version rejects it."""
    try:
        return spec.to_spec().to_json()
    except SpecError:
        return plain(spec)


def run_of(checkpoint: Path) -> str:
    """The name of the run that wrote a checkpoint, or of the checkpoint's folder if no run wrote it."""
    folder = next((parent for parent in (checkpoint, *checkpoint.parents) if parent.name == "checkpoints"), None)
    return folder.parent.name if folder else checkpoint.name


def _text(folder: RunFolder) -> str | None:
    try:
        return folder.text(folder.script)
    except OSError:
        return None


def _anywhere(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in _OF_A_MACHINE}
