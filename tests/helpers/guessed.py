"""Runs with predictions of a learner."""

from __future__ import annotations

import pytest
from folded import fold, spec, status, step

from labkit.runs import guesses


@pytest.fixture(autouse=True)
def nothing_pending():
    guesses.PENDING.clear()
    yield
    guesses.PENDING.clear()


def over(**guessed):
    """A run of two ranks that is over, with these predictions: 150 bytes and more at the peak, 500 ms per step."""
    steps = [step(rank, number) for number in (1, 2, 3) for rank in (0, 1)]
    return fold(spec(), {"kind": "guess", "guess": {"figures": guessed}}, *steps, status("finished"))
