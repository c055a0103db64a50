"""Answers to the exercises of lab 17."""

from labkit import run

TWIN = {"workload": "gpt", "nproc": 4, "device": "cpu", "batch_size": 1, "steps": 5, "samples": 20}

RIGHT = {
    "layout": "FSDP 8 × CP 2",
    "twin": lambda: run("fsdp2_tp", options={"size": "10M"}, **TWIN).wait(),
    "published": "dp=2,tp=4,pp=16,zero=1,micro_batch=1",
}
WRONG = {
    "layout": ("FSDP 16", "fits only with recomputation"),
    "twin": (
        lambda: run("fsdp2", workload="mlp", nproc=2, device="cpu", steps=2, samples=64, batch_size=8).wait(),
        "gpt of size 10M on 4 ranks, got mlp on 2",
    ),
    "published": ("tp=16,zero=1,micro_batch=1", "of the fastest; by the formulas"),
}
