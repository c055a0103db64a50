"""The index of a file with tensors, which the probe writes if `Spec.tensors` is set; see probe/tensors.py."""

from typing import Annotated, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.values import Count, Name

Place: TypeAlias = Annotated[list[Count], Limits(most=64)]


class Piece(TypedDict):
    """A part of a tensor that one rank wrote, and where it belongs: at the `offset` of a block, at the `start` of a
    flat vector, or as a partial sum. `shape` is that of the whole tensor."""

    key: Name
    name: Name
    shape: Place
    kind: Literal["block", "partial", "flat"]
    start: NotRequired[Count]
    offset: NotRequired[Place]
