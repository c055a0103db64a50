"""A `%%torchrun` cell: its first line, the script that is generated around it, and the current output of its ranks as a
value, which renders as HTML (all text escaped) and as text. Nothing is started here.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.common.arguments import shown
from labkit.common.text import escape, visible, visible_log
from labkit.common.units import counted, milliseconds, size
from labkit.figures import rank_colour
from labkit.plan.spec import DEVICES, Spec, SpecError, bounds_of
from labkit.setup.machine import Machine

# ---- the first line and the script

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


# ---- the output of the ranks

_TONES = {"good": "#009E73", "bad": "#D55E00", "busy": "#0A86D8", "waiting": "#E69F00", "quiet": "#8C8C8C"}
_MONO = "font:12px/1.45 var(--jp-code-font-family,monospace)"
_BLOCK = (
    "border:1px solid rgba(128,128,128,.35);border-left:5px solid {colour};border-radius:6px;padding:4px"
    " 10px;min-width:0"
)
# keeps the newest line visible
_LINES = f"{_MONO};max-height:20em;overflow:auto;display:flex;flex-direction:column-reverse"
_PRE = f"{_MONO};margin:0;padding:0;background:none;white-space:pre-wrap;overflow-wrap:anywhere"
PICTURES = ("image/png", "image/svg+xml")  # MIME types of pictures that are shown; a browser runs no code in either
_PLOTLY = "application/vnd.plotly.v1+json"
_WIDGET = "application/vnd.jupyter.widget-view+json"
PAGES = (_PLOTLY, _WIDGET, "text/html")  # MIME types that are shown below the output, as the notebook shows its own
_DIGITS = 6  # significant digits of a number in the table


@dataclass(frozen=True)
class Measured:
    """What one cell took on a rank: seconds, the peak of its memory and the bytes sent by its collectives, None if
    unknown."""

    seconds: float
    peak: float | None = None
    sent: float | None = None


@dataclass(frozen=True)
class RankOutput:
    """The output of one rank, or of several with the same output: the newest lines of both streams, the number of
    earlier lines, the value of the last expression, pictures, pages, and how the rank ended."""

    rank: int
    stdout: str
    stderr: str = ""
    passed: int = 0
    fate: str = ""  # in words, such as "failed first"
    aside: bool = False  # whether its errors are only a consequence of another rank's failure
    value: str = ""
    pictures: tuple[tuple[str, bytes], ...] = ()  # MIME type and content
    pages: tuple[tuple[str, bytes], ...] = ()  # of `PAGES`, also MIME type and content
    measured: tuple[Measured, ...] = ()  # by rank, if the cell was measured
    others: tuple[int, ...] = ()  # the further ranks with this output

    @property
    def name(self) -> str:
        """The rank or ranks: `rank 1`, `ranks 0–3`."""
        return ranks_text((self.rank, *self.others))

    @property
    def heading(self) -> str:
        """The rank, and how it ended."""
        return " · ".join(filter(None, (self.name, self.fate)))

    @property
    def took(self) -> str:
        """`0.12 s · peak 310 MiB · sent 1.5 KiB`, with ranges for several ranks; empty if it was not measured."""
        parts = [
            _between(seconds_text, [rank.seconds for rank in self.measured]),
            _between(_whole, [rank.peak for rank in self.measured], "peak "),
            _between(_whole, [rank.sent for rank in self.measured], "sent "),
        ]
        return " · ".join(filter(None, parts))


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0–3`, `ranks 0, 2, 5–7`."""
    numbers, spans = sorted(ranks), []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in spans]
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(texts)


def merged(outputs: Sequence[RankOutput]) -> tuple[RankOutput, ...]:
    """The same outputs, with ranks together that have the same output. If only the rest differs, what all of them
    printed is in the first of them alone."""
    blocks = _together(outputs)
    first = outputs[0] if outputs else None
    if first is None or len(blocks) == 1 or not first.stdout or {output.stdout for output in outputs} != {first.stdout}:
        return blocks
    others = tuple(output.rank for output in outputs[1:])
    common = RankOutput(first.rank, first.stdout, passed=first.passed, others=others)
    return (common, *_together([replace(output, stdout="", passed=0) for output in outputs]))


