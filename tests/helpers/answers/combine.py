"""Answers to the exercises of lab 08."""

from labkit import run

SMALL = {"workload": "mlp", "nproc": 4, "device": "cpu", "steps": 2, "samples": 64, "batch_size": 8}


def place_of(rank, pp, dp, tp):
    return rank // (dp * tp), rank // tp % dp, rank % tp


def reversed_axes(rank, pp, dp, tp):
    return rank % pp, rank // pp % dp, rank // (pp * dp)


RIGHT = {"place": place_of, "machines": lambda: run("pp_ddp", **SMALL).wait()}
WRONG = {
    "place": (reversed_axes, "neighbouring ranks"),
    "machines": (lambda: run("fsdp2", **SMALL).wait(), "sends only activations"),
}
