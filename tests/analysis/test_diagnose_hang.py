"""Findings about ranks that make no progress, that exited early, or cannot report themselves."""

from __future__ import annotations

import pytest
from diagnosed import (
    CLOSED,
    GONE,
    SITE,
    WATCHDOG,
    activity,
    called,
    end,
    error,
    first,
    fold,
    message,
    names,
    op,
    spec,
    stack,
    start,
    status,
    steps,
    traffic,
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
    assert names(state) == ["left_early"]
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


@pytest.mark.parametrize(("t", "told"), [(142.0, True), (99.0, False)])
def test_what_nccl_says_is_told_if_it_was_asked_since_the_ranks_wait(t, told):
    behind = [
        {"what": "AllReduce", "value": value, "count": 1, "ranks": [rank]} for rank, value in ((1, "9"), (0, "10"))
    ]
    about = {"name": "0xae", "size": 2, "differ": behind, "of_run": True}
    answer = {"kind": "ras", "t": t, "saved": "nccl_ras.json", "communicators": [about]}
    evidence = first(fold(spec(), start(0, 1), mute(1), waiting(0, op(), at=(88, "step")), answer), "hang").evidence
    assert evidence.endswith("; NCCL RAS: rank 1 has launched 9 AllReduce, rank 0 10") is told


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


def test_ranks_at_one_line_in_different_collectives_have_a_second_thread():
    """As async_save does on the default group: its thread and backward call collectives in any order."""
    saving, gathering = op("broadcast", 170, over=False), op("all_gather", 170, over=False)
    state = fold(spec(), start(0, 1), waiting(0, saving), waiting(1, gathering))
    found = first(state, "hang")
    assert "another thread" in found.cause and "process_group=dist.new_group" in found.fix
    elsewhere = fold(spec(), start(0, 1), waiting(0, saving), waiting(1, gathering, at=(140, "save")))
    assert "a different branch" in first(elsewhere, "hang").cause


# ---- messages


@pytest.mark.parametrize(
    ("messages", "title", "cause"),
    [
        (
            [message("send", 1), message("send", 2), message("send", 0)],
            "rank 0 waits to send to 1, 1 to 2, 2 to 0 at train.py:113 in train_step",
            "nobody receives",
        ),
        (
            [message("recv", 1), message("recv", 0)],
            "rank 0 waits to receive from 1, 1 from 0 at train.py:113 in train_step",
            "before it makes the call",
        ),
        (
            [message("send", 1), message("recv", 2), message("send", 0)],
            "rank 0 waits to send to 1, 1 receive from 2, 2 send to 0 at train.py:113 in train_step",
            "before it makes the call",
        ),
    ],
)
def test_messages_in_a_circle(messages, title, cause):
    stood = [waiting(rank, one) for rank, one in enumerate(messages)]
    found = first(fold(spec(nproc=len(stood)), start(*range(len(stood))), stood), "hang")
    assert found.title == title and cause in found.cause and "batch_isend_irecv" in found.fix


def test_a_circle_is_known_when_the_first_rank_reports_it():
    """Rank 2 has not waited long enough to report itself, and rank 1 neither."""
    others = [called(1, ops=[message("send", 2)]), called(2, ops=[message("send", 0)])]
    early = first(fold(spec(nproc=3), start(0, 1, 2), others, waiting(0, message("send", 1))), "hang")
    late = [waiting(1, message("send", 2)), waiting(2, message("send", 0))]
    all_report = first(fold(spec(nproc=3), start(0, 1, 2), others, waiting(0, message("send", 1)), late), "hang")
    assert early == all_report


@pytest.mark.parametrize("reporter", [0, 1])
def test_whichever_of_two_collectives_is_reported_first_the_story_is_the_same(reporter):
    stood = {0: op("all_reduce", 13), 1: op("all_gather", 13)}
    told = [called(rank, ops=[one]) for rank, one in stood.items()]
    early = first(fold(spec(), start(0, 1), told, waiting(reporter, stood[reporter])), "hang")
    late = first(fold(spec(), start(0, 1), told, [waiting(rank, one) for rank, one in stood.items()]), "hang")
    assert early == late and late.ranks == (1, 0)


def test_a_message_and_a_collective_in_a_circle():
    found = first(fold(spec(), start(0, 1), waiting(0, message("recv", 1)), waiting(1, op())), "hang")
    assert found.title.startswith("rank 0 waits to receive from rank 1, rank 1 is in all_reduce #10")
    assert "both before it, or both after it" in found.fix


def test_a_message_whose_peer_is_elsewhere():
    found = first(fold(spec(), start(0, 1), steps(1, 7), waiting(0, message("send", 1))), "hang")
    assert found.title.endswith("; rank 1 has not received it") and found.ranks == (1, 0)
    stood = [waiting(0, message("recv", 1)), waiting(1, at=(30, "load"))]
    found = first(fold(spec(), start(0, 1), stood), "hang")
    assert found.title.endswith("; rank 1 has not sent it") and "it is at train.py:30 in load" in found.fix


def test_a_send_and_a_receive_with_different_tags():
    stood = [waiting(0, message("send", 1, tag=5)), waiting(1, message("recv", 0, tag=7))]
    found = first(fold(spec(), start(0, 1), stood), "hang")
    assert "rank 1 waits to receive from rank 0 with tag 7" in found.title and "same tag" in found.fix


def test_a_message_at_the_end_of_a_chain_is_named():
    stood = [waiting(0, message("recv", 1)), waiting(1, message("recv", 2))]
    found = first(fold(spec(nproc=3), start(0, 1, 2), steps(2, 7), stood), "hang")
    assert found.title.startswith("rank 1 has waited") and found.ranks[0] == 2


# ---- sequences of collectives

LAST = ("barrier", 0)


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ([("all_reduce", 4, "Int")], [("all_reduce", 4, "Float")], "dtypes"),
        ([("all_reduce", 4)], [("all_reduce", 8)], "sizes"),
        ([("broadcast",), ("all_reduce",)], [("all_reduce",), ("broadcast",)], "different order"),
        ([("broadcast",), ("all_reduce",)], [("all_reduce",), ("barrier",)], "did not make"),
        ([("all_gather", 4, "Float", True)], [("broadcast",)], "another thread"),
    ],
)
def test_collectives_that_paired_silently(one, other, cause):
    """The first difference decides, whichever rank reports first."""
    same = [("all_reduce", 16)] * 2
    told = [called(0, *same, *one, LAST), called(1, *same, *other, LAST)]
    stood = [waiting(0, op("barrier", 20)), waiting(1, at=(77, "save"), computed=0.0)]
    both = first(fold(spec(), start(0, 1), told, stood), "hang")
    assert "since call 3 of the default group: rank 0 " in both.title and cause in both.cause
    alone = [first(fold(spec(), start(0, 1), told, event), "hang") for event in stood]
    assert {(found.title, found.cause, found.fix) for found in alone} == {(both.title, both.cause, both.fix)}


