"""Answers to the exercises of lab 21: right, naive and wrong ones. Those to the plan fit the block that is drawn."""

import re
from pathlib import Path

from answers.mutants import mutant

from labkit.course.build.solutions import build_strategies as plan
from labkit.course.exercises.build_strategies import block_of_learner


def planned(*changes):
    """The solution for the block of this learner, in which each (old, new) is replaced first."""
    source = text = Path(plan.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    names, sequence = block_of_learner()
    written = {"w1": "query", "w2": "key", "w3": "value", "w4": "output", "norm": "norm", "attention": "attention"}

    def drawn(key):
        return f'"{".".join(names[written[part]] for part in key[1].split("."))}":'

    text = re.sub(r'"([\w.]+)":', drawn, text).replace("sequence = 1", f"sequence = {sequence}")
    return mutant(plan, "parallelize", (source, text))


def right_plan():
    """The solution."""
    return planned()


def gathers_thrice():
    """Every projection gathers the input for itself."""
    return planned(
        PREPARED, *((f'"attention.w{number}": ColwiseParallel()', GATHERING.format(number)) for number in (1, 2, 3))
    )


PREPARED = (
    '        "attention": PrepareModuleInput(input_layouts=Shard(sequence), desired_input_layouts=Replicate()),\n',
    "",
)
GATHERING = '"attention.w{}": ColwiseParallel(input_layouts=Shard(sequence))'


def sent(before, after, size, ranks):
    passed = size * (ranks - 1) / ranks
    if before in (after, "R"):
        return 0
    if before == "P":
        return 2 * passed if after == "R" else passed
    return passed if after == "R" else passed / ranks


def gathers_to_move(before, after, size, ranks):
    passed = size * (ranks - 1) / ranks
    if before in (after, "R"):
        return 0
    return 2 * passed if (before, after) == ("P", "R") else passed


RIGHT = {"bytes": sent, "plan": right_plan}
WRONG = {
    "bytes": (gathers_to_move, "that is an all-gather; a rank needs only a part of each shard"),
    "plan": (gathers_thrice, "gather it once, before the module that has all three (PrepareModuleInput)"),
}
