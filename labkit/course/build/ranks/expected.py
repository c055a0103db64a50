"""What a single device makes of the inputs that were drawn, and which mistake explains other results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Given = dict[str, Any]  # what one rank is given: tensors by name
Results = dict[str, Tensor]  # what one rank ends with, by name
CLOSE = 1e-3  # relative difference below which a mistake explains a result

_NAMED = 3  # results that a hint names


@dataclass
class Expected:
    """Of one rank: its losses by step, its results by name, and the size that a difference of a result is relative to;
    `squares` has, by step, the sum of the squares of what the rank must contribute to sums over the ranks.
    `mistakes` has the results of common mistakes, by words that may contain `{names}`."""

    losses: list[float] = field(default_factory=list)
    tensors: Results = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)
    mistakes: dict[str, Results] = field(default_factory=dict)

    def expects(self, name: str, tensor: Tensor, since: Tensor | None = None) -> None:
        """The rank must end with this tensor; a difference counts relative to its change `since`, or to its norm."""
        self.tensors[name] = tensor.detach().clone()
        self.sizes[name] = _norm(tensor if since is None else tensor - since)

    def mistake(self, words: str, name: str, tensor: Tensor) -> None:
        """With the mistake in `words`, this result would be `tensor`."""
        self.mistakes.setdefault(words, {})[name] = tensor.detach().clone()

    def differences(self, results: Results) -> dict[str, float]:
        """By name, the relative difference of a result; infinite if it has no value or another shape."""
        return {name: self._difference(name, want, results) for name, want in self.tensors.items()}

    def _difference(self, name: str, want: Tensor, results: Results) -> float:
        got = results.get(name)
        if got is None or got.shape != want.shape:
            return float("inf")
        difference = _norm(got - want) / max(self.sizes[name], 1e-12)
        return difference if difference == difference else float("inf")


def hint(expected: list[Expected], results: list[Results]) -> str:
    """The first mistake that explains what is wrong on every rank that has wrong results."""
    for words in dict.fromkeys(words for rank in expected for words in rank.mistakes):
        named: dict[str, None] = {}
        for mine, got in zip(expected, results):
            made = mine.mistakes.get(words, {})
            wrong = [name for name in made if mine._difference(name, mine.tensors[name], got) > CLOSE]
            if any(mine._difference(name, made[name], got) > CLOSE for name in wrong):
                break
            named |= dict.fromkeys(name.rpartition(" ")[2] for name in wrong)
        else:
            if named:
                names = list(named)
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                return words.replace("{names}", ", ".join(names[:_NAMED]) + more)
    return ""


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())
