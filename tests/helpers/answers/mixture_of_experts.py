"""Answers to the exercises of lab 15; the numbers are those of the learner."""

from labkit import run
from labkit.course.exercises import draw_number
from labkit.course.exercises import model_parallel as mixture_of_experts

SMALL = {
    "workload": "moe",
    "nproc": 2,
    "device": "cpu",
    "steps": 2,
    "samples": 16,
    "batch_size": 4,
    "precision": "fp32",
}


def drawn():
    """The layer of this learner."""
    return draw_number("mixture_of_experts.slots", mixture_of_experts._layer)


def run_of_learner(more=0):
    """A run with the experts of this learner, and `more` slots than are asked for."""
    experts, top_k, slots = mixture_of_experts._asked()
    factor = (slots + more) * experts / (top_k * 128)
    options = {"experts": experts, "top_k": top_k, "capacity_factor": factor}
    return run("ep", options=options, **SMALL).wait()


RIGHT = {"slots": lambda: drawn().right, "bytes": lambda: run_of_learner()}
WRONG = {
    "slots": (lambda: drawn().right / 2, "dispatch and combine"),
    "bytes": (lambda: run_of_learner(1), "C is rounded"),
}
