"""`%%torchrun 4`: runs one cell on 4 ranks and shows the output of each rank; `report(name=value)` returns values as a
table of ranks.

=========== ===========================================================================
`torchrun`  the magic, which `%load_ext labkit` registers; the run of a cell, its output
`cell`      parses the cell and generates its script
`reporting` `report`, the only part that runs in the ranks
=========== ===========================================================================
"""

from labkit.frontends.magic.reporting import report

__all__ = ["report"]
