"""Findings about ranks that make no progress, that exited early, or cannot report themselves."""

from __future__ import annotations

import pytest
from diagnosed import (
    CLOSED,
    GONE,
    WATCHDOG,
    activity,
    end,
    error,
    first,
    fold,
    names,
    op,
    spec,
    stack,
    start,
    status,
    steps,
    waiting,
)

from labkit.analysis.diagnose import findings

# ---- no progress


def test_a_rank_that_skipped_a_collective():
    before = op(seq=9, over=True)
    stood = [waiting(0, before, op("barrier", sizes=()), at=(139, "disturb")), waiting(1, before, op())]
    found = first(fold(spec(), start(0, 1), steps(0, 4), steps(1, 4), stood), "hang")
    assert found.title == "rank 0 waited for 42 s in barrier #10 at train.py:139 in disturb; rank 1 never reached it"
    assert found.ranks == (1, 0)
    assert "rank 0: in barrier #10 at train.py:139 in disturb, 4 steps done" in found.evidence
    assert "rank 1: in all_reduce #10 (405898) at train.py:113 in train_step, 4 steps done" in found.evidence


@pytest.mark.parametrize(
    ("events", "where"),
    [
        ([], "has not started"),
        ([*start(1), *steps(1, 7)], "still running, 7 steps done"),
        ([*start(1), *steps(1, 7), activity(1, "evaluating")], "still evaluating, 7 steps done"),
        ([*start(1), waiting(1, computed=0.9)], "still running, 0 steps done"),
    ],
)
def test_where_a_rank_is_that_never_came(events, where):
    found = first(fold(spec(), start(0), waiting(0, op()), events), "hang")
    assert found.ranks == (1, 0) and found.evidence.endswith(f"rank 1: {where}")


def test_a_rank_that_is_in_no_collective_is_named_before_those_that_wait_for_each_other():
    """Ranks 0 and 1 wait for ranks 2 and 3 in one group, 2 for 3 in another; 3 is somewhere else."""
    rows, columns = (
        [op(seq=12, ranks=ranks, group="dp") for ranks in ((0, 2), (1, 3))],
        op(seq=500, ranks=(2, 3), group="tp"),
    )
    stood = [waiting(0, rows[0]), waiting(1, rows[1]), waiting(2, columns), waiting(3, at=(77, "save"))]
    found = first(fold(spec(nproc=4), start(0, 1, 2, 3), stood), "hang")
    assert found.title.endswith("; rank 3 never reached it") and found.ranks[0] == 3
    assert "rank 3: in no collective, at train.py:77 in save" in found.evidence


