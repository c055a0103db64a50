"""The bytes that two ranks exchange in a step, against what the way of splitting demands."""

from __future__ import annotations

import pytest
import torch
from folded import apply, events_in
from weaving import exchange

from labkit.probe.traffic import joined, operation, sent, since_then
from labkit.record.folder import RunFolder
from labkit.record.state import RunState

ALL = 4 * (16 * 34 + 34 + 34 * 5 + 5)  # bytes of the model's parameters
PADDED = ALL + 4 * (34 + 1)  # FSDP2 gives both ranks as many rows: of five, three each
RECORDER = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")


def ranks(folder: RunFolder) -> dict:
    state = RunState()
    for file in folder.event_files().values():
        for event in events_in(file):
            assert event["kind"] != "probe_error", event
            apply(state, event)
    return state.ranks


@pytest.mark.skipif(not RECORDER, reason="this torch has no flight recorder")
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("ddp", [{"all_reduce": ALL}] * 2),
        ("fsdp2", [{"all_gather": PADDED, "all_reduce": PADDED}] * 2),  # gloo's reduce-scatter is an all-reduce
        ("pp", [{"send": 8 * 34 * 4}] * 2),
    ],
)
def test_bytes_of_a_step(way, expected, shared_run):
    found = ranks(exchange(shared_run, way))
    for rank, ops in enumerate(expected):
        traffic = found[rank].traffic
        assert {name: op.bytes for name, op in traffic.ops.items()} == ops
        assert found[rank].bytes_per_step == sum(sent(name, size, 2) for name, size in ops.items())


@pytest.mark.parametrize("way", ["pp", "ddp"])
def test_a_profiled_call_knows_its_group_and_a_message_its_other_end(way, shared_run):
    for number, rank in ranks(exchange(shared_run, way)).items():
        for timeline in rank.timelines.values():
            assert timeline.comm
            for call in timeline.comm:
                assert call.ranks == ([1 - number] if call.op in ("send", "recv") else [0, 1]), call


def test_one_process_sends_nothing(shared_run):
    assert ranks(exchange(shared_run, "single"))[0].bytes_per_step == 0.0


def test_a_ring():
    assert (sent("all_reduce", 100, 4), sent("all_gather", 100, 4), sent("send", 100, 4), sent("barrier", 100, 4)) == (
        150,
        75,
        100,
        0,
    )


def test_names_of_backends():
    names = ["nccl:_all_gather_base", "nccl:_reduce_scatter_base", "nccl:all_reduce_barrier", "gloo:all_reduce"]
    assert [operation(name) for name in names] == ["all_gather", "reduce_scatter", "barrier", "all_reduce"]


def entry(number: int, time: int, name: str = "nccl:all_reduce", is_p2p: bool = False) -> dict:
    """An entry of a flight recorder."""
    group = ["0", "default_pg"]
    return {"record_id": number, "time_created_ns": time, "profiling_name": name, "is_p2p": is_p2p} | {
        "process_group": group
    }


def test_the_recorders_of_nccl_and_of_other_backends_are_read_as_one():
    nccl, others = [entry(1, 30), entry(0, 10)], [entry(0, 20, "gloo:all_reduce")]
    both = joined([nccl, others])
    assert [(one["record_id"], one["time_created_ns"]) for one in both] == [(0, 10), (1, 20), (2, 30)]
    assert since_then(both, 15, now=40) == both[1:]
    assert joined([[], others]) == joined([others]) == others and joined([[], []]) == []
    late = joined([[entry(7, 30)], others])
    assert since_then(late, 15, now=40) is None, "earlier entries are lost"


def test_messages_and_the_ends_of_coalesced_groups_are_no_collectives():
    names = ["nccl:allreduce_coalesced", "nccl:coalesced", "nccl:send 0->1", "nccl:coalesced"]
    entries = [entry(number, number, name, "send" in name) for number, name in enumerate(names)]
    assert [one["record_id"] for one in since_then(entries, 0, now=9)] == [0]
    assert operation("nccl:allreduce_coalesced") == "all_reduce"
