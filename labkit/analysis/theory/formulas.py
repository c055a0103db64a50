"""The traffic of every strategy per step and the model states of its ranks, as formulas: expected (analytical) bytes.

They are the textbook formulas of ring algorithms, as `sent` in record/writer.py: per rank an all-reduce sends 2(n−1)/n
of its payload (Patarasuk and Yuan 2009), an all-gather, reduce-scatter or broadcast (n−1)/n, a send all of it. Symbols:
n ranks of a group, P parameters (P′ per rank under tensor parallelism), p ranks of a pipeline, s shards, B samples per
rank, T positions, d width, V entries of the vocabulary, L layers, M parameters of linear layers and convolutions, E
experts with C slots each per sample, D parameters outside of them; 4 and 2 are bytes per number.

Known additions, such as padding, the bookkeeping of an engine, or the all-reduce with which gloo implements a
reduce-scatter, are listed next to the formula with their own bytes: only the rest is unexplained. The formulas were
verified against runs with torch 2.13 and DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from labkit.plan.spec import Spec
from labkit.training.rows import Module, Transformer
from labkit.training.strategies.rules import holder

# ---- building blocks of the formulas: the quantities of a Spec, and collectives on a ring


@dataclass(frozen=True)
class Flow:
    """Traffic for one purpose in a step: `op` as it is recorded, `theory` in bytes over all ranks, and `formula`.

    `extra` are bytes in addition to the formula (negative: fewer bytes), each with its reason.
    """

    op: str
    theory: float
    formula: str
    extra: tuple[tuple[float, str], ...] = ()


class Case:
    """The quantities of a Spec that the formulas use. Sizes are in bytes; `blocks` are one rank's parts of all blocks
    of the model."""

    def __init__(self, spec: Spec, step: int):
        self.spec, self.step, self.options, self.n = spec, step, spec.options, spec.nproc
        self.gloo = spec.device != "cuda"
        self.half = spec.precision in ("bf16", "fp16")
        self.cast = self.half and spec.strategy_row.autocast
        self.again = self.options.get("checkpoint_activations", False)  # backward recomputes forward, block by block
        self.rows = spec.strategy_row.one_loss(spec)  # ranks that split a layer
        self.replicas = self.options.get("replicas", 1)  # groups of ranks that each hold all shards
        self.stages = spec.strategy_row.constants(spec).get("STAGES", ())
        self.pipes = self.options.get("pp_size", self.n if self.stages else 1)  # ranks of one pipeline
        self.blocks = tuple(block.part(self.rows) for block in spec.workload_row.blocks(self.options))
        self.outputs = spec.workload_row.outputs(self.options)
        leaves = [module for block in self.blocks for module in block.leaves if module.shapes]
        self.cut = sum(len(module.shapes) for module in leaves if module.cut is not None)  # tensors of split layers
        self.norms = (
            [module.shapes[0][0] for module in leaves if len(module.shapes[0]) == 1]
            if spec.workload_row.batch_norm
            else []
        )
        letters = "P′" if self.rows > 1 else "P"
        self.letter = f"{letters}/p" if self.pipes > 1 else letters

    def holder(self, stage: int) -> int:
        """The rank of a pipeline that holds a stage."""
        return holder(stage, self.pipes, self.options["schedule"])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all parameters of the blocks."""
        return tuple(shape for block in self.blocks for shape in block.parameters)

    @property
    def size(self) -> int:
        """Bytes of all parameters of the blocks, in fp32."""
        return 4 * sum(map(math.prod, self.shapes))

    def without_experts(self) -> Case:
        """The case of the parameters outside of the experts, which are gathered and reduced in fp32."""
        dense = copy(self)
        dense.blocks, dense.letter, dense.half = tuple(block.dense for block in self.blocks), "D", False
        dense.options = {**self.options, "reshard_after_forward": True}
        return dense

    @property
    def shards(self) -> int:
        """The number of ranks among which parameters are sharded, if they are."""
        groups: int = self.pipes * self.rows * self.replicas
        return self.n // groups

    @property
    def batch(self) -> int:
        """Samples per rank in this step: fewer in the last step of an epoch, unless a pipeline fills it up."""
        if self.stages:
            return self.spec.batch_per_rank
        before = (self.step - 1) % self.spec.steps_per_epoch * self.spec.batch_per_rank
        return min(self.spec.batch_per_rank, math.ceil(self.spec.train_samples / self.spec.data_ranks) - before)

    @property
    def parts(self) -> int:
        """The number of micro-batches per batch."""
        wanted: int = self.options.get("accumulate", 1)
        return math.ceil(self.batch / math.ceil(self.batch / wanted))


