"""Timelines from profiler data: compared with brute force, and computed by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from profiled_steps import MS, PHASES

from labkit.probe.timeline import (
    GAP,
    MOST,
    Row,
    busy,
    collectives,
    merged,
    overlap,
    timeline,
    without,
)


def cpu(name, start, end, thread=1):
    return Row(name, round(start * MS), round(end * MS), thread)


def gpu(name, start, end):
    return Row(name, round(start * MS), round(end * MS), 7, on_gpu=True)


def recorded(op, seq, size=1024):
    return {"op": op, "bytes": size, "group": "default_pg", "ranks": [0, 1], "seq": seq}


# ---- spans


def some_spans(chance, many=12, end=200):
    edges = [(chance.randrange(end), chance.randrange(1, 25)) for _ in range(chance.randrange(many))]
    return [(start, start + length) for start, length in edges]


def covered(spans):
    return {moment for start, end in spans for moment in range(start, end)}


@pytest.mark.parametrize("seed", range(30))
def test_spans_agree_with_counting_every_moment(seed):
    chance = random.Random(seed)
    spans, others = some_spans(chance), some_spans(chance)
    own, foreign = merged(spans), merged(others)
    assert covered(own) == covered(spans)
    assert all(before < after for (_, before), (after, _) in pairwise(own))
    left = without(own, foreign)
    assert covered(left) == covered(spans) - covered(others)
    assert all(start < end for start, end in left)
    start, end = sorted((chance.randrange(200), chance.randrange(200)))
    assert overlap(own, start, end) == len(covered(spans) & set(range(start, end)))


@pytest.mark.parametrize("seed", range(10))
def test_a_gap_joins_what_is_no_farther_apart(seed):
    spans, gap = some_spans(random.Random(seed)), 5
    joined = merged(spans, gap)
    assert all(after - before > gap for (_, before), (after, _) in pairwise(joined))
    closed = {
        moment
        for (_, before), (after, _) in pairwise(merged(spans))
        if after - before <= gap
        for moment in range(before, after)
    }
    assert covered(joined) == covered(spans) | closed


# ---- where the rank computes


def test_an_operation_that_holds_a_collective_is_no_computing():
    rows = [
        cpu("aten::linear", 1, 2),
        cpu("aten::wait_tensor", 4, 9),
        cpu("c10d::allreduce_", 5, 8),
        cpu("aten::copy_", 6, 7),
        cpu("python: loop", 0, 40),
    ]
    assert busy(rows, on_gpu=False) == [(1 * MS, 2 * MS), (6 * MS, 7 * MS)]


def test_a_collective_in_another_thread_takes_nothing_away():
    rows = [
        cpu("aten::mm", 4, 9, thread=1),
        cpu("c10d::allreduce_", 5, 8, thread=2),
        cpu("gloo:all_reduce", 5, 8, thread=3),
    ]
    assert busy(rows, on_gpu=False) == [(4 * MS, 9 * MS)]


def test_short_gaps_are_computing_and_long_ones_are_not():
    rows = [
        Row("aten::mm", 0, 100_000, 1),
        Row("aten::mm", 100_000 + GAP, 300_000, 1),
        Row("aten::mm", 300_001 + GAP, 500_000, 1),
    ]
    assert busy(rows, on_gpu=False) == [(0, 300_000), (300_001 + GAP, 500_000)]


def test_on_a_gpu_kernels_and_copies_count_alone():
    rows = [
        cpu("aten::mm", 0, 9),
        gpu("ampere_sgemm_128x64", 2, 4),
        gpu("Memcpy HtoD (Pinned -> Device)", 5, 6),
        gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3, 9),
    ]
    assert busy(rows, on_gpu=True) == [(2 * MS, 4 * MS), (5 * MS, 6 * MS)]


def test_a_named_span_that_is_repeated_among_the_kernels_is_no_computing():
    rows = [
        cpu("nccl:all_reduce", 1, 2),
        cpu("Optimizer.step#SGD.step", 30, 31),
        gpu("nccl:all_reduce", 3, 9),
        gpu("Optimizer.step#SGD.step", 31, 39),
        gpu("multi_tensor_apply", 32, 33),
    ]
    assert busy(rows, on_gpu=True) == [(32 * MS, 33 * MS)]


# ---- collectives


def test_collectives_are_matched_in_order_with_those_of_their_sort():
    rows = [
        cpu("gloo:all_reduce", 20, 21),
        cpu("gloo:all_gather", 15, 16),
        cpu("gloo:all_reduce", 10, 11),
        cpu("gloo:all_reduce", 25, 26),
        cpu("aten::mm", 0, 30),
        cpu("c10d::allreduce_", 9, 12),
    ]
    found = collectives(
        rows, [recorded("all_reduce", 1, 8), recorded("all_gather", 2, 16), recorded("all_reduce", 3, 32)]
    )
    assert [(op, start // MS, size, seq) for op, start, _, size, _, _, seq in found] == [
        ("all_reduce", 10, 8, 1),
        ("all_gather", 15, 16, 2),
        ("all_reduce", 20, 32, 3),
        ("all_reduce", 25, None, None),
    ]


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
    ],
)
def test_a_kernel_of_nccl_finds_its_record(kernel, op):
    assert collectives([gpu(kernel, 1, 2)], [recorded(op, 5)]) == [[op, MS, 2 * MS, 1024, "default_pg", [0, 1], 5]]


def test_the_kernel_of_a_send_and_of_a_receive_is_what_was_asked_for():
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    found = collectives(
        [gpu(name, at, at + 1) for at in (1, 3, 5)], [{"op": "recv", "bytes": 8}, {"op": "send", "bytes": 16}]
    )
    assert [(op, size) for op, _, _, size, *_ in found] == [("recv", 8), ("send", 16), ("send", None)]


def test_the_kernel_of_an_all_to_all_is_found_among_those_of_messages():
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    found = collectives(
        [gpu(name, at, at + 1) for at in (1, 3)], [recorded("all_to_all", 5), recorded("all_to_all", 6)]
    )
    assert [(op, sequence) for op, *_, sequence in found] == [("all_to_all", 5), ("all_to_all", 6)]


# ---- the event


def test_a_timeline_by_hand():
    rows = [
        cpu("aten::mm", 2, 10),
        cpu("aten::mm", 10, 15),
        cpu("aten::mm", 18, 20),
        cpu("aten::add_", 31, 40),
        cpu("gloo:all_reduce", 14, 22, thread=3),
        cpu("gloo:all_reduce", 21, 25, thread=4),
        cpu("gloo:all_reduce", 0, 1, thread=3),
        cpu("FSDP::pre_forward (0)", 2, 3),
        cpu("aten::mm", 45, 50),
    ]
    event = timeline(rows, PHASES, [recorded("all_reduce", number) for number in (1, 2, 3)], "cpu")
    assert (event["seconds"], event["backend"], event["device"], event["left_out"]) == (0.04, "gloo", "cpu", 0)
    assert event["phases"] == [
        ["data", 0.0, 0.002],
        ["forward", 0.002, 0.01],
        ["backward", 0.01, 0.03],
        ["optimizer", 0.03, 0.04],
    ]
    assert event["busy"] == [[0.002, 0.015], [0.018, 0.02], [0.031, 0.04]]
    assert event["exposed"] == {
        "backward": 0.008
    }  # 15 to 18 and 20 to 25 ms; what was under way while data were waited for is not named
    assert event["comm"][1] == ["all_reduce", 0.014, 0.022, 1024, "default_pg", [0, 1], 2]
    assert event["marks"] == [["FSDP::pre_forward (0)", 0.002, 0.003]]


def test_the_backend_is_what_did_the_work():
    kernel = gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 12, 14)
    assert timeline([kernel], PHASES, [], "cuda")["backend"] == "nccl"
    assert timeline([cpu("gloo:all_reduce", 12, 14)], PHASES, [], "cuda")["backend"] == "gloo"
    assert timeline([cpu("aten::mm", 12, 14)], PHASES, [], "cpu")["backend"] == ""


@pytest.mark.parametrize("seed", range(10))
def test_exposed_is_what_counting_finds(seed):
    chance = random.Random(seed)
    kernels, sends = some_spans(chance, end=40), some_spans(chance, end=40)
    rows = [gpu("kernel", *span) for span in kernels] + [gpu("ncclDevKernel_AllReduce", *span) for span in sends]
    open_ = covered(sends) - covered(kernels)
    wanted = {
        name: len(open_ & set(range(start // MS, end // MS))) / 1000 for name, start, end in PHASES if name != "data"
    }
    assert timeline(rows, PHASES, [], "cuda")["exposed"] == pytest.approx(
        {name: value for name, value in wanted.items() if value}
    )


def test_an_event_stays_small():
    step = 40 * MS // 2000
    rows = [Row("gloo:all_reduce", number * step, number * step + 10, 3) for number in range(2000)]
    rows += [Row("FSDP::pre_forward", number * step, number * step + 10 + number, 1) for number in range(2000)]
    spread = [Row("aten::mm", number * 10 * GAP, number * 10 * GAP + 1000, 1) for number in range(2000)]
    event = timeline(rows + spread, (("forward", 0, 2000 * 10 * GAP),), [], "cpu")
    assert len(event["comm"]) == len(event["marks"]) == MOST
    assert event["left_out"] == 2000 - MOST
    assert 0 < len(event["busy"]) <= MOST
    assert event["busy"][-1][1] == pytest.approx((1999 * 10 * GAP + 1000) / 1e9, abs=1e-6)
    lengths = [end - start for _, start, end in event["marks"]]
    assert min(lengths) == pytest.approx((10 + 2000 - MOST) / 1e9, abs=1e-6)
