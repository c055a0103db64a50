"""What trainers log, as metrics of the lab: a callback for Lightning, one for the Trainer of transformers, and a
tracker for accelerate. Each is one line of the user's script.

    Trainer(callbacks=[LightningCallback()])         # from labkit.integrations import LightningCallback
    Trainer(…, callbacks=[TrainerCallback()])        # from labkit.integrations import TrainerCallback
    Accelerator(log_with=Tracker())                  # from labkit.integrations import Tracker

The lab needs none of them to see steps, losses, memory and communication. What it cannot see is what a trainer computes
between steps and hands to its own loggers, such as a validation loss, an accuracy or a learning rate: with these, it is
in the record of the run, `accuracy` in its summary and in comparisons, and all of it in exports.

They pass the values to `torch.monitor`. If the script runs without the lab, nobody listens there, and nothing happens.
A framework is imported when its name is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_HOMES = {
    "LightningCallback": "labkit.integrations.of_lightning",
    "Tracker": "labkit.integrations.of_accelerate",
    "TrainerCallback": "labkit.integrations.of_transformers",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def log_metrics(framework: str, values: Mapping[str, Any]) -> None:
    """Logs the values that are numbers, or tensors and arrays of one number; others, such as texts, are left out. The
    step is that of the lab: the number of optimizer steps so far."""
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if numbers:
        from torch.monitor import Event, log_event

        log_event(Event(framework, datetime.now(), numbers))


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return None
