"""The state of a run as short HTML fragments, all text escaped."""

from __future__ import annotations

import math

from labkit.analysis.diagnose import findings
from labkit.analysis.metrics import seconds_left
from labkit.common.text import escape
from labkit.common.units import counted
from labkit.record.state import RunState
from labkit.setup.machine import Machine
from labkit.training.strategies import STRATEGIES

# ---- the state of a run


_TONES = {
    "finished": "good",
    "failed": "bad",
    "stopped": "quiet",
    "ready": "quiet",
    "lost": "bad",
    "running": "busy",
    "imported": "quiet",
}


def state_html(words: str, tone: str) -> str:
    """The state in words, with a dot: `tone` is quiet, waiting, busy, good or bad. The enclosing widget has the role
    "status".
    """
    text = escape(words, quote=True)
    return f'<div class="labkit-state labkit-{tone}" title="{text}"><i></i><span>{text}</span></div>'


def tone_of(state: RunState) -> str:
    """The tone (colour class) of a run's state."""
    return _TONES.get(state.status.state, "waiting")


def what_html(state: RunState) -> str:
    """What a run trains: strategy, workload and ranks, or its script."""
    spec = state.spec
    row = STRATEGIES.get(spec.strategy or "")
    script = spec.script if state.imported and spec.script else "train.py"  # of an imported run it is its name
    parts = [row.title if row else script, spec.workload or "", counted(state.world_size, "rank")]
    return escape(" · ".join(filter(None, parts)))


def progress_html(state: RunState) -> str:
    """Step i/n, a progress bar, and the time left or, at the end, the total time."""
    total, step = state.total_steps, state.step
    steps = f"step {step:,}/{total:,}" if total else f"step {step:,}"
    share = min(100.0, 100 * step / total) if total else 0.0
    inner = f'<div style="width:{share:.1f}%"></div>'
    value = f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{share:.0f}" aria-valuetext="{steps}"'
    bar = f'<div class="labkit-progress" role="progressbar" aria-label="steps" {value}>{inner}</div>'
    return f'<div class="labkit-advance"><span>{steps}</span>{bar}<span>{_time(state)}</span></div>'


def _time(state: RunState) -> str:
    if state.over:
        return "" if state.seconds is None else f"{_clock(state.seconds)} in total"
    left = seconds_left(state)
    return "" if left is None else f"{_clock(math.ceil(left))} left"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def finding_html(state: RunState) -> str:
    """The most severe finding in one line; empty if there is none."""
    first = next(iter(findings(state)), None)
    if first is None and state.status.state in ("failed", "lost"):
        return sentence_html(state.words)
    if first is None:
        return ""
    more = "" if first.evidence in first.title else f": {first.evidence}"
    return sentence_html(f"{first.title}{more}", first.fix, first.kind)


def sentence_html(text: str, fix: str = "", kind: str = "wrong") -> str:
    """An error message, or one of another `kind` of finding; the tooltip adds the fix."""
    hint = escape(f"{text}\n{fix}".strip(), quote=True)
    return f'<div class="labkit-finding labkit-{kind}" role="alert" title="{hint}">{escape(text)}</div>' if text else ""


def devices_of(machine: Machine) -> str:
    """The devices that a run can use: `2 × Tesla T4`, or why there is no GPU."""
    names = [gpu.name for gpu in machine.gpus]
    if names:
        return " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    reason = machine.no_gpu_reason.removeprefix("this machine has ")
    return "no GPU here: CPU ranks over gloo" if reason == "no GPU" else f"{machine.no_gpu_reason}: CPU ranks over gloo"


def shared_cores(machine: Machine, ranks: int) -> str:
    """That CPU ranks share cores, which makes their steps slower; empty if each can have its own."""
    if ranks <= machine.cores:
        return ""
    return f"{ranks} CPU ranks share {counted(machine.cores, 'core')}: they take turns"
