"""Answers to the exercises of lab 19."""


def bus_bandwidth(size, seconds, ranks):
    return 2 * (ranks - 1) / ranks * size / seconds


def algorithm_bandwidth(size, seconds, ranks):
    return size / seconds


RIGHT = {"bus": bus_bandwidth, "tokens": 4000, "rank": 19, "published": "dp=32,tp=8,zero=0,micro_batch=8"}
WRONG = {
    "bus": (algorithm_bandwidth, "that is the algorithm bandwidth"),
    "tokens": (2667, "only backward overlaps"),
    "rank": (3, "that is the local rank"),
    "published": ("tp=16,zero=1,micro_batch=1", "16% of the fastest"),
}
