"""Exercises of labs 18, 20 and 22: what one device computes and stores, what makes a step slow, and what precision and
recomputation save."""

from __future__ import annotations

import difflib
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from labkit.common.units import size
from labkit.course.answers import Wrong, explained, number_of, numbers_of, require_function, require_number, result_of
from labkit.course.build import criteria
from labkit.course.build.criteria import check_class, check_function, records_of, solution, written_script
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Question, drawn_exercise
from labkit.record.writer import sent

EXERCISES: dict[str, Exercise] = {}
_RANKS = 2  # of answers that run, except for one that runs on a single one

# ---- lab 18: FLOPs of a step, MFU, the roofline, and bytes per parameter; the figures of all but the first are drawn
# for each learner


# ---- the FLOPs of a Llama


_SHAPES = (  # tokens, layers, width, inner, groups, sequence, vocabulary
    (1024, 5, 128, 384, 2, 128, 256),
    (4096, 32, 4096, 14_336, 4, 2048, 128_256),
    (512, 80, 8192, 28_672, 8, 8192, 32_000),
)


def _flops(answer: Any) -> str:
    require_function(answer, "flops(tokens, layers, width, inner, groups, sequence, vocabulary)")
    for shape in _SHAPES:
        call = f"flops{shape}"
        given = number_of(call, "of operations", answer, *shape)
        tokens, layers, width, inner, groups, sequence, vocabulary = shape
        attention, mlp = 2 * width**2 * (2 + 2 / groups), 6 * width * inner
        scores, head = 4 * sequence * width, 2 * vocabulary * width
        right = 3 * tokens * (layers * (attention + mlp + scores) + head)
        mistakes = (
            (right / 3, "that is forward only; backward computes two products for each one of forward"),
            (right / 2, "a multiplication and an addition count as two operations"),
            (right - 3 * tokens * (layers * scores + head), "that is 6ND: attention's scores and the head are missing"),
            (
                right - 3 * tokens * layers * scores,
                "the products of queries with keys, and of weights with values, miss",
            ),
            (right - 3 * tokens * head, "the head is missing: a matrix of width × vocabulary"),
            (
                right + 3 * tokens * layers * 4 * width**2 * (1 - 1 / groups),
                "keys and values are not as wide as queries: `groups` heads of queries share one of each",
            ),
            (
                right - 3 * tokens * layers * scores * (1 - 1 / groups),
                "each head of the queries multiplies with keys, shared or not: the scores do not become fewer",
            ),
            (right - 3 * tokens * layers * mlp / 3, "the MLP has three matrices: gate, up and down"),
        )
        if not math.isclose(given, right, rel_tol=1e-9):
            otherwise = "add up matrices, scores and head for one token of forward first"
            raise Wrong(f"{call} returned {given:.4g}: {explained(given, mistakes, otherwise, 1e-9)}")
    return "shared keys and values make two of the seven matrices smaller, and the scores no cheaper"


# ---- figures of this learner


_GPUS = (("A100", 312, 2.0), ("H100", 989, 3.35), ("B200", 2250, 8.0))  # TFLOP/s in bf16 and TB/s, by data sheet


def _training(random: Random) -> Question:
    gpu, peak, _ = random.choice(_GPUS)
    billions, gpus = random.choice((3, 7, 8, 13, 34, 70)), random.choice((4, 16, 32, 128))
    second = round(random.uniform(0.25, 0.55) * peak * 1e12 / (6e9 * billions) * gpus, -2)  # tokens
    percent = 100 * 6e9 * billions * second / gpus / (peak * 1e12)
    return Question(
        f"You train {billions} · 10⁹ parameters with {second:,.0f} tokens per second on {gpus} {gpu} ({peak} TFLOP/s"
        " in bf16 each)",
        percent,
        (
            (percent / 100, "that is a fraction; answer in percent"),
            (percent / 3, "that counts forward only; training computes three times as much"),
            (percent * gpus, "the tokens are those of all GPUs, and the peak is that of one"),
            (percent * gpus / 100, "the tokens are those of all GPUs, and the peak is that of one"),
        ),
        what="of percent",
        hint="FLOP/s that the model needs are 6N times the tokens per second; divide them by the peak",
        why=f"{percent:.0f} % of the peak; PaLM reached 46 % on TPUs (Chowdhery et al. 2022, table 3)",
    )


