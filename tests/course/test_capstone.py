"""The trainer on a mesh of lab 17: mistakes are named on any draw and on real ranks, another right answer passes."""

from __future__ import annotations

import pytest
import torch
from answers import capstone

from labkit import check, starter
from labkit.course.answers import Wrong
from labkit.course.build import criteria
from labkit.course.build.record import CLOSE, Event, Record, hint
from labkit.course.build.starters import mesh_training
from labkit.course.build.trials import capstone as mesh

MESH = {"data": 2, "pipeline": 2, "tensor": 2}


@pytest.mark.thorough
def test_each_mistake_with_gradients_is_named_on_any_draw():
    """A rank whose first update is that of a mistake is far from right, and gets the words of this mistake."""
    for seed in range(3):
        torch.manual_seed(seed)
        expected = mesh.expect("train", mesh.draw("train", 8))
        right = [dict(rank.tensors) for rank in expected]
        assert not hint(expected, right)
        for words in {words for rank in expected for words in rank.mistakes}:
            got = [tensors | rank.mistakes.get(words, {}) for rank, tensors in zip(expected, right)]
            wrong = max(max(rank.differences(tensors).values()) for rank, tensors in zip(expected, got))
            assert wrong > 50 * criteria.RESULT > CLOSE
            before, _, after = words.partition("{names}")
            said = hint(expected, got)
            assert said.startswith(before) and said.endswith(after), (words, said)


@pytest.mark.thorough
def test_the_reference_is_that_of_one_device():
    """`OneDevice` of the script, whose micro-batches and norms round differently, is far inside the tolerances."""
    given = mesh.draw("train", 8)
    expected = mesh.expect("train", given)
    whole = {name.removeprefix("whole "): tensor for name, tensor in given[0].items() if name.startswith("whole ")}
    training = mesh_training.OneDevice(whole, mesh_training.adam)
    for step in range(mesh.STEPS):
        tokens = torch.cat([given[rank]["tokens"][step] for rank in (0, 4)])
        targets = torch.cat([given[rank]["targets"][step] for rank in (2, 6)])
        loss = training.step(tokens, targets)
        assert abs(float(loss) - expected[0].losses[step]) < criteria.TOLERANCE / 2
    for rank, mine in enumerate(expected):
        *_, tensor = mesh.coordinates(rank)
        parts = {
            f"parameter {name}": mesh.part_of(name, parameter, tensor, mesh.TENSOR)
            for name, parameter in training.stage.named_parameters()
        }
        differences = mine.differences(parts)
        compared = [differences[name] for name in differences.keys() & parts.keys()]
        assert compared and max(compared) < criteria.RESULT / 5


@pytest.mark.parametrize(
    ("event", "axes"),
    [
        (Event("all_reduce", 0, "step", among=[0, 4]), ["data"]),
        (Event("all_reduce", 0, "step", among=[0, 2]), ["pipeline"]),
        (Event("all_reduce", 0, "step", among=[0, 1]), ["tensor"]),
        (Event("all_reduce", 0, "step", among=[0, 1, 2, 3]), ["pipeline", "tensor"]),
        (Event("all_reduce", 0, "step"), ["data", "pipeline", "tensor"]),
        (Event("send", 0, "step", peer=2), ["pipeline"]),
        (Event("send", 0, "step", peer=2, among=[0, 2]), ["pipeline"]),
        (Event("send", 0, "step", peer=6), ["data", "pipeline"]),
    ],
)
def test_a_call_belongs_to_the_axes_along_which_its_ranks_differ(event, axes):
    assert criteria.axes(event, 0, MESH) == axes


def test_bytes_are_judged_along_each_axis():
    events = [Event("all_reduce", 0, "step", sent=100.0, among=[0, 4]), Event("send", 0, "step", sent=30.0, peer=6)]
    record = Record(0, expected=[1.0], events=events)
    criteria.sent_along([record], MESH, "data", lambda record: 100, lambda record: 100, "")
    criteria.groups([record], MESH, 30)
    with pytest.raises(Wrong, match="rank 0 calls send with a group of the ranks 0, 6, which differ along data and"):
        criteria.groups([record], MESH, 29)
    with pytest.raises(Wrong, match="sends 0 B along the tensor axis, expected at least 8 B"):
        criteria.sent_along([record], MESH, "tensor", lambda record: 8, lambda record: 9, "")
    with pytest.raises(Wrong, match="sends 100 B along the data axis, expected at most 9 B"):
        criteria.sent_along([record], MESH, "data", lambda record: 8, lambda record: 9, "")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("changes", "words"), capstone.MISTAKES.values(), ids=capstone.MISTAKES)
def test_a_wrong_trainer_is_rejected_with_what_was_measured(changes, words):
    verdict = check("capstone.trainer", capstone.trainer(*changes))
    assert verdict.state == "wrong" and words in verdict.words, verdict.words


@pytest.mark.usefixtures("forked_ranks")
def test_another_right_trainer_is_right():
    verdict = check("capstone.trainer", capstone.trainer(*capstone.DEVICE_MESH))
    assert verdict.state == "right", verdict.words


def test_the_script_as_it_is_given_is_no_attempt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verdict = check("capstone.trainer", starter("capstone.trainer"))
    assert verdict.state == "empty" and "Training still has the three dots" in verdict.words


@pytest.mark.parametrize(
    ("index", "factor", "words"),
    [
        (0, lambda *case: 3 / (1 + 2 / case[4]), "shards the two moments over the data ranks"),
        (1, lambda *case: case[5] * case[6], "of what it stores, not of the whole model"),
        (2, lambda *case: 1 / case[2], "every micro-batch is sent"),
        (3, lambda *case: case[5], "a rank computes the blocks of its stage"),
        (3, lambda *case: 7, "count what one rank has"),
    ],
)
def test_wrong_bytes_on_a_mesh_are_explained(index, factor, words):
    def answer(*case):
        numbers = list(capstone.per_rank(*case))
        numbers[index] *= factor(*case)
        return numbers

    verdict = check("capstone.bytes", answer)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
