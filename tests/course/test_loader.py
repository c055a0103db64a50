"""The loader of lab 09: every draw accepts the solution and rejects each mistake, and real workers are observed."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from answers import loaders
from simulated_loader import observed

from labkit import check
from labkit.course.answers import Wrong
from labkit.course.build.solutions.input_pipeline import Loader
from labkit.course.build.trials import loader_task as shards
from labkit.course.exercises import input_pipeline as loader


def judged(answer, task, monkeypatch):
    """The verdict in words, of simulated runs."""
    with monkeypatch.context() as patched:
        runs = observed(answer, task, patched)
        patched.setattr(loader, "observe", lambda answer, task: runs)
        return loader.judge(answer, task)


@pytest.mark.thorough
def test_the_solution_is_right_on_every_draw(monkeypatch):
    for _ in range(10):
        task = shards.draw()
        assert "each once per epoch" in judged(Loader, task, monkeypatch), task


@pytest.mark.thorough
@pytest.mark.parametrize(("changes", "words"), loaders.WRONG.values(), ids=loaders.WRONG)
def test_a_mistake_is_named_on_every_draw(changes, words, monkeypatch):
    answer = loaders.loader_of(*changes)
    for _ in range(2):
        task = shards.draw()
        with pytest.raises(Wrong, match=words):
            judged(answer, task, monkeypatch)


HANGS = "says itself how large its state is"  # it writes into all pipes, also those of its workers


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", [name for name in loaders.OBSERVED if name != HANGS])
def test_real_ranks_and_workers_are_observed(name):
    changes, words = loaders.OBSERVED[name]
    verdict = check("input_pipeline.loader", loaders.loader_of(*changes))
    assert verdict.state == "wrong" and re.search(words, verdict.words), verdict.words


def test_nothing_is_left_of_ranks_and_workers_that_are_killed(monkeypatch):
    """Each worker has a socket among the temporary files."""
    changes, words = loaders.OBSERVED[HANGS]
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        verdict = check("input_pipeline.loader", loaders.loader_of(*changes))
        left = list(Path(folder).glob("pymp-*"))
    assert verdict.state == "wrong" and re.search(words, verdict.words), verdict.words
    assert not left