def _product(random: Random) -> Question:
    """Half of the products are limited by the memory: with few columns."""
    gpu, peak, bandwidth = random.choice(_GPUS)
    rows, inner = 1024 * random.randint(2, 16), 1024 * random.randint(2, 16)
    columns = random.choice((8 * random.randint(1, 8), 1024 * random.randint(2, 16)))
    flops, numbers = 2 * rows * inner * columns, rows * inner + inner * columns + rows * columns
    compute, memory = flops / (peak * 1e6), 2 * numbers / (bandwidth * 1e6)  # µs
    right = max(compute, memory)
    twice = "a multiplication and an addition are two operations, and a number in bf16 has two bytes"
    return Question(
        f"Your {gpu} ({peak} TFLOP/s in bf16, {bandwidth:g} TB/s) multiplies a matrix of {rows:,} × {inner:,} by one of"
        f" {inner:,} × {columns:,}; all are in bf16, and each is read or written once",
        right,
        (
            (compute + memory, "computing and moving overlap at best, so they do not add up"),
            (min(compute, memory), "that is one limit; which of the two is larger?"),
            (right / 2, twice),
            (right * 2, twice),
            (right / 1e6, "that is in seconds; answer in µs"),
        ),
        what="of µs",
        hint="FLOPs by the peak, and bytes of all three matrices by the bandwidth: which is longer?",
        why=f"{right:,.1f} µs: whichever is slower decides, left or right of the bend of the roofline",
    )


_OPTIMIZERS = (("SGD with momentum", 1), ("AdamW", 2), ("AdaBelief", 2), ("Lion", 1))  # states per parameter
_FORMATS = (("fp32", 4), ("bf16", 2), ("8 bits", 1))


def _recipe(random: Random) -> Question:
    name, count = random.choice(_OPTIMIZERS)
    (moments, wide), (gradients, sent) = random.choice(_FORMATS), random.choice(_FORMATS[:2])
    copied = random.random() < 0.5
    stored = 2 if copied else 4
    right = stored + sent + 4 * copied + wide * count
    words = "bf16, with a copy in fp32 that the optimizer updates" if copied else "fp32, computed under bf16 autocast"
    cast = "autocast casts inputs of operations; what is stored from step to step keeps its type"
    mistakes = [
        (16, "that is fp32 with two moments in fp32; yours is another recipe"),
        (right - 4, "the copy in fp32 is stored as well") if copied else (right - 2, cast),
        (right - sent, "gradients are stored, too, while they are accumulated"),
        (right + wide * (3 - 2 * count), f"how many numbers per parameter does {name} store?"),
    ]
    if sent != stored:
        mistakes.append((right - sent + stored, "gradients need not have the type of the parameters"))
    if wide < 4:
        mistakes.append((right + (4 - wide) * count, f"the states of {name} are not in fp32 here"))
    return Question(
        f"Parameters are in {words}; gradients are accumulated in {gradients}; the states of {name} are in {moments}",
        right,
        tuple(mistakes),
        what="of bytes",
        hint="add up parameters, gradients, a copy if there is one, and the optimizer's states",
        why=f"{right} bytes: autocast saves activations and time, not states",
    )


EXERCISES |= {
    "one_device.flops": Exercise(
        "FLOPs of a Llama",
        _flops,
        "Per token of forward, `matrices = 2 * width**2 * (2 + 2 / groups) + 6 * width * inner`, `scores = 4 * sequence"
        " * width` and `head = 2 * vocabulary * width`: `return 3 * tokens * (layers * (matrices + scores) + head)`",
    ),
    "one_device.mfu": drawn_exercise(
        "one_device.mfu",
        "MFU from tokens per second",
        _training,
        "`100 * 6 * parameters * tokens_per_second / gpus / peak`. With the scores of attention it is a few percent"
        " more.",
    ),
    "one_device.least": drawn_exercise(
        "one_device.least",
        "The shortest time of a product",
        _product,
        "For m × k by k × n in bf16, `max(2 * m * k * n / peak, 2 * (m * k + k * n + m * n) / bandwidth)`.",
    ),
    "one_device.bytes": drawn_exercise(
        "one_device.bytes",
        "Bytes per parameter of a recipe",
        _recipe,
        "The sum of parameters (bf16 2, fp32 4, also under autocast), gradients, the copy in fp32 (4) if there is one,"
        " and one number per state of the optimizer: AdamW and AdaBelief have two, Lion and momentum one.",
    ),
}


