"""Memory curves from profiler data: by hand, and compared with sums over every move."""

from __future__ import annotations

import math
import random

import pytest
from profiled_steps import MS, PHASES

from labkit.probe import timeline as at
from labkit.probe.timeline import (
    MOST,
    Allocation,
    curve,
)
from labkit.record.writer import OWNERS


def drawn(allocations=(), before=None, after=None, constant=None, freed=0, phases=PHASES, **options):
    return curve(list(allocations), phases, before or {}, after or {}, constant or {}, freed, **options)


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


def test_a_block_that_is_larger_than_its_tensor_ends_as_what_it_was():
    made = drawn(
        [taken(3, 1, -100), taken(15, 2, 100)],
        before={1: ("gradients", 70), 9: ("parameters", 50)},
        after={2: "gradients", 9: "parameters"},
        constant={"other": 35},  # the ends of both blocks
    )
    assert at_ms(made, 0) == at_ms(made, 15) == {"gradients": 100, "parameters": 50, "other": 5}
    assert at_ms(made, 3) == {"parameters": 50, "other": 5}
    assert made["peak"] == 155


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


def test_what_the_last_step_left_counts_until_it_is_released():
    left = {1: ("other", 40), 2: ("other", 7), 3: ("other", 5), 4: ("other", 3)}
    released = {1: 8.0 * MS, 2: math.inf, 3: 9.0 * MS, 4: -1.0 * MS}
    made = drawn([taken(4, 3, 1)], before=left, after={3: "gradients"}, released=released)
    assert made["times"][0] == 0.0, "what is released between profile and step is not there"
    assert [at_ms(made, moment) for moment in (0, 4, 8, 40)] == [
        {"other": 52},
        {"gradients": 1, "other": 47},  # its address is in use again: it was freed before
        {"gradients": 1, "other": 7},
        {"gradients": 1, "other": 7},
    ]
    assert drawn(before=left)["times"] == [0.0], "of what is not watched nothing is known"


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


def test_an_unseen_release_is_early_unless_the_same_operation_makes_activations():
    comm = [["all_gather", 5 * MS, 6 * MS, 64, "", [0, 1], 1]]
    norm = "aten::empty", "aten::layer_norm"
    moves = [taken(3, 1, 64, "aten::empty", "_c10d_functional::all_gather"), taken(4, 2, 32, *norm)]
    moves += [taken(4, 3, 32, "aten::mm")]
    for address in (1, 2, 3):
        moves += [taken(15, address, 8), taken(17, address, -8)]
    early = curve(moves, PHASES, {}, {}, {}, 0, comm)
    assert at_ms(early, 5.5) == {"communication": 64, "other": 64}
    assert at_ms(early, 6) == {}
    made = curve([*moves, taken(3, 4, 32, *norm), taken(12, 4, -32)], PHASES, {}, {}, {}, 0, comm)
    assert at_ms(made, 5.5) == {"communication": 64, "activations": 64, "other": 32}
    assert at_ms(made, 6) == {"activations": 64}
    assert at_ms(made, 12) == {"activations": 32}
    assert at_ms(made, 16) == at_ms(early, 16) == {"other": 24}


@pytest.mark.parametrize("freed", [4.9, 5.5])
def test_a_call_that_is_interrupted_does_not_raise_the_peak(freed):
    """It frees its own copy before gloo's thread makes one, or, by chance, a moment later."""
    comm = [["all_gather", 5 * MS, 6 * MS, 64, "", [0, 1], 1]]
    call = "aten::empty", "c10d::_allgather_base_"
    copy = [taken(4, 1, 64, *call), taken(freed, 1, -64, *call)]
    made = curve([*copy, taken(5.1, 2, 64, "gloo:all_gather"), taken(5.9, 2, -64)], PHASES, {}, {}, {}, 0, comm)
    assert made["peak"] == 64


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
