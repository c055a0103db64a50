"""Pipeline schedules whose stages go down the ranks and up again: rank r of p has the stages r and 2p − 1 − r, so that
the first rank also has the last stage.

The passes of a rank are pairs of a kind (`schedules.Slot`) and the index of its stage: 0 on the way down, 1 on the way
up. The orders are those of torch. Sources: ZB-V (Qi et al. 2023, section 6); DualPipeV, which is DualPipe (DeepSeek-V3,
2024, section 3.2.1) cut in half.
"""

from __future__ import annotations

Passes = list[tuple[str, int]]


def zero_bubble(rank: int, ranks: int, micro_batches: int) -> Passes:
    """ZB-V, for at least 2p − 1 micro-batches; the passes of those that do not exist are to be left out."""
    count = max(2 * ranks - 1, micro_batches)
    down, up = 2 * (ranks - rank) - 1, ranks - rank  # forwards that fill the pipeline, in each direction
    done = [("F", 0)] * down + [("F", 1), ("F", 0)] * rank + [("F", 1), ("B", 1), ("W", 1)] * up
    for k in range(count - ranks):
        done += [("F", 0)] * (k < count - down - rank)
        done += [("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)]
    done += [("B", 0), ("B", 1)] * rank + [("B", 0), ("W", 0)] * up
    return done + [("W", 1)] * rank + [("W", 0)] * rank


def dual_pipe(rank: int, ranks: int, micro_batches: int) -> Passes:
    """DualPipeV, for at least 2p micro-batches. Torch computes the forward and the backward that the paper overlaps one
    after the other."""
    after = ranks - 1 - rank  # ranks that are closer to the tip of the V
    done = [("F", 0)] * (2 * after) + [("F", 0), ("F", 1)] * (rank + 1) + [("B", 1), ("W", 1), ("F", 1)] * after
    done += [("F", 0), ("BW", 1), ("F", 1), ("BW", 0)] * (micro_batches - 2 * ranks + rank + 1)
    done += [("BW", 1), ("F", 1), ("BW", 0)] * after
    # In the last 2 (rank + 1) backwards, those of the second half are split, and so are all that follow.
    ends = [1, 0] * (rank + 1)
    done += [("BW", which) for which in ends[: rank + 1]]
    split = ends[rank + 1 :]
    done += [("B", which) for which in split]
    waiting = [*split, *[0] * after]  # stages whose weight gradients are still to be computed
    for which in waiting[:after]:
        done += [("W", which), ("B", 0)]
    return done + [("W", which) for which in waiting[after:]]


def bubble(ranks: int, micro_batches: int) -> float:
    """The fraction of idle time if stages are equal and each half of a backward takes as long as a forward."""
    idle = max(ranks - 1, 2 * (2 * ranks - 1 - micro_batches))  # in forwards of a stage; too few do not fill the V
    return idle / (6 * micro_batches + idle)
