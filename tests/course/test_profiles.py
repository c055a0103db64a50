"""The slow script of lab 20: each fault is measured on its own, other right answers pass, and cheats do not."""

from __future__ import annotations

import pytest
from answers import profiles

from labkit import check, starter


def verdict_on(text):
    return check("profiles.faults", profiles.script(text))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", profiles.ONE_FAULT)
def test_a_fault_is_named_if_it_is_the_only_one(name):
    text, words = profiles.ONE_FAULT[name]
    verdict = verdict_on(text)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
    assert verdict.words.count("expected at most") == 1


@pytest.mark.usefixtures("forked_ranks")
def test_ddp_with_one_synchronization_per_step_is_right():
    verdict = verdict_on(profiles.changed(profiles.FAST, *profiles.WITH_DDP))
    assert verdict.state == "right" and "without a synchronization" in verdict.words, verdict.words


@pytest.mark.usefixtures("forked_ranks")
def test_ddp_without_no_sync_has_one_fault():
    *wrapped, _, no_average = profiles.WITH_DDP
    text = profiles.changed(profiles.FAST, *wrapped, ("self.model(inputs)", "self.wrapped(inputs)"), no_average)
    verdict = verdict_on(text)
    assert verdict.state == "wrong" and "1 of 5 faults are left: traffic" in verdict.words, verdict.words


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", [*profiles.CHEATS, *profiles.ODD])
def test_what_does_not_train_the_same_is_rejected(name):
    text, words = (profiles.CHEATS | profiles.ODD)[name]
    verdict = verdict_on(text)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words
    assert "not a valid answer" not in verdict.words


def test_the_faults_are_measured_in_an_ordinary_run_too(server):
    """Whose probe replaces functions of torch, and reads the losses."""
    text, words = profiles.ONE_FAULT["synchronization"]
    verdict = verdict_on(text)
    assert verdict.state == "wrong" and words in verdict.words, verdict.words


def test_a_starter_is_written_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = starter("profiles.faults")
    assert (tmp_path / path).read_text(encoding="utf-8") == profiles.SLOW
    path.write_text("mine", encoding="utf-8")
    assert starter("profiles.faults") == path and path.read_text(encoding="utf-8") == "mine"
    with pytest.raises(LookupError, match=r"starts from no file"):
        starter("profiles.gain")
