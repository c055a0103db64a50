"""A `%%torchrun` cell: its first line, and the script that is generated around it. Nothing is started here."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from labkit.common.arguments import shown
from labkit.plan.spec import DEVICES, Spec, SpecError, bounds_of
from labkit.setup.machine import Machine

KEEP = "--keep"
OPTIONS = f"{KEEP}, --device cpu, --device cuda and --as NAME"
INITIALISE = {
    "cpu": 'device = torch.device("cpu")\ndist.init_process_group("gloo")',
    "cuda": (
        'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\n'
        "torch.cuda.set_device(device)\n"
        'dist.init_process_group("nccl", device_id=device)'
    ),
}
_BEFORE = """\
# One cell on {nproc} ranks: torchrun --standalone --nproc-per-node={nproc} train.py
import os
import time

import torch
import torch.distributed as dist

from labkit import report

{initialise}
rank, world_size = dist.get_rank(), dist.get_world_size()

# ---- the cell
"""
_AFTER = """

# ---- shutdown
if dist.is_initialized():
    dist.destroy_process_group()
"""


class CellError(ValueError):
    """A cell cannot be started; the message is one sentence with the value and the fix."""


@dataclass(frozen=True)
class Cell:
    """A valid cell for a number of ranks that this machine supports. `name` is the variable for its reports, if any."""

    body: str
    spec: Spec
    name: str | None = None

    @classmethod
    def read(cls, line: str, body: str, machine: Machine, flags: int = 0, first: int = 2) -> Cell:
        """Parses the rest of the first line after `%%torchrun`, and the lines below it, which begin at line `first` of
        the cell, with `flags` of the compiler. Raises `CellError`."""
        nproc, device, name = _asked(line)
        if device is None:
            device = "cuda" if len(machine.gpus) >= nproc else "cpu"
        cell = cls(body, _settled(nproc, device, machine), name)
        check_body(body, cell.script, cell.before.count("\n"), flags, first)
        return cell

    @property
    def before(self) -> str:
        """The part of the script before the cell, which initialises the process group."""
        return _BEFORE.format(nproc=self.spec.nproc, initialise=INITIALISE[self.spec.device])

    @property
    def script(self) -> str:
        """The complete script that every rank runs."""
        return self.before + self.body.rstrip("\n") + _AFTER

    def in_cell(self, text: str, script: Path) -> str:
        """Replaces references to lines of `script` in `text` by lines of the cell; `%%torchrun` is line 1."""
        first, count = self.before.count("\n"), len(self.body.splitlines())

        def rename(found: re.Match[str]) -> str:
            number = int(found["file"] or found["line"]) - first
            return f"Cell, line {number + 1}" if 0 < number <= count else found[0]

        path = re.escape(str(script))
        return re.sub(
            rf'File "{path}", line (?P<file>\d+)|(?:{path}|\b{re.escape(script.name)}):(?P<line>\d+)', rename, text
        )


def check_body(body: str, script: str, before: int, flags: int = 0, first: int = 2) -> None:
    """Raises `CellError` unless the cell is Python; `script` is what is compiled with `flags`, and has `before` lines
    above the body, which begins at line `first` of the cell."""
    if not body.strip():
        raise CellError("the cell is empty; write the code for every rank below the first line")
    try:
        compile(script, "cell", "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        lines = body.splitlines()
        number = max(min((error.lineno or 0) - before, len(lines)), 1)
        why = error.msg
        if lines[number - 1].lstrip().startswith(("%", "!")):
            why = f"{shown(lines[number - 1].strip())} is not Python; magics and shell commands run on ranks that stay"
        line = number - 1 + first
        raise CellError(f"the cell does not parse, line {line}: {why}; nothing was started") from None
    except ValueError as error:  # a null byte
        raise CellError(f"the cell does not parse: {error}; nothing was started") from None


def words_of(line: str) -> list[str]:
    """The words of a first line. Raises `CellError`."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise CellError(f"cannot parse {shown(line)}: {error}") from None


def _asked(line: str) -> tuple[int, str | None, str | None]:
    """The number of ranks, the device and the variable name in the first line."""
    words = words_of(line)
    if not words:
        raise CellError("the number of ranks is missing, as in %%torchrun 4")
    try:
        nproc = bounds_of("nproc").read("the number of ranks", words[0])
    except ValueError as error:
        raise CellError(f"{error}; write %%torchrun 4") from None
    given = dict(zip(words[1::2], words[2::2]))
    for option in words[1::2]:
        if option not in ("--device", "--as"):
            raise CellError(f"unknown option {shown(option)}; the options are {OPTIONS}")
        if option not in given:
            raise CellError(f"{option} needs a value; the options are {OPTIONS}")
    device, name = given.get("--device"), given.get("--as")
    if device is not None and device not in DEVICES[1:]:
        raise CellError(f"--device must be {' or '.join(DEVICES[1:])}, got {shown(device)}")
    if name is not None and not name.isidentifier():
        raise CellError(f"--as must be a variable name, got {shown(name)}")
    return nproc, device, name


def _settled(nproc: int, device: str, machine: Machine) -> Spec:
    most = len(machine.gpus) if device == "cuda" else machine.max_cpu_ranks
    if 0 < most < nproc:
        limit = f"{most} GPUs" if device == "cuda" else f"at most {most} CPU ranks ({machine.cores} cores)"
        raise CellError(f"this machine has {limit}, got {nproc} ranks; write %%torchrun {most}")
    try:
        return Spec(script="cell.py", nproc=nproc, device=device).on(machine)
    except SpecError as error:
        raise CellError(str(error)) from None
