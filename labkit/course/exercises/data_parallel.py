"""Exercises of labs 00 and 02 to 05: first runs, data parallelism, DDP, ZeRO and FSDP."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.course.answers import Wrong, finished, number_of, require_function, require_number, require_run, result_of
from labkit.course.exercises import Exercise
from labkit.runs.handle import Run

EXERCISES: dict[str, Exercise] = {}

# ---- lab 00: the steps of an epoch, and a run on two ranks with the global batch size of one


def _steps(answer: Any) -> str:
    require_number(answer, "of steps")
    if answer == 469:
        raise Wrong("that is for one rank with 128 samples per step; here three ranks split the 60,000 samples")
    if answer == 156:
        raise Wrong("156 steps of 384 samples are 59,904 samples: what happens to the last 96?")
    if answer != 157:
        raise Wrong("divide the samples by the global batch size, and count the last, smaller step too")
    return "60,000 / (3 × 128) is 156.25, and the remainder needs one more step"


def _two(answer: Any) -> str:
    require_run(finished(answer), strategy="ddp", ranks=2, batch=128)
    return "two ranks with 64 samples each: a step processes as many samples as on one device"


EXERCISES |= {
    "start.steps": Exercise(
        "Steps per epoch",
        _steps,
        "**157.** Three ranks take 3 × 128 = 384 samples per step; 60,000 / 384 = 156.25, and the remainder is one more"
        " step.",
    ),
    "start.two": Exercise(
        "The same global batch on two ranks",
        _two,
        '`run("ddp", nproc=2, batch_size=64, steps=10)`, or `batch_size=128, scaling="strong"`: the global batch size'
        " is 128.",
    ),
}


# ---- lab 02: the bytes of DP's transfers, DP versus DDP, and the same training with both


_DEVICES, _SAMPLES, _PIXELS, _CLASSES, _PARAMETERS = 4, 64, 28 * 28, 10, 669_706
_NUMBERS = (
    _SAMPLES * _PIXELS,
    _PARAMETERS,
    _SAMPLES * _CLASSES,
    _SAMPLES * _CLASSES,
    _PARAMETERS,
)  # to or from one replica
_CIRCLED = "①②③④⑤"
_SIDES = {"a": "dp", "b": "dp", "c": "ddp", "d": "dp", "e": "ddp", "f": "both", "g": "dp"}
_HINTS = {
    "a": "which of them keeps its replicas from step to step?",
    "b": "count the processes",
    "c": "which devices have the sum after the fifth transfer of DP?",
    "d": "look at the third transfer of DP, and at what a rank of DDP sends",
    "e": "can a thread run on another machine?",
    "f": "what is scattered, and what does a sampler divide?",
    "g": "which devices call optimizer.step(), and with which gradients?",
}
_STEPS = 10  # steps to compare: with AdamW, rounding differences grow from step to step
_CLOSE = 1e-3  # relative difference of losses due to rounding (a different order of summation)


def _exchanges(answer: Any) -> str:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or len(answer) != len(_NUMBERS):
        raise Wrong(f"the answer must be a list of five numbers of bytes, ① to ⑤, got {answer!r}")
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in answer):
        raise Wrong(f"each of the five must be a number of bytes, got {answer!r}")
    for mark, given, number in zip(_CIRCLED, answer, _NUMBERS):
        right = 4 * (_DEVICES - 1) * number
        if given == right:
            continue
        if given == right // 4:
            raise Wrong(f"{mark}: that is the count of numbers, and each has four bytes")
        if given == 4 * number:
            raise Wrong(f"{mark}: that is for one of the other devices, and there are several")
        if given == 4 * _DEVICES * number:
            raise Wrong(f"{mark}: device 0 does not send its own data to itself")
        raise Wrong(f"{mark}: {given:,} bytes is wrong; multiply other devices × numbers per device × bytes per number")
    return (
        "inputs and outputs grow with the batch; the model and its gradients do not, but every device needs a copy of"
        " the model"
    )


def _sides(answer: Any) -> str:
    if not isinstance(answer, Mapping) or set(answer) != set(_SIDES):
        raise Wrong(f"the answer must be a dict with the keys {', '.join(_SIDES)}, got {answer!r}")
    odd = [letter for letter in _SIDES if answer[letter] not in ("dp", "ddp", "both")]
    if odd:
        raise Wrong(f"{', '.join(odd)}: the value must be 'dp', 'ddp' or 'both'")
    wrong = [letter for letter, side in _SIDES.items() if answer[letter] != side]
    if wrong:
        raise Wrong(
            f"{len(_SIDES) - len(wrong)} of {len(_SIDES)} are right; check {wrong[0]} again: {_HINTS[wrong[0]]}"
        )
    return "in short: DP has one interpreter and one overloaded device, DDP has equal ranks"


def _same(answer: Any) -> str:
    if isinstance(answer, Run) or not isinstance(answer, Sequence) or not all(isinstance(run, Run) for run in answer):
        raise Wrong("the answer must be a list of two runs: [a run of dp, a run of ddp]")
    by_name = {}
    for run in answer:
        if not run.state.over:
            raise Wrong(f"{run.name} has not ended yet; wait for it with .wait()")
        if run.state.status.state != "finished":
            raise Wrong(f"{run.name} {run.words}; read its logs")
        by_name[run.state.spec.strategy] = run
    if set(by_name) != {"dp", "ddp"} or len(answer) != 2:
        raise Wrong(f"the runs must be one of dp and one of ddp, got {', '.join(map(str, by_name))}")
    for name, run in by_name.items():
        try:
            require_run(run, batch=96, steps=_STEPS)
        except Wrong as wrong:
            raise Wrong(f"{name}: {wrong}") from None
    for step in range(_STEPS):
        first, second = (by_name[name].state.loss_at(step) for name in ("dp", "ddp"))
        if first is None or second is None or abs(first - second) > _CLOSE * abs(first):
            raise Wrong(
                f"the losses differ at step {step + 1}: {first} and {second}; do both runs have the same seed, model"
                " and devices?"
            )
    return f"the losses of the first {_STEPS} steps are the same: DP and DDP are two implementations of one computation"


EXERCISES |= {
    "data_parallel.exchanges": Exercise(
        "The five transfers in bytes",
        _exchanges,
        f"`{[4 * (_DEVICES - 1) * count for count in _NUMBERS]}`: three other devices, four bytes per number; 64 × 784"
        " pixels, 669,706 parameters, 64 × 10 outputs, their gradients, and the gradients of all parameters.",
    ),
    "data_parallel.sides": Exercise(
        "DP or DDP?",
        _sides,
        f"`{_SIDES}`. c: under DP only device 0 has the sum. e: a thread belongs to a process, which runs on one"
        " machine. g: the other replicas of DP are discarded before the optimizer step.",
    ),
    "data_parallel.same": Exercise(
        "The same training with both",
        _same,
        '`[run(name, **place(2), batch_size=48, steps=10).wait() for name in ("dp", "ddp")]`: 48 samples on each of two'
        ' devices are 96. `batch_size=96, scaling="strong"` is right too.',
    ),
}


# ---- lab 03: steps and the last batch, a distributed sampler, and a run with several buckets


_BATCH, _MIN_STEPS, _MIN_BUCKETS, _MAX_BUCKETS = 24, 12, 3, 4


def _steps_and_last(answer: Any) -> str:
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence) or len(answer) != 2:
        raise Wrong(f"the answer must be two numbers, (steps, images), got {answer!r}")
    steps, last = answer
    if steps == 521:
        raise Wrong("521 steps are for a single rank; here eight ranks split the 50,000 images")
    if steps == 65:
        raise Wrong("after 65 full steps each rank has images left that do not fill a batch")
    if steps != 66:
        raise Wrong("first divide the images by the ranks, then the images of a rank by its batch size")
    if last == 80:
        raise Wrong("80 is the remainder over all ranks; what is the remainder of one rank?")
    if last != 10:
        raise Wrong(f"{last!r}: subtract the images of the full steps from the images of a rank")
    return "6,250 images per rank: 65 batches of 96, and one of 10"


def _sampler(answer: Any) -> str:
    require_function(answer, "of (order, rank, ranks)")
    for samples, ranks in ((12, 2), (12, 3), (10, 4), (7, 5)):
        order = random.Random(samples).sample(range(100, 100 + samples), samples)
        shards = [_shard(answer, order, rank, ranks) for rank in range(ranks)]
        case = f"with {samples} samples on {ranks} ranks"
        lengths = [len(shard) for shard in shards]
        if len(set(lengths)) > 1:
            raise Wrong(
                f"{case}, the ranks get {lengths} samples: ranks that finish early make the others hang; repeat some"
                " samples"
            )
        taken = [sample for shard in shards for sample in shard]
        if set(taken) - set(order):
            raise Wrong(f"{case}, a rank gets {sorted(set(taken) - set(order))[0]}, which is not in order")
        missing = [sample for sample in order if sample not in taken]
        if missing:
            raise Wrong(f"{case}, no rank gets the sample at index {order.index(missing[0])} of order")
        if lengths[0] > -(-samples // ranks):
            raise Wrong(f"{case}, each rank gets {lengths[0]} samples; {-(-samples // ranks)} per rank are enough")
    return "every sample is used, and all ranks get the same number: this is what DistributedSampler does"


def _shard(function: Any, order: list[int], rank: int, ranks: int) -> list[Any]:
    """The samples that a learner's function returns for one rank, as a list."""
    given = list(order)
    shard = result_of(f"mine({order}, {rank}, {ranks})", function, given, rank, ranks)
    if not isinstance(shard, Sequence) or isinstance(shard, (str, bytes)):
        raise Wrong(f"mine({order}, {rank}, {ranks}) must return a list of samples, got {shard!r}")
    return list(shard)