def test_a_group_of_one_name_and_other_ranks_is_another():
    stood = [waiting(rank, op(seq=5, ranks=(rank // 2 * 2, rank // 2 * 2 + 1), group="tp")) for rank in (0, 1, 2)]
    found = first(fold(spec(nproc=4), start(0, 1, 2, 3), stood), "hang")
    assert (
        found.title
        == "rank 2 waited for 42 s in all_reduce #5 (405898) at train.py:113 in train_step; rank 3 never reached it"
    )


def test_all_ranks_in_one_collective():
    found = first(fold(spec(), start(0, 1), waiting(0, op()), waiting(1, op())), "hang")
    assert found.title.startswith("ranks 0, 1 waited") and found.title.endswith(
        "; all ranks of its group have reached it"
    )


def test_a_wait_that_is_no_collective():
    found = first(fold(spec(), start(0, 1), waiting(0, at=(30, "load")), waiting(1, at=(30, "load"))), "hang")
    assert (
        found.title == "ranks 0, 1 made no progress for 42 s at train.py:30 in load"
        and "rank 1: in no collective" in found.evidence
    )
    assert "no collective is pending" in found.cause


def test_a_wait_for_a_rank_that_goes_on_elsewhere():
    found = first(fold(spec(), start(0, 1), steps(1, 7), waiting(0, at=(30, "load"))), "hang")
    assert found.ranks == (1, 0) and found.evidence.endswith("rank 1: still running, 7 steps done")


@pytest.mark.parametrize("computed", [None, 1.0])
def test_a_rank_in_a_collective_waits_however_busy_it_looks(computed):
    """NCCL spins while it waits, and not every system reports the CPU time of a thread."""
    found = first(fold(spec(), start(0, 1), waiting(0, op(sizes=[()]), computed=computed)), "hang")
    assert "all_reduce #10 (scalar)" in found.title


def test_a_watchdog_that_ended_the_wait_leaves_it_the_cause():
    state = fold(spec(), start(0, 1), waiting(0, op()), status("failed", rank0=(-6, WATCHDOG), rank1=-15))
    assert names(state) == ["hang", "first_failure"] and findings(state)[0].ranks == (1, 0)


@pytest.mark.parametrize(
    "events",
    [
        [waiting(0, op(over=True), computed=0.9), waiting(1, op(over=True), computed=0.9)],  # a long forward
        [waiting(0, computed=0.285), waiting(1, computed=0.296)],  # imports
        [waiting(0, computed=None), waiting(1, computed=None)],  # not known whether it computes
        [waiting(0, op()), {"kind": "going_on", "t": 150.0, "rank": 0}],
        [waiting(0, op()), *steps(0, 6)],
        [waiting(0, op()), end(0), end(1), status("finished")],
        [waiting(0, op()), end(0), status("stopped")],
        [waiting(0, op()), *start(0, 1, attempt=1)],  # of the attempt before
        [activity(0, "training"), activity(1, "training")],
    ],
)
def test_what_is_no_hang(events):
    assert names(fold(spec(), start(0, 1), events)) == []


# ---- ranks that exited early


def test_a_rank_that_left_early_while_another_waits():
    called = stack(30, "main")
    state = fold(
        spec(),
        start(0, 1),
        steps(0, 4),
        steps(1, 4),
        end(1) | {"stack": called},
        waiting(0, op(seq=57), at=(88, "step")),
    )
    found = first(state, "left_early")
    assert (
        found.title
        == "rank 1 exited with code 0 after 4 steps while rank 0 waits in all_reduce #57 (train.py:88 in step)"
    )
    assert found.ranks == (1, 0) and "rank 1: exited at train.py:30 in main, 4 steps done" in found.evidence
    assert names(state) == ["left_early", "hang"]


@pytest.mark.parametrize("complaint", [GONE, CLOSED])
def test_a_rank_that_left_early_is_named_before_its_victim(complaint):
    gone = error(0, complaint, at=(88, "step"), ops=[op(seq=57)])
    state = fold(spec(), start(0, 1), steps(0, 4), steps(1, 4), end(1), gone, status("failed", rank0=1))
    found = first(state, "left_early")
    assert found.title.startswith(
        "rank 1 exited with code 0 after 4 steps while rank 0 waited in all_reduce #57 (train.py:88"
    )
    victim = findings(state)[1]
    assert victim.name == "first_failure" and victim.title.startswith(
        "rank 0 failed because rank 1 had already ended: RuntimeError"
    )
    assert state.failure.left == [1] and state.words.startswith(
        "failed (rank 1 ended early with exit code 0; rank 0: RuntimeError"
    )


def test_ranks_that_left_early_in_a_pipeline():
    state = fold(spec(nproc=3), start(0, 1, 2), end(1), end(2), waiting(0, at=(88, "step")))
    title = first(state, "left_early").title
    assert title == "ranks 1, 2 exited with code 0 after 0 steps while rank 0 waits (train.py:88 in step)"


def test_a_process_that_went_without_a_word_while_the_run_goes_on():
    """For example by `_exit(0)` in a C library: torchrun treats exit code 0 as success."""
    both, one = {"cpu_percent": 1.0, "rss": 9}, {"0": {"cpu_percent": 1.0, "rss": 9}}
    samples = [
        {"kind": "system", "t": 100.0, "ranks": {"0": both, "1": both}},
        {"kind": "system", "t": 110.0, "ranks": one},
    ]
    state = fold(spec(), start(0, 1), steps(1, 4), samples, waiting(0, op()), status("running"))
    found = first(state, "left_early")
    assert found.title.startswith("rank 1 exited after 4 steps while rank 0 waits in all_reduce #10")
    assert "rank 1: its process exited after 4 steps" in findings(state)[1].evidence


@pytest.mark.parametrize(
    "events",
    [
        [end(0), end(1), status("finished")],
        [end(1), *steps(0, 6)],  # the last steps of rank 0
        [error(0, "bad sample", "ValueError"), end(1), status("failed", rank0=1)],  # a failure of its own
        [end(1), waiting(0, op(ranks=(0, 2), over=False), step=4), *start(2)],  # rank 0 waits for another
    ],
)
def test_ranks_that_ended_in_good_order(events):
    assert "left_early" not in names(fold(spec(nproc=3), start(0, 1), events))


# ---- ranks that cannot report themselves


def mute(rank: int, process: str = "stopped", computed: float = 0.0, at=(30, "load")) -> dict:
    """An event in which the supervisor reports a rank that cannot report itself."""
    return {
        "kind": "silent",
        "t": 142.0,
        "rank": rank,
        "process": process,
        "since": 100.0,
        "computed": computed,
        "stack": stack(*at),
    }


def test_a_rank_that_is_stopped_is_named():
    state = fold(
        spec(), mute(1), start(0, 1), steps(1, 4), waiting(0, op(), at=(88, "step"))
    )  # the supervisor's file may be read first
    found = first(state, "hang")
    stopped, waits = found.title.split("; ")
    assert stopped == "rank 1 has been stopped for 42 s, last seen at train.py:30 in load"
    assert waits == "rank 0 waits in all_reduce #10 (train.py:88 in step)"
    assert "kill -CONT 101" in found.fix and found.ranks == (1, 0) and "SIGSTOP" in found.cause
    assert "rank 1: stopped, last seen at train.py:30 in load, 4 steps done (process 101: stopped)" in found.evidence


def test_a_rank_that_is_stopped_is_named_in_a_pipeline_too():
    found = first(fold(spec(), start(0, 1), mute(1, "tracing-stop"), waiting(0, at=(101, "pipeline"))), "hang")
    assert found.title.endswith("; rank 0 waits (train.py:101 in pipeline)") and found.title.startswith(
        "rank 1 has been stopped for 42 s"
    )
    assert first(fold(spec(), start(0, 1), mute(1)), "hang").title.endswith("in load")  # nobody waits yet


@pytest.mark.parametrize(("process", "computed"), [("sleeping", 0.0), ("running", 1.0), ("disk-sleep", 0.0)])
def test_a_rank_inside_a_c_call_that_holds_the_gil(process, computed):
    found = first(fold(spec(), start(0, 1), mute(1, process, computed), waiting(0, op(), at=(88, "step"))), "hang")
    assert found.title.startswith(
        "rank 1 has been inside a C call that holds the GIL for 42 s, at train.py:30 in load; rank 0 waits in"
        " all_reduce"
    )
    assert f"on the CPU for {computed:.0%}" in found.evidence and "GIL" in found.cause and found.ranks == (1, 0)


def test_a_long_computation_that_holds_the_gil_is_no_hang_while_nobody_waits():
    assert names(fold(spec(), start(0, 1), mute(1, "running", 1.0))) == []
    assert names(fold(spec(), start(0, 1), mute(1, "sleeping"), {"kind": "heard", "t": 150.0, "rank": 1})) == []
    assert names(fold(spec(), start(0, 1), mute(1), steps(1, 4, first=1400))) == []  # steps have come since
    assert names(fold(spec(), start(0, 1), mute(1), [event | {"t": 150.0} for event in start(1, attempt=1)])) == []
    assert names(fold(spec(), start(0, 1), mute(1), end(1), end(0), status("finished"))) == []
