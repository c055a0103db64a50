"""Real runs of scripts that break in ways that ranks cannot report themselves, and the findings about them."""

from __future__ import annotations

import pytest
from conftest import wait_until
from places import SCRIPTS

from labkit import Run, run
from labkit.analysis.diagnose import findings
from labkit.record.events import NotFinite

SCRIPT = SCRIPTS / "breaks.py"


def line(code: str) -> int:
    """The number of the only line of the script with this code."""
    (number,) = [number for number, text in enumerate(SCRIPT.read_text().splitlines(), 1) if text.strip() == code]
    return number


def broken(case: str, *more: str, nproc: int = 2) -> Run:
    return run(SCRIPT, nproc=nproc, device="cpu", args=(case, *more), hang_after=3)


def ended(case: str) -> Run:
    return broken(case).wait(180)


def first(job: Run):
    return findings(job.state)[0]


@pytest.mark.parametrize(
    ("case", "title"),
    [
        ("crashes", f"rank 1 failed first: SIGSEGV (breaks.py:{line('ctypes.string_at(0)')} in crashes)"),
        (
            "exits_at_once",
            f"rank 1 failed first: exit code 3: os._exit(3) (breaks.py:{line('os._exit(3)')} in exits_at_once)",
        ),
        ("is_killed", "rank 1 failed first: SIGKILL (last seen at breaks.py:"),
    ],
)
def test_a_rank_that_dies_is_told_with_its_last_line(case, title):
    job = ended(case)
    assert first(job).name == "first_failure" and first(job).title.startswith(title)
    assert job.state.failure.rank == 1 and job.state.failure.collateral == [0]
    if case == "is_killed":
        assert "in spin)" in first(job).title and job.state.status.oom_kills in (0, None)


def test_a_mistake_of_every_rank_and_a_script_that_is_not_there(tmp_path):
    job = ended("same_error")
    number = line("print(undefined_name)  # noqa: F821")
    if job.state.failure.collateral:  # torchrun may terminate a rank before it comes to the line
        assert first(job).title.startswith("rank ") and f"(breaks.py:{number} in same_error)" in first(job).title
    else:
        title = (
            f"all 2 ranks failed in the same way: NameError: name 'undefined_name' is not defined (breaks.py:{number}"
            " in same_error)"
        )
        assert first(job).title == title


def test_a_rank_that_left_early_is_named_and_not_its_victim():
    job = ended("returns_early")
    found = first(job)
    assert found.name == "left_early" and found.ranks == (1, 0)
    assert found.title.startswith("rank 1 exited with code 0 after 4 steps while rank 0 waited in all_reduce #")
    assert f"exited at breaks.py:{line('sys.exit()')} in returns_early" in found.evidence


def test_ranks_that_are_stopped_or_hold_the_gil_are_named_in_a_pipeline():
    job = broken("one_stops_and_one_holds_the_gil", "pipeline", nproc=4)
    try:
        wait_until(lambda: len([rank for rank in job.state.ranks.values() if rank.waiting or rank.silent]) == 4, 400)
        found = first(job)
        told = {number: rank.silent and rank.silent.process for number, rank in job.state.ranks.items()}
    finally:
        job.stop()
    assert told == {0: None, 1: "stopped", 2: "sleeping", 3: None}
    assert (
        found.name == "hang"
        and found.title.startswith("rank 1 has been stopped for ")
        and "; ranks 0, 3 wait" in found.title
    )
    held = (
        f"rank 2: in a C call that holds the GIL, at breaks.py:{line('ctypes.PyDLL(None).sleep(SECONDS)')} in"
        " holds_the_gil, 4 steps done"
    )
    assert held in found.evidence
    assert job.state.status.state == "stopped"


def test_groups_in_opposite_order_are_told_apart():
    job = broken("crossed_groups")
    try:
        wait_until(lambda: all(rank.waiting for rank in job.state.ranks.values()) and len(job.state.ranks) == 2, 180)
        found = first(job)
    finally:
        job.stop()
    assert found.name == "hang" and found.title.endswith("; each waits for the other")
    for rank in (0, 1):
        assert f"rank {rank} is in all_reduce #1 of group #" in found.title


def test_a_loss_that_diverges_on_all_ranks():
    job = ended("diverges")
    assert first(job).name == "loss_diverged" and "on all 2 ranks" in first(job).title
    (seen,) = job.state.ranks[1].seen(NotFinite)
    assert seen.parameters == 2 and seen.nan == 0 and seen.step == job.state.ranks[1].not_finite
