"""What every event has, and the aliases that several kinds of events share."""

from typing import Annotated, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.values import RANKS, Bytes, Count, Name, Rank, Time

Owners: TypeAlias = Annotated[dict[str, Bytes], Limits(most=100)]  # bytes by owner, see `events.OWNERS`
Ranks: TypeAlias = Annotated[list[Rank], Limits(most=RANKS)]


class Envelope(TypedDict):
    """What every event has: `t`, its time in unix seconds on the clock of the run, `v`, the version of the envelope,
    and `kind`."""

    v: NotRequired[Count | None]
    t: Time


class OfRank(Envelope):
    """An event of a rank. `after` is the number of records in its step file when it was written (default: 0)."""

    rank: Rank
    after: NotRequired[Count | None]


class Unknown(Envelope):
    """An event of a kind of a newer version; its other fields pass unchecked."""

    kind: Name
