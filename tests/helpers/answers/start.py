"""Answers to the exercises of lab 00."""

from labkit import run

DDP = {"nproc": 2, "device": "cpu", "workload": "mlp", "steps": 3, "samples": 512}

RIGHT = {"steps": 157, "two": lambda: run("ddp", batch_size=64, **DDP).wait()}
WRONG = {
    "steps": (156, "the last 96"),
    "two": (lambda: run("ddp", batch_size=128, **DDP).wait(), "must be 128, got 256"),
}
