"""The exercises of lab 21: honest mistakes are named, and the block is another one for each learner."""

from __future__ import annotations

import pytest
from answers.dtensor import planned, sent

from labkit import check
from labkit.course.exercises.build_strategies import block_of_learner

NORM = '        "norm": SequenceParallel(sequence_dim=sequence),\n'
KEY = '        "attention.w2": ColwiseParallel(),\n'
OUTPUT = "RowwiseParallel(output_layouts=Shard(sequence))"
MISTAKES = {
    "the norm": ([(NORM, "")], "is that of this rank's own positions; which style makes the parameters of a norm"),
    "the key": ([(KEY, "")], "expected 25%; the plan has no style that splits"),
    "the output": ([(OUTPUT, "RowwiseParallel()")], "must return the positions of its rank (output_layouts)"),
    "the roles": (
        [
            ('"attention.w3": ColwiseParallel()', '"attention.w3": RowwiseParallel(output_layouts=Shard(sequence))'),
            (f'"attention.w4": {OUTPUT}', '"attention.w4": ColwiseParallel()'),
        ],
        "split all three in the same way, so that a rank has whole heads",
    ),
    "the dimension": (
        [("Shard(sequence)", "Shard(1 - sequence)"), ("sequence_dim=sequence", "sequence_dim=1 - sequence")],
        "along which dimension of x is the sequence sharded?",
    ),
    "local inputs": (
        [("desired_input_layouts=Replicate()", "desired_input_layouts=Replicate(), use_local_output=True")],
        "reduce the gradient of their common input separately: if this input stays a DTensor",
    ),
    "nothing": ([("    parallelize_module(block, mesh, plan)\n", "    return\n")], "expected 25%"),
}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("changes", "words"), MISTAKES.values(), ids=MISTAKES)
def test_an_honest_mistake_is_named(changes, words):
    verdict = check("dtensor.plan", planned(*changes))
    assert verdict.state == "wrong" and words in verdict.words, verdict.words


def test_a_verdict_on_an_empty_answer_has_the_block_of_this_learner(runs):
    names, _ = block_of_learner()
    words = check("dtensor.plan", ...).words
    assert all(name in words for name in names.values()) and words == check("dtensor.plan", ...).words
    assert (runs / "learner.json").stat().st_mode & 0o077 == 0


def test_learners_have_different_blocks(runs, tmp_path, monkeypatch):
    drawn = set()
    for number in range(12):
        monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / str(number)))
        names, sequence = block_of_learner()
        drawn.add((*names.values(), sequence))
    assert len(drawn) > 6


@pytest.mark.parametrize(
    ("factor", "pair", "words"),
    [
        (0.5, ("P", "R"), "a reduce-scatter and an all-gather"),
        (2, ("P", "S0"), "a reduce-scatter is one pass"),
        (1 / 3, ("S1", "R"), "in the ring, it also passes on the shards of others"),
        (2, ("S0", "S1"), "sends all of them but the part that it keeps"),
    ],
)
def test_a_wrong_number_of_bytes_is_explained(factor, pair, words):
    def answer(before, after, size, ranks):
        return sent(before, after, size, ranks) * (factor if (before, after) == pair else 1)

    verdict = check("dtensor.bytes", answer)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
