"""Answers to the exercises of lab 11."""

from labkit import run

CNN = {"nproc": 2, "device": "cpu", "steps": 4, "samples": 2048}


def states(parameters, devices, stage):
    sharded = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return (16 - sharded) * parameters + sharded * parameters / devices


def doubled(parameters, devices, stage):
    sharded = {0: 0, 1: 14, 2: 14, 3: 16}[stage]
    return (16 - sharded) * parameters + sharded * parameters / devices


RIGHT = {
    "states": states,
    "seven": 14.0,
    "fits": lambda: run("ddp", options={"accumulate": 4}, **CNN).wait(),
    "published": "dp=32,pp=2,zero=1,micro_batch=1",
}
WRONG = {
    "states": (doubled, "stage 1 shards only the optimizer state"),
    "seven": (112, "divides it by their number"),
    "fits": (lambda: run("fsdp2", **CNN).wait(), "most of it is activations"),
    "published": ("dp=64,zero=0,micro_batch=1", "ran out of memory or crashed"),
}
