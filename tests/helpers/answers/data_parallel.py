"""Answers to the exercises of lab 02."""

from labkit import run

FIELDS = {"nproc": 2, "device": "cpu", "workload": "mlp", "steps": 10, "samples": 2048}
SIDES = {"a": "dp", "b": "dp", "c": "ddp", "d": "dp", "e": "ddp", "f": "both", "g": "dp"}


def both(dp, ddp):
    """A run of each, with these batch sizes per device."""
    return [run(name, batch_size=batch, **FIELDS).wait() for name, batch in (("dp", dp), ("ddp", ddp))]


RIGHT = {"exchanges": [602_112, 8_036_472, 7_680, 7_680, 8_036_472], "sides": SIDES, "same": lambda: both(48, 48)}
WRONG = {
    "exchanges": ([602_112, 10_715_296, 7_680, 7_680, 10_715_296], "device 0 does not send its own data"),
    "sides": (SIDES | {"c": "both"}, "which devices have the sum"),
    "same": (lambda: both(48, 96), "ddp: the global batch size must be 96, got 192"),
}
