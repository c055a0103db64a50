"""Findings about ranks that do not call the same collectives."""

from __future__ import annotations

import pytest
from diagnosed import (
    CLOSED,
    DETAIL,
    GONE,
    UNLIKE,
    activity,
    end,
    error,
    first,
    fold,
    loader,
    names,
    op,
    spec,
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
    assert names(state) == ["uneven_inputs", "mismatch"]
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


def test_a_mismatch_with_another_thread_in_a_collective():
    """As async_save on the default group, where gloo ends the process."""
    state = fold(spec(), start(0, 1), status("failed", rank0=(-6, UNLIKE), rank1=-15))
    assert "process_group=" not in first(state, "mismatch").fix
    ended = status("failed", rank0=(-6, UNLIKE))
    ended["status"]["failures"]["0"]["beside"] = "…/distributed_c10d.py"
    found = findings(fold(spec(), start(0, 1), ended))
    assert [one.name for one in found] == ["mismatch"] and "process_group=dist.new_group" in found[0].fix


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
