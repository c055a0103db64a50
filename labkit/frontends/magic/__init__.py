"""`%%torchrun 4`: one cell on so many ranks, the output of each apart; `report(name=value)` brings values back as a table of ranks.

=========== ===========================================================================
`torchrun`  the magic itself, once `%load_ext labkit` has registered it
`cell`      what was asked for, and the script that is written from the cell
`following` the run of a cell, from its start to its end, and what it brings back
`output`    what is shown of it at one moment, as HTML and as text
`reporting` `report`, the one part that runs in the ranks
=========== ===========================================================================
"""

from labkit.frontends.magic.reporting import report

__all__ = ["report"]
