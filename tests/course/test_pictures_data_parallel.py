"""The pictures of data parallelism are correct: bytes, samples per rank, averages, and buckets as DDP closes them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from labkit import Spec
from labkit.analysis.theory.formulas import Case, _buckets, theory
from labkit.course import pictures
from labkit.course.answers import Wrong
from labkit.course.exercises import exercise
from labkit.course.pictures.data_parallel import Bucket, divide, filled, sent

draw = pictures.data_parallel


def words(figure):
    return " ".join(note["text"] for note in figure.to_dict()["layout"]["annotations"])


def boxes(figure):
    """(lane, words) of every box."""
    (trace,) = figure.to_dict()["data"]
    return list(zip(trace["y"], trace["text"]))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_dp_has_five_transfers_and_all_involve_device_0(devices):
    figure = draw.dp_step(devices)
    arrows = [note for note in figure.to_dict()["layout"]["annotations"] if note["showarrow"]]
    ends = [{round(arrow["y"]), round(arrow["ay"])} for arrow in arrows]
    assert len(arrows) == 5 * (devices - 1) and all(0 in pair for pair in ends)
    assert all(mark in words(figure) for mark in "①②③④⑤")
    assert {lane for lane, word in boxes(figure) if word == "backward"} == set(range(devices))
    assert {lane for lane, word in boxes(figure) if word in ("loss", "update")} == {0}


def test_the_bytes_of_dp_are_those_of_the_formulas():
    assert "392.0 KiB" in words(draw.dp_step(2))  # 128 images of 28 × 28, in 32 bits
    assert "4.6 MiB" in words(draw.dp_step(4))  # three more copies of 405,898 parameters


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_of_ddp_does_the_same(ranks):
    figure = draw.ddp_step(ranks)
    by_lane = [[word for lane, word in boxes(figure) if lane == rank] for rank in range(ranks)]
    assert by_lane == [by_lane[0]] * ranks and "update" in by_lane[0]
    both = [note for note in figure.to_dict()["layout"]["annotations"] if note.get("arrowside") == "end+start"]
    assert len(both) == 3 * (ranks - 1)


def test_a_picture_of_batch_norm_is_drawn_too():
    assert "42.6 MiB per rank" in words(draw.ddp_step(workload="resnet18"))


def test_the_traffic_of_device_0_grows_with_the_devices_and_with_nccl_only_by_their_samples():
    copied, nccl, ddp = (trace["y"] for trace in draw.wires(8).to_dict()["data"])
    assert list(copied) == sorted(copied) and copied[-1] == pytest.approx(7 * copied[0], rel=1e-3)
    samples = 4 * 128 * (28 * 28 + 2 * 10) / 2**20  # of one device
    assert nccl[0] == pytest.approx(copied[0], rel=1e-3)
    assert nccl[-1] - nccl[0] == pytest.approx(6 * samples, rel=1e-2)
    once = 2 * theory(Spec(strategy="ddp", nproc=8))[0].theory / 8 / 2**20
    assert ddp[-1] == pytest.approx(once, rel=1e-3) and max(ddp) < 2 * min(ddp)


@pytest.mark.parametrize(("samples", "ranks"), [(20, 2), (10, 4), (7, 5), (3, 8)])
def test_samples_are_divided_as_in_torch(samples, ranks):
    from torch.utils.data import DistributedSampler

    order = list(range(samples))
    expected = [list(DistributedSampler(order, ranks, rank, shuffle=False)) for rank in range(ranks)]
    assert divide(order, ranks) == expected


def test_every_rank_gets_its_samples():
    (cells,) = draw.shares(22, 4, 3).to_dict()["data"]
    assert len(cells["z"]) == 8 and {len(row) for row in cells["z"]} == {6}
    assert all(
        {sample for row in cells["z"][first : first + 4] for sample in row} == set(range(22)) for first in (0, 4)
    )
    assert "24 samples, 22 different" in draw.shares(22, 4, 3).layout.title.text


def test_a_missing_sampler_or_set_epoch_is_visible():
    (alike,) = draw.shares(sampler=False).to_dict()["data"]
    assert list(alike["z"][0]) == list(alike["z"][1]) != list(alike["z"][2])
    (again,) = draw.shares(set_epoch=False).to_dict()["data"]
    assert [list(row) for row in again["z"][:2]] == [list(row) for row in again["z"][2:]]
    assert "40 samples, 20 different" in draw.shares(sampler=False).layout.title.text
    assert "4 steps per epoch" in draw.shares(sampler=False).layout.title.text


def test_the_average_is_next_to_the_gradients():
    traces = draw.average([[1.0, 2.0], [3.0, 6.0], [2.0, -2.0]]).to_dict()["data"]
    assert [trace["name"] for trace in traces] == ["rank 0", "rank 1", "rank 2", "average"]
    assert list(traces[-1]["y"]) == [2.0, 2.0]


@pytest.mark.parametrize("workload", ["cnn", "mlp", "gpt", "resnet18"])
@pytest.mark.parametrize("bucket_mb", [0, 1, 2, 25])
def test_buckets_are_closed_as_ddp_closes_them(workload, bucket_mb):
    spec = Spec(strategy="ddp", workload=workload, nproc=2, options={"bucket_mb": bucket_mb})
    found = filled(workload, bucket_mb)
    assert len(found) == _buckets(Case(spec, 3))
    assert sum(bucket.bytes for bucket in found) == 4 * spec.workload_row.parameters(spec.options)
    moments = [bucket.ready for bucket in found]
    assert moments == sorted(moments) and moments[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(("workload", "buckets"), [("cnn", 2), ("gpt", 2)])  # measured: all-reduces per step
def test_the_first_bucket_of_the_default_is_smaller(workload, buckets):
    found = filled(workload, 0)
    assert len(found) == buckets
    assert 2**20 <= found[0].bytes < 2 * 2**20
    assert len(filled(workload, 25)) == 1


def test_full_buckets_are_sent_one_after_another():
    spans = sent(
        [Bucket(1000, 0.1), Bucket(1000, 0.2), Bucket(500, 1.0)], backward=10.0, rate=500.0, latency=0.5, ranks=2
    )
    assert spans == [(1.0, 4.0), (4.0, 7.0), (10.0, 12.0)]  # two messages of half a bucket each
    (end,) = {end for _, end in sent([Bucket(800, 0.0)], 1.0, 100.0, 0.0, ranks=4)}
    assert math.isclose(end, 2 * 3 / 4 * 800 / 100)


def test_hooks_fill_each_bucket_before_it_is_sent():
    (trace,) = draw.buckets("gpt", (1,)).to_dict()["data"]
    lanes = [
        [(base, base + length) for lane, base, length in zip(trace["y"], trace["base"], trace["x"]) if lane == number]
        for number in range(3)
    ]
    (backward,), filling, sending = lanes
    assert len(filling) == len(sending) == 4
    assert filling[0][0] == backward[0] and filling[-1][1] == pytest.approx(backward[1])
    for (start, full), (following, _) in pairwise(filling):
        assert start < full == pytest.approx(following)
    assert all(begin >= full - 1e-3 for (_, full), (begin, _) in zip(filling, sending))
    spec = Spec(workload="gpt")
    tensors = sum(len(block.parameters) for block in spec.workload_row.blocks(spec.options))
    assert sum(bucket.gradients for bucket in filled("gpt", 1)) == tensors


def test_the_buckets_are_played_from_the_first_gradient_to_the_last_all_reduce():
    figure = draw.buckets("gpt", (25, 1))
    (trace,) = figure.data
    last = max(base + length for base, length in zip(trace.base, trace.x))
    for number, frame in enumerate(figure.frames, 1):
        now = last * number / len(figure.frames)
        for base, whole, length in zip(trace.base, trace.x, frame.data[0].x, strict=True):
            assert (length or 0) == pytest.approx(min(max(now - base, 0), whole), abs=1e-3)
    assert None in figure.frames[0].data[0].x
    assert figure.frames[-1].data[0].x == pytest.approx(trace.x, rel=1e-5)


def test_one_bucket_overlaps_with_nothing():
    assert "1 bucket, 0% overlapped" in words(draw.buckets("gpt", (25,)))
    assert "4 buckets" in words(draw.buckets("gpt", (1,)))
    assert draw.buckets("gpt").layout.title.text.startswith("<b>Modelled")
    assert "10,893,312" in draw.buckets("gpt", size="10M").layout.title.text


@pytest.mark.parametrize(
    ("name", "answer", "hint"),
    [
        ("ddp.steps", (521, 1), "for a single rank"),
        ("ddp.steps", (66, 80), "the remainder of one rank"),
        ("ddp.steps", (70, 80), "first divide"),
        ("ddp.sampler", lambda order, rank, ranks: order, "are enough"),
        ("ddp.sampler", lambda order, rank, ranks: order[: len(order) // ranks], "no rank gets the sample at index"),
        ("ddp.sampler", lambda order, rank, ranks: [-1], "which is not in order"),
        ("ddp.sampler", lambda order, rank, ranks: 3, "a list of samples"),
        ("ddp.buckets", "ddp", "got str"),
        ("data_parallel.exchanges", [150_528, 0, 0, 0, 0], "each has four bytes"),
        ("data_parallel.exchanges", [200_704, 0, 0, 0, 0], "there are several"),
        ("data_parallel.exchanges", [1, 2, 3], "list of five"),
        ("data_parallel.sides", {"a": "dp"}, "the keys a, b"),
        ("data_parallel.sides", dict.fromkeys("abcdefg", "me"), "must be 'dp'"),
        ("data_parallel.same", [1, 2], "a list of two runs"),
    ],
)
def test_each_mistake_has_its_own_hint(name, answer, hint):
    with pytest.raises(Wrong, match=hint):
        exercise(name).check(answer)