# ---- lab 20: what a fix can gain by a profile, and a slow training script with five faults. The answer is judged by
# what its ranks do: operators, elements, bytes, calls and synchronizations. These figures are the same on a busy
# machine, unlike the time of a step.


# ---- what a fix can gain


_GAINS = ((100.0, 30.0, 0.0), (218.0, 143.9, 0.0), (50.0, 20.0, 5.0), (80.0, 80.0, 40.0))  # ms


def _gain(answer: Any) -> str:
    require_function(answer, "gain(step, part, left)")
    for case in _GAINS:
        step, part, left = case
        call = f"gain{case}"
        given = number_of(call, "for a factor", answer, *case)
        if math.isclose(given, (part - left) / step, rel_tol=1e-6):
            raise Wrong(f"{call} returned {given:.3g}, the fraction of a step that is saved; answer with the factor")
        if not math.isclose(given, step / (step - part + left), rel_tol=1e-6):
            raise Wrong(f"{call} returned {given:.3g}; how long is a step in which the part takes {left:g} ms?")
    return "what remains decides: without a part that takes 30 % of a step, training is 1.43 times as fast at most"


_LAUNCHES, _COMMUNICATION, _IDLE = 0.66, 0.06, 0.77  # of a step, in the profile that the lab shows


def _launches(answer: Any) -> str:
    require_number(answer, "for a factor")
    mistakes = (
        (1 / (1 - _COMMUNICATION), "that is without all communication, which is not the largest part"),
        (1 / (1 - _IDLE), "that is without all idle time; for launches the GPU waits for less of it"),
        (100 * _LAUNCHES, "that is a percentage; answer with the factor by which a step becomes faster"),
    )
    if not math.isclose(answer, 1 / (1 - _LAUNCHES), rel_tol=0.03):
        otherwise = "use gain(): which part of the 218 ms is the largest with one cause, and what remains without it?"
        raise Wrong(explained(answer, mistakes, otherwise, 0.02))
    return "34 % of the step remain: 2.9 times as fast at most; faster links would gain a factor of 1.05"


# ---- a slow script


_CLASS = "Training"  # of the script, used by the judge


@dataclass(frozen=True)
class _Fault:
    """A fault: what it is called, in words with the figure `{got}` of the worst rank and step, and the largest figure
    without it. `figure(record, step)` measures it, `words` writes it."""

    said: str
    figure: Callable[[Record, int], float]
    most: Callable[[Record], float]
    words: Callable[[float], str] = "{:,.0f}".format

    def left(self, records: list[Record]) -> str:
        """The fault in words, if it is there in any step but the first, in which libraries prepare."""
        worst = max(records, key=self._worst)
        got, most = self._worst(worst), self.most(worst)
        return f"{self.said.format(got=self.words(got))}, expected at most {self.words(most)}" if got > most else ""

    def _worst(self, record: Record) -> float:
        return max(self.figure(record, step) for step in record.steps()[1:])


def _once(record: Record) -> float:
    """Bytes that a rank sends when all gradients are reduced once: 2 (n − 1) / n of them."""
    return sent("all_reduce", record.figures["gradients"], _RANKS)


def _loading(record: Record, step: int) -> float:
    return record.operators.get(f"{step} data", 0) / record.figures["micro_batches"]


def _elements(record: Record, step: int) -> float:
    return record.elements.get(f"{step} step", 0) / record.figures["scores"]


def _calls(record: Record, step: int) -> float:
    """Calls for each time that all gradients are sent, however often that is."""
    calls = sum(1 for event in record.of_step(step) if event.sent)
    return calls * _once(record) / max(record.sent(step), 1)


