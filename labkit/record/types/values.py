"""The types of single values in a run folder: each is a Python type, annotated with the shape that its JSON must have.

mypy sees the Python type; `schema.shape_of` reads the shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from labkit.record.schema import Sequence
from labkit.record.shapes import Either, Flag, Null, Number, Shape, Text

RANKS = 1_024  # most ranks of one run; front ends draw a row for each

_SCALAR = Either((Number(any_float=True), Text(), Flag(), Null()))
_VALUE: Shape = _SCALAR  # nested lists, at most as deep as a tensor of eight dimensions
for _ in range(8):
    _VALUE = Either((_SCALAR, Sequence(_VALUE)))

if TYPE_CHECKING:
    Plain: TypeAlias = float | str | bool | list["Plain"] | None
else:
    Plain = Any

Rank = Annotated[int, Number(0, RANKS - 1, whole=True)]
World = Annotated[int, Number(1, RANKS, whole=True)]  # processes of a run
# Unix seconds, up to the year 2984: the last that every platform can write as a date is in 3000.
Time = Annotated[float, Number(0, 32_000_000_000)]
Seconds = Annotated[float, Number(-1e9, 1e9)]
Count = Annotated[int, Number(0, 2**53, whole=True)]  # the largest that a column of floats holds exactly
Amount = Annotated[float, Number(0, 1e15)]
Bytes = Annotated[float, Number(0, 2**62)]  # a mean over steps is not an integer
Flops = Annotated[float, Number(0, 1e30)]  # floating-point operations, and those per second
Loss = Annotated[float, Number(any_float=True)]  # not finite if the training diverged
Attempt = Annotated[int, Number(0, 1_000_000, whole=True)]  # 0, and one more after each restart
Series = Annotated[int, Number(0, 63, whole=True)]  # optimizers with separate losses; a chart has a line for each
Pid = Annotated[int, Number(1, 2**31 - 1, whole=True)]
Code = Annotated[int, Number(-(2**63), 2**63, whole=True)]
Name = Annotated[str, Text(4_096, inline=True)]
Line = Annotated[str, Text(inline=True)]  # arguments, variables and paths, of any length
Value = Annotated[Plain, _VALUE]  # of a metric or a report
