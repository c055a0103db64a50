"""Asks the ranks of a running run to look closely at one step; see probe/sampler.py for what they do then."""

from __future__ import annotations

import math

from labkit.record.folder import RunFolder
from labkit.record.state import RunState

_AHEAD = 1.0  # seconds: a request is seen within 0.2 s, and the state may be as old as that


def ask(folder: RunFolder, state: RunState, snapshot: bool = False) -> int:
    """The step that all ranks will look at: far enough ahead that none of them is past it when it reads the request."""
    newest = max((int(rank.steps.step[-1]) for rank in state.ranks.values() if len(rank.steps)), default=0)
    step = newest + 2 + math.ceil(_AHEAD / max(state.step_seconds_now or _AHEAD, 1e-4))
    RunFolder.write_json(folder.capture, {"step": step, "snapshot": snapshot})
    return step