def test_the_rank_that_differs_from_the_majority_is_named():
    told = [called(rank, ("all_reduce", 4, "Half" if rank == 1 else "Float"), LAST) for rank in range(3)]
    found = first(fold(spec(nproc=3), start(0, 1, 2), told, waiting(0, op("barrier", 9, ranks=(0, 1, 2)))), "hang")
    assert found.ranks[0] == 1 and "ranks 0, 2 all_reduce (4, Float), rank 1 all_reduce (4, Half)" in found.title


def test_sequences_that_agree_as_far_as_both_are_known():
    shorter = [called(0, ("broadcast",), LAST), called(1, LAST, ("all_reduce",), begin=2)]
    found = first(fold(spec(), start(0, 1), shorter, waiting(0, op("barrier", 9))), "hang")
    assert found.title.endswith("rank 1 never reached it")
    assert names(fold(spec(), start(0, 1), called(0, ("broadcast",)), called(1, LAST))) == []  # nobody waits


@pytest.mark.parametrize(
    ("events", "fix"),
    [
        ([waiting(0, op()), waiting(1, op())], "firewall"),
        ([waiting(0, op()), waiting(1, at=(30, "load"))], "line of that rank"),
        ([waiting(0, op())], "longer"),
        ([waiting(0, op()), activity(1, "evaluating")], "evaluate on every rank"),
        ([waiting(0, phase="data"), waiting(1, phase="data")], "num_workers=0"),
        ([waiting(0, stack=stack(3, "init_process_group"))], "MASTER_ADDR"),
    ],
)
def test_the_fix_follows_the_cause(events, fix):
    assert fix in first(fold(spec(), start(0, 1), events), "hang").fix


def test_a_sharded_model_that_is_called_different_numbers_of_times():
    inside = (
        stack(32, "main") + f'\n  File "{SITE}/fsdp/_fully_shard/_fsdp_collectives.py", line 9, in foreach_all_gather'
    )
    stood = [waiting(0, op("all_reduce", 13)), waiting(1, op("all_gather", 13), stack=inside)]
    assert "equally often" in first(fold(spec(), start(0, 1), stood), "hang").fix


