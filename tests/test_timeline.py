"""Timelines and memory curves from profiler data: compared with brute force, and computed by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from labkit.probe import timeline as at
from labkit.probe.timeline import (
    GAP,
    MOST,
    Allocation,
    Row,
    busy,
    collectives,
    curve,
    merged,
    overlap,
    timeline,
    without,
)
from labkit.record.events import OWNERS

MS = 1_000_000
PHASES = (
    ("data", 0, 2 * MS),
    ("forward", 2 * MS, 10 * MS),
    ("backward", 10 * MS, 30 * MS),
    ("optimizer", 30 * MS, 40 * MS),
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


# ---- memory


def drawn(allocations=(), before=None, after=None, constant=None, freed=0, phases=PHASES):
    return curve(list(allocations), phases, before or {}, after or {}, constant or {}, freed)


def at_ms(made, moment):
    """Bytes by owner at so many ms, without the owners that hold nothing."""
    index = max(index for index, time in enumerate(made["times"]) if time <= moment / 1000 + 1e-9)
    return {owner: made["owners"][owner][index] for owner in OWNERS if made["owners"][owner][index]}


def taken(time, address, size, *inside):
    return Allocation(round(time * MS), address, size, inside)


def test_what_backward_gives_back_of_a_forward_are_activations():
    made = drawn(
        [taken(3, 1, 100), taken(4, 2, 7), taken(5, 2, -7), taken(12, 1, -100)],
        before={9: ("parameters", 50)},
        after={9: "parameters"},
    )
    assert at_ms(made, 0) == {"parameters": 50}
    assert at_ms(made, 4) == {"parameters": 50, "activations": 100, "other": 7}
    assert at_ms(made, 5) == {"parameters": 50, "activations": 100}
    assert at_ms(made, 12) == {"parameters": 50}
    assert (made["peak"], made["at_peak"]["activations"]) == (157, 100)


def test_gradients_let_go_of_unseen_end_at_zero_grad():
    made = drawn([taken(15, 2, 40)], before={1: ("gradients", 40)}, after={2: "gradients"}, freed=3 * MS)
    assert [at_ms(made, moment) for moment in (0, 2.9, 3, 15)] == [
        {"gradients": 40},
        {"gradients": 40},
        {},
        {"gradients": 40},
    ]


def test_an_address_that_is_used_again_was_given_back_before():
    made = drawn([taken(15, 1, 40)], before={1: ("gradients", 40)}, after={1: "gradients"}, freed=3 * MS)
    assert [at_ms(made, moment) for moment in (0, 3, 15, 40)] == [
        {"gradients": 40},
        {},
        {"gradients": 40},
        {"gradients": 40},
    ]
    early = drawn([taken(1, 1, 40)], before={1: ("gradients", 40)}, after={1: "gradients"}, freed=3 * MS)
    assert early["peak"] == 40


def test_what_was_given_back_and_seen_ends_there():
    made = drawn([taken(8, 1, -40)], before={1: ("gradients", 40)}, freed=3 * MS)
    assert [at_ms(made, moment) for moment in (7, 8)] == [{"gradients": 40}, {}]


def test_what_fsdp_gathers_are_parameters_and_its_buffers_communication():
    gathered = taken(3, 1, 80, "aten::empty", "FSDP::all_gather_copy_out (0)", "FSDP::pre_forward (0)")
    buffer = taken(3, 2, 60, "aten::empty", "FSDP::all_gather (0)")
    sent = taken(12, 3, 20, "c10d::_reduce_scatter_base_")
    made = drawn([gathered, buffer, sent, taken(4, 2, -60), taken(14, 1, -80), taken(15, 3, -20)])
    assert at_ms(made, 3) == {"parameters": 80, "communication": 60}
    assert at_ms(made, 12) == {"parameters": 80, "communication": 20}
    assert at_ms(made, 20) == {}


def test_buckets_that_never_move_are_there_throughout():
    made = drawn([taken(3, 1, 10)], constant={"communication": 64})
    assert [at_ms(made, moment).get("communication") for moment in (0, 3, 40)] == [64, 64, 64]


def test_what_was_taken_before_the_step_counts_by_what_is_known_of_it():
    bucket = Allocation(-5 * MS, 1, 64, ("DistributedDataParallel.forward",))
    made = drawn([bucket], constant={"communication": 64})
    assert at_ms(made, 0) == at_ms(made, 40) == {"communication": 64}


def test_an_address_taken_again_in_the_step_was_given_back_unseen():
    made = drawn([taken(3, 1, 100), taken(12, 1, 30)], after={1: "gradients"})
    assert [at_ms(made, moment) for moment in (3, 12, 40)] == [
        {"activations": 100},
        {"gradients": 30},
        {"gradients": 30},
    ]


def test_an_address_known_before_is_not_counted_twice_where_its_allocation_was_seen():
    made = drawn([Allocation(-5 * MS, 1, 30), taken(20, 1, -30)], before={1: ("gradients", 30)})
    assert made["peak"] == 30
    assert [at_ms(made, moment) for moment in (19, 20)] == [{"gradients": 30}, {}]


@pytest.mark.parametrize("seed", range(10))
def test_columns_are_whole_and_the_peak_is_their_highest_sum(seed):
    chance, moves, open_ = random.Random(seed), [], {}
    before = {number: (chance.choice(OWNERS), chance.randrange(1, 500)) for number in range(5)}
    for moment in sorted(chance.sample(range(1, 40 * MS), 5000)):
        if open_ and chance.random() < 0.5:
            address = chance.choice(list(open_))
            moves.append(Allocation(moment, address, -open_.pop(address)))
        else:
            address = 100 + len(moves)
            open_[address] = chance.randrange(1, 1000)
            moves.append(Allocation(moment, address, open_[address]))
    made = drawn(moves, before=before, after={number: owner for number, (owner, _) in before.items()})
    sums = [sum(row) for row in zip(*made["owners"].values())]
    assert len(sums) == len(made["times"]) == MOST
    assert made["times"][0] == 0.0
    assert made["times"] == sorted(made["times"])
    assert sums[0] == sum(size for _, size in before.values())
    assert sums[-1] == sums[0] + sum(open_.values())
    held, highest = sums[0], sums[0]
    for move in moves:
        held += move.size
        highest = max(highest, held)
    assert made["peak"] == sum(made["at_peak"].values()) == max(sums) == highest
    assert min(min(column) for column in made["owners"].values()) >= 0


def test_a_step_in_which_nothing_is_held_is_a_curve_of_zeros():
    made = drawn()
    assert made["times"] == [0.0]
    assert made["peak"] == 0
    assert all(column == [0] for column in made["owners"].values())


def test_thinning_keeps_the_first_the_last_and_what_is_highest():
    points = [(number, (number * 7919 % 9973,)) for number in range(MOST * 9 + 5)]
    kept = at._thinned(points)
    assert len(kept) == MOST
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(kept, key=lambda point: point[1]) == max(points, key=lambda point: point[1])
    assert kept == sorted(kept)
