"""What NCCL's RAS service says about a communicator, in words: ranks that did not answer, that report an error, or that
launched fewer collectives than the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from labkit.common.text import visible_line
from labkit.common.units import counted, some_ranks

if TYPE_CHECKING:
    from labkit.record.events import Communicator, Ras, RasAlike, RasRank

_SHOWN = 8  # ranks or values in one sentence
STATUS = "status"  # the `what` of ranks that differ in their status


def answer_in_words(event: Ras) -> str:
    """`NCCL RAS: rank 1 has launched 56 AllReduce, ranks 0, 2, 3 57`; empty if all ranks answered and are alike."""
    sentences = list(dict.fromkeys(sentence for about in event.communicators for sentence in _sentences(about)))
    if not sentences:
        return ""
    more = [f"{len(sentences) - _SHOWN} more in {event.saved}"] if len(sentences) > _SHOWN else []
    return "NCCL RAS: " + "; ".join([*sentences[:_SHOWN], *more])


def _sentences(about: Communicator) -> Iterator[str]:
    within = "" if about.of_run else f" (ranks of {name_of(about)})"
    for ranks in (about.missing, about.failed):
        if ranks:
            yield ranks_say(ranks) + within
    for parts in differing(about):
        yield part_in_words(parts) + within


def name_of(about: Communicator) -> str:
    """`communicator 27a079b828ff1a75 of 32 ranks`."""
    return f"communicator {visible_line(about.name)} of {counted(about.size, 'rank')}"


def ranks_say(ranks: Sequence[RasRank]) -> str:
    """`rank 1 did not answer and is considered dead (process 42 on 10.0.0.2, GPU 1)`, of ranks that say the same."""
    by_word: dict[str, list[RasRank]] = {}
    for rank in ranks:
        by_word.setdefault(rank.says, []).append(rank)
    sentences = []
    for says, those in by_word.items():
        processes = [process for rank in those[:_SHOWN] if (process := process_of(rank))]
        named = f" ({'; '.join(processes)})" if processes else ""
        sentences.append(f"{some_ranks([rank.rank for rank in those])} {visible_line(says)}{named}")
    return "; ".join(sentences)


def process_of(rank: RasRank) -> str:
    """`process 42 on 10.0.0.2, GPU 1`; empty if unknown."""
    host = f" on {visible_line(rank.host)}" if rank.host else ""
    gpu = f", GPU {visible_line(rank.gpu)}" if rank.gpu else ""
    return f"process {rank.pid}{host}{gpu}" if rank.pid else ""


def differing(about: Communicator) -> list[list[RasAlike]]:
    """What is not equal on all ranks, one list for each: the ranks with fewer calls first, or the rarer status."""
    by_what: dict[str, list[RasAlike]] = {}
    for part in about.differ:
        by_what.setdefault(part.what, []).append(part)
    return [
        sorted(parts, key=lambda part: part.count if what == STATUS else calls(part)) for what, parts in by_what.items()
    ]


def calls(part: RasAlike) -> int:
    """How often ranks launched a collective."""
    return int(part.value) if part.value.isdecimal() and part.value.isascii() else 0


def part_in_words(parts: Sequence[RasAlike]) -> str:
    """`rank 1 has launched 56 AllReduce, ranks 0, 2, 3 57`."""
    words = []
    for part in parts[:_SHOWN]:
        who, value, what = members(part), visible_line(part.value), visible_line(part.what)
        verb = "has" if part.count == 1 else "have"
        if part.what == STATUS:
            words.append(f"{who} {verb} status {value}")
        else:
            words.append(f"{who} {value}" if words else f"{who} {verb} launched {value} {what}")
    return ", ".join(words) + (f" and {len(parts) - _SHOWN} more groups" if len(parts) > _SHOWN else "")


def members(part: RasAlike) -> str:
    """`ranks 0, 2`; `26 ranks` if the report does not name all of them."""
    return some_ranks(part.ranks) if len(part.ranks) == part.count else counted(part.count, "rank")
