"""Exercises of lab 17: a layout of a 13B model on two nodes, and its twin on four ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

from labkit.course.exercises import Exercise, Wrong
from labkit.course.exercises.own import finished
from labkit.course.exercises.published import pick_a_layout
from labkit.prediction.scale.advice import Advice, advice
from labkit.prediction.scale.asked import training

_SLOWER = 1.05  # relative to the fastest
_STEPS = 5


@cache
def _advice() -> Advice:
    return advice(training("13B", devices=16, machine="a100x8", memory="40GB"))


def _layout(answer: Any) -> str:
    if not isinstance(answer, str):
        raise Wrong(f"the answer must be the name of a layout, such as 'FSDP 16', got {answer!r}")
    advice = _advice()
    chosen = next((estimate for estimate in advice.fitting if estimate.layout.title == " ".join(answer.split())), None)
    if chosen is None:
        raise Wrong(f"{answer} is not among the layouts that fit; check its name and its memory")
    if chosen.layout.recompute != "none":
        raise Wrong(f"{answer} fits only with recomputation; split the activations instead")
    fastest = advice.fitting[0]
    if chosen.seconds > _SLOWER * fastest.seconds:
        raise Wrong(
            f"{answer} takes {chosen.seconds / fastest.seconds - 1:.0%} longer than the fastest; which axis costs the"
            " most?"
        )
    return (
        f"{chosen.seconds:.0f} s per step, {chosen.seconds / fastest.seconds - 1:.1%} more than the fastest (modelled)"
    )


def _twin(answer: Any) -> str:
    run = finished(answer)
    if not run.state.spec.strategy:
        raise Wrong("this run uses a script; choose a strategy instead")
    spec = run.state.spec.to_spec()
    if spec.workload != "gpt" or spec.options.get("size") != "10M" or spec.nproc != 4:
        size = f" of size {spec.options['size']}" if "size" in spec.options else ""
        raise Wrong(f"the run must train the gpt of size 10M on 4 ranks, got {spec.workload}{size} on {spec.nproc}")
    if run.state.step < _STEPS:
        raise Wrong(f"the run must have at least {_STEPS} steps, got {run.state.step}")
    if spec.data_ranks != 2:
        raise Wrong(
            f"the run must have two axes of two ranks, one of them for the batch; its batch is split over"
            f" {spec.data_ranks} ranks"
        )
    return f"{spec.strategy_row.title}: two ranks share the batch, and each of those is split over two"


EXERCISES: dict[str, Exercise] = {
    "layout": Exercise(
        "A layout for 13B on two nodes",
        _layout,
        "`'FSDP 8 × CP 2'` is the fastest, `'FSDP 8 × TP 2'` is 1 % slower; both need no recomputation.",
    ),
    "twin": Exercise(
        "The twin of the layout",
        _twin,
        "`run('fsdp2_tp', workload='gpt', **place(4), batch_size=1, steps=5, samples=40, options={'size':"
        " '10M'}).wait()` for FSDP × TP.",
    ),
    "published": pick_a_layout(
        "A layout for 80B on 128 H100",
        "nanotron Llama 80B",
        128,
        "`'dp=2,tp=4,pp=16,zero=1,micro_batch=1'` or `'tp=4,pp=32,dp=1,zero=0,micro_batch=1'`: TP within a node, and"
        " the states over 64 or 128 GPUs by TP × PP. TP 16 fits too, and its all-gathers cross the nodes in every"
        " layer.",
    ),
}
