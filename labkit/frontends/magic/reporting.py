"""`report`: a rank brings values back. It runs in the ranks, where torch is there already, and loads nothing else."""

from __future__ import annotations

import json
import os
from typing import Any

from labkit.common.arguments import shown
from labkit.record.events import REPORT

DEEPEST = 8  # lists in lists
MOST = 1_000  # numbers in one value: a table of ranks is read by people


def report(*given: Any, **values: Any) -> None:
    """Brings this rank's values back: `report(total=x, seconds=0.2)` is two columns of the table of ranks under a `%%torchrun` cell.

    A value is a number, a text, a tensor or a list of `MOST` numbers at the most; of two reports of one name the newer counts.
    Where no run collects them they are printed. Raises `ValueError` for a value that does not fit into a table.
    """
    if given:
        raise TypeError(f"report takes values by name, such as report(total=x); got {shown(given[0])} without a name")
    plain = {name: _plain(name, value) for name, value in values.items()}
    if not os.environ.get("LABKIT_RUN_DIR"):
        print(", ".join(f"{name} = {value}" for name, value in plain.items()))
        return
    from datetime import datetime

    from torch.monitor import Event, log_event

    log_event(Event(name=REPORT, timestamp=datetime.now(), data={"values": json.dumps(plain)}))


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """The value as JSON has it."""
    if depth > DEEPEST:
        raise ValueError(f"report({name}=…) has lists in lists deeper than {DEEPEST}; report a flat list")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):  # a tensor or an array
        size = value.numel() if hasattr(value, "numel") else value.size
        if size > MOST:
            raise ValueError(f"report({name}=…) has {size:,} numbers, and {MOST:,} are the most; report a part, a sum or its shape")
        return value.tolist()
    if isinstance(value, (list, tuple)):
        if len(value) > MOST:
            raise ValueError(f"report({name}=…) has {len(value):,} values, and {MOST:,} are the most; report a part of them")
        return [_plain(name, one, depth + 1) for one in value]
    raise ValueError(f"report({name}=…) was a {type(value).__name__}; a number, a text, a tensor or a list of them can be reported")
