"""Answers to the exercises of lab 06."""

from labkit import run

TP = {"strategy": "tp", "workload": "gpt", "nproc": 2, "device": "cpu", "steps": 5, "samples": 32, "batch_size": 2}


def _train(**more):
    return run(TP["strategy"], **{name: value for name, value in (TP | more).items() if name != "strategy"}).wait()


def right(a, b, rank, ranks):
    return a.chunk(ranks, dim=1)[rank], b.chunk(ranks, dim=0)[rank]


def rows_first(a, b, rank, ranks):
    return a.chunk(ranks, dim=0)[rank], b.chunk(ranks, dim=1)[rank]


RIGHT = {"parts": right, "logits": lambda: _train(options={"loss_parallel": True})}
WRONG = {"parts": (rows_first, "along which dimension can a be split"), "logits": (_train, "still all-gathers")}
