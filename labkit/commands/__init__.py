"""What the commands do: one thin function each, named as the command, from parsed arguments to the exit code."""

from labkit.commands.pages import diff, handout, notebook, script
from labkit.commands.project import bench, claims, doctor, progress
from labkit.commands.recorded import capture, clean, compare, logs, replay, run, runs, show, stop, trace
from labkit.commands.setting_up import lab, lab_command, lab_environment, setup, test
from labkit.commands.shared import Refused
from labkit.record.documents import Unreadable

__all__ = [
    "Refused",
    "Unreadable",
    "bench",
    "capture",
    "claims",
    "clean",
    "compare",
    "diff",
    "doctor",
    "handout",
    "lab",
    "lab_command",
    "lab_environment",
    "logs",
    "notebook",
    "progress",
    "replay",
    "run",
    "runs",
    "script",
    "setup",
    "show",
    "stop",
    "test",
    "trace",
]
