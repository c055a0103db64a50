"""Answers to the exercises of lab 03."""

from labkit import run

FIELDS = {"workload": "gpt", "nproc": 2, "device": "cpu", "steps": 12, "samples": 4096, "batch_size": 12}


def sampler():
    """A correct sampler."""

    def mine(order, rank, ranks):
        return (order + order[: -len(order) % ranks])[rank::ranks]

    return mine


def uneven():
    """A sampler that does not pad."""

    def mine(order, rank, ranks):
        return order[rank::ranks]

    return mine


RIGHT = {
    "steps": (66, 10),
    "sampler": sampler,
    "buckets": lambda: run("ddp", options={"bucket_mb": 1}, **FIELDS).wait(),
}
WRONG = {
    "steps": ((65, 80), "do not fill a batch"),
    "sampler": (uneven, "make the others hang"),
    "buckets": (lambda: run("ddp", **FIELDS | {"workload": "mlp"}).wait(), "at least 3 buckets per step, got 2"),
}
