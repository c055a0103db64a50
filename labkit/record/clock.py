"""One clock for every process of a run.

A run's times are unix seconds as this machine's clock had them when the run was asked for, continued by the monotonic clock. Setting
the system clock while the run lasts therefore changes no duration, and the times of two processes can be compared. The launcher puts
the difference between the two clocks into LABKIT_CLOCK, and every process of the run inherits it. Monotonic clocks are shared by the
processes of one boot of one machine only, so the value also names those; on any other machine it is ignored. Standard library only.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "LABKIT_CLOCK"
_SET = 50_000_000  # ns by which the two clocks may differ over one step without anybody having set one
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def reference() -> str:
    """The value of LABKIT_CLOCK for a run that is asked for now."""
    return f"{time.time() - time.monotonic():.6f}@{_machine()}"


def now(of: str | None = None) -> float:
    """Unix seconds on the run's clock; outside a run, on a clock that begins with this process. `of` is the `reference` of another run."""
    return time.monotonic() + (_offset() if of is None else _offset_of(of))


def shift() -> float:
    """Seconds to add to a reading of the system clock, taken just now, to have it on the run's clock."""
    return now() - time.time()


@dataclass(frozen=True)
class SystemMoment:
    """A moment as the system clock and the monotonic clock have it, for times that torch takes from the system clock (ns)."""

    ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> SystemMoment:
        """This moment."""
        return cls(time.time_ns(), time.monotonic_ns())

    def clock_was_set(self) -> bool:
        """Whether the system clock was set since then, so that its times before and after cannot be compared."""
        return abs((time.time_ns() - self.ns) - (time.monotonic_ns() - self.monotonic_ns)) > _SET

    def seconds(self, ns: int) -> float:
        """A reading of the system clock, near this moment, on the run's clock."""
        return (self.monotonic_ns + ns - self.ns) / 1e9 + _offset()


@cache
def _offset() -> float:
    return _offset_of(os.environ.get(VARIABLE, ""))


def _offset_of(reference: str) -> float:
    offset, _, machine = reference.partition("@")
    try:
        if machine == _machine():
            return float(offset)
    except ValueError:
        pass  # not written by `reference`
    return time.time() - time.monotonic()


@cache
def _machine() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