def _buckets(answer: Any) -> str:
    state = finished(answer).state
    if state.spec.strategy != "ddp" or state.world_size < 2:
        raise Wrong(f"the run must be DDP on at least two ranks, got {answer.name}")
    if any(finding.name in ("same_samples", "no_set_epoch") for finding in answer.findings()):
        raise Wrong("the ranks do not use each sample once per epoch; see the findings() of the run")
    require_run(answer, batch=_BATCH, steps=_MIN_STEPS)
    calls = sum(entry.calls for entry in answer.ledger() if entry.op == "all_reduce")
    if calls < _MIN_BUCKETS:
        raise Wrong(
            f"the run must have at least {_MIN_BUCKETS} buckets per step, got {calls:.0f}: how many bytes of gradients"
            " does the workload have, and how large is a bucket?"
        )
    if calls > _MAX_BUCKETS:
        raise Wrong(f"the run must have at most {_MAX_BUCKETS} buckets per step, got {calls:.0f}")
    return f"{calls:.0f} buckets per step: the first one is sent while backward still computes the earlier layers"


EXERCISES |= {
    "ddp.steps": Exercise(
        "Steps, and the last batch",
        _steps_and_last,
        "**(66, 10).** A rank has 50,000 / 8 = 6,250 images; 65 batches of 96 are 6,240, and the 66th has 10.",
    ),
    "ddp.sampler": Exercise(
        "Write a distributed sampler",
        _sampler,
        "`padded = order + order[: -len(order) % ranks]`, then `return padded[rank::ranks]`: padded with the first"
        " samples, assigned round-robin.",
    ),
    "ddp.buckets": Exercise(
        "A run with several buckets",
        _buckets,
        '`run("ddp", **place(2), workload="gpt", batch_size=12, steps=12, options={"bucket_mb": 1}).wait()`: the 4.1'
        " MiB of the GPT fill four buckets of 1 MiB, and two by default. The 1.5 MiB of the CNN fill at most two.",
    ),
}


