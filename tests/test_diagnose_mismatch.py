"""Findings about ranks that do not call the same collectives: mismatches and hangs."""

from __future__ import annotations

import pytest
from diagnosed import (
    CLOSED,
    DETAIL,
    GONE,
    UNLIKE,
    WATCHDOG,
    activity,
    end,
    error,
    first,
    fold,
    loader,
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

# ---- collective mismatch


def test_ranks_with_unlike_numbers_of_batches():
    aborted = status("failed", rank0=-15, rank1=(-6, UNLIKE))
    state = fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), error(0, GONE), aborted)
    found = first(state, "uneven_inputs")
    assert found.title == "rank 1 had only 5 batches per epoch; other ranks had up to 16"
    assert found.ranks == (1,) and "0: 16, 1: 5" in found.evidence
    state = fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), error(0, DETAIL), status("failed"))
    assert names(state) == ["uneven_inputs", "mismatch", "first_failure"]
    last = [waiting(0, op()), activity(0, "training"), activity(1, "evaluating"), end(1)]
    assert names(fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), last)) == ["uneven_inputs", "hang"]
    last = [waiting(0, op()), activity(0, "training"), activity(1, "evaluating"), waiting(1, op("barrier"))]
    assert "evaluation_on_one_rank" not in names(fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), last))


@pytest.mark.parametrize(
    "events",
    [
        [waiting(0, op()), end(0), end(1), status("finished")],  # it had waited once, and went on
        [waiting(0, op(over=True), computed=0.9)],  # a long forward that computes
        [waiting(0, op(), step=4), *steps(0, 6)],  # steps have come since
        [
            error(1, "bad sample", "ValueError"),
            error(0, GONE, t=501.0),
            status("failed"),
        ],  # failed for a reason of its own
        [error(0, GONE), status("failed", rank1=-9)],  # was killed
    ],
)
def test_unlike_numbers_of_batches_are_no_finding_alone(events):
    assert "uneven_inputs" not in names(fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), events))


def test_a_run_with_join_may_have_unlike_numbers_of_batches():
    asked = spec(options={"join": True})
    assert names(fold(asked, start(0, 1), loader(0, 16), loader(1, 5), waiting(0, op()))) == ["hang"]
    assert names(fold(spec(), start(0, 1), loader(0, None), loader(1, 5), waiting(0, op()))) == [
        "hang"
    ]  # a stream has no length


def test_an_evaluation_on_one_rank():
    imports, failed = waiting(0, computed=0.3, at=(14, "<module>"), step=0), error(0, CLOSED, at=(129, "evaluate"))
    state = fold(
        spec(),
        start(0, 1),
        imports,
        activity(0, "evaluating"),
        activity(1, "training"),
        end(1),
        failed,
        status("failed"),
    )
    found = first(state, "evaluation_on_one_rank")
    assert (
        found.ranks == (0, 1) and "train.py:129 in evaluate" in found.evidence and "rank 1 had exited" in found.evidence
    )


def test_an_evaluation_on_one_rank_that_holds_all_up():
    stood = [waiting(0, op("all_gather", 31), at=(129, "evaluate")), waiting(1, op("all_reduce", 31))]
    found = first(
        fold(spec(), start(0, 1), activity(0, "evaluating"), activity(1, "training"), stood), "evaluation_on_one_rank"
    )
    assert "rank 1 continued training" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [activity(1, "evaluating"), waiting(0, op()), waiting(1, op())],  # all evaluate
        [
            activity(1, "training"),
            waiting(1, op("barrier", 31, ()), at=(150, "main")),
        ],  # rank 0 computes, the other waits at a barrier
        [activity(1, "training"), error(0, "no such metric", "KeyError"), status("failed")],  # a failure of its own
        [activity(1, "training"), error(0, GONE), status("failed", rank1=-9)],  # the other was killed
        [activity(1, "training"), end(0), end(1), status("finished")],
    ],
)
def test_what_looks_like_an_evaluation_on_one_rank(events):
    assert "evaluation_on_one_rank" not in names(fold(spec(), start(0, 1), activity(0, "evaluating"), events))


def test_a_rank_that_still_trains_while_most_evaluate():
    doing = [activity(0, "training"), *(activity(rank, "evaluating") for rank in (1, 2, 3))]
    held = [waiting(rank, op("all_reduce", 31, ranks=range(4))) for rank in (1, 2, 3)]
    assert names(fold(spec(nproc=4), start(0, 1, 2, 3), doing, held)) == ["hang"]