def _together(outputs: Sequence[RankOutput]) -> tuple[RankOutput, ...]:
    blocks: dict[RankOutput, RankOutput] = {}
    for output in outputs:
        alike = replace(output, rank=0, measured=())
        block = blocks.get(alike)
        if block is None:
            blocks[alike] = output
        else:
            measured = (*block.measured, *output.measured)
            blocks[alike] = replace(block, others=(*block.others, output.rank), measured=measured)
    return tuple(blocks.values())


def _between(text: Callable[[float], str], values: Sequence[float | None], name: str = "") -> str:
    """The range of the known values; empty if all are unknown or zero."""
    known = [value for value in values if value is not None]
    if not any(known):
        return ""
    low, high = text(min(known)), text(max(known))
    return name + (low if low == high else f"{low} to {high}")


def seconds_text(seconds: float) -> str:
    """`3.05 ms`, `0.12 s`, `12.3 s`."""
    if seconds < 0.1:
        return milliseconds(seconds)
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _whole(count: float) -> str:
    return size(count, 0)


@dataclass(frozen=True)
class Shown:
    """The whole output: a title with a tone, the ranks, and their reports by rank."""

    title: str
    tone: str
    ranks: Sequence[RankOutput] = ()
    reports: Mapping[int, Mapping[str, Any]] | None = None
    hint: str = ""

    @property
    def _said(self) -> Sequence[RankOutput]:
        """The ranks whose output is shown: all of them, or none if they reported values and wrote nothing."""
        wrote = any(
            output.stdout or output.stderr or output.passed or output.value or output.pictures or output.pages
            for output in self.ranks
        )
        return self.ranks if wrote or not self.reports else ()

    @property
    def _numbers(self) -> list[int]:
        return sorted({rank for output in self.ranks for rank in (output.rank, *output.others)})

    @property
    def bundle(self) -> dict[str, str]:
        """Both forms, by MIME type."""
        return {"text/html": self.html(), "text/plain": self.text()}

    def html(self) -> str:
        """The whole output as HTML with inline styles only."""
        dot = f'<span aria-hidden="true" style="color:{_TONES[self.tone]}">●</span>'
        hint = f'<div style="opacity:.8">{escape(self.hint)}</div>' if self.hint else ""
        head = f'<div role="status" class="labkit-cell-state">{dot} <b>{escape(self.title)}</b>{hint}</div>'
        blocks = "".join(_block(output) for output in self._said)
        grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(190px,100%),1fr));gap:6px;margin:4px 0"
        table = table_html(self.reports or {}, self._numbers)
        return f'<div class="labkit-cell">{head}<div style="{grid}">{blocks}</div>{table}</div>'

    def text(self) -> str:
        """The whole output as plain text."""
        parts = [self.title, self.hint]
        for output in self._said:
            passed = f"… {output.passed:,} earlier lines\n" if output.passed else ""
            pictures = f"({counted(len(output.pictures), 'picture')})" if output.pictures else ""
            pages = _below(output) if not output.value else ""
            said = passed + "\n".join(filter(None, (output.stdout, output.value, pictures, pages, output.stderr)))
            heading = " · ".join(filter(None, (output.heading, output.took)))
            parts.append(f"── {heading}\n{_plain(said) or '(no output)'}")
        parts.append(table_text(self.reports or {}, self._numbers))
        return visible("\n".join(filter(None, parts)))


