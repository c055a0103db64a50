"""The colours: one per rank in all charts and logs, and one per phase, different from those of the ranks."""

from __future__ import annotations

# Okabe and Ito, "Color Universal Design": safe for colour-blind readers. Grey replaces black, so that it is visible in
# a dark theme.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B5A800", "#8C8C8C")

# A ramp of purple, a hue that no rank has, for the computation of a step; greys for waiting.
PHASES = {
    "data": "#8F8F8F",
    "copy": "#6E6E6E",
    "forward": "#C4A9E8",
    "backward": "#9263C8",
    "optimizer": "#633A96",
    "other": "#BDBDBD",
}

# Communication: Paul Tol's muted scheme, safe for colour-blind readers, in hues that neither ranks nor phases have.
OPERATIONS = {
    "all_reduce": "#44AA99",
    "all_gather": "#88CCEE",
    "reduce_scatter": "#117733",
    "broadcast": "#DDCC77",
    "send": "#CC6677",
    "recv": "#882255",
    "barrier": "#999933",
    "all_to_all": "#AA4499",
}
COMMUNICATION = "#44AA99"
OTHER_OPERATION = "#999999"

# Memory by owner: blues for what persists from step to step, warm colours for what does not.
OWNERS = {
    "parameters": "#6357CF",
    "gradients": "#6699CC",
    "optimizer": "#88CCEE",
    "activations": "#CC6677",
    "communication": "#44AA99",
    "other": "#BBBBBB",
}

# What the learner predicted: a hue that nothing else has, readable on white and on black.
GUESS = "#E6007A"

# For figures that do not know the theme of the page: a grey that is readable on white and on black.
INK = "#808080"
GRID = "rgba(128, 128, 128, 0.25)"


def rank_colour(rank: int) -> str:
    """The colour of a rank, as `#RRGGBB`; the colours repeat after eight ranks."""
    return RANKS[rank % len(RANKS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever has more contrast (WCAG 2) with a colour, `#RRGGBB`."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000" if luminance + 0.05 > (1.05 * 0.05) ** 0.5 else "#fff"
