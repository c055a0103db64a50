"""Answers to the exercises of lab 19."""


def bus_bandwidth(size, seconds, ranks):
    return 2 * (ranks - 1) / ranks * size / seconds


def algorithm_bandwidth(size, seconds, ranks):
    return size / seconds


RIGHT = {"bus": bus_bandwidth, "tokens": 4000, "rank": 19}
WRONG = {
    "bus": (algorithm_bandwidth, "that is the algorithm bandwidth"),
    "tokens": (2667, "only backward overlaps"),
    "rank": (3, "that is the local rank"),
}