# ---- lab 04: which stage of ZeRO fits, and a run in which only the optimizer state is sharded


_GB = 10**9
_FITTING = (  # parameters, ranks, bytes per device, and the lowest stage that fits with 2 + 2 + 12 bytes per parameter
    (1 * _GB, 1, 16 * _GB, 0),
    (1 * _GB, 1, 15 * _GB, None),
    (4 * _GB, 8, 80 * _GB, 0),
    (7 * _GB, 2, 80 * _GB, 1),
    (7 * _GB, 8, 30 * _GB, 2),
    (7 * _GB, 8, 14 * _GB, 3),
    (30 * _GB, 4, 80 * _GB, None),
    (30 * _GB, 64, 80 * _GB, 2),
    (70 * _GB, 16, 80 * _GB, 3),
)


def _stage(answer: Any) -> str:
    require_function(answer, "of parameters, ranks and memory")
    for parameters, ranks, memory, expected in _FITTING:
        call = f"lowest_stage({parameters:,}, ranks={ranks}, memory={memory:,})"
        given = result_of(call, answer, parameters, ranks, memory)
        if type(given) is type(expected) and given == expected:
            continue
        if expected is None:
            raise Wrong(f"{call} returned {given!r}, but the states do not fit at any stage: return None")
        if given is None:
            raise Wrong(f"{call} returned None, but some stage fits: 12 of the 16 bytes belong to the optimizer here")
        if type(given) is not int or given not in range(4):
            raise Wrong(f"{call} must return 0, 1, 2 or 3, or None if no stage fits, got {given!r}")
        reason = "a lower stage fits too" if given > expected else "the states are larger than the device memory"
        raise Wrong(f"{call} returned stage {given}: {reason}")
    return (
        "each stage divides one more of the terms 2 + 2 + 12 by the number of ranks; the first sum that fits is the"
        " answer"
    )


