"""Parts of a run as escaped HTML, for a lab's page or a page of the run: where it ran, its logs, its script and the
diff.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from labkit.common.text import escape, visible, visible_log
from labkit.figures import rank_colour
from labkit.plan.script import write_script
from labkit.plan.spec import SpecError
from labkit.record.files import NotPlain
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.logs import LogTail
from labkit.record.state import RunState

_LINES = 200  # newest lines of a log that a page contains; they are printed too
_LEXERS = {"python": PythonLexer(), "diff": DiffLexer()}


def coloured(text: str, language: str) -> str:
    """Source code with syntax highlighting as CSS classes; `language` is python or diff."""
    return highlight(visible(text), _LEXERS[language], HtmlFormatter(cssclass="source"))


def printed(text: str) -> str:
    """The output of a program as a terminal shows it, without colours."""
    return escape(visible_log(text))


def fold(summary: str, inner: str, kind: str = "") -> str:
    """A collapsible section; `summary` is plain text, `inner` is HTML."""
    return f'<details class="{kind}"><summary>{escape(summary)}</summary>{inner}</details>'


def place(state: RunState) -> str:
    """The devices of a run's ranks: `2 CPU ranks (no GPU)`, `4 × Tesla T4`."""
    ranks = state.ranks.values()
    number = state.world_size
    names = Counter(rank.device_name or "GPU" for rank in ranks if rank.device.startswith("cuda"))
    if names:
        return " + ".join(f"{count} × {name}" for name, count in names.items())
    if any(rank.device == "cpu" for rank in ranks) or state.spec.device == "cpu":
        return f"{number} CPU rank{'' if number == 1 else 's'} (no GPU)"
    return f"{number} rank{'' if number == 1 else 's'}"


def day(seconds: float | None) -> str:
    """A date and time in this machine's time zone: `3 March 2025, 14:05`."""
    return time.strftime("%d %B %Y, %H:%M", time.localtime(seconds)).lstrip("0")


def title(state: RunState) -> str:
    """A run in a few words: `ddp · cnn`, or the script's name."""
    script = state.spec.script
    if script:
        return str(script).replace("\\", "/").rsplit("/", 1)[-1]
    return " · ".join(filter(None, (state.spec.strategy, state.spec.workload)))


def facts(state: RunState, recorded: bool = False) -> str:
    """One line: the state of a run, where it ran and when."""
    when = day(state.status.started) if isinstance(state.status.started, (int, float)) else "at an unknown time"
    ran = f"recorded {when}, on {place(state)}" if recorded else f"ran on {place(state)}, {when}"
    return " · ".join(filter(None, (state.words, ran, state.note)))


def logs(folder: RunFolder, state: RunState) -> str:
    """The output of each rank in a collapsible section; only the newest lines of long logs."""
    folds = [_log(folder, rank, stream) for rank in range(state.world_size) for stream in STREAMS]
    if state.status.state in ("failed", "lost"):
        folds.append(_text(folder.tail(folder.launcher_log, keep=_LINES), "torchrun", ""))
    return "".join(folds)


def _log(folder: RunFolder, rank: int, stream: str) -> str:
    words = f"rank {rank}" if stream == "stdout" else f"rank {rank}, stderr"
    tail = folder.log_tail(rank, stream, keep=_LINES)
    return _text(tail, words, rank_colour(rank), empty="no output" if stream == "stdout" else "")


def _text(tail: LogTail, words: str, colour: str, empty: str = "") -> str:
    while tail.poll():
        pass
    lines = [*tail.lines, *filter(None, [tail.partial])]
    count = tail.count + bool(tail.partial)
    if not lines:
        return f'<p class="log-of-none">Log of {escape(words)}: {empty}.</p>' if empty else ""
    gone = f"… {count - len(lines):,} earlier lines are in the run folder\n" if count > len(lines) else ""
    style = f' style="--rank:{colour}"' if colour else ""
    return fold(f"Log of {words} · {_lines(count)}", f"<pre{style}>{gone}{printed(chr(10).join(lines))}</pre>", "log")


def script(folder: RunFolder, state: RunState) -> str:
    """The script that ran, or the name of a user's script that was not stored."""
    own = state.spec.script
    text = _script_of(folder)
    if isinstance(text, NotPlain):
        return f"<p>The script is not shown: {escape(str(text))}.</p>"
    if text is None:
        return f"<p>Script: {escape(title(state))}, which is not stored with the run.</p>" if own else ""
    return fold(f"Script · {_lines(len(text.splitlines()))}", coloured(text, "python"), "code")


def diff(folder: RunFolder, state: RunState) -> str:
    """The diff between the single-device script and the script that ran."""
    spec, text = state.asked, _script_of(folder)
    if spec is None or not isinstance(text, str) or spec == spec.on_one_device:
        return ""
    try:
        before = write_script(spec.on_one_device)
    except SpecError:
        return ""
    lines = list(
        difflib.unified_diff(before.splitlines(), text.splitlines(), "one device", f"{spec.name}/train.py", lineterm="")
    )
    more, fewer = (sum(line.startswith(sign) and not line.startswith(3 * sign) for line in lines) for sign in "+-")
    return fold(f"Diff to one device · {more} lines added, {fewer} removed", coloured("\n".join(lines), "diff"), "code")


def _script_of(folder: RunFolder) -> str | NotPlain | None:
    """The script in the run folder, the reason why it is not shown, or None if the folder has none."""
    try:
        return folder.text(folder.script)
    except NotPlain as error:
        return error
    except OSError:
        return None


def _lines(number: int) -> str:
    return f"{number:,} line" + ("" if number == 1 else "s")