def flow_of(
    op: str,
    payload: float,
    ranks: int,
    what: str,
    groups: int = 1,
    more: Mapping[str, float] | None = None,
    times: int = 1,
) -> Flow:
    """A collective on a ring of `ranks`, in each of `groups` groups, `times` times.

    `payload` is in bytes, `what` is its formula, and `more` is additional payload by reason.
    """
    share = (2 if op == "all_reduce" else 1) * times
    sent = share * groups * (ranks - 1)  # by all ranks of all groups, each (ranks − 1) / ranks of the payload
    formula = f"{'' if share == 1 else share}(n−1)/n · {what} per rank"
    return Flow(op, sent * payload, formula, tuple((sent * size, why) for why, size in (more or {}).items() if size))


def scattered(case: Case, flow: Flow) -> Flow:
    """A reduce-scatter as the backend implements it."""
    named = replace(flow, formula=f"reduce-scatter {flow.formula}")
    if not case.gloo:
        return named
    twice = flow.theory + sum(size for size, _ in flow.extra)
    return replace(
        named, op="all_reduce", extra=(*flow.extra, (twice, "gloo implements reduce-scatter as an all-reduce"))
    )


def scalars(why: str, size: float, ranks: int, groups: int = 1) -> Flow:
    """An all-reduce of a few numbers, which the textbook formulas do not count."""
    return flow_of("all_reduce", 0, ranks, "", groups, {why: size})


# ---- the expected traffic of replicas


# bytes of parameters that stay gathered under DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance
_KEPT = 4 * 10**9


def threads(case: Case) -> Iterator[Flow]:
    """`nn.DataParallel`: device 0 takes part in all traffic, and keeps its own part."""
    samples, others = case.batch * case.n, case.n - 1
    unseen = "copies from device 0 within its process are not measured"
    inputs = case.spec.data_row.input_bytes(case.options)
    for op, size, formula in (
        ("scatter", case.batch * inputs * others, "(n−1)/n · inputs"),
        ("broadcast", case.size * others, "(n−1) · 4P"),
    ):
        yield Flow(op, size, formula, ((-size, unseen),))
    logits = (2 if case.half else 4) * case.outputs[-1][0]
    yield Flow("gather", others / case.n * samples * logits, "(n−1)/n · logits")
    yield Flow("reduce", case.size * others, "(n−1) · 4P")


def gradients(case: Case) -> Iterator[Flow]:
    """DDP (Li et al. 2020) all-reduces every gradient once; PowerSGD (Vogels et al. 2019) the factors of a matrix, from
    step 3 on."""
    compression = case.options.get("compression", "none")
    if compression == "powersgd" and case.step > 2:
        yield flow_of("all_reduce", 4 * sum(map(_low_rank, case.shapes)), case.n, "4·(rows + columns + vectors)")
    elif compression == "fp16":
        yield flow_of("all_reduce", case.size / 2, case.n, "2P")
    else:
        yield flow_of("all_reduce", case.size, case.n, f"4{case.letter}")
    if case.options.get("join"):
        yield scalars("join() counts the ranks that still have batches", 8, case.n)
    if case.norms:  # two numbers per channel, and a count of batches
        buffers = sum(8 * channels + 8 for channels in case.norms)
        yield flow_of(
            "broadcast",
            0,
            case.n,
            "",
            more={"DDP broadcasts the batch-norm buffers of rank 0 before each step": buffers},
        )
    if case.step == (3 if case.options.get("static_graph") else 2):
        order = 4 * (len(case.shapes) + 1 + _buckets(case))
        yield flow_of(
            "broadcast", 0, case.n, "", more={"DDP rebuilds its buckets once, and rank 0 broadcasts the layout": order}
        )