def _quarter(answer: Any) -> str:
    state = finished(answer).state
    if not state.spec.strategy:
        raise Wrong("this run uses a script; choose one of the strategies of this lab instead")
    spec = state.spec.to_spec()
    if spec.workload != "gpt":
        raise Wrong(f"the workload must be gpt, got {spec.workload}")
    whole = 4 * spec.workload_row.parameters(spec.options)
    memory = [rank["memory_bytes"] for rank in answer.summary()["ranks"]]
    if not all({"parameters", "optimizer"} <= owners.keys() for owners in memory):
        raise Wrong("this run did not measure its memory; run a few more steps")
    if min(owners["parameters"] for owners in memory) < 0.99 * whole:
        raise Wrong("the ranks do not store all parameters between two steps: use a lower stage")
    most = max(owners["optimizer"] for owners in memory) / (2 * whole)
    if most > 0.275:
        raise Wrong(f"on {len(memory)} ranks, one rank stores {most:.0%} of the optimizer state; it must be a quarter")
    if most < 0.225:
        raise Wrong(f"no rank stores more than {most:.0%} of the optimizer state; it must be a quarter")
    return f"each of {len(memory)} ranks stores all parameters and at most {most:.0%} of the optimizer state"


EXERCISES |= {
    "zero.stage": Exercise(
        "The lowest stage that fits",
        _stage,
        "With n ranks the states take 16P, 4P + 12P/n, 2P + 14P/n and 16P/n bytes; the answer is the first of these"
        " that does not exceed `memory`:\n\n```python\ndef lowest_stage(parameters, ranks, memory):\n    for stage in"
        " range(4):\n        sizes = {3: 2, 2: 2, 1: 12}  # the first stage that shards it: its bytes\n        if"
        " sum(size * parameters / (ranks if stage >= first else 1) for first, size in sizes.items()) <= memory:\n      "
        "      return stage\n    return None\n```\n\n30 billion parameters on four devices with 80 GB do not fit at any"
        " stage (120 GB each); on 64 devices stage 2 is enough.",
    ),
    "zero.quarter": Exercise(
        "A quarter of the optimizer state",
        _quarter,
        '`run("zero1", **(GPT | place(4))).wait()`: stage 1 on four ranks. DeepSpeed\'s stages 1 and 2 on '
        "four ranks are right too. FSDP is not, because it also shards the parameters between the steps.",
    ),
}


