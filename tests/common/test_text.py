"""Untrusted text: characters that control a terminal or hide text are displayed as escapes everywhere."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fabricate import FakeRun
from foreign import command, copy_of
from rich.table import Table
from rich.text import Text

import labkit
from labkit.common.text import escape, visible, visible_line, visible_log
from labkit.figures.as_plotly import parts
from labkit.figures.charts import CHARTS
from labkit.figures.tables import Findings
from labkit.frontends import terminal
from labkit.frontends.console import Console
from labkit.frontends.handout.page import run_page
from labkit.frontends.magic.cell import RankOutput, Shown
from labkit.frontends.panel.lab import Lab
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run
from labkit.setup.environment import CLONE
from labkit.setup.progress import Progress

OSC8, OSC52, CSI, BELL = "\x1b]8;;http://host.example\x1b\\here", "\x1b]52;c;aGk=\x07", "\x1b[2J\x1b[31m", "\x07"
C1, BIDI, ZERO, LINES = (
    "\x9b2J\x9d0;x\x9c",
    "\u202egnp.exe\u2066\u2069\u200e\u200f",
    "a\u200bb\u2060\ufeff",
    "\u2028\u2029\x85",
)
HOSTILE = OSC8 + OSC52 + CSI + BELL + C1 + BIDI + ZERO + LINES
FORBIDDEN = {*"\x1b\x07\x9b\x9d\x9c\x85\x7f\r", *"\u202e\u2066\u2069\u200e\u200f\u200b\u2060\ufeff\u2028\u2029"}
NAME = f"20261123-000000-{HOSTILE.replace('/', '_')}-x2"


def is_clean(text: str) -> bool:
    return not FORBIDDEN & set(text)


@pytest.fixture
def hostile(runs) -> RunFolder:
    """A run with malicious name, errors, host, device, operations and logs."""
    run = FakeRun(runs, steps=30)
    run.start()
    run.step(10)
    run.say(0, f"{HOSTILE}\rlast\n{HOSTILE}\n")
    run.writers[0].write("device", device="cpu", device_name=HOSTILE)
    span = [["backward", 0.0, 0.04]]
    comm = [[f"<b>{HOSTILE}", 0.01, 0.02, 100, HOSTILE, [0, 1], 5]]
    more = {
        "busy": [[0.0, 0.04]],
        "marks": [[HOSTILE, 0.0, 0.01]],
        "exposed": {"backward": 0.01},
        "device": "cpu",
        "backend": HOSTILE,
    }
    run.writers[0].write("timeline", step=10, t0=run.began, seconds=0.04, phases=span, comm=comm, **more)
    run.writers[1].write("start", host=HOSTILE, device=HOSTILE, attempt=0, pid=3)
    run.writers[1].write("error", type=HOSTILE, message=HOSTILE, traceback=f'File "{HOSTILE}.py", line 1, in x')
    run.end("failed", message=HOSTILE, failures={"1": {"exit_code": 1, "message": HOSTILE, "signal": HOSTILE}})
    run.close()
    path = run.folder.path.rename(runs / NAME)
    return RunFolder(path)


@pytest.mark.parametrize("character", sorted(FORBIDDEN), ids=ascii)
def test_control_characters_become_escapes(character):
    for function in (visible, visible_line, escape, visible_log):
        shown = function(f"a{character}b")
        assert is_clean(shown)
    assert visible_line(f"a{character}b") in (f"a\\x{ord(character):02x}b", f"a\\u{ord(character):04x}b", "a\\rb")


def test_other_text_is_unchanged():
    text = "loss 0.5 → 1.2 MiB · rank 0 ■ 汉字 עברית 🏖️ e\u0301\tx\n"
    assert visible(text) == visible_log(text) == escape(text) == text
    assert visible_line("a\tb\nc") == r"a\tb\nc"
    assert visible("\ud800\U000e0041\x00") == r"\ud800\U000e0041\x00"
    assert visible(visible(HOSTILE)) == visible(HOSTILE)
    assert visible_log("\x1b[31mred\x1b[0m\x1b[K 10%\r20%\r\nend") == "20%\nend"
    assert escape("<a href='x'>&\u202e") == "&lt;a href=&#x27;x&#x27;&gt;&amp;\\u202e"


COMMANDS = (
    *(
        ["runs"],
        ["show", "last"],
        ["show", "nowhere"],
        ["stop", "last"],
        ["capture", "last"],
        ["replay", "last", "--speed", "1e9"],
    ),
    *(
        ["replay", "last", "--speed", "0"],
        ["compare", "last"],
        ["handout", "last", "-o", "page.html"],
        ["clean"],
        ["clean", "--yes"],
    ),
    *(
        ["show", HOSTILE],
        ["stop", HOSTILE],
        ["export", HOSTILE, "--to", "csv"],
        ["handout", f"{HOSTILE}.py"],
        ["run", HOSTILE],
        ["run", f"{HOSTILE}.py"],
    ),
    *([HOSTILE], ["runs", HOSTILE], ["script", HOSTILE], ["diff", "ddp", HOSTILE], ["run", "ddp", "--option", HOSTILE]),
    *(
        ["compare", "--strategies", HOSTILE],
        ["notebook", HOSTILE],
        ["claims", HOSTILE],
        ["run", "ddp", "--nproc", HOSTILE],
    ),
    *(
        ["export", "last", "--to", "perfetto"],
        ["export", "last", "--to", HOSTILE],
        ["handout", "last", "-o", f"none/{HOSTILE}/x"],
        ["compare", HOSTILE],
    ),
    *(
        ["run", "ddp", "--resume", HOSTILE, "--nproc", "1"],
        ["handout", "--all", "--recorded", HOSTILE],
        ["runs", "--json"],
    ),
)


@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=lambda words: " ".join(words).encode("ascii", "backslashreplace").decode()[:40]
)
def test_no_command_writes_control_characters(hostile, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    _, said = command(*arguments)
    assert said.strip() and is_clean(said), ascii(said)


@pytest.mark.parametrize("arguments", [("runs",), ("show",), ("stop",), ("show", HOSTILE)])
def test_no_command_writes_control_characters_in_a_subprocess(hostile, arguments):
    done = subprocess.run(
        [sys.executable, "-m", "labkit", *arguments], cwd=CLONE, capture_output=True, check=False, timeout=120
    )
    assert is_clean((done.stdout + done.stderr).decode()), ascii(done)


def test_an_unreadable_folder_of_a_hostile_name_is_listed(runs):
    folder = copy_of(runs, name=NAME)
    RunFolder.write_json(folder.status, {"state": HOSTILE})
    for words in (("runs",), ("show",), ("clean", "--yes"), ("compare",)):
        _, said = command(*words)
        assert is_clean(said) and "\\x1b" in said


def test_the_live_terminal_gets_control_sequences_only_from_rich(hostile):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    terminal.watch(terminal_source(hostile), hostile, console)
    drawn = out.getvalue()
    assert "\x1b[?25h" in drawn, "rich's own controls pass"
    for sequence in ("\x1b]", "\x07", "\x9b", "\u202e", "\u200b", "\x1b[2J"):
        assert sequence not in drawn
    assert "\\x1b]52;c;aGk=\\x07" in drawn


def terminal_source(folder: RunFolder):
    from labkit.record.follow import Follower

    return Follower(folder)


def test_a_console_cleans_whatever_is_drawn_on_it():
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=300)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    for thing in (HOSTILE, Text(HOSTILE), table, f"[link=http://host.example]{HOSTILE}[/link]"):
        console.print(thing)
    assert is_clean(out.getvalue()) and "[link=" in out.getvalue()


def test_progress_is_one_line_for_each_step():
    out = io.StringIO()
    with Progress(out) as progress:
        progress.step(f"{HOSTILE}\nlabkit: a second line")
        progress.lines([HOSTILE])
    assert is_clean(out.getvalue()) and out.getvalue().count("\n") == 2


def test_pages_and_panels_have_no_hidden_characters(hostile):
    page = run_page(hostile).html()
    assert is_clean(page) and "\\u202e" in page
    lab = Lab(recorded=str(hostile.path))
    assert all(is_clean(label) for label, _ in lab._recorded.which.options)
    run = Run.attach(hostile.path)
    assert is_clean(json.dumps(parts(CHARTS["timeline"](run.state).drawn()), ensure_ascii=False))
    assert "<b>\\x1b" not in json.dumps(parts(CHARTS["timeline"](run.state).drawn()))
    assert is_clean(repr(run) + repr(run.findings()) + repr(run.ledger()) + run.findings()._repr_html_())
    shown = Shown(HOSTILE, "bad", [RankOutput(0, HOSTILE, HOSTILE, fate=HOSTILE)], {0: {HOSTILE: HOSTILE}}, HOSTILE)
    assert is_clean(shown.html()) and is_clean(shown.text())
    assert isinstance(run.findings(), Findings)


# ---- the boundary, checked in the code


def _calls(path: Path, name: str) -> list[ast.Call]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_commands_print_json_or_say_lines():
    root = Path(labkit.__file__).parent
    printed = [(path, call) for path in (root / "cli").glob("*.py") for call in _calls(path, "print")]
    assert printed
    for path, call in printed:
        text = ast.unparse(call)
        cleaned = "visible_line(" in text or "json.dumps(" in text or "jsonlib.dumps(" in text
        assert cleaned or isinstance(call.args[0], ast.Constant), f"{path.name}:{call.lineno} prints {text}"


def test_one_function_makes_html_of_text_and_one_class_draws_on_terminals():
    root = Path(labkit.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert path.name == "text.py" or ("from html import escape" not in text and "html.escape(" not in text), path
        assert path.name == "console.py" or "from rich.console import Console\n" not in text, path


@pytest.mark.skipif(os.name == "nt", reason="such names cannot be made")
def test_the_name_of_the_folder_is_unchanged(hostile):
    assert RunFolder.find(NAME).name == NAME
    assert json.loads(command("runs", "--json")[1])["runs"][0]["run"] == NAME
