"""What a finding is, and the words that several rules share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.state import RunState

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
DDP = "DistributedDataParallel"  # the class, as the probe tells it


@dataclass(frozen=True)
class Finding:
    """One finding.

    `kind` is "wrong" (the run is not what was meant), "slow", "memory", or "unseen" (part of it was not measured). `title` says what
    it is, `evidence` by what it is seen, `cause` why it comes to that, `way_out` what to do. `ranks` are those that it speaks of.
    """

    name: str
    kind: str
    title: str
    evidence: str
    cause: str
    way_out: str
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self) | {"ranks": list(self.ranks)}


def ranks_in_words(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1`."""
    numbers = list(numbers)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def place(stack: str | None) -> str:
    """The innermost line of a stack that is no library's: `train.py:139 in disturb`; empty where there is none."""
    lines = [match for match in _LINE.finditer(stack or "") if "site-packages" not in match["file"] and "/lib/python" not in match["file"]]
    if not lines:
        return ""
    file = lines[-1]["file"].replace("\\", "/").rpartition("/")[2]
    return f"{file}:{lines[-1]['line']} in {lines[-1]['function']}"


def texts(state: RunState) -> Iterator[tuple[int | None, str]]:
    """What errors said, with their rank: the first failure's words, then those of the others, then torchrun's."""
    failure = state.failure
    if failure is not None:
        yield failure["rank"], f"{failure['type']}: {failure['message']}"
    for rank in state.ranks.values():
        if rank.error:
            yield rank.rank, f"{rank.error.get('type')}: {rank.error.get('message')}"
    for number, failed in (state.status.get("failures") or {}).items():
        yield int(number), str(failed.get("message", ""))
    yield None, str(state.status.get("message") or "")


def shorter(text: str) -> str:
    """A text in one line, of 300 letters at the most."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "…"
