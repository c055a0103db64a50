"""Real runs that hang, and what the first finding says from the first report on."""

from __future__ import annotations

import re

import pytest
from conftest import wait_until
from places import SCRIPTS

from labkit import run
from labkit.analysis.diagnose import findings

PATIENCE = 3


def untimed(found) -> str:
    """A title without the seconds of the wait."""
    return re.sub(r"for \d+ s ", "", found.title)


@pytest.mark.parametrize(
    ("case", "nproc", "title", "fix"),
    [
        ("ring", 3, "rank 0 waits to send to 1, 1 to 2, 2 to 0 at hangs.py:", "batch_isend_irecv"),
        (
            "pairs",
            2,
            "the ranks' collectives do not match since call 1 of the default group: rank 0 all_reduce (4, Int), rank 1"
            " all_reduce (4, Float)",
            "one dtype",
        ),
        ("elsewhere", 2, "rank 0 waited in barrier #1 at hangs.py:", "look at the line of that rank"),
    ],
)
def test_the_first_report_and_the_later_ones_tell_one_story(case, nproc, title, fix):
    job = run(SCRIPTS / "hangs.py", nproc=nproc, device="cpu", args=(case,), hang_after=PATIENCE)
    try:
        first = wait_until(lambda: next(iter(findings(job.state)), None), 120)
        wait_until(lambda: all(job.state.ranks[rank].waiting for rank in range(nproc)), 120)
        later = findings(job.state)[0]
        waits = [rank.waiting for rank in job.state.ranks.values()]
    finally:
        job.stop()
    assert all(wait.t - wait.since >= PATIENCE for wait in waits)
    assert later.name == "hang" and untimed(later).startswith(title) and fix in later.fix
    assert untimed(first) == untimed(later) and first.ranks == later.ranks
