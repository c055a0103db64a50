"""One clock for every process of a run.

The times of a run are unix seconds by the system clock when the run was requested, continued by the monotonic clock.
Setting the system clock during the run therefore changes no duration, and times of two processes can be compared. The
launcher puts the difference between the two clocks into LABKIT_CLOCK, which every process of the run inherits.
Processes share a monotonic clock only within one boot of one machine, so the value also names the boot; on any other
machine it is ignored. Standard library only.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "LABKIT_CLOCK"
_SET = 50_000_000  # ns by which the two clocks may drift apart during one step without either having been set
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def reference() -> str:
    """The value of LABKIT_CLOCK for a run that is requested now."""
    return f"{time.time() - time.monotonic():.6f}@{_machine()}"


def now(of: str | None = None) -> float:
    """Unix seconds on the run's clock; outside a run, on a clock that starts with this process. `of`: the `reference`
    of another run.
    """
    return time.monotonic() + (_offset() if of is None else _offset_of(of))


def shift() -> float:
    """Seconds to add to a current reading of the system clock to convert it to the run's clock."""
    return now() - time.time()


@dataclass(frozen=True)
class SystemMoment:
    """One moment on the system clock and on the monotonic clock (ns), to convert times that torch takes from the system
    clock.
    """

    ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> SystemMoment:
        return cls(time.time_ns(), time.monotonic_ns())

    def clock_was_set(self) -> bool:
        """Whether the system clock was set since this moment, so that its times before and after cannot be compared."""
        return abs((time.time_ns() - self.ns) - (time.monotonic_ns() - self.monotonic_ns)) > _SET

    def seconds(self, ns: int) -> float:
        """A system-clock reading `ns` near this moment, in unix seconds on the run's clock."""
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
