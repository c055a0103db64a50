"""The rounds of the kill matrix: their order, the file that they continue, and what counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench import killed_training
from bench import main as bench
from bench.kill_rounds import (
    ATTACKS,
    MOMENTS,
    VICTIMS,
    Attack,
    Outcome,
    Round,
    Rounds,
    figures,
    matrix,
    next_attack,
)
from bench.kills import NotReached
from rich.console import Console

CLEAN = Outcome(processes=(), ports=0, shared=0, files=(), wrong="", lost=0, checked=3, warm=True)
ONE = Attack("ddp", ("agent", "rank 0"), "checkpoint", True, True)


def values(rounds: list[Round]) -> dict[str, tuple[float, str]]:
    return {figure.name: (figure.median, figure.note) for figure in figures(rounds)}


def test_every_moment_and_victims_are_tried_before_any_is_tried_again():
    rounds: list[Round] = []
    for _ in range(2 * 126):
        rounds.append(Round(next_attack(rounds), CLEAN))
    assert len(MOMENTS) * len(VICTIMS) == 126
    for part in (rounds[:126], rounds[126:]):
        assert {one.attack.combination for one in part} == {(moment, who) for moment in MOMENTS for who in VICTIMS}
    assert len({one.attack for one in rounds}) == 252, "each time with another strategy or kind of start"
    assert len({one.attack.moment for one in rounds[:20]}) > 3 and len(set(ATTACKS)) == len(ATTACKS) == 1008


def test_an_attack_that_does_not_take_place_is_not_tried_for_ever():
    first = next_attack([])
    assert next_attack([Round(first, None, "no server")]).combination != first.combination


def test_a_file_of_rounds_is_continued_behind_its_last_whole_line(tmp_path):
    path = tmp_path / "rounds.jsonl"
    written = [Round(ONE, replace(CLEAN, files=("pymp",))), Round(ONE, None, "no agent appeared within 60 s")]
    results = Rounds(path)
    for one in written:
        results.add(one)
    with path.open("a") as file:
        file.write('{"attack": {"str')
    again = Rounds(path)
    assert again.all == written
    again.add(written[0])
    assert Rounds(path).all == [*written, written[0]]


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"attack": {}, "outcome": null, "why": ""}', '{"attack": "ab"}', "not JSON", "\0"]
)
def test_a_file_of_something_else_is_refused_and_stays(line, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"--results .*notes.txt.* line .*; name another file"):
        Rounds(path)
    assert path.read_text() == f"{line}\n"


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--results must name a file that can be read, got .*: it is no regular file"):
        Rounds(tmp_path)
    with pytest.raises(ValueError, match=r"--results is for one benchmark: add --only training_kills"):
        bench.main(results=str(tmp_path / "new"))
    with pytest.raises(ValueError, match=r"--minutes does not apply to the benchmark kill_matrix: leave it out"):
        bench.main(only="kill_matrix", minutes=1)


def test_a_round_without_an_attack_counts_neither_as_clean_nor_as_wrong():
    wrong = replace(
        CLEAN, wrong="running", lost=1, processes=("rank 0", "agent"), files=("pymp", "sockets"), warm=False
    )
    rounds = [Round(ONE, CLEAN), Round(ONE, wrong), Round(ONE, None, "the warm server was not ready within 120 s")]
    found = values(rounds)
    assert found["runs in a wrong state after SIGKILL in training"] == (
        1.0,
        "agent and rank 0 at checkpoint, warm and detached: running",
    )
    assert found["checkpoints lost after SIGKILL in training"] == (
        1.0,
        "of 6 that the runs had reported as written",
    )
    assert found["processes left after SIGKILL in training"] == (
        2.0,
        "agent and rank 0 at checkpoint, warm and detached: rank 0, agent",
    )
    assert found["temporary files left after SIGKILL in training"] == (2.0, "pymp, sockets")
    assert found["of its rounds with a warm server, those that started cold"][0] == 1.0
    assert found["rounds without an attack, which count nowhere else"] == (
        1.0,
        "1 × the warm server was not ready within 120 s",
    )
    assert all(len(figure.each) == 2 for figure in figures(rounds)[:7]), "each of the rounds with an attack"
    assert values([rounds[2]])["runs in a wrong state after SIGKILL in training"] == (0.0, "")


def test_the_matrix_shows_all_moments_and_victims():
    console = Console(width=80)
    with console.capture() as text:
        console.print(matrix([Round(ONE, CLEAN), Round(ONE, replace(CLEAN, lost=1)), Round(ONE, None, "gone")]))
    _, head, *rows = text.get().splitlines()
    assert head.split() == ["killed", *" ".join(MOMENTS).split()]
    cells = {row[:20].strip(): row[20:].split() for row in rows}
    assert list(cells) == [", ".join(victims) for victims in VICTIMS], "each is one line"
    assert cells["agent, rank 0"] == ["–", "–", "–", "2", "(1)", "–", "–"]


def test_rounds_and_minutes_bound_the_benchmark_and_earlier_rounds_count(monkeypatch, tmp_path):
    struck = []

    def attack(one: Attack) -> Outcome:
        struck.append(one)
        if len(struck) == 2:
            raise NotReached("the warm server was not ready within 120 s")
        return CLEAN

    monkeypatch.setattr(killed_training, "attack", attack)
    path = str(tmp_path / "rounds.jsonl")
    killed_training.training_kills(1, None, path)
    rounds = Rounds(path).all
    assert len(struck) == len(rounds) == len(MOMENTS) and rounds[1].outcome is None
    killed_training.training_kills(2, None, path)
    assert len(struck) == len(Rounds(path).all) == 2 * len(MOMENTS)
    killed_training.training_kills(3, 0.0, path)
    assert len(struck) == 2 * len(MOMENTS), "no round starts after its minutes"
