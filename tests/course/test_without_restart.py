"""The exercises of lab 23: honest mistakes are named, and what only looks like an answer is rejected."""

from __future__ import annotations

import pytest
from answers import without_restart as answers

from labkit import check


def verdict_on(name, made, words):
    verdict = check(name, made)
    possible = words if isinstance(words, tuple) else (words,)
    assert verdict.state == "wrong" and any(said in verdict.words for said in possible), verdict.words
    assert "not a valid answer" not in verdict.words


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", [*answers.MISTAKES_OF_DILOCO, *answers.CHEATS_OF_DILOCO])
def test_an_outer_step_that_is_not_that_of_diloco(name):
    changes, words = (answers.MISTAKES_OF_DILOCO | answers.CHEATS_OF_DILOCO)[name]
    verdict_on("without_restart.diloco", answers.diloco(*changes), words)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", [*answers.MISTAKES_OF_RECOVERY, *answers.CHEATS_OF_RECOVERY])
def test_a_recovery_that_is_none(name):
    changes, words = (answers.MISTAKES_OF_RECOVERY | answers.CHEATS_OF_RECOVERY)[name]
    verdict_on("without_restart.recovery", answers.recovery(*changes), words)


def test_a_rank_is_killed_in_an_ordinary_run_too(server):
    verdict = check("without_restart.recovery", answers.RIGHT["recovery"])
    assert verdict.state == "right", verdict.words
