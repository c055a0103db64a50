"""The fold: the state after events, its wording, and what went wrong."""

from __future__ import annotations

import json
import math

import pytest
from folded import apply, error, fold, spec, start, status, step

from labkit.analysis.metrics import pace, seconds_left
from labkit.analysis.summary import summarise
from labkit.plan.spec import Spec
from labkit.record.documents import plain
from labkit.record.folder import RunFolder
from labkit.record.stacks import MESSAGE_LIMIT, TEXT_LIMIT


def test_ranks_are_in_order_whichever_file_is_read_first():
    one, other = fold(spec(), start(1), start(0), step(1, 1)), fold(spec(), start(0), step(0, 1), start(1))
    assert list(one.ranks) == list(other.ranks) == [0, 1]
    assert [one.ranks[rank].rank for rank in one.ranks] == [0, 1] and len(one.ranks[1].steps) == 1


# ---- folding


def test_steps_of_two_ranks_in_any_order():
    state = fold(spec(), step(1, 1), step(0, 1), step(0, 2), step(1, 2, loss=None), step(0, 3))
    assert state.step == 2  # the last that both have finished
    assert len(state.ranks[0].steps) == 3 and len(state.ranks[1].steps) == 2
    assert state.ranks[0].steps.phases["backward"][-1] == 0.2
    assert math.isnan(state.ranks[1].steps.loss[-1])
    assert state.loss_at(0) == 1.0 and state.loss_at(1) == 0.5  # of those that have one
    assert state.loss_at(2) == pytest.approx(1 / 3) and state.loss_at(7) is None
    assert state.ranks[0].peak_memory == 153
    assert state.broken == 0


def test_a_rank_that_has_not_spoken_holds_the_step_at_none():
    assert fold(spec(), step(0, 1), step(0, 2)).step == 0


def test_ranks_of_a_script_that_serve_the_others_do_not_hold_the_step():
    script = {"kind": "spec", "spec": Spec(script="train.py", nproc=3, device="cpu").to_json()}
    events = [script, start(0), start(1), start(2), step(1, 1), step(2, 1), step(2, 2)]
    state = fold(events)
    assert state.step == 1 and not state.note
    assert fold(events[:4]).step == 0 and fold(events[:2], events[4:]).step == 1
    apply(state, status("finished"))
    assert "rank 0 finished 0 steps, rank 1 finished 1 step, rank 2 finished 2 steps" in state.note
    apply(state, {"kind": "saw", "t": 1.0, "rank": 1, "what": "restored", "step": 1})
    assert "loaded an optimizer's state after step 1: steps that it repeats count again" in state.note
    alike = fold(script, *(step(rank, number) for rank in range(3) for number in (1, 2)), status("finished"))
    assert alike.step == 2 and not alike.note


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "step", "t": 1.0, "rank": 0},
        step(0, 1, step="many"),
        step(0, 1, step=math.nan),
        step(0, 1, step=math.inf),
        step(0, 1, loss=10**400),
        step(0, 1, seconds=[1, 2]),
        step("zero", 1),
        {"kind": "step", "t": 1.0, "step": 1},
        {"kind": "memory", "t": 1.0, "rank": 0, "owners": 5},
        {"kind": "memory", "t": 1.0, "rank": 0, "owners": {"parameters": math.nan}},
        {"kind": "activity", "t": 1.0, "rank": 0},
        {"kind": "device", "t": 1.0, "rank": 0},
        {"kind": "system", "t": 1.0, "gpus": [3]},
    ],
)
def test_an_event_with_invalid_fields_is_a_broken_line(event, tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (step(0, 1), event, step(0, 2))), encoding="utf-8")
    reader = RunFolder(tmp_path).reader(path)
    assert [one.step for one in reader.poll()] == [1, 2]
    assert reader.broken == 1


def test_unknown_kinds_and_fields_pass():
    state = fold({"kind": "of another time", "t": 1.0}, step(0, 1, colour="red"), {"kind": "comm", "rank": 0, "t": 1.0})
    assert state.broken == 0 and len(state.ranks[0].steps) == 1


