"""The colours: one per rank in every chart and log, and one per phase that no rank has."""

from __future__ import annotations

# Okabe and Ito, "Color Universal Design": told apart by colour-blind eyes. Black is grey here, so that it shows in a dark theme.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B5A800", "#8C8C8C")

# A ramp of purple, the hue that no rank has, for what a step computes; greys for what it waits for.
PHASES = {"data": "#8F8F8F", "copy": "#6E6E6E", "forward": "#C4A9E8", "backward": "#9263C8", "optimizer": "#633A96", "other": "#BDBDBD"}

# What is communicated: Paul Tol's muted scheme, told apart by colour-blind eyes, in hues that neither ranks nor phases have.
OPERATIONS = {
    "all_reduce": "#44AA99",
    "all_gather": "#88CCEE",
    "reduce_scatter": "#117733",
    "broadcast": "#DDCC77",
    "send": "#CC6677",
    "recv": "#882255",
    "barrier": "#999933",
}
COMMUNICATION = "#44AA99"
OTHER_OPERATION = "#999999"

# Who holds memory: what stays from step to step in blues, what comes and goes in warm colours.
OWNERS = {
    "parameters": "#6357CF",
    "gradients": "#6699CC",
    "optimizer": "#88CCEE",
    "activations": "#CC6677",
    "communication": "#44AA99",
    "other": "#BBBBBB",
}

# Where a picture cannot ask the page for its theme: a grey that is read on white and on black alike.
INK = "#808080"
GRID = "rgba(128, 128, 128, 0.25)"


def rank_colour(rank: int) -> str:
    """The colour of a rank, as `#RRGGBB`; after eight ranks they come again."""
    return RANKS[rank % len(RANKS)]
