"""How metrics of a trainer reach the record of the run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from torch.monitor import Event, log_event


def log_metrics(framework: str, values: Mapping[str, Any]) -> None:
    """Logs the values that are numbers, or tensors and arrays of one number; others, such as texts, are left out. The
    step is that of the lab: the number of optimizer steps so far."""
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if numbers:
        log_event(Event(framework, datetime.now(), numbers))


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return None
