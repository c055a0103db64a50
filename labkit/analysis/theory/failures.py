"""Failures of a cluster, and what checkpoints and restarts cost: everything here is modelled.

Failures are taken to be independent and equally likely at any time, so that a job with n devices has n times as many.
J. W. Young (1974), "A first order approximation to the optimum checkpoint interval"; J. T. Daly (2006), "A higher order
estimate of the optimum checkpoint interval for restart dumps".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class Observed:
    """Interruptions of a published training: `count` in `days` on `devices`, and where that is written."""

    name: str
    devices: int
    days: float
    count: int
    source: str

    @property
    def per_device_day(self) -> float:
        """Interruptions per device and day."""
        return self.count / (self.days * self.devices)

    def between(self, devices: int) -> float:
        """Mean seconds between two interruptions of a job on `devices` such devices."""
        return DAY / (self.per_device_day * devices)


PUBLISHED = {
    "llama3": Observed(
        "Llama 3 405B", 16_384, 54, 466, "Grattafiori et al. 2024, section 3.3.4: 466, of which 419 unexpected"
    ),
    "opt": Observed(
        "OPT-175B", 992, 60, 105, "Zhang et al. 2022, section 2.5: 35 manual restarts and about 70 automatic ones"
    ),
}


def first_order_cost(interval: float, saving: float, between: float) -> float:
    """The fraction of time for saving, and for steps that are computed twice (Young 1974): saving / interval +
    interval / (2 between). All arguments in seconds; a restart is not in it."""
    return saving / interval + interval / (2 * between)


def first_order_interval(saving: float, between: float) -> float:
    """The interval with the lowest `first_order_cost`, in seconds: √(2 saving · between) (Young 1974)."""
    return math.sqrt(2 * saving * between)


def goodput(interval: float, saving: float, restart: float, between: float) -> float:
    """The fraction of time that ends up in the training, from 0 to 1 (Daly 2006, equation 20, for exponentially
    distributed failures, which may also come while a job saves or restarts).

    `interval` are the seconds of training between two checkpoints, `saving` those that training waits for one,
    `restart` those from a failure to the first step, `between` the mean ones between failures.
    """
    if (interval + saving + restart) / between > 500:
        return 0.0  # the exponential is too large for a float
    return interval / (between * math.exp(restart / between) * math.expm1((interval + saving) / between))


def best_interval(saving: float, between: float) -> float:
    """The interval with the highest `goodput`, in seconds (Daly 2006, equation 37): that of Young with terms of higher
    order. It does not depend on the restart."""
    if saving >= 2 * between:
        return between
    ratio = saving / (2 * between)
    return first_order_interval(saving, between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - saving