# ---- lab 05: the memory cost of prefetching, and a wrap policy that makes a unit of every layer


_PREFETCHED = (  # parameters per unit in order, ranks, prefetched units, and the maximum number of parameters on a rank
    ((100, 100, 100, 100), 4, 0, 200.0),
    ((100, 100, 100, 100), 4, 1, 300.0),
    ((10, 200, 30), 2, 0, 320.0),
    ((10, 200, 30), 2, 1, 350.0),
    ((300, 10, 10, 300), 2, 1, 620.0),
    ((50, 60, 70), 3, 5, 240.0),
    ((400,), 4, 2, 500.0),
)
_LAYERS = 5  # of gpt with 1M parameters


def _held(answer: Any) -> str:
    require_function(answer, "of units, ranks and ahead")
    for units, ranks, ahead, expected in _PREFETCHED:
        call = f"most_held({list(units)}, ranks={ranks}, ahead={ahead})"
        given = number_of(call, "of parameters", answer, list(units), ranks, ahead)
        if abs(given - expected) > 1e-6 * expected:
            raise Wrong(f"{call} returned {given:g}: {_hint(given, units, ranks, ahead, expected)}")
    return (
        "the rank's own shards of all units, plus the largest sum of consecutive units that are whole at the same time"
    )


def _hint(given: float, units: tuple[int, ...], ranks: int, ahead: int, expected: float) -> str:
    if ahead and abs(given - (sum(units) / ranks + max(units))) < 1e-6 * expected:
        return "a prefetched unit is whole at the same time as the unit that computes"
    if ahead and abs(given - (sum(units) / ranks + sum(sorted(units)[-ahead - 1 :]))) < 1e-6 * expected:
        return "units are gathered in model order: the two largest need not be neighbours"
    if abs(given - (expected - sum(units) / ranks)) < 1e-6 * expected:
        return "the rank's own shards stay in memory while a unit is whole"
    if given > sum(units) * (1 + 1 / ranks):
        return "that is more than the shards plus all units"
    return "look at the picture: what is in memory all the time, and which units are whole at the same moment?"


def _units(answer: Any) -> str:
    state = finished(answer).state
    spec = state.spec
    require_run(answer, strategy="fsdp")
    if spec.workload != "gpt" or spec.options.get("size") != "1M":
        raise Wrong("this run must train gpt with size=1M")
    seen = state.ranks[0].models
    if not seen:
        raise Wrong("this run recorded no model; run a few more steps")
    units = seen[-1].units
    if units == 1:
        raise Wrong("this run has only one unit: no module has as many parameters as the threshold")
    if units > _LAYERS + 1:
        raise Wrong(
            f"this run has {units} units: modules inside a layer became separate units; which of them is the largest?"
        )
    if units < _LAYERS + 1:
        raise Wrong(f"this run has {units} units; five layers and the root are {_LAYERS + 1}")
    return f"{units} units: the five layers, and the root with the rest of the model"


EXERCISES |= {
    "fsdp.held": Exercise(
        "The memory cost of prefetching",
        _held,
        "```python\n"
        "def most_held(units, ranks, ahead):\n"
        "    whole = max(sum(units[first : first + ahead + 1]) for first in range(len(units)))\n"
        "    return sum(units) / ranks + whole\n"
        "```\n\n"
        "Backward passes through the same consecutive units in reverse order, so it has the same maximum.",
    ),
    "fsdp.units": Exercise(
        "One unit per layer",
        _units,
        '`run("fsdp", **GPT, options={"min_parameters": 100_000}).wait()`: any threshold from 66,049 to 198,272. A'
        " layer has 198,272 parameters; the largest modules inside it are attention and the first matrix of the MLP,"
        " with 66,048 each.",
    ),
}
