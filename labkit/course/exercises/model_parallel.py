"""Exercises of labs 06 to 08, 15 and 16: tensor parallelism, pipelines, meshes, experts and long contexts."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Any

from labkit.common.units import size
from labkit.course.answers import Wrong, finished, require_function, require_run, result_of
from labkit.course.exercises import Exercise, Question, drawn, drawn_exercise
from labkit.course.pictures.pipeline import SCHEDULES, least
from labkit.course.pictures.pipeline import order as by_rule
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

EXERCISES: dict[str, Exercise] = {}

# ---- lab 06: splitting a pair of matrices, and logits that stay sharded


_SPLITS = ((2, 3, 4, 5), (2, 4, 6, 3), (3, 5, 9, 4), (4, 2, 8, 6))  # ranks, width of x, inner width, width of y


def _parts(answer: Any) -> str:
    require_function(answer, "parts(a, b, rank, ranks)")
    import torch

    for ranks, width_in, inner, width_out in _SPLITS:
        draw = torch.Generator().manual_seed(ranks)
        shapes = ((7, width_in), (width_in, inner), (inner, width_out))
        x, a, b = (torch.randint(-3, 4, shape, generator=draw).double() for shape in shapes)
        total = torch.zeros(7, width_out, dtype=torch.double)
        for rank in range(ranks):
            case = f"rank {rank} of {ranks}, with a of {width_in}×{inner} and b of {inner}×{width_out}"
            shards = _called(answer, (a.clone(), b.clone(), rank, ranks), case)
            _shaped(shards, (width_in, inner // ranks), (inner // ranks, width_out), case)
            total += torch.relu(x @ shards[0].double()) @ shards[1].double()
        if not torch.allclose(total, torch.relu(x @ a) @ b):
            raise Wrong(
                f"on {ranks} ranks every shard has the right shape, but the sum is not relu(x @ a) @ b: a rank's"
                " columns of a and its rows of b must have the same indices, and each index must belong to one rank"
            )
    return "the sum of the partial sums is the whole product, on 2, 3 and 4 ranks"


def _called(answer: Any, given: tuple, case: str) -> tuple:
    shards = result_of(f"for {case}, parts(a, b, rank, ranks)", answer, *given)
    if (
        not isinstance(shards, (tuple, list))
        or len(shards) != 2
        or not all(hasattr(shard, "shape") for shard in shards)
    ):
        raise Wrong(
            f"for {case}, the function must return two tensors, a shard of a and one of b, got {type(shards).__name__}"
        )
    return tuple(shards)


def _shaped(shards: tuple, a: tuple[int, int], b: tuple[int, int], case: str) -> None:
    for name, shard, wanted in zip("ab", shards, (a, b)):
        if tuple(shard.shape) != wanted:
            raise Wrong(
                f"for {case}, the shard of {name} is {'×'.join(map(str, shard.shape))}; every rank has all columns of"
                f" x, and relu needs complete sums: along which dimension can {name} be split then?"
            )


def _logits(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.spec
    if spec.strategy != "tp" or spec.workload != "gpt":
        raise Wrong(f"the run must train gpt with tp, got {spec.workload or 'a script'} with {spec.strategy}")
    require_run(run, ranks=2)
    entries = run.ledger()
    if not entries:
        raise Wrong("no step of this run was profiled; run at least 5 steps")
    gathered = sum(entry.measured for entry in entries if entry.op == "all_gather")
    if gathered and not spec.options.get("loss_parallel"):
        raise Wrong(f"a step still all-gathers {size(gathered)}; look for an option that concerns the loss")
    return (
        "each rank computes its part of the loss from its shard of the logits: 3 numbers per position are sent instead"
        " of 256"
    )


EXERCISES |= {
    "tensor_parallel.parts": Exercise(
        "Split a pair of matrices",
        _parts,
        "`return a.chunk(ranks, dim=1)[rank], b.chunk(ranks, dim=0)[rank]`: columns of the first, the same rows of the"
        " second. relu between them gets complete sums, so a single all-reduce at the end is enough.",
    ),
    "tensor_parallel.logits": Exercise(
        "Do not gather the logits",
        _logits,
        '`run("tp", workload="gpt", nproc=2, steps=5, samples=200, options={"loss_parallel": True}).wait()`: of all'
        " logits, the loss needs the maximum, the sum of exponentials and the logit of the target: three small"
        " all-reduces.",
    ),
}


# ---- lab 07: the order of a stage under 1F1B, and a run with a small bubble


_STAGES = ((1, 2, 3), (0, 2, 4), (0, 4, 8), (1, 4, 8), (2, 4, 8), (3, 4, 8), (0, 4, 2))  # stage, stages, micro-batches
_MAX_BUBBLE = 0.12  # fraction of the step


def _order(answer: Any) -> str:
    require_function(answer, "order(stage, stages, micro_batches)")
    for stage, stages, micro_batches in _STAGES:
        call = f"order({stage}, {stages}, {micro_batches})"
        given = result_of(call, answer, stage, stages, micro_batches)
        if not isinstance(given, (list, tuple)) or not all(isinstance(row, str) for row in given):
            raise Wrong(f"{call} must return a list of strings such as 'F0' and 'B0', got {given!r:.80}")
        wanted = [f"{kind}{number}" for kind, _, number in by_rule("1F1B", stage, stages, micro_batches)]
        if list(given) != wanted:
            raise Wrong(f"{call}: {_first_wrong(list(given), wanted, stage, stages)}")
    return f"right for all {len(_STAGES)} cases, including one with fewer micro-batches than stages"


def _first_wrong(given: list[str], wanted: list[str], stage: int, stages: int) -> str:
    """The first wrong entry and why it is wrong, without the right one."""
    for index, (row, right) in enumerate(zip(given, wanted)):
        if row == right:
            continue
        entry = f"entry {index + 1} is {row!r}"
        if row not in wanted:
            return f"{entry}, and there is no such pass; a micro-batch has F and B, and numbers start at 0"
        if row in given[:index]:
            return f"{entry}, which was already done"
        if row[0] == "B" and f"F{row[1:]}" not in given[:index]:
            return f"{entry}, a backward before its forward"
        if row[0] == right[0]:
            return f"{entry}, but the micro-batches must be processed in the order of their numbers"
        if row[0] == "F":
            later = stages - 1 - stage
            return (
                f"{entry}, so the stage stores more micro-batches than necessary; "
                f"{later} stages follow this one, how many forwards do they need first?"
            )
        return (
            f"{entry}, but its gradient cannot have arrived from the next stage yet: the rank can do another forward "
            "in the meantime"
        )
    if len(given) < len(wanted):
        return f"the list must have {len(wanted)} passes, got {len(given)}"
    return f"{given[len(wanted)]!r} comes after all {len(wanted)} passes are done"


def _bubble(answer: Any) -> str:
    run = finished(answer)
    spec, ranks = run.state.spec, 2
    require_run(run, strategy="pp", ranks=ranks)
    options = spec.options
    schedule, micro_batches = options["schedule"], options["micro_batches"]
    formula = SCHEDULES[schedule].formula
    bubble = formula(ranks, micro_batches)
    described = f"{schedule} with {micro_batches} micro-batches on 2 ranks has a bubble of {bubble:.0%} by formula"
    if bubble > _MAX_BUBBLE:
        raise Wrong(f"{described}, and the limit is {_MAX_BUBBLE:.0%}; what in the formula can you change?")
    size = spec.batch_size // micro_batches
    divisors = [m for m in range(max(ranks, least(schedule, ranks)), micro_batches) if micro_batches % m == 0]
    if any(formula(ranks, fewer) <= _MAX_BUBBLE for fewer in divisors):
        raise Wrong(f"{described}, but its micro-batches of {size} are smaller than necessary: use fewer of them")
    return f"{described}, with micro-batches of {size} samples"


EXERCISES |= {
    "pipeline_parallel.order": Exercise(
        "The order of a stage under 1F1B",
        _order,
        "`stages − 1 − stage` forwards first (at most the number of micro-batches), then one forward and one backward"
        " alternately, then the remaining backwards. The last stage starts with F0, B0; the first stage starts with one"
        " forward for each later stage.",
    ),
    "pipeline_parallel.bubble": Exercise(
        "A bubble of at most 12 %",
        _bubble,
        "1/(m+1) ≤ 0.12 gives m ≥ 8 for GPipe and 1F1B: 8 micro-batches of 2 samples. Interleaved1F1B has 1/(2m+1), so"
        " 4 are enough; InterleavedZeroBubble has 1/(6m+1), so 2 are enough. ZBVZeroBubble and DualPipeV"
        " have it with at least 4.",
    ),
}


# ---- lab 08: the coordinates of a rank on a mesh, and a mesh for two machines


_MESHES = ((2, 2, 2), (2, 1, 4), (1, 3, 2), (4, 2, 8))


def _place(answer: Any) -> str:
    require_function(answer, "place_of(rank, pp, dp, tp)")
    for sizes in _MESHES:
        for rank, wanted in enumerate(product(*map(range, sizes))):
            call = f"place_of({', '.join(map(str, (rank, *sizes)))})"
            given = result_of(call, answer, rank, *sizes)
            if not isinstance(given, (tuple, list)) or len(given) != 3:
                raise Wrong(f"{call} must return three numbers, (pp, dp, tp), got {given!r:.80}")
            if tuple(given) != wanted:
                raise Wrong(f"{call} returned {tuple(given)}: {_hint(tuple(given), wanted, sizes)}")
    return f"the coordinates of every rank are right on {len(_MESHES)} meshes"


def _hint(given: tuple, wanted: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    for axis, coordinate, right, ranks in zip(("pp", "dp", "tp"), given, wanted, sizes):
        if not isinstance(coordinate, int) or not 0 <= coordinate < ranks:
            return f"the coordinate on {axis} must be in 0 … {ranks - 1}"
        if coordinate != right:
            return f"{axis} is wrong; how many neighbouring ranks have the same coordinate on {axis}?"
    return "check all three coordinates"


def _machines(answer: Any) -> str:
    run = finished(answer)
    spec, options = run.state.spec, run.state.spec.options
    require_run(run, ranks=4)
    strategy = f"the strategy of this run is {spec.strategy or 'a script'}"
    stages, split = options.get("pp_size", 1), options.get("tp_size", 1)
    if stages == 1:
        raise Wrong(f"{strategy}: which axis sends only activations, and does this strategy have it?")
    if stages != 2:
        raise Wrong(f"{strategy} with {stages} pipeline stages: some boundaries between stages are within a machine")
    if split != 1:
        raise Wrong(
            f"{strategy} with tp_size={split}: the two ranks of a machine split layers and have the same samples"
        )
    return "the pipeline is the outermost axis: each machine is one stage and averages its gradients internally"


EXERCISES |= {
    "combine.place": Exercise(
        "The coordinates of a rank on the mesh",
        _place,
        "`return rank // (dp * tp), rank // tp % dp, rank % tp`: the last axis changes with every rank, the first one"
        " least often.",
    ),
    "combine.machines": Exercise(
        "Only activations between the machines",
        _machines,
        '`run("pp_ddp", nproc=4, steps=5, samples=200).wait()`: ranks 0 and 1 have the first stage, 2 and 3 the second.'
        " `pp_fsdp2_tp` with `tp_size=1` is right too.",
    ),
}


# ---- lab 15: the bytes of a layer of experts, and experts for given bytes; drawn for each learner


_RANKS, _BATCH, _USUAL = 2, 4, WORKLOADS["moe"]  # of the runs of the lab
_DEFAULTS = {option.name: option.default for option in _USUAL.options}


def _slots_of(experts: int, top_k: int, factor: float, positions: int) -> int:
    return math.ceil(factor * top_k * positions / experts)


# ---- slots and bytes of a layer


def _layer(random: Random) -> Question:
    experts, top_k, factor = random.choice((16, 32, 64)), random.choice((1, 2, 4)), random.choice((0.75, 1.0, 1.5, 2.0))
    positions, ranks, batch = 100 * random.randint(3, 12), random.choice((4, 8)), random.randint(2, 6)
    width = 256 * random.randint(2, 8)
    slots = _slots_of(experts, top_k, factor, positions)
    whole = 2 * batch * experts * slots * width / 1e6  # MB of one all-to-all, of which a part stays
    right = 2 * whole * (ranks - 1) / ranks
    uneven = factor * top_k * positions / experts
    return Question(
        f"A layer has {experts} experts on {ranks} ranks, top_k is {top_k} and the capacity factor {factor:g}. Each"
        f" rank has {batch} sequences of {positions} positions, and a token is {width} numbers in bf16",
        right,
        (
            (2 * whole, "the slots of its own experts stay on a rank"),
            (right / 2, "a layer has two all-to-alls in forward: dispatch and combine"),
            (right * 2, "that is forward and backward; or is it 4 bytes for a number?"),
            (right * uneven / slots, "a slot is whole: how is the capacity rounded?"),
            (right / factor, "empty slots are sent, too: where is the capacity factor?"),
            (right / batch, "every sequence has its slots"),
            *(((right / top_k, "a token is sent to each of its experts"),) if top_k > 1 else ()),
            (right / experts, "a rank sends to all experts of the others"),
            (right / whole * 2 * batch * positions * top_k * width / 1e6, "slots are sent, empty or not"),
        ),
        what="of MB",
        hint="count the slots of all experts for the sequences of a rank, and what leaves the rank",
        why=f"{right:,.1f} MB, empty slots included: it is known before the run, which is why slots were invented",
    )


# ---- an expert for other bytes


def _options(random: Random) -> tuple[int, int, int]:
    """Experts, experts per token, and slots per expert, none of which are the defaults."""
    usual = _DEFAULTS["experts"] * _slots_of(*(_DEFAULTS[name] for name in _NAMES))
    while True:
        experts, top_k = random.choice((4, 16, 32)), random.choice((1, 2, 4))
        even = top_k * _DEFAULTS["context"] / experts
        slots = random.randint(math.ceil(0.5 * even), math.floor(2 * even))
        if (100 * experts * slots) % usual == 0 and experts * slots != usual and slots != even:
            return experts, top_k, slots


_NAMES = ("experts", "top_k", "capacity_factor", "context")


def _asked() -> tuple[int, int, int]:
    return _options(drawn("mixture_of_experts.bytes"))


def _task() -> str:
    experts, top_k, slots = _asked()
    usual = _DEFAULTS["experts"] * _slots_of(*(_DEFAULTS[name] for name in _NAMES))
    return (
        f"Your model has {experts} experts per layer, top_k is {top_k}, and tokens need"
        f" {100 * experts * slots // usual} % of the bytes of the run above"
    )


def _bytes(answer: Any) -> str:
    run = finished(answer)
    spec = run.state.asked
    name = run.state.spec.strategy or "a script"
    if spec is None or spec.workload_row.mixture is None or STRATEGIES[name].states != "experts":
        raise Wrong(f"this is a run of {name}: train the workload moe with expert parallelism")
    if run.state.world_size != _RANKS or spec.batch_per_rank != _BATCH or spec.precision != "fp32":
        raise Wrong("compare like with like: two ranks, a batch of 4 per rank, and fp32")
    if any(spec.options[name] != _DEFAULTS[name] for name in ("context", "size")):
        raise Wrong("leave the context and the size of the model as they are")
    experts, top_k, slots = _asked()
    if (spec.options["experts"], spec.options["top_k"]) != (experts, top_k):
        raise Wrong(f"your model has experts={experts} and top_k={top_k}")
    got = _slots_of(*(spec.options[name] for name in _NAMES))
    if got != slots:
        raise Wrong(
            f"an expert has {got} slots per sequence, and tokens need {got / slots:.3g} times what is asked for:"
            " they are proportional to E · C, and C is rounded"
        )
    return f"{experts} experts with {slots} slots each: the bytes follow from E · C alone"


EXERCISES |= {
    "mixture_of_experts.slots": drawn_exercise(
        "mixture_of_experts.slots",
        "The bytes of a layer of experts",
        _layer,
        "`slots = math.ceil(factor * top_k * positions / experts)`; a rank sends `2 * 2 * batch * experts * slots *"
        " width * (ranks - 1) / ranks` bytes in forward: two all-to-alls, of which its own part stays.",
    ),
    "mixture_of_experts.bytes": Exercise(
        "Experts for given bytes",
        _bytes,
        "The run above has E · C = 8 · 40. For p percent of its bytes C = p / 100 · 320 / E, and `capacity_factor` is"
        ' C · E / (top_k · 128) or slightly less: `run("ep", **HERE, steps=4, **SMALL, options={…}).wait()`. The'
        " numbers differ between learners.",
        task=_task,
    ),
}


# ---- lab 16: the chunks of a rank, and the method of context parallelism that sends the fewest bytes


_SIZES = (1, 2, 4, 8)


def _chunks(answer: Any) -> str:
    require_function(answer, "chunks_of(rank, ranks)")
    for ranks in _SIZES:
        for rank in range(ranks):
            call = f"chunks_of({rank}, {ranks})"
            given = result_of(call, answer, rank, ranks)
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise Wrong(f"{call} must return two numbers, got {given!r:.80}")
            if sorted(map(repr, given)) != sorted(map(repr, (rank, 2 * ranks - 1 - rank))):
                raise Wrong(
                    f"{call} returned {tuple(given)}: there are {2 * ranks} chunks; one is as far from the beginning as"
                    " the other from the end"
                )
    return f"the chunks of every rank are right for {', '.join(map(str, _SIZES))} ranks"


def _fewest_bytes(answer: Any) -> str:
    run = finished(answer)
    name, spec = run.state.spec.strategy or "a script", run.state.asked
    if spec is None or "keys_and_values" not in (STRATEGIES[name].traffic or ()):
        raise Wrong(f"this is a run of {name}: train gpt with context parallelism")
    if run.state.world_size != 4 or spec.batch_per_rank != 4 or spec.precision != "fp32":
        raise Wrong("compare like with like: four ranks, a batch of 4, and fp32")
    if spec.options["method"] != "ulysses":
        raise Wrong(
            f"method={spec.options['method']} sends keys and values to every rank: what is it that need not be?"
        )
    return "an all-to-all sends each number to one rank, so the bytes per rank shrink with the number of ranks"


EXERCISES |= {
    "long_context.chunks": Exercise(
        "The chunks of a rank",
        _chunks,
        "`return rank, 2 * ranks - 1 - rank`: an early chunk with few keys, and a late one with many.",
    ),
    "long_context.bytes": Exercise(
        "The fewest bytes for attention",
        _fewest_bytes,
        '`run("cp", **HERE, **SMALL, options={"method": "ulysses"}).wait()`: from three ranks on it sends the least.',
    ),
}