# ---- a collective that one rank called alone, long before the end


def counted(rank: int, calls: dict[int, int], end: tuple[int, int] | None = None, group: str = "0") -> list[dict]:
    """How many collectives a rank had called after steps, and at its end."""
    looks = [(step, number, False) for step, number in calls.items()]
    looks += [(*end, True)] if end else []
    return [
        {
            "kind": "look",
            "t": 10.0 + step,
            "rank": rank,
            "step": step,
            "sums": [],
            "end": over,
            "calls": {group: number},
        }
        for step, number, over in looks
    ]


BEFORE = counted(1, {4: 4, 8: 8, 12: 12})
AFTER_8 = counted(0, {4: 4, 8: 8, 12: 13})
LINES = (op(seq=21), op("barrier", seq=21, sizes=()))  # rank 0 is in the 20th step, rank 1 has done it


def stood(*counts: list[dict], step: int = 20) -> list:
    """Rank 0 waits in a step, rank 1 behind the loop."""
    waits = [waiting(0, LINES[0], step=step), waiting(1, LINES[1], step=step + 1, at=(40, "main"))]
    return [start(0, 1), *counts, *steps(0, step), *steps(1, step + 1), *waits]


def test_a_hang_names_the_step_in_which_one_rank_called_more():
    found = findings(fold(spec(), *stood(AFTER_8, BEFORE)))
    assert [one.name for one in found] == ["hang"]
    assert "rank 0: in all_reduce #21" in found[0].evidence and "rank 1: in barrier #21" in found[0].evidence
    assert "13 on rank 0, 12 on rank 1 after step 12, equally many after step 8" in found[0].evidence
    assert "rank 0 called a collective in a step between 9 and 12" in found[0].cause
    assert found[0].fix.startswith("stop the run; make that call on every rank")


@pytest.mark.parametrize(
    ("counts", "events"),
    [
        ((counted(0, {4: 4, 8: 9, 12: 12}), BEFORE), []),  # a thread was late on one rank for a while
        ((counted(0, {4: 4, 8: 8, 12: 12}), BEFORE), []),
        ((AFTER_8, counted(1, {4: 4, 8: 8, 12: 12}, group="1")), []),
        ((AFTER_8, BEFORE), [traffic(0, send=(4, 64))]),  # some backends count messages
    ],
)
def test_a_hang_whose_ranks_called_equally_many_collectives(counts, events):
    found = first(fold(spec(), *stood(*counts), *events), "hang")
    assert found.cause.startswith("a collective completes only when every rank in its group calls it")


def test_ranks_that_lose_each_other_after_a_collective_of_one_of_them():
    lost = [error(0, CLOSED, ops=[op(seq=21)]), end(0, 1), end(1), status("failed", rank0=1)]
    told = [start(0, 1), AFTER_8, BEFORE, steps(0, 19), steps(1, 20), lost]
    state = fold(spec(), *told)
    assert names(state) == ["extra_collective"]
    found = findings(state)[0]
    assert (
        found.ranks == (0, 1) and "rank 0 called a collective of the default group in a step between 9" in found.title
    )


def test_a_collective_of_one_rank_after_the_last_count():
    """Rank 0 has called more, and did fewer steps."""
    ends = counted(0, {4: 4}, end=(9, 11)), counted(1, {4: 4}, end=(10, 10))
    lost = [error(0, CLOSED, ops=[op(seq=11)]), end(0, 1), end(1), status("failed", rank0=1)]
    found = first(fold(spec(), start(0, 1), *ends, steps(0, 9), steps(1, 10), lost), "extra_collective")
    assert "11 on rank 0, 10 on rank 1" in found.evidence and "between 5 and 10" in found.title
    fewer = counted(0, {4: 4}, end=(9, 10)), counted(1, {4: 4}, end=(10, 10))
    assert names(fold(spec(), start(0, 1), *fewer, steps(0, 9), steps(1, 10), lost))[0] == "left_early"
    failed = [error(0, "no memory", ops=[]), status("failed", rank0=1, rank1=-15)]
    assert names(fold(spec(), start(0, 1), AFTER_8, BEFORE, *steps(0, 19), *failed)) == ["first_failure"]


def test_a_group_that_is_not_the_default_one_has_its_number():
    told = counted(0, {4: 4, 8: 9}, group="3"), counted(1, {4: 4, 8: 8}, group="3")
    assert "collectives of group #3" in first(fold(spec(), *stood(*told)), "hang").evidence