def test_a_spec_of_another_version_is_shown_and_not_reckoned_with():
    state = fold({"kind": "spec", "spec": {"strategy": "of another time", "nproc": 2}})
    assert state.spec.strategy == "of another time" and state.world_size == 2
    assert state.total_steps is None and state.broken == 0


def test_metrics_owners_device_and_system():
    state = fold(
        start(0),
        {"kind": "device", "t": 1.0, "rank": 0, "device": "cuda:0", "device_name": "T4"},
        {"kind": "metric", "t": 1.0, "rank": 0, "name": "accuracy", "value": 0.5, "step": 4},
        {"kind": "metric", "t": 2.0, "rank": 0, "name": "accuracy", "value": 0.75, "step": 8},
        {"kind": "memory", "t": 1.0, "rank": 0, "owners": {"parameters": 100, "gradients": 100}},
        {
            "kind": "system",
            "t": 1.0,
            "cpu_percent": 50.0,
            "memory_used": 9,
            "gpus": [{"index": 0, "memory_used": 5, "memory_total": 16}],
        },
        {"kind": "system", "t": 1.2, "cpu_percent": None, "ranks": {"0": {"cpu_percent": 90.0, "rss": 7}}},
    )
    assert (state.ranks[0].device, state.ranks[0].device_name) == ("cuda:0", "T4")
    assert state.metric("accuracy") == 0.75 and state.metric("f1") is None
    assert state.ranks[0].owners == {"parameters": 100, "gradients": 100}
    assert list(state.system.gpus[0]["memory_used"]) == [5.0] and state.system.gpu_memory_total[0] == 16
    assert list(state.system.ranks[0]["rss"]) == [7.0] and math.isnan(state.system.cpu_percent[1])


# ---- words


def test_the_words_of_a_good_run():
    state = fold(spec())
    said = [state.words]
    for event in (
        status("starting"),
        status("running"),
        start(0),
        start(1),
        {"kind": "activity", "t": 1.0, "rank": 0, "name": "training"},
        {"kind": "activity", "t": 1.0, "rank": 1, "name": "training"},
        {"kind": "activity", "t": 2.0, "rank": 0, "name": "evaluating"},
        {"kind": "activity", "t": 2.0, "rank": 1, "name": "evaluating"},
        {"kind": "activity", "t": 3.0, "rank": 1, "name": "training"},
        status("stopping"),
        status("finished"),
    ):
        apply(state, event)
        said.append(state.words)
    assert said == [
        "ready",
        *["starting ranks"] * 4,
        *["training"] * 3,
        "evaluating",
        "training",
        "stopping",
        "finished",
    ]
    assert state.over


def test_the_words_of_a_failure():
    assert fold(status("failed"), error(1, 5.0)).words == "failed (rank 1: ValueError: bad sample)"
    assert fold(status("failed"), error(0, 5.0, message="")).words == "failed (rank 0: ValueError)"
    assert fold(status("failed", message="torchrun did not start")).words == "failed (torchrun did not start)"


# ---- what went wrong


def test_the_first_error_is_the_cause_and_the_others_fell_with_it():
    state = fold(spec(nproc=4), *(start(rank) for rank in range(4)), error(2, 5.0), error(1, 5.5, message="also bad"))
    apply(state, {"kind": "end", "t": 5.1, "rank": 2, "exit_code": 1})
    failure = state.failure
    assert (failure.rank, failure.type, failure.message, failure.exit_code) == (
        2,
        "ValueError",
        "bad sample",
        1,
    )
    assert failure.collateral == [1] and failure.traceback