def _buckets(case: Case) -> int:
    """The number of gradient buckets."""
    gradients = [4 * math.prod(shape) for shape in reversed(case.shapes)]
    bucket_mb = case.spec.strategy_row.constants(case.spec).get("BUCKET_MB", case.options.get("bucket_mb", 0))
    return 1 + max(bucket_numbers(gradients, bucket_mb))


def bucket_numbers(gradients: Iterable[int], bucket_mb: float) -> Iterator[int]:
    """The number of the DDP bucket that each gradient is in, from 0. `gradients` are their bytes, those of the last
    parameter first.

    A bucket is closed as soon as it is full (Li et al. 2020, section 3.2.2). `bucket_mb` is its size in MiB; 0 is
    torch's default, 1 MiB for the first bucket and 25 MiB for the others.
    """
    number = filled = 0
    for size in gradients:
        yield number
        filled += size
        if filled >= (bucket_mb or (25 if number else 1)) * 2**20:
            number, filled = number + 1, 0


def _low_rank(shape: tuple[int, ...]) -> int:
    """Elements that PowerSGD of rank 1 sends for a parameter: rows + columns of its matrix, if that is less than half
    of all."""
    rows, columns = shape[0], math.prod(shape[1:])
    return rows + columns if 2 * (rows + columns) < rows * columns else rows * columns


def pseudo_gradients(case: Case) -> Iterator[Flow]:
    """DiLoCo (Douillard et al. 2023, algorithm 1): an all-reduce of all parameters in every k-th step; the formula is
    the mean over k steps."""
    every = case.options["sync_every"]
    mean = flow_of("all_reduce", case.size / every, case.n, "4P/k")
    sent = 0 if case.step % every else every * mean.theory
    if sent != mean.theory:
        why = f"all of it is sent in every step that is a multiple of {every}, and nothing in the others"
        mean = replace(mean, extra=((sent - mean.theory, why),))
    yield mean


def updated_parameters(case: Case) -> Iterator[Flow]:
    """ZeroRedundancyOptimizer broadcasts each tensor from the rank that updated it."""
    yield flow_of("broadcast", case.size, case.n, "4P")


