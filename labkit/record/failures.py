"""The failure of a run, from the reports of ranks and torchrun: which ranks failed first, how, and which followed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TypedDict

from labkit.record.columns import RankState
from labkit.record.stacks import error_in, place
from labkit.record.types.documents import KnownStatus
from labkit.record.types.summary import Failure

# Messages of gloo, NCCL and torchrun on a rank whose peer is gone: a consequence, if any other error is known.
PEER_GONE = re.compile(
    r"connection (?:was likely )?(?:closed|reset|refused)|broken pipe|timed out|timeout|remote process exited|peer"
    r" closed",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # numbers may differ between messages with the same cause


class _Report(TypedDict):
    """One rank's failure. `consequence`: it only reports a lost peer."""

    rank: int
    t: float
    type: str
    message: str
    traceback: str
    exit_code: int | None
    consequence: bool
    last_seen: bool


def failure_of(ranks: Mapping[int, RankState], status: KnownStatus, over: bool) -> Failure | None:
    """The first failure of a run; None if no rank failed.

    `rank`, `type`, `message`, `traceback` (a stack, innermost frame last) and `exit_code` are those of the first rank
    in time. An error that only reports a lost peer never outranks the peer itself: a rank killed by a signal leaves no
    error event, only the errors of its peers. `alike` are all ranks that failed in the same way, including the first:
    same type, same message except for numbers, same line. `collateral` are the other ranks that ended because of it;
    once the run is over, these include ranks that did not report how they ended. `left` are ranks that had exited with
    code 0, if the first failure reports a lost peer. `last_seen` is true if `traceback` was sampled shortly before the
    process died and is not the stack of the failure itself.
    """
    failures = [*_reported_by_ranks(ranks, status), *_reported_by_torchrun(ranks, status)]
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure["consequence"], failure["t"]))
    alike = sorted(failure["rank"] for failure in failures if failure is first or _same_way(first, failure))
    left = sorted(rank.rank for rank in ranks.values() if rank.exit_code == 0) if first["consequence"] else []
    others = {failure["rank"] for failure in failures}
    if over:
        others |= {rank.rank for rank in ranks.values() if rank.exit_code is None}
    return {
        "rank": first["rank"],
        "type": first["type"],
        "message": first["message"],
        "traceback": first["traceback"],
        "exit_code": first["exit_code"],
        "last_seen": first["last_seen"],
        "alike": alike,
        "collateral": sorted(others - set(alike)),
        "left": left,
    }


def exit_code(ranks: Mapping[int, RankState], status: KnownStatus, number: int) -> int | None:
    """A rank's exit code, from its own last event or from torchrun's report; None if it was terminated with its
    group."""
    rank = ranks.get(number)
    if rank is not None and rank.exit_code is not None:
        return rank.exit_code
    reported = (status.get("failures") or {}).get(str(number), {}).get("exit_code")
    return 1 if reported is None and rank is not None and rank.error else reported


def _reported_by_ranks(ranks: Mapping[int, RankState], status: KnownStatus) -> Iterator[_Report]:
    for rank in ranks.values():
        if rank.error:
            kind, message = rank.error["type"], rank.error["message"]
            yield {
                "rank": rank.rank,
                "t": rank.error["t"],
                "type": kind,
                "message": message,
                "traceback": rank.error["traceback"],
                "exit_code": exit_code(ranks, status, rank.rank),
                "consequence": bool(PEER_GONE.search(f"{kind} {message}")),
                "last_seen": False,
            }


def _reported_by_torchrun(ranks: Mapping[int, RankState], status: KnownStatus) -> Iterator[_Report]:
    for name, failure in (status.get("failures") or {}).items():
        rank = int(name)
        if not failure.get("exit_code") or (rank in ranks and ranks[rank].error):
            continue
        kind, message = failure.get("signal") or f"exit code {failure['exit_code']}", str(failure.get("message") or "")
        if not failure.get("signal"):
            kind, message = error_in(message) or (kind, message)  # the last line of a traceback in its log
        t = failure.get("t")
        yield {
            "rank": rank,
            "t": math.inf if t is None else t,
            "type": kind,
            "message": message,
            "traceback": failure.get("traceback", ""),
            "exit_code": failure["exit_code"],
            "consequence": failure.get("signal") == "SIGTERM",
            "last_seen": bool(failure.get("last_seen")),
        }


def _same_way(one: _Report, other: _Report) -> bool:
    """Whether two ranks failed in the same way. A rank known only from torchrun's report has no line to compare."""
    if one["type"] != other["type"] or _NUMBERS.sub("#", one["message"]) != _NUMBERS.sub("#", other["message"]):
        return False
    lines = {
        place(failure["traceback"]) for failure in (one, other) if failure["traceback"] and not failure["last_seen"]
    }
    return len(lines) < 2