@pytest.mark.parametrize(
    "complaint",
    [
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:14345",
        "NCCL error: remote process exited or there was a network error",
        "Broken pipe",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_a_complaint_about_a_peer_never_outranks_the_peer(complaint):
    state = fold(start(0), start(1), error(0, 4.0, "RuntimeError", complaint), error(1, 5.0))
    assert state.failure.rank == 1 and state.failure.collateral == [0]


def test_a_rank_that_died_by_a_signal_outranks_the_complaints():
    state = fold(
        start(0),
        start(1),
        error(0, 4.0, "RuntimeError", "Connection reset by peer"),
        status(
            "failed", failures={"1": {"exit_code": -9, "signal": "SIGKILL", "t": 6.0}, "0": {"exit_code": 1, "t": 6.0}}
        ),
    )
    assert (state.failure.rank, state.failure.type, state.failure.exit_code) == (1, "SIGKILL", -9)
    assert state.failure.collateral == [0]
    assert state.words == "failed (rank 1: SIGKILL)"


def test_a_rank_that_the_agent_ended_is_no_cause():
    failures = {"0": {"exit_code": -15, "signal": "SIGTERM", "t": 1.0}, "1": {"exit_code": 3, "t": 2.0}}
    state = fold(status("failed", failures=failures))
    assert state.failure.rank == 1 and state.failure.type == "exit code 3"


def test_a_failure_without_a_time_comes_last():
    failures = {"0": {"exit_code": 1, "t": None}, "1": {"exit_code": 3, "t": 2.0}, "2": {"exit_code": 4}}
    assert fold(status("failed", failures=failures)).failure.rank == 1


def test_a_complaint_alone_is_the_cause():
    assert fold(error(0, 1.0, "RuntimeError", "Broken pipe")).failure.rank == 0
    assert fold(start(0), step(0, 1)).failure is None


def test_a_rank_that_never_said_how_it_ended_fell_with_the_first():
    events = spec(), start(0), start(1), error(1, 2.0)
    assert fold(*events).failure.collateral == []  # while the run goes on, rank 0 may still be well
    assert fold(*events, status("failed")).failure.collateral == [0]


# ---- attempts


def test_a_new_attempt_forgets_the_error_and_counts_from_its_own_steps():
    state = fold(spec(), *(start(rank) for rank in (0, 1)))
    for number in (1, 2, 3):
        apply(state, step(0, number))
        apply(state, step(1, number))
    apply(state, error(1, 4.0))
    for rank in (0, 1):
        apply(state, start(rank, t=10.0, attempt=1))
    assert state.failure is None and state.step == 0 and state.ranks[0].attempts == {0: 0, 1: 3}
    for rank in (0, 1):
        apply(state, step(rank, 1, t=11.0))
        apply(state, step(rank, 2, t=11.5))
    assert state.step == 2
    assert pace(state) == pytest.approx(0.5)  # not the ten seconds between the attempts
    assert seconds_left(state) == pytest.approx(8 * 0.5)


# ---- long texts


def test_texts_of_any_length_are_bounded_where_they_are_read():
    long = "shm connection was likely " * 100_000
    failures = {"1": {"exit_code": 1, "message": long, "t": 1.0}}
    state = fold(
        spec(),
        start(0),
        start(1),
        {"kind": "error", "t": 2.0, "rank": 0, "type": "RuntimeError", "message": long, "traceback": long},
        {"kind": "waiting", "t": 2.0, "rank": 1, "since": 1.0, "stack": long},
        {"kind": "probe_error", "t": 2.0, "rank": 1, "part": "memory", "type": "KeyError", "message": long},
        status("failed", message=long, failures=failures),
    )
    texts = [
        getattr(record, name)
        for record in (state.ranks[0].error, state.ranks[1].waiting, state.unwatched[0])
        for name in record.__struct_fields__
    ]
    texts += [state.status.message, state.status.failures[1].message]
    assert max(len(text) for text in texts if isinstance(text, str)) < TEXT_LIMIT + 100
    assert len(state.failure.message) < MESSAGE_LIMIT + 100 and state.failure.message.startswith("shm connection")
    assert state.failure.message.endswith("likely ") and "characters left out" in state.failure.message
    assert len(json.dumps(plain(summarise(state)))) < 10 * TEXT_LIMIT
