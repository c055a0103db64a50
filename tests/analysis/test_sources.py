"""Which ranks of a script read the same samples, inferred from their first steps."""

from __future__ import annotations

import pytest
from diagnosed import fold, saw, script, start, steps

from labkit.analysis.metrics import throughput
from labkit.record.ranks import inferred


def ranks(inputs: dict[int, str], batches: dict[int, str] | None = None) -> list[dict]:
    """By rank, a letter for each of its first steps: the digest of its inputs (a dot is an activation), and of its
    loader's batches."""
    found = []
    for what, seen in (("input", inputs), ("batch", batches or {})):
        for rank, letters in seen.items():
            found += [
                saw(rank, what, step=step, digest=None if one == "." else one) for step, one in enumerate(letters, 1)
            ]
    return found


CASES = {
    "data parallel": ({0: "abc", 1: "def"}, {}, {0: 1, 1: 1}),
    "tensor parallel": ({0: "abc", 1: "abc"}, {}, {0: 0.5, 1: 0.5}),
    "tensor parallel, each with a loader": ({0: "abc", 1: "abc"}, {0: "xyz", 1: "xyz"}, {0: 0.5, 1: 0.5}),
    "tensor parallel, rank 0 has the loader": ({0: "abc", 1: "abc"}, {0: "xyz"}, {0: 0.5, 1: 0.5}),
    "pipeline": ({0: "abc", 1: "...", 2: "..."}, {}, {0: 1, 1: 0, 2: 0}),
    "pipeline, the last stage loads for the labels": ({0: "abc", 1: "..."}, {0: "xyz", 1: "xyz"}, {0: 1, 1: 0}),
    "pipeline × data": ({0: "abc", 1: "...", 2: "def", 3: "..."}, {}, {0: 1, 1: 0, 2: 1, 3: 0}),
    "tensor × data": ({0: "abc", 1: "abc", 2: "def", 3: "def"}, {}, {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}),
    "a GAN, whose noise is the same": ({0: "abc", 1: "abc"}, {0: "xyz", 1: "uvw"}, {0: 1, 1: 1}),
    "the same first step alone": ({0: "abc", 1: "ade"}, {}, {0: 1, 1: 1}),
    "one step is too few": ({0: "a", 1: "a"}, {}, {0: 1, 1: 1}),
    "embeddings that require gradients on all ranks": ({0: "...", 1: "..."}, {}, {0: 1, 1: 1}),
    "nothing was seen": ({}, {}, {0: 1, 1: 1}),
    "one of two was seen": ({0: "abc"}, {}, {0: 1, 1: 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_sample_counts_once(case):
    inputs, batches, expected = CASES[case]
    state = fold(script(len(expected)), start(*expected), ranks(inputs, batches), *(steps(rank) for rank in expected))
    assert state.sample_weights() == expected
    each = 8 / 0.1
    assert throughput(state) == pytest.approx(sum(expected.values()) * each)
    assert bool(state.note) == any(weight != 1 for weight in expected.values())


def test_what_was_inferred_is_said():
    state = fold(script(4), start(0, 1, 2, 3), ranks({0: "abc", 1: "abc", 2: "...", 3: "..."}))
    assert inferred(state.ranks) == ([(0, 1)], (2, 3))
    assert (
        state.note
        == "samples/s inferred from the first batches: ranks 0 and 1 read the same samples, so each sample counts"
        " once; "
        "ranks 2 and 3 receive activations, so no samples count there"
    )
