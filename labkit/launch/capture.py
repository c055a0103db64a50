"""Asks the ranks of an active run to profile one step; see probe/sampler.py for the profiling itself."""

from __future__ import annotations

import math

from labkit.analysis.metrics import pace
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

_AHEAD = 1.0  # seconds: a request is read within 0.2 s, and the state may lag by the same time


def ask(folder: RunFolder, state: RunState, snapshot: bool = False) -> int:
    """Requests a profile and returns its step, which is far enough ahead that no rank is past it when it reads the
    request.
    """
    newest = max((int(rank.steps.step[-1]) for rank in state.ranks.values() if len(rank.steps)), default=0)
    step = newest + 2 + math.ceil(_AHEAD / max(pace(state) or _AHEAD, 1e-4))
    RunFolder.write_json(folder.capture, {"step": step, "snapshot": snapshot})
    return step