@pytest.mark.parametrize("words", [UNLIKE, DETAIL])
def test_a_mismatch_by_the_words_of_the_backend(words):
    told = status("failed", rank0=(-6, words), rank1=-15)
    found = first(fold(spec(), start(0, 1), error(1, GONE, at=(139, "disturb")), told), "mismatch")
    assert found.ranks == (0, 1) and found.title.endswith("at train.py:139 in disturb") and words[:60] in found.evidence


def test_a_mismatch_by_what_the_ranks_were_in():
    state = fold(
        spec(), start(0, 1), error(0, GONE, ops=[op()]), error(1, GONE, ops=[op("barrier", sizes=())]), status("failed")
    )
    assert first(state, "mismatch").evidence == "rank 0 was in all_reduce #10 (405898), rank 1 in barrier #10"


def test_a_mismatch_that_nccl_waits_in():
    state = fold(
        spec(), start(0, 1), waiting(0, op(sizes=[(1000,)]), at=(139, "disturb")), waiting(1, op(sizes=[(1024,)]))
    )
    found = first(state, "mismatch")
    assert found.evidence == "rank 0 was in all_reduce #10 (1000), rank 1 in all_reduce #10 (1024)"
    assert "train.py:139" in found.title and names(state) == ["mismatch", "hang"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (op("all_to_all", sizes=[(8, 4)]), op("all_to_all", sizes=[(3, 4)])),  # splits that are unlike by design
        (op("scatter", sizes=[(4,), (4,)]), op("scatter", sizes=[])),
        (op(group="mesh_tp", ranks=(0, 1)), op("all_gather", group="mesh_tp", ranks=(2, 3))),  # two groups of one name
        (op(seq=10), op("barrier", seq=11)),
    ],
)
def test_collectives_that_may_be_unlike(one, other):
    state = fold(
        spec(),
        start(0, 1),
        error(0, "bad", "ValueError", ops=[one]),
        error(1, GONE, ops=[other], t=501.0),
        status("failed"),
    )
    assert names(state) == ["first_failure"]


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
    assert state.failure["left"] == [1] and state.words.startswith(
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


# ---- groups in opposite order


def in_group(number: int, name: str = "undefined", seq: int = 1, ranks=(0, 1), **more) -> dict:
    return op(seq=seq, sizes=[(4,)], group=name, ranks=ranks, **more) | {"id": str(number)}


def test_two_groups_in_opposite_order():
    """Both groups have the same ranks, no description and the same number of collectives: only their ids differ."""
    state = fold(spec(), start(0, 1), waiting(0, in_group(1)), waiting(1, in_group(2)))
    found = first(state, "hang")
    of_groups = [f"rank {rank} is in all_reduce #1 of group #{rank + 1} of ranks 0, 1" for rank in (0, 1)]
    assert found.title == f"{', '.join(of_groups)}; each waits for the other"
    assert "the same order" in found.fix and found.ranks == (0, 1) and len(findings(state)) == 1


def test_two_groups_with_names_and_a_bystander():
    stood = [waiting(0, in_group(1, "tp")), waiting(1, in_group(2, "dp", 9)), waiting(2, op(ranks=(0, 1, 2)))]
    found = first(fold(spec(nproc=3), start(0, 1, 2), stood), "hang")
    assert (
        'all_reduce #1 of group "tp" of ranks 0, 1, rank 1 is in all_reduce #9 of group "dp"' in found.title
        and found.ranks == (0, 1, 2)
    )
    assert "rank 2: in all_reduce #10" in found.evidence


def test_three_groups_in_a_circle():
    pairs = [waiting(rank, in_group(rank, ranks=(rank, (rank + 1) % 3))) for rank in (0, 1, 2)]
    found = first(fold(spec(nproc=3), start(0, 1, 2), pairs), "hang")
    assert found.title.endswith("each waits for the next") and found.title.count("is in all_reduce") == 3


@pytest.mark.parametrize(
    "stood",
    [
        [waiting(0, in_group(1)), waiting(1, in_group(1))],  # one group
        [waiting(0, in_group(1)), waiting(1, in_group(1, over=True), in_group(2))],  # rank 1 has completed that one
        [waiting(0, in_group(1)), waiting(1, in_group(2, ranks=(1, 2)))],  # rank 1 waits for rank 2
        [waiting(0, op()), waiting(1, op("barrier"))],  # one group, other operations
    ],
)
def test_waits_that_are_no_circle(stood):
    found = next(one for one in findings(fold(spec(nproc=3), start(0, 1, 2), stood)) if one.name == "hang")
    assert "each waits" not in found.title


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