def _block(output: RankOutput) -> str:
    colour = rank_colour(output.rank)
    earlier = f"… {output.passed:,} earlier lines are in the log"
    passed = f'<div style="opacity:.7">{earlier}</div>' if output.passed else ""
    said = f'<pre style="{_PRE}">{_clean(output.stdout)}</pre>' if output.stdout else ""
    shown = _below(output) or output.value
    value = f'<pre class="labkit-cell-value" style="{_PRE}">{_clean(shown)}</pre>' if shown else ""
    errors = ""
    if output.stderr:
        style = f"{_PRE};border-top:1px dashed {_TONES['bad']}"
        errors = f'<pre class="labkit-cell-stderr" style="{style}">{_clean(output.stderr)}</pre>'
    if errors and output.aside:
        errors = f"<details><summary>stderr</summary>{errors}</details>"
    pictures = "".join(_image(*picture, output.name) for picture in output.pictures)
    nothing = "" if said or errors or passed or value or pictures else '<span style="opacity:.75">(no output)</span>'
    squares = "".join(f'<span style="color:{rank_colour(rank)}">■</span>' for rank in (output.rank, *output.others))
    took = f' <span style="opacity:.75">{escape(output.took)}</span>' if output.measured else ""
    mark = f'<span aria-hidden="true">{squares}</span> <b>{escape(output.heading)}</b>{took}'
    lines = f'<div style="{_LINES}" tabindex="0"><div>{passed}{said}{value}{errors}{nothing}</div></div>{pictures}'
    style = _BLOCK.format(colour=_TONES["quiet"] if output.others else colour)
    return f'<div role="group" aria-label="{output.name}" class="labkit-cell-rank" style="{style}">{mark}{lines}</div>'


def _below(output: RankOutput) -> str:
    return f"({counted(len(output.pages), 'output')} below)" if output.pages else ""


def page_bundles(outputs: Sequence[RankOutput]) -> list[dict[str, Any]]:
    """The tables and charts of ranks by MIME type, each as a separate output with the ranks above it. HTML is that of
    the objects of the user's own cell, as the notebook shows it without ranks; a handout sanitises both."""
    bundles: list[dict[str, Any]] = []
    for output in outputs:
        name = f'<div class="labkit-cell-pages"><b>{escape(output.name)}</b></div>'
        for kind, content in output.pages:
            text = content.decode("utf-8", "replace")
            if kind in (_PLOTLY, _WIDGET):
                bundles += [{"text/html": name, "text/plain": output.name}, {kind: json.loads(text), "text/plain": ""}]
            else:
                bundles.append({"text/html": name + text, "text/plain": ""})
    return bundles


def _image(kind: str, content: bytes, name: str) -> str:
    source = f"data:{escape(kind)};base64,{b64encode(content).decode()}"
    return f'<img alt="picture of {name}" style="max-width:100%;background:#fff" src="{source}">'


def counted_ranks(nproc: int, device: str = "") -> str:
    """`1 GPU`, `4 CPU ranks`."""
    kind = {"cpu": "CPU rank", "cuda": "GPU"}.get(device, "rank")
    return counted(nproc, kind)


def script_bundle(script: str) -> dict[str, str]:
    """The generated script in a collapsible section, by MIME type; as text there is none."""
    code = f'<pre style="{_PRE};padding:4px 10px">{escape(script)}</pre>'
    fold = f'<details class="labkit-cell-script"><summary>The script that every rank runs</summary>{code}</details>'
    return {"text/html": fold, "text/plain": ""}


def columns(reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The names that any rank reported, in order of first occurrence."""
    return list(dict.fromkeys(name for rank in sorted(reports) for name in reports[rank]))


def table_html(reports: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> str:
    """The table of ranks as HTML; empty if nothing was reported."""
    names = columns(reports)
    if not names:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("rank", *names))
    rows = []
    for rank in ranks:
        mark = f'<span aria-hidden="true" style="color:{rank_colour(rank)}">■</span> {rank}'
        cells = "".join(f"<td>{escape(value_text(reports.get(rank, {}).get(name)))}</td>" for name in names)
        rows.append(f"<tr><td>{mark}</td>{cells}</tr>")
    head, body = f"<thead><tr>{heads}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<table class="labkit-cell-reports" style="font-variant-numeric:tabular-nums">{head}{body}</table>'


def table_text(reports: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> str:
    """The table of ranks as aligned text; empty if nothing was reported."""
    names = columns(reports)
    if not names:
        return ""
    rows = [["rank", *names]]
    rows += [[str(rank), *(value_text(reports.get(rank, {}).get(name)) for name in names)] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def value_text(value: Any) -> str:
    """A reported value as the table shows it; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)


def _plain(text: str) -> str:
    return visible_log(text).rstrip()


def _clean(text: str) -> str:
    return escape(_plain(text))
