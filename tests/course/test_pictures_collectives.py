"""Collectives: the plans are correct, the pictures show the plans, and the exercise finds what is wrong with a ring."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import replace

import pytest
from answers.collectives import RIGHT

from labkit import check
from labkit.analysis.theory import collectives as plans
from labkit.course import pictures
from labkit.course.pictures.collectives import _cells, _name
from labkit.figures import rank_colour

pictured = pictures.collectives
DRAWN = {
    "broadcast": [("broadcast", by) for by in plans.BROADCASTS],
    "reduce": [("reduce", by) for by in plans.REDUCES],
    "all_reduce": [("all_reduce", by) for by in plans.ALL_REDUCES],
    "others": [(name, None) for name in ("all_gather", "reduce_scatter", "all_to_all")],
}
EVERY = [each for several in DRAWN.values() for each in several]


def plan_of(name, by, n):
    return getattr(plans, name)(n, *[by] if by else [])


def picture_of(name, by, n):
    return getattr(pictured, name)(n, *[by] if by else [])


# ---- the plans, simulated


@pytest.mark.parametrize("n", range(2, 10))
def test_every_plan_reaches_its_goal(n):
    every = list(plans.plans(n))
    assert len(every) == len(EVERY)
    for plan in every:
        assert len(plan.states()) == len(plan.rounds) + 1


def numbers_after(plan):
    """The same messages with real numbers: rank r has 10**r + piece / 10 in every chunk that it starts with."""
    holds = [
        {piece: 10.0**rank + str(piece).count("1") / 10 for piece in begins} for rank, begins in enumerate(plan.start)
    ]
    for messages in plan.rounds:
        carried = [(one, {piece: holds[one.source][piece] for piece in one.pieces}) for one in messages]
        for one, values in carried:
            for piece, value in values.items():
                holds[one.target][piece] = holds[one.target][piece] + value if one.add else value
    return holds


@pytest.mark.parametrize("by", plans.ALL_REDUCES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_an_all_reduce_gives_the_sum_to_every_rank(by, n):
    plan = plans.all_reduce(n, by)
    for held in numbers_after(plan):
        for piece in range(plan.parts):
            assert held[piece] == pytest.approx(sum(10.0**rank for rank in range(n)) + n * str(piece).count("1") / 10)


def test_rounds_and_bytes_are_those_of_the_formulas():
    for n in (2, 4, 8, 16):
        log = math.ceil(math.log2(n))
        assert {by: len(plans.broadcast(n, by).rounds) for by in plans.BROADCASTS} == {
            "one_by_one": n - 1,
            "chain": n - 1,
            "tree": log,
        }
        assert {by: len(plans.all_reduce(n, by).rounds) for by in ("root", "tree", "ring")} == {
            "root": 2 * (n - 1),
            "tree": 2 * log,
            "ring": 2 * (n - 1),
        }
        assert len(plans.all_reduce(n, "double_tree").rounds) <= 4 * log
        assert plans.all_reduce(n, "double_tree").busiest() <= 2, "half of the message from an inner node to each child"
        assert plans.all_reduce(n, "ring").busiest() == pytest.approx(2 * (n - 1) / n)
        assert plans.all_gather(n).busiest() == plans.reduce_scatter(n).busiest() == pytest.approx((n - 1) / n)
        assert plans.all_to_all(n).busiest() == pytest.approx((n - 1) / n)
    assert [len(plans.broadcast(n).rounds) for n in (3, 5, 6, 9)] == [2, 3, 3, 4]


@pytest.mark.parametrize("n", range(2, 17))
def test_the_trees_of_a_double_tree_are_binary_and_share_no_inner_node(n):
    inner = []
    for parents in plans.double_tree(n):
        (root,) = set(range(n)) - parents.keys()
        for rank in parents:
            path = [rank]
            while path[-1] != root:
                path.append(parents[path[-1]])
                assert len(path) <= 2 + math.log2(n), "the tree is balanced"
        inner.append(set(parents.values()))
        assert all(list(parents.values()).count(parent) <= 2 for parent in inner[-1])
    assert n % 2 or not inner[0] & inner[1]


def test_the_model_of_latency_and_bandwidth():
    ring, tree = plans.all_reduce(8, "ring"), plans.all_reduce(8, "tree")
    assert ring.seconds(800, alpha=2.0, beta=0.01) == pytest.approx(14 * 2.0 + 1.75 * 800 * 0.01)
    assert tree.seconds(800, alpha=2.0, beta=0.01) == pytest.approx(6 * (2.0 + 800 * 0.01))
    assert tree.seconds(8, 1.0, 0.001) < ring.seconds(8, 1.0, 0.001)
    assert tree.seconds(1e9, 1.0, 0.001) > ring.seconds(1e9, 1.0, 0.001)


def test_the_first_half_of_a_ring_is_a_reduce_scatter_and_the_second_an_all_gather():
    ring = plans.all_reduce(5, "ring").rounds
    assert ring == plans.reduce_scatter(5).rounds + plans.all_gather(5).rounds


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (((plans.Message(0, 1, (0,)), plans.Message(0, 2, (0,))),), "a rank is the source of two messages"),
        (((plans.Message(0, 2, (0,)), plans.Message(1, 2, (0,))),), "a rank is the target of two messages"),
        (((plans.Message(1, 2, (0,)),),), "rank 1 sends chunk 0, which it does not have"),
        (((plans.Message(0, 1, (0,)),),), "rank 2 has None of chunk 0"),
    ],
)
def test_an_impossible_plan_is_rejected(rounds, words):
    with pytest.raises(ValueError, match=words):
        replace(plans.broadcast(3), rounds=rounds).states()


def test_a_plan_that_counts_a_rank_twice_is_rejected():
    with pytest.raises(ValueError, match=r"rank 0 would count \[1\] twice in chunk 0"):
        replace(plans.reduce(2), rounds=plans.reduce(2).rounds * 2).states()


@pytest.mark.parametrize("n", [1, 0, True, 2.5, "4"])
def test_a_number_of_ranks_that_makes_no_collective(n):
    with pytest.raises(ValueError, match="n must be at least 2"):
        plans.all_gather(n)


# ---- the pictures


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "by"), EVERY)
def test_a_picture_has_an_arrow_for_every_message_in_its_round(name, by, n):
    plan, drawn = plan_of(name, by, n), picture_of(name, by, n).to_dict()
    texts, shapes = drawn["layout"]["annotations"], drawn["layout"]["shapes"]
    assert len(drawn["data"]) == len(plan.rounds) + 1, "a panel for what is there at first, and one for each round"
    for number, messages in enumerate([(), *plan.rounds]):
        axis = drawn["data"][number]["xaxis"]
        arrows = [one["arrowcolor"] for one in texts if one["showarrow"] and one["xref"] == axis]
        assert sorted(arrows) == sorted(rank_colour(one.source) for one in messages)
        labels = [one["text"] for one in texts if not one["showarrow"] and one["xref"] == axis]
        for one in messages:
            assert ("+" if one.add else "") + "".join(map(_name, one.pieces)) in labels
        thick = [one for one in shapes if one["xref"] == axis and one["type"] == "rect" and one["line"]["width"] > 1]
        assert len(thick) == sum(len(one.pieces) for one in messages), (
            "chunks received in this round have a thick border"
        )


@pytest.mark.parametrize(("name", "by"), EVERY)
def test_a_picture_ends_with_the_result_of_the_collective(name, by):
    plan, figure = plan_of(name, by, 4), picture_of(name, by, 4)
    adds = any(one.add for messages in plan.rounds for one in messages)
    for rank, text in enumerate(figure.data[-1].hovertext):
        has = dict(re.findall(r"(\S+?): (\S+?)(?:,|$)", text.partition(" has ")[2]))
        for piece in plan.goal[rank]:
            assert has[_name(piece)] == ("Σ" if adds else _name(piece))


def test_pictures_have_no_background_and_use_the_colours_of_ranks():
    figure = pictured.all_reduce(4)
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    discs = [shape.fillcolor for shape in figure.layout.shapes if shape.type == "circle"][:4]
    assert discs == [rank_colour(rank) for rank in range(4)]


def test_cells_of_different_ranks_do_not_overlap():
    for n in range(2, 9):
        cells = [(left, low, side) for rank in range(n) for _, left, low, side in _cells(plans.all_reduce(n), rank)]
        for number, (left, low, side) in enumerate(cells):
            for other_left, other_low, _ in cells[number + 1 :]:
                assert abs(left - other_left) > side - 1e-6 or abs(low - other_low) > side - 1e-6


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: pictured.all_reduce(9), "n must be at most 8 for a picture, got 9"),
        (lambda: pictured.all_reduce(1), "n must be at least 2"),
        (lambda: pictured.broadcast(4, by="rumour"), "by must be one of one_by_one, chain, tree, got 'rumour'"),
    ],
)
def test_invalid_arguments_are_rejected(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


def test_the_costs_are_those_of_the_plans():
    rounds, sent = pictured.costs(8).data
    ring = rounds.y.index("all-reduce<br>each chunk travels around the ring twice")
    assert (rounds.x[ring], sent.x[ring]) == (14, 1.75)
    assert len(rounds.x) == len(EVERY)


def test_times_shows_what_it_is_given():
    figure = pictured.times([1024, 4096], {"ring": [0.002, 0.004]}, {"ring": [0.001, 0.004], "tree": [0.02, 0.03]})
    assert [(line.name, line.mode, tuple(line.y)) for line in figure.data] == [
        ("ring, modelled", "lines", (1, 4)),
        ("tree, modelled", "lines", (20, 30)),
        ("ring, measured", "markers", (2, 4)),
    ]
    assert figure.data[0].line.color == figure.data[2].marker.color != figure.data[1].line.color
    assert figure.layout.xaxis.ticktext == ("1 KiB", "4 KiB")
    ticks = figure.layout.yaxis.tickvals
    assert min(ticks) <= 1 and max(ticks) >= 30


# ---- the exercises


def ring_with(change):
    """The correct ring, except on ranks for which `change` returns something else."""

    def ring(chunks, rank, n, send, receive):
        given = change(chunks, rank, n, send, receive)
        return RIGHT["ring"](chunks, rank, n, send, receive) if given is None else given

    return ring


def all_send_first(chunks, rank, n, send, receive):
    send((rank + 1) % n, chunks[rank])
    return [receive((rank - 1) % n)]


def through_rank_0(chunks, rank, n, send, receive):
    if rank:
        send(0, chunks)
        return receive(0)
    for other in range(1, n):
        chunks = [one + more for one, more in zip(chunks, receive(other))]
    for other in range(1, n):
        send(other, chunks)
    return chunks


def infinite_loop(chunks, rank, n, send, receive):
    while rank == 2:
        pass
    return chunks


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            all_send_first,
            "a deadlock on 4 ranks: rank 0 waits for rank 1 to receive, rank 1 waits for rank 2 to receive",
        ),
        (ring_with(lambda chunks, rank, *_: chunks if rank == 3 else None), "rank 2 waits for rank 3 to receive"),
        (through_rank_0, "sends a list; a message is one number"),
        (lambda chunks, rank, n, send, receive: send(n, 1), "rank 0 sends to rank 4; the other ranks are 1, 2, 3"),
        (lambda chunks, rank, n, send, receive: receive(rank), "rank 0 receives from rank 0"),
        (lambda chunks, rank, n, send, receive: [2 * one for one in chunks], "the number of rank 0 was added 2 times"),
        (
            lambda chunks, rank, n, send, receive: chunks[:2],
            "rank 0 must return a list of 4 sums, one per chunk, got a list of 2",
        ),
        (lambda chunks, rank, n, send, receive: chunks.sort(), "rank 0 returned None"),
        (lambda chunks, rank, n, send, receive: chunks[::-1], "numbers of another chunk"),
        (lambda chunks, rank, n, send, receive: 1 / (rank - 1), "rank 1 failed: ZeroDivisionError"),
        (lambda chunks, rank, n, send, receive: receive((rank + 1) % n), "waits for rank 1 to send"),
    ],
)
def test_the_verdict_names_the_rank_and_the_chunk_that_is_wrong(function, words):
    verdict = check("collectives.ring", function)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
    assert not [thread for thread in threading.enumerate() if "exercise" in thread.name]


def test_an_infinite_loop_is_terminated(monkeypatch):
    monkeypatch.setattr("labkit.course.exercises.collectives._TIMEOUT", 0.3)
    verdict = check("collectives.ring", infinite_loop)
    assert "rank 2 did not return within 0.3 s" in verdict.words
    assert not [thread for thread in threading.enumerate() if "exercise" in thread.name]


@pytest.mark.parametrize(
    "answer", ["Reduce-Scatter then All-Gather", ["reduce_scatter", "all_gather"], "reduce scatter + all gather"]
)
def test_the_halves_however_they_are_spelt(answer):
    assert check("collectives.halves", answer).state == "right"


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("bytes", 87.5, "that is one pass"),
        ("bytes", 1400, "a whole message in every round"),
        ("bytes", 100, "two passes"),
        ("bytes", "175", "a number of MB"),
        ("halves", "all-gather, reduce-scatter", "in the other order"),
        ("halves", "reduce-scatter, broadcast", "the first is right"),
        ("halves", "all-reduce", "got 1"),
    ],
)
def test_a_wrong_answer_gets_the_hint_that_fits_it(name, answer, words):
    verdict = check(f"collectives.{name}", answer)
    assert verdict.state == "wrong" and words in verdict.words