_FAULTS = (
    _Fault(
        "data: torch runs {got} operators to load one micro-batch",
        _loading,
        lambda record: 64,
    ),
    _Fault(
        "attention: outside of matrix products a step computes {got} times as many elements as attention has scores",
        _elements,
        lambda record: 6.0,
        "{:.1f}".format,
    ),
    _Fault(
        "traffic: a rank sends {got} per step",
        lambda record, step: record.sent(step),
        lambda record: (1 + criteria.SLACK) * _once(record),
        size,
    ),
    _Fault(
        "collectives: {got} calls send the gradients once",
        _calls,
        lambda record: 8,
    ),
    _Fault(
        "synchronization: `load` and `step` hand {got} values of tensors to Python",
        lambda record, step: sum(record.syncs.get(f"{step} {phase}", 0) for phase in ("data", "step")),
        lambda record: 0,
    ),
)


def _faults(answer: Any) -> str:
    written = written_script(answer, _CLASS, "fast_training.py")
    records = criteria.ended(criteria.records_of("profiles", "train", written, _RANKS), finished_api=True)
    criteria.results(records)
    criteria.sent_between(records, _once, lambda record: math.inf, "")
    left = list(filter(None, (fault.left(records) for fault in _FAULTS)))
    if left:
        raise Wrong(f"it trains the same; {len(left)} of {len(_FAULTS)} faults are left: {'; '.join(left)}")
    record = records[0]
    return (
        f"it trains the same, and all {len(_FAULTS)} faults are gone: a micro-batch takes {_loading(record, 1):.0f}"
        f" operators to load, and {criteria.sent_in_words(record, 1)}, without a synchronization"
    )


def _changes() -> str:
    """What the reference solution changes in the script that is given (markdown)."""
    build = Path(criteria.__file__).parent
    scripts = build / "starters" / "slow_training.py", build / "solutions" / "profiles.py"
    before, after = (script.read_text(encoding="utf-8").splitlines() for script in scripts)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
    return "```diff\n" + "\n".join(lines) + "\n```"


EXERCISES |= {
    "profiles.gain": Exercise(
        "What a fix can gain",
        _gain,
        "`return step / (step - part + left)`: the time that remains decides (Amdahl's law).",
    ),
    "profiles.launches": Exercise(
        "The profile of a GPU",
        _launches,
        "The GPU waits 66 % of a step for launches; without it 34 % remain: 1 / 0.34 = **2.9**. Without communication"
        " that is exposed (5 %), a step would become 1.05 times as fast.",
    ),
    "profiles.faults": Exercise("Five faults", _faults, _changes(), given="slow_training.py", runs="script"),
}


# ---- lab 22: the bytes of FSDP2 with a policy, a mixed-precision step, which activations to recompute under a limit of
# memory, and what a snapshot of memory has at its peak


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


def _step(answer: Any) -> str:
    check_class(answer, "whose objects have step(loss)", ["model", "make_optimizer", "scale"])
    records = criteria.ended(records_of("precision", "step", answer, _RANKS))
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
    records = criteria.ended(records_of("precision", "recompute", answer, 1), finished_api=True)
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
        outside, plain = record.other_elements(case, "forward", "backward"), record.other_elements(case, "plain")
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


EXERCISES |= {
    "precision.bytes": Exercise(
        "What FSDP2 stores and sends",
        _bytes,
        "Stored: `12 * parameters / ranks`, a shard of the parameters and two moments in fp32, whatever the policy."
        " Sent: `(ranks - 1) / ranks * parameters * (param * (1 + reshard) + reduce)`.",
    ),
    "precision.step": Exercise("A mixed-precision step", _step, solution("precision", "MixedPrecision"), runs="code"),
    "precision.recompute": Exercise(
        "Recompute under a limit",
        _recompute,
        solution("precision", "forward", "stored_and_recomputed"),
        given="activations.py",
        runs="code",
    ),
    "precision.snapshot": Exercise(
        "The peak of a snapshot",
        _snapshot,
        solution("precision", "at_the_peak", "line_of"),
        given="leak.pickle.gz",
    ),
}
