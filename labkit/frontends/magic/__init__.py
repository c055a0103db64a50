"""`%%torchrun 4`: runs one cell on 4 ranks and shows the output of each rank; `report(name=value)` returns values as a
table of ranks.

`torchrun.py` is the magic, which `%load_ext labkit` registers, `cell.py` its first line, its script and what is shown.
`kept.py` is `%%torchrun 4 --keep`, `%%ranks` and `%ranks`: ranks that stay across cells; `group.py` is their run, the
connection to them, and the notebook's end of their widgets. `report` sends values of a rank back to the notebook: it is
the only part here that runs in the ranks, and imports nothing heavy besides torch.
"""

from __future__ import annotations

import json
import os
from typing import Any

from labkit.common.arguments import shown
from labkit.record.writer import REPORT

DEEPEST = 8  # maximum nesting of lists
MOST = 1_000  # maximum count of numbers in one value: the table of ranks is read by people


def report(*given: Any, **values: Any) -> None:
    """Reports values of this rank: `report(total=x, seconds=0.2)` adds two columns to the table of ranks below a
    `%%torchrun` cell.

    A value is a number, a string, a tensor or a list of at most `MOST` numbers; a later report of the same name
    replaces the value. Outside of a run the values are printed. Raises `ValueError` for a value that does not fit into
    a table.
    """
    if given:
        raise TypeError(f"report takes keyword arguments, as in report(total=x), got {shown(given[0])} without a name")
    plain = {name: _plain(name, value) for name, value in values.items()}
    if not os.environ.get("LABKIT_RUN_DIR"):
        print(", ".join(f"{name} = {value}" for name, value in plain.items()))
        return
    from datetime import datetime

    from torch.monitor import Event, log_event

    log_event(Event(name=REPORT, timestamp=datetime.now(), data={"values": json.dumps(plain)}))


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """The value as JSON-compatible data."""
    if depth > DEEPEST:
        raise ValueError(f"report({name}=…) nests lists deeper than {DEEPEST} levels; report a flat list")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):  # a tensor or an array
        size = value.numel() if hasattr(value, "numel") else value.size
        if size > MOST:
            raise ValueError(
                f"report({name}=…) must have at most {MOST:,} numbers, got {size:,}; report a slice, a sum or its shape"
            )
        return value.tolist()
    if isinstance(value, (list, tuple)):
        if len(value) > MOST:
            raise ValueError(f"report({name}=…) must have at most {MOST:,} values, got {len(value):,}; report a slice")
        return [_plain(name, item, depth + 1) for item in value]
    raise ValueError(
        f"report({name}=…) must be a number, a string, a tensor or a list of them, got {type(value).__name__}"
    )
