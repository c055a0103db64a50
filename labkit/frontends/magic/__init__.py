"""`%%torchrun 4`: runs one cell on 4 ranks and shows the output of each rank; `report(name=value)` returns values as a
table of ranks.

=========== ===========================================================================
`torchrun`  the magic, which `%load_ext labkit` registers
`cell`      parses the cell and generates its script
`following` the run of a cell from start to end, and its reports
`output`    the current output as HTML and as text
`reporting` `report`, the only part that runs in the ranks
=========== ===========================================================================
"""

from labkit.frontends.magic.reporting import report

__all__ = ["report"]
