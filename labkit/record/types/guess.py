"""The learner's own predictions of a run, made before it started: `guess.json`.

`VERSION` grows when a field is removed or changes its meaning; new figures do not change it.
"""

from typing import Annotated, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.values import RANKS, Amount, Count, Name

VERSION = 1

# One value for all ranks, or a value by rank.
Guessed: TypeAlias = Amount | Annotated[dict[str, Amount], Limits(most=RANKS, numbers=RANKS)]


class Guesses(TypedDict):
    """Predicted values by the name of a figure, in its unit, see `analysis/guess.py`; unknown names are ignored.
    `notebook` is the name of the notebook without its suffix, if it is known: of a lab, that of the lab."""

    v: NotRequired[Count | None]
    notebook: NotRequired[Name | None]
    figures: Annotated[dict[str, Guessed], Limits(most=100)]
