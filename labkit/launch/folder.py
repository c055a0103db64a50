"""RunFolder: the one class that knows the paths of a run. Nobody else joins strings into paths."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

STREAMS = ("stdout", "stderr")


def runs_root() -> Path:
    """Where run folders go: LABKIT_RUNS, else `runs/` in the working folder."""
    return Path(os.environ.get("LABKIT_RUNS") or "runs").absolute()


class RunFolder:
    """One run's folder, there or not. It can be moved, mailed and opened elsewhere: no path inside is absolute in meaning."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, name: str, root: Path | None = None) -> RunFolder:
        """A new folder `<date>-<time>-<name>` under `root`, the user's own (mode 0700)."""
        root = root or runs_root()
        root.mkdir(parents=True, exist_ok=True)
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
        for number in range(1, 1000):
            path = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            folder = cls(path)
            for inner in (folder.events, folder.logs):
                inner.mkdir(mode=0o700)
            return folder
        raise FileExistsError(f"{root / stem}: a thousand runs began in this second")

    @classmethod
    def all(cls, root: Path | None = None) -> list[RunFolder]:
        """Every run under `root`, oldest first."""
        root = root or runs_root()
        if not root.is_dir():
            return []
        return [cls(path) for path in sorted(root.iterdir()) if (path / "spec.json").is_file()]

    @classmethod
    def find(cls, name: str, root: Path | None = None) -> RunFolder:
        """The run that `name` names: a path, a folder's name, the end or beginning of one, or `last`.

        Raises `LookupError`, one sentence with the runs there are.
        """
        if (Path(name) / "spec.json").is_file():
            return cls(name)
        runs = cls.all(root)
        if name == "last" and runs:
            return runs[-1]
        matches = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name) or run.name.endswith(name)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise LookupError(f"{name!r} could be {', '.join(run.name for run in matches[-5:])}; say more of the name")
        there = ", ".join(run.name for run in runs[-5:]) or "none yet"
        raise LookupError(f"there is no run {name!r} under {root or runs_root()}; the newest are: {there}")

    # ---- the paths

    @property
    def name(self) -> str:
        """The folder's name, which is the run's."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """What was asked."""
        return self.path / "spec.json"

    @property
    def script(self) -> Path:
        """The script as written out; a script of one's own stays where it is."""
        return self.path / "train.py"

    @property
    def command(self) -> Path:
        """The exact command to run it by hand."""
        return self.path / "command.txt"

    @property
    def plan(self) -> Path:
        """What the supervisor starts: argv, the environment's additions, the working folder."""
        return self.path / "launch.json"

    @property
    def status(self) -> Path:
        """State, pids, exit codes, restarts: written by the supervisor alone."""
        return self.path / "status.json"

    @property
    def capture(self) -> Path:
        """A request to look closely at one step, for the ranks to read."""
        return self.path / "capture.json"

    @property
    def trace(self) -> Path:
        """The sampled steps for Perfetto, where somebody asked for that."""
        return self.path / "trace.json"

    @property
    def tensors(self) -> Path:
        """Gradients and parameters of every rank, where LABKIT_TENSORS=1 asked for them."""
        return self.path / "tensors"

    @property
    def summary(self) -> Path:
        """The figures of the finished run."""
        return self.path / "summary.json"

    @property
    def system(self) -> Path:
        """Device and process samples, taken from outside the ranks."""
        return self.path / "system.jsonl"

    @property
    def events(self) -> Path:
        """The folder of the ranks' events."""
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, beside the script that writes them."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of the ranks' output."""
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """What torchrun itself said."""
        return self.logs / "torchrun.log"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor had to say, empty in a good run."""
        return self.logs / "supervisor.log"

    @property
    def rendezvous(self) -> Path:
        """The file through which the ranks of one machine find each other, instead of an open port."""
        return self.path / "rendezvous"

    def events_of(self, rank: int) -> Path:
        """The events of one rank."""
        return self.events / f"rank{rank}.jsonl"

    def event_files(self) -> dict[int, Path]:
        """The event files there are, by rank."""
        found = {}
        for path in self.events.glob("rank*.jsonl"):
            number = path.stem.removeprefix("rank")
            if number.isdigit():
                found[int(number)] = path
        return dict(sorted(found.items()))

    def log_of(self, rank: int, stream: str = "stdout", attempt: int | None = None) -> Path | None:
        """One rank's output of one attempt (the newest where none is named); None where there is none yet."""
        logs = self.log_files(stream)
        attempts = [number for number, of in logs if of == rank and attempt in (None, number)]
        return logs[max(attempts), rank] if attempts else None

    def log_files(self, stream: str = "stdout") -> dict[tuple[int, int], Path]:
        """The output files there are, by (attempt, rank), as torchrun lays them: `<id>/attempt_<n>/<rank>/<stream>.log`."""
        found = {}
        for path in self.logs.glob(f"*/attempt_*/*/{stream}.log"):
            attempt, rank = path.parent.parent.name.removeprefix("attempt_"), path.parent.name
            if attempt.isdigit() and rank.isdigit():
                found[int(attempt), int(rank)] = path
        return dict(sorted(found.items()))

    # ---- reading and writing

    @staticmethod
    def read_json(path: Path) -> dict[str, Any]:
        """The object in `path`; empty where the file is missing or is not whole."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    @staticmethod
    def write_json(path: Path, value: dict[str, Any]) -> None:
        """Writes `value` so that a reader sees the old file or the new one, never half of one."""
        RunFolder.write_text(path, json.dumps(value, indent=2) + "\n")

    @staticmethod
    def write_text(path: Path, text: str) -> None:
        """Writes `text` atomically, readable by its owner alone."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