def engine(case: Case) -> Iterator[Flow]:
    """ZeRO (Rajbhandari et al. 2020, section 7): stages 1 and 2 reduce-scatter gradients and all-gather parameters,
    stage 3 gathers twice."""
    size, what = case.size, "4P"
    if case.half:
        size, what = case.size - 2 * sum(block.multiplied for block in case.blocks), "(2M + 4(P − M))"
    gradients = flow_of("reduce_scatter", size, case.n, what)
    if case.options["stage"] < 3:
        twice = (gradients.theory, "DeepSpeed reduces whole buckets with all-reduce")
        yield replace(gradients, op="all_reduce", formula=f"reduce-scatter {gradients.formula}", extra=(twice,))
        filled = 4 * (-(case.size // 4) % (2 * case.n))
        yield flow_of(
            "all_gather", case.size, case.n, "4P", more={"DeepSpeed pads to a multiple of 2n elements": filled}
        )
        yield scalars("the norm of all gradients", 4, case.n)
        return
    padded = 4 * sum(-math.prod(shape) % case.n for shape in case.shapes)
    why = "DeepSpeed pads every tensor to a multiple of the number of ranks"
    yield scattered(case, flow_of("reduce_scatter", size, case.n, what, more={why: padded}))
    kept = case.size if case.size <= _KEPT else 0
    more = {
        "DeepSpeed keeps parameters gathered from forward to backward, so they are gathered only once": -kept / 2,
        why: padded if not kept else padded / 2,
    }
    yield flow_of("all_gather", case.size, case.n, "4P", more=more, times=2)
    yield scalars("the norm of all gradients", 8, case.n)
    if case.step == 2:
        order = 8 * (3 + case.spec.workload_row.visited(case.options) + 4 * len(case.shapes))
        agreed = {"DeepSpeed checks once that all ranks agree on the order of modules and parameters": order}
        yield flow_of("broadcast", 0, case.n, "", more=agreed)


# ---- the expected traffic of sharded parameters


def rows(case: Case) -> Iterator[Flow]:
    """FSDP2: all-gather before forward, and before backward if resharded after forward; reduce-scatter of gradients."""
    shards, replicas, columns = case.shards, case.replicas, case.rows
    padded = 4 * sum(-shape[0] % shards * math.prod(shape[1:]) for shape in case.shapes)
    why, share = "FSDP2 pads the rows of every parameter to a multiple of the number of shards", 2 if case.half else 1
    times = case.parts * (2 if case.options.get("reshard_after_forward") else 1)
    what, more = f"{4 // share}{case.letter}", {why: padded / share}
    yield flow_of("all_gather", case.size / share, shards, what, replicas * columns, more, times)
    yield from reduced(case, shards, replicas, {why: padded}, columns)


def norms(case: Case) -> Iterator[Flow]:
    """The gradient norm of each sharded tensor."""
    if case.options["clip_norm"]:
        size = 4 * len(case.shapes)
        yield scalars("the norms of all gradients", size, case.shards, case.replicas * case.rows)


def reduced(case: Case, shards: int, replicas: int, padded: Mapping[str, float], columns: int = 1) -> Iterator[Flow]:
    """Gradients: reduce-scatter over the shards, then all-reduce of each shard over the replicas."""
    what = f"4{case.letter}"
    yield scattered(case, flow_of("reduce_scatter", case.size, shards, what, replicas * columns, padded, case.parts))
    if replicas > 1:
        smaller = {why: size / shards for why, size in padded.items()}
        flow = flow_of("all_reduce", case.size / shards, replicas, f"{what}/s", shards * columns, smaller, case.parts)
        yield replace(flow, formula=flow.formula.replace("(n−1)/n", "(r−1)/r"))


def units(case: Case) -> Iterator[Flow]:
    """FSDP1 (Zhao et al. 2023): each unit is a flat parameter; the root unit stays gathered from forward to
    backward."""
    replicas, found = case.options["replicas"], units_of(case)
    shards = case.n // replicas
    sizes = [4 * numbers for numbers in flats(case, shards)]
    padded = {
        "FSDP1 aligns tensors to 16 bytes and pads each unit to a multiple of the number of ranks": (
            sum(sizes) - case.size
        )
    }
    if case.options["sharding"] == "NO_SHARD":
        yield flow_of("all_reduce", case.size, case.n, "4P", more=padded, times=case.parts)
    elif case.options["sharding"] == "SHARD_GRAD_OP":
        yield flow_of("all_gather", case.size, shards, "4P", replicas, padded, case.parts)
        yield from reduced(case, shards, replicas, padded)
    else:
        more = padded | {"the root unit is gathered only once": -sizes[-1] / 2}
        if case.again:
            again = sum(size for unit, size in zip(found[:-1], sizes) if unit.again)
            more["units within a block are gathered again to recompute its activations"] = again / 2
        yield flow_of("all_gather", case.size, shards, "4P", replicas, more, 2 * case.parts)
        yield from reduced(case, shards, replicas, padded)
    if case.options["clip_norm"]:
        yield scalars("the norm of all gradients", 4, shards, replicas)


@dataclass(frozen=True)
class Unit:
    """One unit (flat parameter) of FSDP1. `again`: activation checkpointing of the block around it gathers it once
    more."""

    shapes: tuple[tuple[int, ...], ...]
    again: bool = False


def units_of(case: Case) -> list[Unit]:
    """The units of FSDP1's size-based policy, the root unit last.

    Recomputation of a block stops as soon as no activation is missing: a unit at the end of the block, as in gpt, is
    still gathered then. The outputs of experts are combined after the last of them.
    """
    least, units = case.options["min_parameters"], []

    def wrap(module: Module, inside: bool, ends: bool) -> tuple[tuple[int, ...], ...]:
        """Makes units of modules that are large enough; returns the shapes left to the enclosing unit."""
        if module.size < least:
            return module.parameters
        left = module.shapes
        for inner in module.inside:
            left += wrap(inner, True, ends and inner is module.inside[-1] and not inner.experts)
        if sum(map(math.prod, left)) < least:
            return left
        units.append(Unit(left, inside and not ends))
        return ()

    whole, ends = sum(block.size for block in case.blocks) >= least, case.spec.workload_row.ends_in_layer
    left = [wrap(block, False, ends) if whole else block.parameters for block in case.blocks]
    return [*units, Unit(tuple(shape for those in left for shape in those))]


def flats(case: Case, shards: int) -> list[int]:
    """Elements of FSDP1's flat parameters in `shards` shards, including padding; the root unit is last."""
    return [_flat(unit, shards) for unit in units_of(case)]


def _flat(unit: Unit, ranks: int) -> int:
    """Elements of a flat parameter: each tensor starts at a multiple of four, and the total is a multiple of
    `ranks`."""
    total = 0
    for shape in unit.shapes:
        total += -total % 4 + math.prod(shape)
    return total + -total % ranks


# ---- the expected traffic of a model that is split


def layers(case: Case) -> Iterator[Flow]:
    """Tensor parallelism (Shoeybi et al. 2019, section 3): one all-reduce per direction after each pair of split
    matrices."""
    groups, wide, row = case.n // case.rows // case.pipes, 2 if case.half else 4, case.spec.workload_row
    if row.transformer:
        yield from _of_transformer(case, row.transformer(case.options), groups, wide)
        return
    sums = " + ".join(map(str, row.partial_sums))
    what = f"{wide}·B·({sums})" if len(row.partial_sums) > 1 else f"{wide}·B·{sums}"
    again = wide * case.batch * row.recomputed_sums if case.again else 0
    more = {"recomputing a layer's activations repeats the all-reduce of its partial sums": again}
    yield flow_of("all_reduce", wide * case.batch * sum(row.partial_sums), case.rows, what, groups, more)


def _of_transformer(case: Case, model: Transformer, groups: int, wide: int) -> Iterator[Flow]:
    layers, width, positions = model.layers, model.width, case.batch * model.positions
    vectors, what = wide * positions * width, f"{wide}·B·T·d"
    if case.options["sequence_parallel"]:
        yield from _sequence_split(case, model, groups, vectors, what)
    else:
        more = {
            "gradients of query, key and value inputs are all-reduced separately": 2 * layers * vectors,
            "recomputing the attention repeats the all-reduce of its partial sums": (
                layers * vectors if case.again else 0
            ),
            "autocast keeps the gradients of cast tensors in fp32": (4 * layers + 1) * vectors if case.cast else 0,
        }
        yield flow_of("all_reduce", (4 * layers + 1) * vectors, case.rows, f"{what}·(4L + 1)", groups, more)
    if case.options.get("loss_parallel"):
        yield flow_of("all_reduce", 3 * 4 * positions, case.rows, "3·4·B·T", groups)
    else:
        yield flow_of("all_gather", wide * positions * model.vocabulary, case.rows, f"{wide}·B·T·V", groups)


def _sequence_split(case: Case, model: Transformer, groups: int, vectors: int, what: str) -> Iterator[Flow]:
    """Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): an all-reduce becomes a reduce-scatter and an
    all-gather."""
    layers, width = model.layers, model.width
    again, cast = layers if case.again else 0, vectors if case.cast else 0
    gathered = {
        "the inputs of MLPs and of the head are gathered again for their weight gradients": (layers + 1) * vectors,
        "recomputing a layer's activations repeats its all-gathers": 2 * again * vectors,
        "autocast casts only after the all-gather before attention, and not the gradients of the embedding": (
            (layers + 1 + again) * cast
        ),
    }
    yield flow_of("all_gather", (4 * layers + 2) * vectors, case.rows, f"{what}·(4L + 2)", groups, gathered)
    sent_back = {
        "recomputing a layer's activations repeats its reduce-scatter": again * vectors,
        "autocast keeps the gradients of cast tensors in fp32": (2 * layers + 1) * cast,
    }
    yield scattered(
        case, flow_of("reduce_scatter", (4 * layers + 1) * vectors, case.rows, f"{what}·(4L + 1)", groups, sent_back)
    )
    # FSDP2 reduces the gradients of norms itself; otherwise each operation that needs them does: three in AdamW, and
    # the clipping.
    norms = 4 * 2 * width * (2 * layers + 1)
    times = 1 if case.spec.strategy_row.wrapper == "FSDP" else 4 if case.options["clip_norm"] else 3
    yield scalars("gradients of norms, reduced by each operation that needs them", times * norms, case.rows, groups)


def norms_of_layers(case: Case) -> Iterator[Flow]:
    """The gradient norm of each tensor of the split layers."""
    if case.options["clip_norm"]:
        groups = case.n // case.rows // case.pipes
        yield scalars("the gradient norms of split layers", 4 * case.cut, case.rows, groups)


def stages(case: Case) -> Iterator[Flow]:
    """A pipeline (Huang et al. 2019): the output of a stage is sent to the next, if another rank holds it, and its
    gradient is sent back."""
    inner = [stage for stage in range(1, len(case.stages) - 1) if case.holder(stage) != case.holder(stage - 1)]
    behind = [case.outputs[case.stages[stage] - 1] for stage in inner]
    wide = 2 if case.half and not (case.cast and case.spec.workload_row.wide_outputs) else 4
    lanes = case.n // case.pipes
    numbers = sum(size / case.rows if split else size for size, split in behind)
    total = 2 * wide * case.batch * numbers * lanes
    yield Flow("send", total, f"2 · {wide}·B·A per pipeline, A elements per sample between stages")


def gradients_of_stages(case: Case) -> Iterator[Flow]:
    """DDP between pipelines: an all-reduce of the gradients of each stage."""
    used = {"DDP all-reduces the bitmap of used parameters": 4 * len(case.shapes)}
    yield flow_of("all_reduce", case.size, case.n // case.pipes, f"4{case.letter}", more=used)


def agreements(case: Case) -> Iterator[Flow]:
    """Scalars on which the pipeline stages agree."""
    if case.options["clip_norm"]:
        yield scalars("the norm of all gradients", 4, case.pipes, case.n // case.pipes)
    if case.spec.precision == "fp16":
        yield scalars("whether a gradient overflowed", 4, case.n)


def keys_and_values(case: Case) -> Iterator[Flow]:
    """Context parallelism. As Llama 3 was trained (2024, section 3.3.2): all-gather of keys and values, reduce-scatter
    of their gradients. Around a ring (Liu et al. 2023): n − 1 hops of keys and values in forward and again in backward,
    where the sums of their gradients make n, the last one home. Ulysses (Jacobs et al. 2023, section 3.2): an
    all-to-all of query, key, value and output, and of their gradients."""
    transformer, wide = case.spec.workload_row.transformer, 2 if case.half else 4
    assert transformer is not None  # the strategy takes no other workload
    model = transformer(case.options)
    both = 2 * wide * model.layers * case.batch * model.positions * model.width
    what = f"2·{wide}·L·B·T·d"
    if case.options["method"] == "ring":
        around, why = (case.n - 1) * both, "recomputing a layer's activations sends its keys and values again"
        home = case.n * both
        yield Flow("send", 2 * around + home, f"(3 − 2/n) · {what} per rank", ((around if case.again else 0, why),))
        return
    if case.options["method"] == "ulysses":
        part, why = both / 2 / case.n, "recomputing a layer's activations repeats its exchanges"
        more = {why: 4 * part if case.again else 0}
        yield flow_of("all_to_all", 8 * part, case.n, f"8·{wide}·L·B·T·d/n", more=more)
        return
    again = {"recomputing a layer's activations repeats its all-gather": both if case.again else 0}
    yield flow_of("all_gather", both, case.n, what, more=again)
    yield scattered(case, flow_of("reduce_scatter", both, case.n, what))


# ---- the expected traffic of expert parallelism


def tokens(case: Case) -> Iterator[Flow]:
    """Expert parallelism (Lepikhin et al. 2020, section 3.3.2): each layer sends the slots of all experts to their
    ranks and the outputs back, and in backward the gradients of both."""
    mixture, wide = case.spec.workload_row.mixture, 2 if case.half else 4
    assert mixture is not None  # the strategy takes no other workload
    model = mixture(case.options)
    slots = wide * model.layers * case.batch * model.experts * model.slots * model.width
    again = {"recomputing a layer's activations sends its tokens again": 2 * slots if case.again else 0}
    yield flow_of("all_to_all", 4 * slots, case.n, f"4L · {wide}·B·E·C·d", more=again)


def gradients_of_dense(case: Case) -> Iterator[Flow]:
    """The parameters outside of the experts, D in number: replicated by DDP, or sharded by FSDP2."""
    yield from rows(case.without_experts()) if _sharded(case) else gradients(case.without_experts())


def norms_of_experts(case: Case) -> Iterator[Flow]:
    """The norm of the gradients of all experts, and of each sharded tensor."""
    if case.options["clip_norm"]:
        yield scalars("the norm of the gradients of all experts", 4, case.n)
    if _sharded(case):
        yield from norms(case.without_experts())


def _sharded(case: Case) -> bool:
    return bool(case.options["dense"] == "sharded")


# ---- by the names that the rows of the strategies use

TRAFFIC: dict[str, Callable[[Case], Iterator[Flow]]] = {
    formula.__name__: formula
    for formula in (
        *(threads, gradients, updated_parameters, engine, pseudo_gradients),
        *(units, rows, norms),
        *(layers, norms_of_layers, stages, gradients_of_stages),
        *(agreements, keys_and_values),
        *(tokens, gradients_of_dense, norms_of_experts),
    )
}


def theory(spec: Spec, step: int = 3) -> tuple[Flow, ...] | None:
    """The expected traffic of step `step` of a Spec with a known number of ranks; the first two steps differ from later
    ones. None if there is no formula for its strategy."""
    names, case = spec.strategy_row.traffic, Case(spec, step)
    return None if names is None else tuple(flow for name in names for flow in TRAFFIC[name](case))


# ---- the textbook estimate of a transformer's floating-point operations, next to which a count can be put


SIX_ND = "6·N·D for N parameters in the layers, without embeddings and head, and D tokens (Kaplan et al. 2020, table 1)"


def six_nd(spec: Spec) -> int | None:
    """FLOPs of forward and backward of a step as `SIX_ND` says, which omits attention's scores and the head; None for
    a model that is not a dense transformer."""
    tokens = tokens_of_a_sample(spec)
    if tokens is None or spec.workload_row.mixture:
        return None
    _, *layers, _ = spec.workload_row.blocks(spec.options)
    return 6 * sum(layer.size for layer in layers) * tokens * spec.global_batch


def tokens_of_a_sample(spec: Spec) -> int | None:
    """The positions of a sequence; None if the samples of a Spec are no sequences, or not known."""
    row = spec.workload_row if spec.strategy else None
    return row.transformer(spec.options).positions if row and row.transformer else None


# ---- expected (analytical) bytes of model states per rank


Shape = tuple[int, ...]

# Bytes per parameter of each owner: in 32 bits, and in mixed precision, where the optimizer also has a 32-bit copy of
# the parameters (Rajbhandari et al. 2020, section 3.1). Both add up to 16.
RECIPES = {
    "fp32": {"parameters": 4, "gradients": 4, "optimizer": 8},
    "mixed": {"parameters": 2, "gradients": 2, "optimizer": 12},
}


@dataclass(frozen=True)
class States:
    """The model states of one rank, in bytes."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.parameters + self.gradients + self.optimizer


def states(spec: Spec) -> tuple[States, ...] | None:
    """The model states of each rank of a Spec with a known number of ranks, on its device; None without a formula."""
    name = spec.strategy_row.states
    return None if name is None else tuple(STATES[name](Case(spec, step=1)))


def _of(numbers: float, stepped: float | None = None) -> States:
    """The states of `numbers` parameters, of which the rank updates `stepped` (default: all)."""
    each = RECIPES["fp32"]
    updated = numbers if stepped is None else stepped
    return States(each["parameters"] * numbers, each["gradients"] * numbers, each["optimizer"] * updated)


def _whole(case: Case) -> Iterator[States]:
    """All states of the layers, or parts of layers, of each rank."""
    for rank in range(case.spec.processes):
        yield _of(sum(map(math.prod, _shapes(case, rank))))


def _shapes(case: Case, rank: int) -> list[Shape]:
    """The parameter shapes of a rank's pipeline stages; of all blocks without a pipeline."""
    if not case.stages:
        return list(case.shapes)
    place = rank // (case.n // case.pipes)
    own = (stage for stage in range(len(case.stages) - 1) if case.holder(stage) == place)
    blocks = [block for stage in own for block in case.blocks[case.stages[stage] : case.stages[stage + 1]]]
    return [shape for block in blocks for shape in block.parameters]


def _outer(case: Case) -> Iterator[States]:
    """DiLoCo: a replica, and as large as it the point that all replicas have in common, its pseudo-gradient, and the
    momentum of the outer optimizer; all three exist from the first synchronization on."""
    for whole in _whole(case):
        yield States(2 * whole.parameters, 2 * whole.gradients, whole.optimizer + whole.parameters)


def _by_tensor(case: Case) -> Iterator[States]:
    """ZeroRedundancyOptimizer assigns each tensor, the largest first, to the rank with the fewest numbers so far."""
    stepped = [0] * case.n
    for size in sorted(map(math.prod, case.shapes), reverse=True):
        stepped[stepped.index(min(stepped))] += size
    for numbers in stepped:
        yield _of(case.size / 4, numbers)


def _units(case: Case) -> Iterator[States]:
    """FSDP1: an equal shard of each flat parameter, or all of it with NO_SHARD."""
    shards, whole = case.shards, sum(flats(case, case.shards))
    for _ in range(case.n):
        yield _of(whole if case.options["sharding"] == "NO_SHARD" else whole / shards)


def _rows(case: Case) -> Iterator[States]:
    """FSDP2: rows of each parameter as `torch.chunk` splits them; every storage has the size of the largest chunk."""
    lanes, shards = case.n // case.pipes, case.shards
    stages = [Counter(_shapes(case, first)) for first in range(0, case.n, lanes)]

    @cache
    def stored(stage: int, place: int) -> States:
        if case.options.get("cpu_offload"):
            return _of(0)  # the shards, their gradients and the moments are in CPU memory
        return _of(_in_rows(stages[stage], shards, 0), _in_rows(stages[stage], shards, place))

    for rank in range(case.n):
        yield stored(rank // lanes, rank % lanes // case.rows % shards)


def _experts(case: Case) -> Iterator[States]:
    """Expert parallelism: an equal part of the experts, and all other parameters, or their rows if FSDP2 shards
    them."""
    dense = case.without_experts()
    own, shapes = (case.size - dense.size) // 4 // case.n, Counter(dense.shapes)
    for rank in range(case.n):
        if case.options["dense"] == "sharded":
            yield _of(own + _in_rows(shapes, case.n, 0), own + _in_rows(shapes, case.n, rank))
        else:
            yield _of(own + dense.size / 4)


def _in_rows(shapes: Mapping[Shape, int], shards: int, place: int) -> int:
    """The number of elements in the rows of shard `place`, of as many parameters of each shape."""
    numbers = 0
    for (rows, *others), count in shapes.items():
        each = -(-rows // shards)
        numbers += count * max(0, min(each, rows - place * each)) * math.prod(others)
    return numbers


STATES: dict[str, Callable[[Case], Iterator[States]]] = {
    "whole": _whole,
    "by_tensor": _by_tensor,
    "units": _units,
    "rows": _rows,
    "experts": _experts,
    "outer": _outer,
}
