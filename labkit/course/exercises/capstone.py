"""Exercises of lab 17: bytes of a layout by formula, a trainer on a mesh of eight CPU ranks, a layout of a 13B model on
several nodes, and its twin on four ranks."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from labkit.common.units import size
from labkit.course.answers import Wrong, explained, finished, numbers_of, require_function, require_run
from labkit.course.build import criteria
from labkit.course.build.criteria import Bytes, records_of, solution, written_script
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, drawn
from labkit.course.exercises.layouts import pick_a_layout
from labkit.prediction.scale.advice import Advice, advice, training
from labkit.record.writer import sent

# ---- bytes per rank by formula


_CASES = (  # parameters, positions × samples × width of a micro-batch, micro-batches, blocks, data, pipeline, tensor
    (49_152, 1_536, 5, 8, 4, 2, 3),
    (960_000, 8_192, 6, 12, 5, 3, 1),
    (6_400_000, 65_536, 16, 8, 1, 4, 8),
    (50_000_000, 131_072, 24, 24, 8, 2, 4),
)
_BYTES = ("bytes stored", "sent along data", "along pipeline", "along tensor")
_NAMES = ("stores", "sends along data", "sends along pipeline", "sends along tensor")


def _by_formula(
    parameters: int, numbers: int, micro_batches: int, blocks: int, data: int, pipeline: int, tensor: int
) -> tuple[float, ...]:
    """Bytes that a rank of the first stage stores between two steps, and sends in one along each axis, in fp32."""
    own = 4 * parameters / (pipeline * tensor)
    return (
        own * (1 + 2 / data),
        2 * (data - 1) / data * own,
        4 * micro_batches * numbers / tensor,
        8 * (tensor - 1) / tensor * 4 * micro_batches * numbers * blocks / pipeline,
    )


def _mistakes(case: tuple[int, ...]) -> tuple[tuple[tuple[float, str], ...], ...]:
    """What each of the four numbers would be with common mistakes, and the words for them."""
    parameters, _, micro_batches, _, data, pipeline, tensor = case
    stored, along_data, along_pipeline, along_tensor = _by_formula(*case)
    own = 4 * parameters / (pipeline * tensor)
    return (
        (
            (3 * own / data, "ZeRO-1 shards the moments only; the parameters are whole in each replica"),
            (3 * own, "ZeRO-1 shards the two moments over the data ranks"),
            (stored + own, "between two steps there are no gradients"),
            (4 * parameters * (1 + 2 / data), "a rank has the blocks of its stage, and of these its tensor shard"),
        ),
        (
            (along_data * pipeline * tensor, "a rank reduces the gradients of what it stores, not of the whole model"),
            (along_data * micro_batches, "gradients add up over the micro-batches before they are sent"),
            (along_data / 2, "a reduce-scatter of the gradients, and an all-gather of the parameters"),
            (2 * own, "a ring sends (n − 1) / n of the whole: a rank has its own shard already"),
        ),
        (
            (along_pipeline * tensor, "between the blocks, a rank of the tensor group has its own positions only"),
            (along_pipeline / micro_batches, "every micro-batch is sent"),
            (along_pipeline * 2, "the first stage sends outputs, and receives the gradients"),
        ),
        (
            (along_tensor * pipeline, "a rank computes the blocks of its stage"),
            (along_tensor / micro_batches, "every micro-batch passes the blocks"),
            (along_tensor / 2, "a block has two parts, attention and the MLP"),
            (along_tensor * 3 / 4, "backward communicates as often as forward"),
        ),
    )


def _bytes(answer: Any) -> str:
    require_function(answer, "per_rank(parameters, numbers, micro_batches, blocks, data, pipeline, tensor)")
    for case in _CASES:
        call = f"per_rank{case}"
        given = numbers_of(call, _BYTES, answer, *case)
        for name, got, wanted, mistakes in zip(_NAMES, given, _by_formula(*case), _mistakes(case)):
            if math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-6):
                continue
            hint = explained(got, mistakes, "count what one rank has, and each call")
            raise Wrong(f"{call} {name} {got:,.0f} bytes: {hint}")
    return "tensor parallelism sends most, once per block and micro-batch; the data axis sends once per step"


# ---- a trainer on a mesh


_RANKS = 8
_SMALL = 1024  # bytes per step that may be sent in groups along several axes: the loss


def _split(record: Record) -> float:
    """Bytes that a rank of the tensor group sends to gather or scatter one activation, for all micro-batches."""
    figures = record.figures
    return sent("all_gather", figures["activation"] * figures["micro_batches"], figures["mesh"]["tensor"])


def _along_data(record: Record) -> float:
    return sent("all_reduce", record.figures["parameters"], record.figures["mesh"]["data"])


def _along_pipeline(record: Record) -> float:
    figures = record.figures
    shards = figures["micro_batches"] * figures["activation"] / figures["mesh"]["tensor"]
    return shards + sent("all_reduce", figures["vocabulary"], figures["mesh"]["pipeline"])


def _activations(record: Record) -> float:
    """Eight calls for each block, two for the embedding or the logits."""
    return (8 * record.figures["blocks"] + 2) * _split(record)


def _along_tensor(record: Record) -> float:
    """The activations, the cross-entropy of the last stage, and the gradients of what is replicated, at most once per
    micro-batch."""
    figures = record.figures
    tensor, micro_batches = figures["mesh"]["tensor"], figures["micro_batches"]
    scores = 3 * figures["token"] * micro_batches * figures["stage"]
    return _activations(record) + sent("all_reduce", scores + micro_batches * figures["replicated"], tensor)


_SENT: dict[str, tuple[Bytes, Bytes, str]] = {
    "data": (
        _along_data,
        lambda record: _along_data(record) + _SMALL,
        "a reduce-scatter of the gradients and an all-gather of the parameters that this rank stores, once per step",
    ),
    "pipeline": (
        _along_pipeline,
        lambda record: _along_pipeline(record) + _SMALL,
        "of each micro-batch the positions of this rank, and once per step the gradient of the vocabulary",
    ),
    "tensor": (
        _activations,
        _along_tensor,
        "for each block and micro-batch four all-gathers and four reduce-scatters of the activations, and the gradients"
        " of replicated parameters",
    ),
}


def _trainer(answer: Any) -> str:
    written = written_script(answer, "Training", "mesh_training.py")
    records = criteria.ended(records_of("capstone", "train", written, _RANKS))
    mesh = records[0].figures["mesh"]
    criteria.groups(records, mesh, _SMALL)
    for axis, (least, most, why) in _SENT.items():  # a group that is wrong, before its results are
        criteria.sent_along(
            records, mesh, axis, lambda r, least=least: least(r) / 2, lambda r, most=most: 2 * most(r), why
        )
    criteria.results(records)
    for axis, (least, most, why) in _SENT.items():
        criteria.sent_along(records, mesh, axis, least, most, why)
    criteria.memory(
        records,
        "after the construction",
        lambda record: (1 + 1 / mesh["data"]) * record.figures["parameters"],
        "this rank's parts of its stage, and of a shard of them a copy; a view keeps the whole tensor alive, a clone"
        " does not",
    )
    criteria.memory(
        records,
        "between two steps",
        lambda record: (1 + 3 / mesh["data"]) * record.figures["parameters"],
        "this rank's parts of its stage, and of a shard of them a copy and the two moments of Adam; gradients are"
        " freed",
    )
    products = "this rank's parts of the blocks of its stage, for the samples of its replica, in forward and backward"
    criteria.computed(
        records,
        ("step",),
        lambda record: record.figures["products"] + 3 * record.figures["attention"],
        lambda record: record.figures["products"] + 3.5 * record.figures["attention"],
        products,
    )
    stored = criteria.most_memory(records, "between two steps")
    most_sent = {axis: max(criteria.sent_in(record, 0, mesh, axis) for record in records) for axis in mesh}
    along = ", ".join(f"{size(count)} along {axis}" for axis, count in most_sent.items())
    return (
        f"eight ranks train as one device does; between two steps a rank stores at most {size(stored)}, and it sends at"
        f" most {along} per step"
    )


# ---- a layout for 13B


_SLOWER = 1.03  # relative to the fastest
_STEPS = 5


def case_of_learner() -> dict[str, Any]:
    """The training, as arguments of `advise`, that is drawn for this learner."""
    random = drawn("capstone.layout")
    sizes = {"devices": random.choice((32, 64, 128)), "sequence": random.choice((4096, 8192))}
    return sizes | {"machine": "a100x8", "memory": "40GB", "batch": random.choice((256, 512))}


def _task() -> str:
    case = case_of_learner()
    return (
        f"You train 13B parameters on {case['devices']} A100 of 40 GB, eight per node, with a global batch of"
        f" {case['batch']} sequences of {case['sequence']:,} tokens"
    )


@cache
def _advice(**case: Any) -> Advice:
    return advice(training("13B", **case))


def _layout(answer: Any) -> str:
    if not isinstance(answer, str):
        raise Wrong(f"the answer must be the name of a layout, such as 'FSDP 16', got {answer!r}")
    advice = _advice(**case_of_learner())
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
    require_run(run, steps=_STEPS)
    if spec.data_ranks != 2:
        raise Wrong(
            f"the run must have two axes of two ranks, one of them for the batch; its batch is split over"
            f" {spec.data_ranks} ranks"
        )
    return f"{spec.strategy_row.title}: two ranks share the batch, and each of those is split over two"


EXERCISES: dict[str, Exercise] = {
    "capstone.bytes": Exercise(
        "Bytes on a mesh",
        _bytes,
        "With `own = 4 * parameters / (pipeline * tensor)`: stored `own * (1 + 2 / data)`; sent along data `2 * (data -"
        " 1) / data * own`, along the pipeline `4 * micro_batches * numbers / tensor`, along tensor `8 * (tensor - 1) /"
        " tensor * 4 * micro_batches * numbers * blocks / pipeline`.",
    ),
    "capstone.trainer": Exercise(
        "A trainer on a mesh",
        _trainer,
        solution("capstone", "groups", "Training"),
        given="mesh_training.py",
        runs="script",
    ),
    "capstone.layout": Exercise(
        "A layout for 13B on several nodes",
        _layout,
        "The case differs between learners. On 16 devices with 4,096 tokens, FSDP 8 × CP 2 is the fastest, and FSDP 8 ×"
        " TP 2 is 1 % slower; longer sequences need more of CP or TP, and none of the fast ones recomputes. HSDP keeps"
        " the all-gathers of the parameters on fewer nodes, if the memory allows it.",
        task=_task,
    ),
    "capstone.twin": Exercise(
        "The twin of the layout",
        _twin,
        "`run('fsdp2_tp', workload='gpt', **place(4), batch_size=1, steps=5, samples=40, options={'size':"
        " '10M'}).wait()` for FSDP × TP.",
    ),
    "capstone.published": pick_a_layout(
        "A layout for 80B on 128 H100",
        "nanotron Llama 80B",
        128,
        "`'dp=2,tp=4,pp=16,zero=1,micro_batch=1'` or `'tp=4,pp=32,dp=1,zero=0,micro_batch=1'`: TP within a node, and"
        " the states over 64 or 128 GPUs by TP × PP. TP 16 fits too, and its all-gathers cross the nodes in every"
        " layer.",
    ),
}
