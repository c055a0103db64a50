"""RunPaths: the one class that knows the paths of a run. No other code joins strings into paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

from labkit.record.files import names_below
from labkit.record.types.values import RANKS


class RunPaths:
    """The paths in the folder of one run, existing or not. It can be moved, sent and opened elsewhere: no path in it is
    absolute.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The folder's name, which is the run's."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """The Spec of the run."""
        return self.path / "spec.json"

    @property
    def script(self) -> Path:
        """The generated script; a user's own script stays where it is."""
        return self.path / "train.py"

    @property
    def command(self) -> Path:
        """The exact command that runs the script without labkit."""
        return self.path / "command.txt"

    @property
    def plan(self) -> Path:
        """The launch plan: argv, additional environment variables, working directory."""
        return self.path / "launch.json"

    @property
    def batch(self) -> Path:
        """The batch file, if a scheduler runs the job."""
        return self.path / "job.sbatch"

    @property
    def prediction(self) -> Path:
        """The memory and traffic that were predicted before the run."""
        return self.path / "plan.json"

    @property
    def guess(self) -> Path:
        """What the learner predicted before the run."""
        return self.path / "guess.json"

    @property
    def status(self) -> Path:
        """State, pids, exit codes, restarts: written only by the supervisor."""
        return self.path / "status.json"

    @property
    def capture(self) -> Path:
        """A request to the ranks to profile a step."""
        return self.path / "capture.json"

    @property
    def trace(self) -> Path:
        """The profiled steps for Perfetto, if requested."""
        return self.path / "trace.json"

    @property
    def tensors(self) -> Path:
        """Gradients and parameters of every rank, if LABKIT_TENSORS=1 is set."""
        return self.path / "tensors"

    @property
    def summary(self) -> Path:
        """The figures of the finished run."""
        return self.path / "summary.json"

    @property
    def system(self) -> Path:
        """Device and process samples, taken by the supervisor."""
        return self.path / "system.jsonl"

    @property
    def events(self) -> Path:
        """The folder of the ranks' events."""
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, next to the script that writes them."""
        return self.path / "checkpoints"

    @property
    def save_request(self) -> Path:
        """The file next to the script that asks it for a checkpoint; the script removes it."""
        return self.path / "save"

    @property
    def logs(self) -> Path:
        """The folder of the ranks' output."""
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """The output of torchrun itself."""
        return self.logs / "torchrun.log"

    @property
    def supervisor_log(self) -> Path:
        """The output of the supervisor; empty if all went well."""
        return self.logs / "supervisor.log"

    @property
    def rendezvous(self) -> Path:
        """The file through which the ranks of one machine find each other, instead of an open port."""
        return self.path / "rendezvous"

    @property
    def reserve(self) -> Path:
        """Disk space reserved for the final status and the summary while the run lasts."""
        return self.path / ".reserve"

    def reserves_of_ranks(self) -> list[Path]:
        """The disk space that ranks have reserved for their last events."""
        return list(self.events.glob(".rank*.reserve"))

    def events_of(self, rank: int) -> Path:
        """The events of one rank."""
        return self.events / f"rank{rank}.jsonl"

    def position_of(self, rank: int) -> Path:
        """The last known line of one rank's script; see probe/position.py."""
        return self.path / "stacks" / f"rank{rank}.position.json"

    def crash_of(self, rank: int) -> Path:
        """The output of faulthandler in one rank."""
        return self.path / "stacks" / f"rank{rank}.crash.txt"

    def event_files(self) -> dict[int, Path]:
        """The event files there are, by rank."""
        found = {}
        for name in names_below(self.path, self.events):
            number = re.fullmatch(r"rank(\d{1,6})\.jsonl", name, re.ASCII)
            if number and int(number[1]) < RANKS:
                found[int(number[1])] = self.events / name
        return dict(sorted(found.items()))

    def log_of(self, rank: int, stream: str = "stdout", attempt: int | None = None) -> Path | None:
        """The output of one rank in one attempt (default: the newest); None if there is none yet."""
        logs = self.log_files(stream)
        attempts = [number for number, of in logs if of == rank and attempt in (None, number)]
        return logs[max(attempts), rank] if attempts else None

    def log_files(self, stream: str = "stdout") -> dict[tuple[int, int], Path]:
        """The output files by (attempt, rank), in torchrun's layout: `<id>/attempt_<n>/<rank>/<stream>.log`."""
        found = {}
        for place in (self.logs / name for name in names_below(self.path, self.logs)):
            for attempt in (
                name for name in names_below(self.path, place) if re.fullmatch(r"attempt_\d{1,6}", name, re.ASCII)
            ):
                for rank in (
                    name for name in names_below(self.path, place / attempt) if re.fullmatch(r"\d{1,6}", name, re.ASCII)
                ):
                    path = place / attempt / rank / f"{stream}.log"
                    if os.path.lexists(path):
                        found[int(attempt.removeprefix("attempt_")), int(rank)] = path
        return dict(sorted(found.items()))
