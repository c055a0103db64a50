"""Exercises of lab 22: the bytes of FSDP2 with a policy, a mixed-precision step on two CPU ranks, which activations to
recompute under a limit of memory, and what a snapshot of memory has at its peak."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.common.units import size
from labkit.course.build import criteria
from labkit.course.build.criteria import check_class, check_function, records_of, solution
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Wrong, explained, numbers_of, require_function, require_number, result_of
from labkit.record.writer import sent

# ---- the bytes of FSDP2 with a policy


_CASES = (  # parameters, ranks, bytes of param_dtype and of reduce_dtype, reshard_after_forward
    (1_000_000, 4, 4, 4, True),
    (1_000_000, 4, 1, 4, True),
    (1_000_000, 4, 2, 4, True),
    (3_000_000, 8, 2, 2, True),
    (3_000_000, 2, 2, 4, False),
    (7_000_000, 64, 1, 2, True),
)


def _bytes(answer: Any) -> str:
    require_function(answer, "fsdp2(parameters, ranks, param, reduce, reshard)")
    for case in _CASES:
        call = f"fsdp2{case}"
        given = numbers_of(call, ("bytes stored", "bytes sent"), answer, *case)
        parameters, ranks, param, reduce, reshard = case
        stored, moved = 12 * parameters / ranks, (ranks - 1) / ranks * parameters * (param * (1 + reshard) + reduce)
        if not math.isclose(given[0], stored, rel_tol=1e-6):
            raise Wrong(f"{call} stores {given[0]:,.0f} bytes: {_why_stored(given[0], case)}")
        if not math.isclose(given[1], moved, rel_tol=1e-6):
            raise Wrong(f"{call} sends {given[1]:,.0f} bytes: {_why_sent(given[1], case)}")
    return "the policy decides what is sent; what is stored from step to step stays in fp32"


def _why_stored(got: float, case: Sequence[int]) -> str:
    parameters, ranks, param, *_ = case
    mistakes = (
        (12 * parameters, "that is all of it; each rank has a shard"),
        (
            (param + 8) * parameters / ranks,
            "the sharded parameters keep the dtype that the model has; param_dtype is that of the gathered copy",
        ),
        (16 * parameters / ranks, "between two steps there are no gradients"),
    )
    return explained(got, mistakes, "which dtype have the shard of the parameters and the two moments of Adam?")


def _why_sent(got: float, case: Sequence[int]) -> str:
    parameters, ranks, param, reduce, reshard = case
    whole = (ranks - 1) / ranks * parameters
    mistakes = (
        (
            whole * (param * (2 - reshard) + reduce),
            "parameters are gathered again for backward only if they were freed after forward",
        ),
        (whole * (param * (1 + reshard) + param), "the gradients are sent in reduce_dtype"),
        (
            parameters * (param * (1 + reshard) + reduce),
            "a ring sends (n − 1) / n of the whole: a rank has its own shard already",
        ),
    )
    return explained(got, mistakes, "count the all-gathers in param_dtype and the reduce-scatter in reduce_dtype")


# ---- a step in mixed precision


_RANKS = 2


def _step(answer: Any) -> str:
    check_class(answer, "whose objects have step(loss)", ["model", "make_optimizer", "scale"])
    records = criteria.ended(records_of("precision.trial", "step", answer, _RANKS))
    for record in records:
        computing, updated = record.figures["computing"], record.figures.get("updated", ["nothing"])
        if computing != ["float16"]:
            raise Wrong(
                f"parameters: on rank {record.rank} the model has {', '.join(computing)}, expected float16: use"
                " model.half()"
            )
        if updated != ["float32"]:
            raise Wrong(
                f"master weights: on rank {record.rank} the optimizer updates {', '.join(updated)}, expected float32:"
                " fp16 rounds small updates away"
            )
        wide = {kind: count for kind, count in record.figures["products"].items() if kind != "float16"}
        if wide:
            kinds = ", ".join(f"{count} of {kind}" for kind, count in wide.items())
            raise Wrong(
                f"computation: the matrix products of rank {record.rank} get tensors that are not fp16: {kinds}"
            )
    _finite(records)
    criteria.results(records)
    criteria.sent_between(
        records, _gradients, _gradients, "an all-reduce of the gradients with 2 bytes each, in every step"
    )
    criteria.memory(
        records,
        "between two steps",
        lambda record: 14 * record.figures["numbers"],
        "per parameter 2 bytes in fp16, 4 of its fp32 copy, and 8 of the moments of Adam; gradients are freed",
    )
    stored = criteria.most_memory(records, "between two steps")
    return (
        "losses and parameters are those of one device, two overflows are skipped on both ranks; between two steps a"
        f" rank stores {stored / records[0].figures['numbers']:.1f} bytes per parameter;"
        f" {criteria.sent_in_words(records[0])}"
    )


def _finite(records: Sequence[Record]) -> None:
    """No loss is NaN, which the parameters are after an update with a gradient that overflowed."""
    for step in records[0].steps():
        lost = [record.rank for record in records if not all(map(math.isfinite, record.losses[step : step + 1]))]
        if len(lost) == len(records):
            raise Wrong(
                f"losses: from step {step} on they have no value: a gradient overflowed, and the update was made all"
                " the same"
            )
        if lost:
            raise Wrong(
                f"losses: from step {step} on, that of rank {lost[0]} has no value, but others have one: a gradient"
                " overflowed on one rank, and another one made an update; decide by the gradients after the all-reduce"
            )


def _gradients(record: Record) -> float:
    """Bytes that a rank sends to reduce all gradients in fp16."""
    return sent("all_reduce", 2 * record.figures["numbers"], _RANKS)


# ---- forward under a limit of memory


_EXACT = 1e-4  # relative difference of a gradient: what is recomputed is the same, in another order at most
_ELEMENTS = 2.0  # times as many elements outside of matrix products as without recomputation


def _recompute(answer: Any) -> str:
    check_function(answer, ["blocks", "x", "limit"])
    records = criteria.ended(records_of("precision.trial", "recompute", answer, 1), finished_api=True)
    (record,) = records
    criteria.results(records)
    for name, difference in record.differences.items():
        if difference > _EXACT:
            raise Wrong(
                f"results: the {name} differs by {difference:.2g} (relative), expected at most {_EXACT:g}: store"
                " activations as they are, or recompute them"
            )
    said = []
    for case in record.steps():
        limit, everything = record.figures["limit"][case], record.figures["all"][case]
        got = record.memory["after forward"][case]
        if got > limit:
            raise Wrong(
                f"memory: after forward of case {case} there are {size(got)} of new tensors, the limit is"
                f" {size(limit)}; without recomputation there are {size(everything)}"
            )
        if record.process["after forward"][case] > (everything - limit) / 2:
            grown = size(record.process["after forward"][case])
            raise Wrong(
                f"memory: after forward of case {case}, the process has grown by {grown} beyond its tensors; byte"
                " strings and arrays count as well"
            )
        again = record.flops(case, "forward", "backward") - record.flops(case, "plain")
        best = record.figures["least"][case]
        if again > best * (1 + criteria.SLACK):
            raise Wrong(
                f"computation: case {case} recomputes {again / 1e6:,.0f} million operations of matrix products; with"
                f" another choice of blocks, {best / 1e6:,.0f} are enough for this limit ({size(got)} of"
                f" {size(limit)} are used)"
            )
        outside, plain = (
            record.operations(case, *phases) - record.flops(case, *phases)
            for phases in (("forward", "backward"), ("plain",))
        )
        if outside > _ELEMENTS * plain:
            raise Wrong(
                f"computation: case {case} computes {outside:,} elements outside of matrix products, expected at most"
                f" {_ELEMENTS * plain:,.0f}: twice as many as without recomputation"
            )
        said.append(f"{size(got)} of {size(limit)} with {again / 1e6:,.0f} million operations more")
    return f"gradients are exact, and no choice of blocks is cheaper: {'; '.join(said)}"


# ---- the peak of a snapshot


_LAYERS, _LOOPS = 3, 5
_BLOCK = 512  # bytes: sizes are multiples of it
_TRACES = 3
Trace = list[dict[str, Any]]


def draw_trace() -> Trace:
    """A trace in which every wrong peak that has a name is another number."""
    while True:
        trace = _some_trace()
        peaks = [max(_sizes(trace)), *(peak for peak, _ in _wrong_peaks(trace))]
        if len({*peaks}) == len(peaks):
            return trace


def _some_trace() -> Trace:
    """Events of an allocator as `torch.cuda.memory._snapshot()` has them, without those of a second device: a model,
    and a loop with samples, activations, gradients without a line of the script, and states of the optimizer.

    Samples have different lengths, of which one in the middle of the loop is longest, so that the peak is neither at
    the end nor where most was allocated in total.
    """
    trace: Trace = []
    unused = [1 << 32]  # addresses: a block gets that of the one that was freed last

    def happens(action: str, address: int, count: int, line: int | None) -> None:
        inner = {"filename": "torch/nn/modules/linear.py", "line": random.randrange(100, 300), "name": "forward"}
        outer = {"filename": "/home/ada/train.py", "line": 40, "name": "<module>"}
        own = [] if line is None else [{"filename": "/home/ada/train.py", "line": line, "name": "step"}, outer]
        trace.append({"action": action, "addr": address, "size": count, "stream": 0, "frames": [inner, *own]})

    def allocate(count: int, line: int | None) -> tuple[int, int]:
        address = unused.pop()
        if not unused:
            unused.append(address + (1 << 24))
        if random.random() < 0.2:
            happens("segment_alloc", address, 1 << 24, line)
        happens("alloc", address, count, line)
        return address, count

    def free(block: tuple[int, int]) -> None:
        for action in ("free_requested", "free_completed"):
            happens(action, *block, None)
        unused.append(block[0])

    model, batch, loss, states, *layers = random.sample(range(2, 39), 4 + _LAYERS)
    weights = [_BLOCK * random.randrange(20, 60) for _ in range(_LAYERS)]
    for count in weights:
        allocate(count, model)
    lengths = [random.randrange(20, 60) for _ in range(_LOOPS)]
    lengths[random.randrange(1, _LOOPS - 1)] = random.randrange(90, 120)
    widths = [random.randrange(1, 6) for _ in range(_LAYERS)]
    for loop, length in enumerate(lengths):
        samples = allocate(_BLOCK * length, batch)
        activations = [allocate(_BLOCK * length * width, line) for width, line in zip(widths, layers)]
        value = allocate(_BLOCK, loss)
        gradients = []
        for count, activation in zip(reversed(weights), reversed(activations)):
            gradients.append(allocate(count, None))
            free(activation)
        if loop == 0:
            for count in weights:
                allocate(2 * count, states)
        for block in (*gradients, value, samples):
            free(block)
    return trace


def _sizes(trace: Trace, counted: Sequence[str] = ("alloc",), freed: Sequence[str] = ("free_completed",)) -> list[int]:
    """Bytes in use after each event, if these are added and these are subtracted."""
    used, sizes = 0, []
    for event in trace:
        used += event["size"] * ((event["action"] in counted) - (event["action"] in freed))
        sizes.append(used)
    return sizes


def _lines(trace: Trace) -> Counter[int | None]:
    """By line, the bytes of the blocks that these events have allocated and not freed."""
    held: dict[int, tuple[int | None, int]] = {}
    for event in trace:
        if event["action"] == "alloc":
            own = [frame["line"] for frame in event["frames"] if frame["filename"].endswith("train.py")]
            held[event["addr"]] = (own[0] if own else None), event["size"]
        elif event["action"] == "free_completed":
            held.pop(event["addr"], None)
    lines: Counter[int | None] = Counter()
    for line, size_of_block in held.values():
        lines[line] += size_of_block
    return lines


def _snapshot(answer: Any) -> str:
    require_function(answer, "at_the_peak(trace)")
    for _ in range(_TRACES):
        trace = draw_trace()
        given = result_of("at_the_peak(trace)", answer, [{**event} for event in trace])
        if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[1], dict):
            raise Wrong(f"at_the_peak(trace) returned {given!r}, expected bytes, and a dict of bytes by line")
        require_number(given[0], "of bytes, from at_the_peak(trace)")
        sizes = _sizes(trace)
        peak = max(sizes)
        if given[0] != peak:
            raise Wrong(f"peak: {given[0]:,} bytes of a trace with {len(trace)} events: {_why_peak(given[0], trace)}")
        lines = dict(_lines(trace[: sizes.index(peak) + 1]))
        if given[1] != lines:
            raise Wrong(f"lines: {_why_lines(given[1], trace, lines)}")
    return f"right for {_TRACES} drawn traces: this is what a page of explain(…) says of a snapshot's peak"


def _wrong_peaks(trace: Trace) -> list[tuple[int, str]]:
    """The peaks by mistakes, with words."""
    sizes = _sizes(trace)
    return [
        (sizes[-1], "that is what is in use at the end; the peak was before"),
        (max(_sizes(trace, freed=())), "freed memory counts no more"),
        (max(_sizes(trace, counted=("alloc", "segment_alloc"))), "a segment is what the allocator reserves from the"
         " device; blocks inside of it are what is in use"),
        (max(_sizes(trace, freed=("free_requested", "free_completed"))), "a block is freed once: it has two events, the"
         " request and its completion"),
    ]  # fmt: skip


def _why_peak(got: float, trace: Trace) -> str:
    general = "add what is allocated, subtract what is freed, and keep the largest sum"
    return next((words for peak, words in _wrong_peaks(trace) if got == peak), general)


def _why_lines(got: dict[Any, Any], trace: Trace, right: dict[int | None, int]) -> str:
    total: Counter[int | None] = Counter()
    for event in trace:
        if event["action"] == "alloc":
            total += _lines([event])
    if got == total:
        return "that is all that each line has ever allocated; which blocks are in use at the peak?"
    if got == dict(_lines(trace)):
        return "that is what is in use at the end of the trace"
    if sum(got.values()) != sum(right.values()):
        return f"the blocks at the peak have {sum(right.values()):,} bytes in total, and yours {sum(got.values()):,}"
    if 40 in got:
        return "the first frame is the innermost: take the first one in train.py, which allocated"
    return "blocks are named by the line of the first frame in train.py; None has those without one, as in backward"


EXERCISES = {
    "precision.bytes": Exercise(
        "What FSDP2 stores and sends",
        _bytes,
        "Stored: `12 * parameters / ranks`, a shard of the parameters and two moments in fp32, whatever the policy."
        " Sent: `(ranks - 1) / ranks * parameters * (param * (1 + reshard) + reduce)`.",
    ),
    "precision.step": Exercise("A mixed-precision step", _step, solution(__file__, "MixedPrecision"), runs="code"),
    "precision.recompute": Exercise(
        "Recompute under a limit",
        _recompute,
        solution(__file__, "forward", "stored_and_recomputed"),
        given="activations.py",
        runs="code",
    ),
    "precision.snapshot": Exercise(
        "The peak of a snapshot",
        _snapshot,
        solution(__file__, "at_the_peak", "line_of"),
        given="leak.pickle.gz",
    ),
}
