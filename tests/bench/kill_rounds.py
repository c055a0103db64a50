"""The rounds of the kill matrix of a training run: which one comes next, how they are stored, and what they show."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

from rich.table import Column, Table

from bench.results import Result, append, read

STRATEGIES = ("ddp", "fsdp2")
MOMENTS = ("start", "first step", "training", "checkpoint", "evaluation", "end")
WHO = ("starter", "supervisor", "agent", "server", "rank 0", "rank 1")
VICTIMS = (*((one,) for one in WHO), *combinations(WHO, 2))


@dataclass(frozen=True)
class Attack:
    """A run to start, the processes of it to kill, in this order, and the moment."""

    strategy: str
    victims: tuple[str, ...]
    moment: str
    detached: bool
    warm: bool

    @property
    def goes_on(self) -> bool:
        """Whether the run must finish: it needs neither the warm server, nor its starter if it is detached."""
        return set(self.victims) <= {"server", *(["starter"] if self.detached else [])}

    @property
    def combination(self) -> tuple[str, tuple[str, ...]]:
        """Moment and victims: a cell of the matrix."""
        return self.moment, self.victims


@dataclass(frozen=True)
class Outcome:
    """What was found a few seconds after the kill, or after the end of a run that goes on."""

    processes: tuple[str, ...]  # what each of them is in the run
    ports: int
    shared: int
    files: tuple[str, ...]  # the first words of their names
    wrong: str
    lost: int
    checked: int
    warm: bool

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left, wrong or lost."""
        return not (self.processes or self.ports or self.shared or self.files or self.wrong or self.lost)


@dataclass(frozen=True)
class Round:
    """An attack and its outcome; None if it did not take place, for the reason `why`."""

    attack: Attack
    outcome: Outcome | None
    why: str = ""


_WAYS = [Attack(*way) for way in product(STRATEGIES, VICTIMS, MOMENTS, (False, True), (False, True))]
ATTACKS = tuple(random.Random(1).sample(_WAYS, len(_WAYS)))


def next_attack(rounds: Sequence[Round]) -> Attack:
    """The attack that was tried least: of the moment and victims that were tried least, the strategy and kind of start
    that were. Ties are in a fixed random order."""
    cells = Counter(one.attack.combination for one in rounds)
    tried = Counter(one.attack for one in rounds)
    return min(ATTACKS, key=lambda one: (cells[one.combination], tried[one]))


# ---- storing


class Rounds:
    """The rounds in a file of JSON lines, or in memory alone. Raises `ValueError` for a file of something else."""

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._path = path
        records = [] if path is None else read(path)
        try:
            self.all = [_round(record) for record in records]
        except (TypeError, ValueError, LookupError):
            raise ValueError(
                f"--results {path} has a line that is no round of training_kills; name another file"
            ) from None

    def add(self, one: Round) -> None:
        """Appends a round."""
        self.all.append(one)
        if self._path is not None:
            append(self._path, asdict(one))


def _round(value: dict[str, Any]) -> Round:
    attack, outcome = dict(value["attack"]), value["outcome"]
    attack["victims"] = tuple(attack["victims"])
    if outcome is not None:
        outcome = Outcome(**outcome | {name: tuple(outcome[name]) for name in ("processes", "files")})
    return Round(Attack(**attack), outcome, str(value["why"]))


# ---- what they show


def figures(rounds: Sequence[Round]) -> list[Result]:
    """What was left, wrong and lost, of the rounds in which the attack took place; and how many others there were."""
    found = [(one.attack, one.outcome) for one in rounds if one.outcome is not None]
    outcomes = [outcome for _, outcome in found]
    why = Counter(one.why for one in rounds if one.outcome is None)
    names = sorted({name for outcome in outcomes for name in outcome.files})
    who = [f"{_named(attack)}: {', '.join(outcome.processes)}" for attack, outcome in found if outcome.processes]
    which = [f"{_named(attack)}: {outcome.wrong}" for attack, outcome in found if outcome.wrong]
    after = "after SIGKILL in training"
    left = [
        ("processes", [len(outcome.processes) for outcome in outcomes], "; ".join(who)),
        ("listening ports", [outcome.ports for outcome in outcomes], ""),
        ("segments of shared memory", [outcome.shared for outcome in outcomes], ""),
        ("temporary files", [len(outcome.files) for outcome in outcomes], ", ".join(names)),
    ]
    verified = f"of {sum(outcome.checked for outcome in outcomes)} that the runs had reported as written"
    rows = [
        *((f"{what} left {after}", each, note) for what, each, note in left),
        (f"checkpoints lost {after}", [outcome.lost for outcome in outcomes], verified),
        (f"runs in a wrong state {after}", [bool(outcome.wrong) for outcome in outcomes], "; ".join(which)),
        (
            "of its rounds with a warm server, those that started cold",
            [not outcome.warm for attack, outcome in found if attack.warm],
            "",
        ),
        (
            "rounds without an attack, which count nowhere else",
            [one.outcome is None for one in rounds],
            "; ".join(f"{number} × {reason}" for reason, number in why.most_common()),
        ),
    ]
    return [Result(name, float(sum(each)), "in total", "0", tuple(map(float, each)), note) for name, each, note in rows]


def matrix(rounds: Sequence[Round]) -> Table:
    """One row per victims and one column per moment: the rounds in which the attack took place, and those of them in
    which something was left, wrong or lost."""
    attacked = Counter(one.attack.combination for one in rounds if one.outcome is not None)
    failed = Counter(one.attack.combination for one in rounds if one.outcome is not None and not one.outcome.is_clean)
    title = "attacks (something left, lost or wrong)"
    columns = [Column(name, no_wrap=True) for name in ("killed", *MOMENTS)]
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0))
    for victims in VICTIMS:
        cells = [(attacked[moment, victims], failed[moment, victims]) for moment in MOMENTS]
        table.add_row(", ".join(victims), *(f"{tried} ({bad})" if tried else "–" for tried, bad in cells))
    return table


def _named(attack: Attack) -> str:
    kind = ("warm" if attack.warm else "cold") + (" and detached" if attack.detached else "")
    return f"{' and '.join(attack.victims)} at {attack.moment}, {kind}"
