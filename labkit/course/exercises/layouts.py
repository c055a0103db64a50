"""Exercises of labs 11, 17 and 19: which strategy fits, clusters, layouts that published runs have tried, and a trainer
on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

from labkit.common.units import counted, size
from labkit.course.answers import (
    Wrong,
    explained,
    finished,
    number_of,
    numbers_of,
    require_function,
    require_number,
    require_run,
)
from labkit.course.build import criteria
from labkit.course.build.criteria import Bytes, records_of, solution, written_script
from labkit.course.build.record import Record
from labkit.course.exercises import Exercise, Question, drawn, drawn_exercise
from labkit.figures.advice import PARTS
from labkit.prediction.scale.advice import Advice, advice, training
from labkit.prediction.scale.atlas import EXAMPLE, Case, Published, case, degrees_of, evidence, modelled
from labkit.record.writer import sent

EXERCISES: dict[str, Exercise] = {}

# ---- published runs: the learner picks a layout, and the atlas says what it did there and which one won


_ENOUGH = 0.85  # of the fastest layout: repeated runs differ by as much
_DEGREES = ("tp", "pp", "cp")


def pick_a_layout(title: str, model: str, gpus: int, why: str) -> Exercise:
    """The exercise to pick a layout for a model of the atlas on a number of GPUs; `why` explains the solution."""
    return Exercise(title, lambda answer: _picked(case(model, gpus), answer), why)


def _picked(there: Case, answer: Any) -> str:
    degrees = _complete(there, answer)
    runs = there.of(degrees)
    if not runs:
        raise Wrong(_not_published(there, degrees))
    best, winner = there.ranked[0]
    reached = there.speed(runs)
    if reached is None:
        raise Wrong(_failure(runs[0]))
    share = f"{reached:,.0f} tokens/s per GPU, {reached / best:.0%} of the fastest"
    if reached < _ENOUGH * best:
        raise Wrong(f"on real GPUs this layout reached {share}; {_cost(runs[0])}")
    return (
        f"on real GPUs this layout reached {share} of {counted(len(there.ranked), 'layout')} that ran, with"
        f" {size(runs[0].measured.memory or 0)} per GPU; {counted(len(there.failures), 'run')} failed. The fastest is"
        f" {_name(winner)} with {best:,.0f}"
    )


def _complete(there: Case, answer: Any) -> Mapping[str, int]:
    """The degrees of the answer, with those that follow, or are 1 if they are not named; `Wrong` if they are not
    possible on this cluster."""
    try:
        given = degrees_of(answer)
    except (TypeError, ValueError) as error:
        raise Wrong(str(error)) from None
    lacking = [name for name in ("zero", "micro_batch") if name not in given]
    if lacking:
        raise Wrong(f"the layout needs {' and '.join(lacking)} as well, such as {EXAMPLE}")
    if not 0 <= given["zero"] <= 3:
        raise Wrong(f"zero must be 0 to 3, got {given['zero']}")
    degrees = dict.fromkeys(_DEGREES, 1) | given
    gpus, batch = there.training.devices, there.training.batch
    model = degrees["tp"] * degrees["pp"] * degrees["cp"]
    degrees.setdefault("dp", gpus // max(1, model))
    used = degrees["dp"] * model
    if used != gpus:
        raise Wrong(f"dp × tp × pp × cp must be the number of GPUs, {gpus}, got {used}")
    samples = degrees["dp"] * degrees["micro_batch"]
    if not samples or batch % samples:
        raise Wrong(f"dp × micro_batch must divide the global batch of {batch} samples, got {samples}")
    if degrees["dp"] == 1:
        del degrees["zero"]  # with one data-parallel rank there is nothing to shard
    return degrees


def _name(run: Published) -> str:
    return f"{run.layout.title} with micro-batches of {counted(run.layout.micro_batch, 'sample')}"


def _not_published(there: Case, degrees: Mapping[str, int]) -> str:
    [nearest] = evidence(there.training, there.layout(degrees), 1, there.runs)
    speed = there.speed(there.same(nearest.run))
    did = "failed" if speed is None else f"reached {speed / there.ranked[0][0]:.0%} of the fastest"
    return f"no run with exactly this layout was published; the nearest, {_name(nearest.run)}, {did}"


def _failure(run: Published) -> str:
    """Why a run may have failed, by the formulas."""
    estimate, words = modelled(run), "on real GPUs this layout ran out of memory or crashed"
    if estimate.fits:
        return f"{words}; by the formulas it needs {size(estimate.memory_bytes)} per GPU, so look for another cause too"
    owner, most = max(estimate.memory.owners.items(), key=lambda owned: owned[1])
    return f"{words}; by the formulas it needs {size(estimate.memory_bytes)} per GPU, most of it {owner} ({size(most)})"


def _cost(run: Published) -> str:
    """What a slow layout spends its time on besides computation, by the formulas."""
    estimate = modelled(run)
    shares = {name: seconds / estimate.seconds for name, seconds in estimate.parts.items()}
    computation = shares.pop("computation")
    largest = sorted(shares, key=lambda name: -shares[name])[:2]
    words = " and ".join(f"{PARTS[name][1]} {shares[name]:.0%}" for name in largest)
    return f"by the formulas, {words} of a step, and the computation {computation:.0%}"


# ---- lab 11: bytes per ZeRO stage, a 7B model on eight devices, and a run that has to fit into memory


_SHARDED: dict[int, Callable[[float, int], float]] = {  # bytes per device, by stage, in mixed precision
    0: lambda parameters, devices: 16 * parameters,
    1: lambda parameters, devices: (2 + 2 + 12 / devices) * parameters,
    2: lambda parameters, devices: (2 + 14 / devices) * parameters,
    3: lambda parameters, devices: 16 * parameters / devices,
}
_TRIED = ((1000, 8), (1_000_000, 4), (50, 1))


def _states(answer: Any) -> str:
    require_function(answer, "of parameters, devices and stage")
    for parameters, devices in _TRIED:
        for stage, right in _SHARDED.items():
            call = f"states({parameters}, {devices}, {stage})"
            given = number_of(call, "of bytes", answer, parameters, devices, stage)
            if not math.isclose(given, right(parameters, devices), rel_tol=1e-6):
                raise Wrong(f"{call} returned {given:,.6g} bytes: {_HINTS[stage]}")
    return (
        "on one device, all stages store 16 bytes per parameter; with many devices, stage 3 stores almost nothing on"
        " each"
    )


_HINTS = {
    0: "without ZeRO every device stores all states; add up the five components",
    1: "stage 1 shards only the optimizer state",
    2: "stage 2 shards the optimizer state and one more component",
    3: "stage 3 shards everything",
}


def _seven(answer: Any) -> str:
    require_number(answer, "of GB")
    mistakes = (
        (112, "that is the total over all GPUs; ZeRO-3 divides it by their number"),
        (13.04, "that is in GiB (2³⁰ bytes); answer in GB (10⁹ bytes)"),
        (38.5, "that is ZeRO-1, which shards only the optimizer state"),
        (26.25, "that is ZeRO-2, which does not shard the parameters"),
        (1.75, "that is only the parameters in bf16; what else does training store?"),
        (3.5, "that is parameters and gradients in bf16; Adam stores more than both"),
        (10.5, "that is only the optimizer state"),
    )
    if answer > 1e9:
        raise Wrong(f"{answer:,.0f} looks like bytes; answer in GB (10⁹ bytes)")
    if not 13.9 <= answer <= 14.2:
        otherwise = "multiply the parameters by the bytes per parameter in training, and divide by the number of GPUs"
        raise Wrong(explained(answer, mistakes, otherwise, 0.01))
    return (
        "16 × 7 · 10⁹ / 8 bytes. Of 24 GB that leaves about 10 GB for activations, the gathered block and memory "
        "fragmentation: it can fit"
    )


_BUDGET = 24 << 20  # bytes per rank
_MIN_BATCH = 256
_COUNTED = ("parameters", "gradients", "optimizer", "activations")


def _fits(answer: Any) -> str:
    summary = finished(answer).summary()
    if not summary["strategy"]:
        raise Wrong("this run uses a script; choose a strategy instead")
    spec = answer.state.spec.to_spec()
    if spec.workload != "cnn" or spec.nproc != 2:
        raise Wrong(f"the run must train the cnn on 2 ranks, got {spec.workload} on {spec.nproc}")
    if spec.global_batch < _MIN_BATCH:
        raise Wrong(f"the global batch size must be at least {_MIN_BATCH}, got {spec.global_batch}")
    worst = max((rank["memory_bytes"] for rank in summary["ranks"]), key=_counted)
    if not worst.get("activations"):
        raise Wrong("no step of this run was profiled, so its activations are unknown; run at least 6 steps")
    total = _counted(worst)
    if total > _BUDGET:
        most = max(_COUNTED, key=lambda owner: worst.get(owner, 0))
        used = f"a rank needs {size(total)} and has {size(_BUDGET)}"
        raise Wrong(f"{used}; most of it is {most}, {size(worst[most])}. What reduces those?")
    return f"{size(total)} per rank, of which {size(worst['activations'])} are activations"


def _counted(memory: dict[str, float]) -> float:
    """Bytes of the owners that count against the budget."""
    return sum(memory.get(owner, 0) for owner in _COUNTED)


EXERCISES |= {
    "choose.states": Exercise(
        "What each ZeRO stage stores",
        _states,
        "`16*P`, `(4 + 12/n)*P`, `(2 + 14/n)*P`, `16*P/n` for stages 0 to 3: 2 + 2 bytes for parameters and gradients"
        " in 16 bits, 12 bytes for Adam.",
    ),
    "choose.seven": Exercise(
        "7B on eight GPUs",
        _seven,
        "**14 GB**: 16 × 7 · 10⁹ = 112 GB, an eighth on each GPU. The model fits into 24 GB if activations and a"
        " gathered block stay below about 9 GB.",
    ),
    "choose.fits": Exercise(
        "Make it fit",
        _fits,
        "The activations are too large, so sharding the states does not help. `run('ddp', nproc=2,"
        " options={'accumulate': 4}, steps=6)` splits the batch into four micro-batches; `fsdp2` with `accumulate=2`"
        " fits too.",
    ),
    "choose.published": pick_a_layout(
        "A layout for 8B on 64 H100",
        "nanotron Llama 8B",
        64,
        "`'dp=32,pp=2,zero=1,micro_batch=1'` is the fastest of those published. DDP does not fit: 18 bytes per"
        " parameter (here with gradients in 32 bits) are more than a GPU has. ZeRO-1 with two halves of the model (PP 2"
        " or TP 2) fits, and sends little.",
    ),
}


# ---- lab 19: bus bandwidth, the crossover of DDP, and ranks on several nodes, drawn for each learner


_OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def _benchmark(random: Random) -> Question:
    """A collective that took some time; three of the four pass each byte once."""
    name, ranks = random.choice(_OPERATIONS), random.choice((4, 8, 16))
    gigabytes, seconds = random.choice((1, 2, 4, 8)), round(random.uniform(0.008, 0.04), 4)
    algorithm, part = gigabytes / seconds, (ranks - 1) / ranks
    if name == "all-reduce":
        right, twice = 2 * algorithm * part, (algorithm * part, "an all-reduce is a reduce-scatter and an all-gather")
    else:
        words = "that holds for an all-reduce, in which each byte crosses a link twice"
        right, twice = algorithm * part, (2 * algorithm * part, words)
    whole = {"all-gather": "the result of a rank has", "reduce-scatter": "the input of a rank has"}
    return Question(
        f"On {ranks} ranks, the operation {name}, in which {whole.get(name, 'a rank has')} {gigabytes} GB, takes"
        f" {1e3 * seconds:.1f} ms",
        right,
        (
            (algorithm, "that is the algorithm bandwidth; how much of a message crosses each link?"),
            twice,
            (algorithm * (ranks - 1), "the GB are those of all ranks together, not one rank's chunk"),
        ),
        what="of GB/s",
        hint="multiply size / seconds by what each link carries per byte of the message",
        why="it can be compared with the bandwidth of the link, for any collective and number of ranks",
    )


def _crossover(random: Random) -> Question:
    """All but bf16 gradients without recomputation, which the lab has computed."""
    reached, bandwidth = 10 * random.randint(20, 60), random.choice((25, 50, 100, 200))  # TFLOP/s, GB/s
    (kind, wide), again = random.choice(((("fp32", 4), False), (("fp32", 4), True), (("bf16", 2), True)))
    operations, ratio = 6 if again else 4, 1e3 * reached / bandwidth
    right = 2 * wide * ratio / operations
    how = "backward recomputes the forward of every layer" if again else "nothing is recomputed"
    twice = f"a gradient in {kind} has {wide} bytes, and each link carries almost two times the gradients"
    mistakes = [
        (right / 2, twice),
        (2 * right, twice),
        (ratio, "that is for gradients in bf16 and a backward without recomputation"),
        (2 * wide * ratio / (operations + 2), "only backward overlaps with the all-reduce, not forward"),
        (1e3 * right, "check the units: tera is 10¹², giga is 10⁹"),
    ]
    if again:
        mistakes.append((2 * wide * ratio / 4, "recomputation makes backward longer: a forward more"))
    return Question(
        f"GPUs reach {reached} TFLOP/s, the bus bandwidth is {bandwidth} GB/s, gradients are reduced in {kind}, and"
        f" {how}",
        right,
        tuple(mistakes),
        what="of tokens per GPU",
        hint="how long does backward take with D tokens, and how long the all-reduce of N gradients? For which D are"
        " they equal?",
        why=f"{right:,.0f} tokens, whatever the number of parameters: small models have the same crossover as large"
        " ones",
    )


def _place(random: Random) -> Question:
    per_node, nodes = random.choice((4, 8)), random.randint(4, 9)
    node, local = random.randint(1, nodes - 1), random.randint(1, per_node - 1)
    right = node * per_node + local
    return Question(
        f"{nodes} nodes have {per_node} GPUs each and were started with `--node-rank` 0 to {nodes - 1}. You look for"
        f" local rank {local} of node {node}",
        right,
        (
            (right - per_node, f"nodes are counted from 0: there are {node} nodes before this one"),
            (local, "that is the local rank; the rank counts across all nodes"),
            (right + 1, "ranks are counted from 0"),
            (local * nodes + node, "the ranks of a node have consecutive numbers"),
        ),
        what="of a rank",
        hint="count the ranks on the nodes before this one, and add the local rank",
        why=f"{right}: the ranks of a node have consecutive numbers, so a TP group of a node's size stays in it",
    )


EXERCISES |= {
    "clusters.bus": drawn_exercise(
        "clusters.bus",
        "The bus bandwidth of a collective",
        _benchmark,
        "`size / seconds`, times `(ranks - 1) / ranks`, and twice that for an all-reduce, as in nccl-tests.",
    ),
    "clusters.tokens": drawn_exercise(
        "clusters.tokens",
        "Tokens per GPU with which backward hides the all-reduce",
        _crossover,
        "c·N·D / rate = 2 · b·N / bandwidth, with c = 4 (6 if forward is recomputed) and b bytes per gradient, so D ="
        " 2 · b · rate / (c · bandwidth) for any N.",
    ),
    "clusters.rank": drawn_exercise(
        "clusters.rank", "The rank of a process", _place, "node · GPUs per node + local rank."
    ),
    "clusters.published": pick_a_layout(
        "A layout for 8B on 256 H100",
        "nanotron Llama 8B",
        256,
        "`'dp=32,tp=8,zero=0,micro_batch=8'`: TP within the node, so that each GPU reduces an eighth of the gradients"
        " between nodes, in one large micro-batch. With 256 samples for 256 GPUs, DP 256 has no backward to hide it"
        " behind.",
    ),
}


# ---- lab 17: bytes of a layout by formula, a trainer on a mesh of eight CPU ranks, a layout of a 13B model on several
# nodes, and its twin on four ranks


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
    for sizes in _CASES:
        call = f"per_rank{sizes}"
        given = numbers_of(call, _BYTES, answer, *sizes)
        for name, got, wanted, mistakes in zip(_NAMES, given, _by_formula(*sizes), _mistakes(sizes)):
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


EXERCISES |= {
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
