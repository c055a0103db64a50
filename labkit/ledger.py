"""The ledger: bytes that the ranks sent in a step, by operation, against what the strategy demands by formula, with why they differ.

The formulas count what textbooks count, in a ring, as `sent` in probe/traffic.py has it: an all-reduce sends 2(n−1)/n of its payload
(Patarasuk and Yuan 2009), an all-gather, reduce-scatter or broadcast (n−1)/n, a send all of it. Their letters: n ranks of a group,
P parameters (P′ what tensor parallelism leaves a rank of them), p ranks of a pipeline, s shards, B samples of a rank, T places, d width,
V bytes of the vocabulary, L layers, M parameters of linear layers and convolutions; 4 and 2 are the bytes of a number.

What is known to come on top, such as padding, an engine's bookkeeping, or what gloo makes of a reduce-scatter, stands beside the formula
with a number of its own: only the rest is unexplained. Formulas and the rest were held against runs with torch 2.13 and DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.spec import Spec, SpecError
from labkit.workloads import GPT_SIZES, GPT_VOCABULARY

if TYPE_CHECKING:
    from labkit.state import RunState

CLOSE = 0.01  # of two figures, the larger: what is nearer needs no reason
_KEPT = 4 * 10**9  # bytes of the parameters that DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance let stay gathered


@dataclass(frozen=True)
class Entry:
    """One operation of a step. `calls` is the mean of the ranks; `measured` and `theory` are bytes sent in a step, over all ranks.

    `theory` is None where there is no formula, as for a script of one's own; `formula` says how it is made up. `reason` is one sentence
    with numbers where the two differ, and empty where they are within one per cent of each other.
    """

    op: str
    calls: float
    measured: float
    theory: float | None
    formula: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Flow:
    """What is sent for one purpose in a step: `op` as it is recorded, `theory` in bytes over all ranks, and `formula`.

    `beside` are bytes that are sent on top of the formula (below zero: that are saved), each with why.
    """

    op: str
    theory: float
    formula: str
    beside: tuple[tuple[float, str], ...] = ()


def ledger(state: RunState) -> tuple[Entry, ...]:
    """An entry for every operation that was seen or is demanded, the largest first; empty until every rank has told of a step."""
    spec = _asked(state)
    seen = _copied(state) if spec and spec.strategy == "dp" else _seen(state)
    if seen is None:
        return ()
    measured, step = seen
    if spec is None:
        entries = [Entry(op, calls, sent, None, "", "") for op, (calls, sent) in measured.items()]
    else:
        flows: dict[str, list[Flow]] = {op: [] for op in measured}
        for flow in theory(spec, step):
            flows.setdefault(flow.op, []).append(flow)
        entries = [_entry(op, *measured.get(op, (0.0, 0.0)), those) for op, those in flows.items()]
    return tuple(sorted(entries, key=lambda entry: -max(entry.measured, entry.theory or 0.0)))


def theory(spec: Spec, step: int = 3) -> tuple[Flow, ...]:
    """What the strategy of a Spec, whose ranks are known, sends by formula in a step (the first ones differ from the rest)."""
    return tuple(THEORY[spec.strategy](_Case(spec, step)))


def _asked(state: RunState) -> Spec | None:
    """The Spec of a run, where it has a strategy and its ranks are known."""
    try:
        spec = Spec.from_json(state.spec) if state.spec else None
    except SpecError:
        return None  # of a version that knew more
    return spec if spec and spec.strategy and spec.nproc else None


def _seen(state: RunState) -> tuple[dict[str, tuple[float, float]], int] | None:
    """Calls (mean per rank) and bytes sent (over all ranks) by operation, and the step; None where a rank has told of none."""
    told = [rank.traffic for rank in state.ranks.values() if rank.traffic is not None]
    if not told or len(told) < state.world_size:
        return None
    ops = dict.fromkeys(op for traffic in told for op in traffic["ops"])
    found = {}
    for op in ops:
        those = [traffic["ops"][op] for traffic in told if op in traffic["ops"]]
        found[op] = sum(one["calls"] for one in those) / len(told), float(sum(one["sent"] for one in those))
    return found, max(traffic["step"] for traffic in told)


def _entry(op: str, calls: float, measured: float, flows: list[Flow]) -> Entry:
    demanded = float(sum(flow.theory for flow in flows))
    formula = " + ".join(dict.fromkeys(flow.formula for flow in flows if flow.theory))
    return Entry(op, calls, measured, demanded, formula, _reason(measured, demanded, flows))


def _reason(measured: float, demanded: float, flows: list[Flow]) -> str:
    gap, least = measured - demanded, CLOSE * max(measured, demanded)
    if abs(gap) <= least:
        return ""
    known: dict[str, float] = {}
    for bytes_, why in (each for flow in flows for each in flow.beside):
        known[why] = known.get(why, 0.0) + bytes_
    told = [f"{_signed(bytes_)}: {why}" for why, bytes_ in known.items() if abs(bytes_) > 0.05 * abs(gap)]
    rest = gap - sum(known.values())
    if abs(rest) > least:
        told.append(f"{_signed(rest)}: no formula explains them")
    return "; ".join(told)


def _signed(size: float) -> str:
    """Bytes in words, with their sign."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= bytes_:
            return f"{size / bytes_:+.2f} {unit}".replace("-", "−")
    return f"{size:+.0f} B".replace("-", "−")


def _copied(state: RunState) -> tuple[dict[str, tuple[float, float]], int] | None:
    """What device 0 of `nn.DataParallel` gathers and reduces in the newest step that was looked at; its copies pass no process group."""
    if not state.in_threads:
        return None
    newest = state.in_threads[-1]
    others, extra = len(newest["replicas"]) - 1, newest["extra"]
    outputs = extra["outputs"] * others / (others + 1)
    return {"gather": (others, outputs), "reduce": (others, float(extra["gradients"]))}, max(state.step, 1)


# ---- the models, as shapes


@dataclass(frozen=True)
class Module:
    """Parameters by their shapes, then the modules inside. `cut` is the dimension in which tensor parallelism splits its matrix."""

    shapes: tuple[tuple[int, ...], ...] = ()
    inside: tuple[Module, ...] = ()
    cut: int | None = None

    @property
    def parameters(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all parameters, in the order of the model."""
        return self.shapes + tuple(shape for module in self.inside for shape in module.parameters)

    @property
    def size(self) -> int:
        """How many numbers all parameters have."""
        return sum(map(math.prod, self.parameters))

    @property
    def multiplied(self) -> int:
        """Numbers in linear layers and convolutions; an embedding is the one matrix that has no bias and is never split."""
        most = max(map(len, self.shapes), default=0)
        looked_up = most == 2 and len(self.shapes) == 1 and self.cut is None
        own = sum(map(math.prod, self.shapes)) if most > 1 and not looked_up else 0
        return own + sum(module.multiplied for module in self.inside)

    @property
    def leaves(self) -> tuple[Module, ...]:
        """Itself and all modules inside."""
        return self, *(leaf for module in self.inside for leaf in module.leaves)

    def part(self, ranks: int) -> Module:
        """What one of so many tensor-parallel ranks has of it: a bias is split with the rows of its matrix, and whole where columns are."""
        shapes = self.shapes
        if self.cut == 0:
            shapes = tuple((shape[0] // ranks, *shape[1:]) for shape in shapes)
        elif self.cut == 1:
            shapes = tuple((shape[0], shape[1] // ranks) if len(shape) == 2 else shape for shape in shapes)
        return replace(self, shapes=shapes, inside=tuple(module.part(ranks) for module in self.inside))


def _linear(come: int, go: int, cut: int | None = None) -> Module:
    return Module(((go, come), (go,)), cut=cut)


def _norm(width: int) -> Module:
    return Module(((width,), (width,)))


def _convolution(come: int, go: int, side: int, bias: bool = False) -> Module:
    return Module(((go, come, side, side), *[(go,)] * bias))


def _cnn(options: Mapping[str, Any]) -> tuple[Module, ...]:
    convolutions = (Module(inside=(_convolution(come, go, 5, bias=True),)) for come, go in ((1, 32), (32, 64), (64, 128)))
    return (*convolutions, Module(inside=(_linear(1152, 128, cut=0),)), _linear(128, 10, cut=1))


def _mlp(options: Mapping[str, Any]) -> tuple[Module, ...]:
    return Module(inside=(_linear(784, 512, cut=0),)), Module(inside=(_linear(512, 512, cut=1),)), _linear(512, 10)


def _gpt(options: Mapping[str, Any]) -> tuple[Module, ...]:
    layers, width, _ = GPT_SIZES[options["size"]]
    norm = _norm(width)
    attention = Module(inside=(*[_linear(width, width, cut=0)] * 3, _linear(width, width, cut=1)))
    layer = Module(inside=(norm, attention, norm, _linear(width, 4 * width, cut=0), _linear(4 * width, width, cut=1)))
    embedding = Module(inside=(Module(((GPT_VOCABULARY, width),)), Module(((options["context"], width),))))
    head = Module(inside=(norm, Module(((GPT_VOCABULARY, width),), cut=0)))
    return embedding, *[layer] * layers, head


_RESNET18 = (64, 64, 64, 128, 128, 256, 256, 512, 512)  # channels behind the stem and each residual block


def _resnet18(options: Mapping[str, Any]) -> tuple[Module, ...]:
    blocks = []
    for come, go in pairwise(_RESNET18):
        shortcut = [Module(inside=(_convolution(come, go, 1), _norm(go)))] * (come != go)
        blocks.append(Module(inside=(_convolution(come, go, 3), _norm(go), _convolution(go, go, 3), _norm(go), *shortcut)))
    return Module(inside=(_convolution(3, 64, 3), _norm(64))), *blocks, Module(inside=(_linear(512, 10),))


MODELS: dict[str, Callable[[Mapping[str, Any]], tuple[Module, ...]]] = {"cnn": _cnn, "mlp": _mlp, "gpt": _gpt, "resnet18": _resnet18}


def _borders(spec: Spec) -> tuple[tuple[int, bool], ...]:
    """Numbers that one sample has behind each block, and whether each of the tensor-parallel ranks has a part of them only."""
    options = spec.options
    if spec.workload == "cnn":
        return (32 * 14 * 14, False), (64 * 7 * 7, False), (128 * 3 * 3, False), (128, True), (10, False)
    if spec.workload == "mlp":
        return (512, True), (512, False), (10, False)
    if spec.workload == "resnet18":
        return *((channels * (2048 // channels) ** 2, False) for channels in _RESNET18), (10, False)
    layers, width, _ = GPT_SIZES[options["size"]]
    vectors = options["context"] * width, options.get("sequence_parallel", False)
    return *[vectors] * (layers + 1), (options["context"] * GPT_VOCABULARY, False)


# ---- the pieces that formulas are made of


class _Case:
    """A Spec as the formulas ask for it. Sizes are in bytes, and `blocks` are what one rank has of every block of the model."""

    def __init__(self, spec: Spec, step: int):
        self.spec, self.step, self.options, self.n = spec, step, spec.options, spec.nproc
        self.gloo = spec.device != "cuda"
        self.half = spec.precision in ("bf16", "fp16")
        self.cast = self.half and "fsdp2" not in spec.strategy  # by autocast, and not by FSDP2's policy
        self.again = self.options.get("checkpoint_activations", False)  # forward runs a second time, block by block
        self.rows = self.options.get("tp_size", self.n if spec.strategy == "tp" else 1)  # ranks that split a layer
        self.stages = spec.strategy_row.constants(spec).get("STAGES", ())
        self.pipes = self.options.get("pp_size", self.n if self.stages else 1)  # ranks that a batch goes through
        self.blocks = tuple(block.part(self.rows) for block in MODELS[spec.workload](self.options))
        self.shapes = tuple(shape for block in self.blocks for shape in block.parameters)
        self.size = 4 * sum(map(math.prod, self.shapes))
        leaves = [module for block in self.blocks for module in block.leaves if module.shapes]
        self.cut = sum(len(module.shapes) for module in leaves if module.cut is not None)  # tensors that are split, or of a split layer
        self.norms = [module.shapes[0][0] for module in leaves if len(module.shapes[0]) == 1] if spec.workload_row.batch_norm else []
        letters = "P′" if self.rows > 1 else "P"
        self.letter = f"{letters}/p" if self.pipes > 1 else letters

    @property
    def batch(self) -> int:
        """Samples of a rank in this step: fewer in an epoch's last one, which a pipeline fills up."""
        if self.stages:
            return self.spec.batch_per_rank
        before = (self.step - 1) % self.spec.steps_per_epoch * self.spec.batch_per_rank
        return min(self.spec.batch_per_rank, math.ceil(self.spec.train_samples / self.spec.data_ranks) - before)

    @property
    def parts(self) -> int:
        """Parts that a batch is taken in."""
        return math.ceil(self.batch / math.ceil(self.batch / self.options.get("accumulate", 1)))


def _flow(op: str, payload: float, ranks: int, what: str, groups: int = 1, more: Mapping[str, float] | None = None, times: int = 1) -> Flow:
    """A collective in a ring, in so many groups of ranks and so many times over.

    `payload` is in bytes, `what` the formula of it, and `more` payload beside it, by why.
    """
    share = (2 if op == "all_reduce" else 1) * times
    sent = share * groups * (ranks - 1)  # all ranks of all groups, each (ranks − 1) / ranks of it
    formula = f"{'' if share == 1 else share}(n−1)/n · {what} per rank"
    return Flow(op, sent * payload, formula, tuple((sent * size, why) for why, size in (more or {}).items() if size))


def _scattered(case: _Case, flow: Flow) -> Flow:
    """A reduce-scatter as the backend does it."""
    told = replace(flow, formula=f"reduce-scatter {flow.formula}")
    if not case.gloo:
        return told
    twice = flow.theory + sum(size for size, _ in flow.beside)
    return replace(told, op="all_reduce", beside=(*flow.beside, (twice, "gloo does a reduce-scatter as an all-reduce of the whole")))


def _scalars(why: str, size: float, ranks: int, groups: int = 1) -> Flow:
    """An all-reduce of a few numbers, which no textbook counts."""
    return _flow("all_reduce", 0, ranks, "", groups, {why: size})


# ---- the strategies


def _single(case: _Case) -> Iterator[Flow]:
    return iter(())


def _dp(case: _Case) -> Iterator[Flow]:
    """`nn.DataParallel`: device 0 takes part in all that is sent, and keeps its own share."""
    samples, others = case.batch * case.n, case.n - 1
    unseen = "what device 0 hands out inside its process is counted nowhere"
    inputs = 8 * case.options["context"] if case.spec.workload == "gpt" else 4 * (3 * 32**2 if case.norms else 28**2)
    for op, size, formula in (
        ("scatter", case.batch * inputs * others, "(n−1)/n · inputs"),
        ("broadcast", case.size * others, "(n−1) · 4P"),
    ):
        yield Flow(op, size, formula, ((-size, unseen),))
    logits = (2 if case.half else 4) * _borders(case.spec)[-1][0]
    yield Flow("gather", others / case.n * samples * logits, "(n−1)/n · logits")
    yield Flow("reduce", case.size * others, "(n−1) · 4P")


def _ddp(case: _Case) -> Iterator[Flow]:
    """DDP (Li et al. 2020) sends every gradient once; PowerSGD (Vogels et al. 2019) of a matrix its factors, from the third step on."""
    compression = case.options.get("compression", "none")
    if compression == "powersgd" and case.step > 2:
        yield _flow("all_reduce", 4 * sum(map(_low_rank, case.shapes)), case.n, "4·(rows + columns + vectors)")
    elif compression == "fp16":
        yield _flow("all_reduce", case.size / 2, case.n, "2P")
    else:
        yield _flow("all_reduce", case.size, case.n, "4P")
    if case.options.get("join"):
        yield _scalars("join counts the ranks that have samples left", 8, case.n)
    if case.norms:  # two numbers for each channel, and a count of batches
        buffers = sum(8 * channels + 8 for channels in case.norms)
        yield _flow("broadcast", 0, case.n, "", more={"DDP hands out rank 0's running figures of batch norm before a step": buffers})
    if case.step == (3 if case.options.get("static_graph") else 2):
        order = 4 * (len(case.shapes) + 1 + _buckets(case))
        yield _flow("broadcast", 0, case.n, "", more={"DDP lays out its buckets anew, once, and rank 0 tells how": order})


def _buckets(case: _Case) -> int:
    """How many buckets take the gradients, from the last parameter to the first; one is closed as soon as it is full."""
    count, filled = 0, 0
    for shape in reversed(case.shapes):
        filled += 4 * math.prod(shape)
        if filled >= case.options["bucket_mb"] << 20:
            count, filled = count + 1, 0
    return count + (filled > 0)


def _low_rank(shape: tuple[int, ...]) -> int:
    """Numbers that rank 1 sends of a parameter: rows and columns of the matrix that it makes, where they are less than half of all."""
    rows, columns = shape[0], math.prod(shape[1:])
    return rows + columns if 2 * (rows + columns) < rows * columns else rows * columns


def _zero1(case: _Case) -> Iterator[Flow]:
    """ZeroRedundancyOptimizer sends each tensor whole from the rank that stepped it."""
    yield from _ddp(case)
    yield _flow("broadcast", case.size, case.n, "4P")


def _deepspeed(case: _Case) -> Iterator[Flow]:
    """ZeRO (Rajbhandari et al. 2020, section 7): stages 1 and 2 scatter gradients and gather parameters, stage 3 gathers them twice."""
    size, what = case.size, "4P"
    if case.half:
        size, what = case.size - 2 * sum(block.multiplied for block in case.blocks), "(2M + 4(P − M))"
    gradients = _flow("reduce_scatter", size, case.n, what)
    if case.options["stage"] < 3:
        twice = (gradients.theory, "DeepSpeed sums up whole buckets by all-reduce")
        yield replace(gradients, op="all_reduce", formula=f"reduce-scatter {gradients.formula}", beside=(twice,))
        filled = 4 * (-(case.size // 4) % (2 * case.n))
        yield _flow("all_gather", case.size, case.n, "4P", more={"DeepSpeed fills up to a multiple of 2n numbers": filled})
        yield _scalars("the norm of all gradients", 4, case.n)
        return
    padded = 4 * sum(-math.prod(shape) % case.n for shape in case.shapes)
    why = "DeepSpeed pads every tensor to a multiple of the ranks"
    yield _scattered(case, _flow("reduce_scatter", size, case.n, what, more={why: padded}))
    kept = case.size if case.size <= _KEPT else 0
    more = {
        "DeepSpeed keeps parameters from forward to backward, and gathers them once": -kept / 2,
        why: padded if not kept else padded / 2,
    }
    yield _flow("all_gather", case.size, case.n, "4P", more=more, times=2)
    yield _scalars("the norm of all gradients", 8, case.n)
    if case.step == 2:
        order = 8 * (3 + _visits(case.spec) + 4 * len(case.shapes))
        yield _flow("broadcast", 0, case.n, "", more={"DeepSpeed has all ranks agree on the order of modules and parameters, once": order})


def _visits(spec: Spec) -> int:
    """Modules that forward and backward go through; backward does not go through one before the first parameter."""
    known = {"cnn": 36, "mlp": 17, "resnet18": 148}
    return known[spec.workload] if spec.workload in known else 2 * (10 * GPT_SIZES[spec.options["size"]][0] + 7)


def _fsdp(case: _Case) -> Iterator[Flow]:
    """FSDP1 (Zhao et al. 2023): each unit is a flat parameter, and the root's stays whole from forward to backward."""
    replicas, units = case.options["replicas"], _units(case)
    shards = case.n // replicas
    flats = [4 * _flat(unit, shards) for unit in units]
    padded = {"FSDP1 aligns tensors to 16 bytes, and pads a unit to a multiple of the ranks": sum(flats) - case.size}
    if case.options["sharding"] == "NO_SHARD":
        yield _flow("all_reduce", case.size, case.n, "4P", more=padded, times=case.parts)
    elif case.options["sharding"] == "SHARD_GRAD_OP":
        yield _flow("all_gather", case.size, shards, "4P", replicas, padded, case.parts)
        yield from _reduced(case, shards, replicas, padded)
    else:
        more = padded | {"the root unit is gathered once": -flats[-1] / 2}
        if case.again:
            again = sum(flat for unit, flat in zip(units[:-1], flats) if unit.again)
            more["units inside a block are gathered again to compute its activations anew"] = again / 2
        yield _flow("all_gather", case.size, shards, "4P", replicas, more, 2 * case.parts)
        yield from _reduced(case, shards, replicas, padded)
    if case.options["clip_norm"]:
        yield _scalars("the norm of all gradients", 4, shards, replicas)


def _reduced(case: _Case, shards: int, replicas: int, padded: Mapping[str, float], columns: int = 1) -> Iterator[Flow]:
    """Gradients: reduce-scatter among the shards, then all-reduce of what a shard holds among the replicas."""
    what = f"4{case.letter}"
    yield _scattered(case, _flow("reduce_scatter", case.size, shards, what, replicas * columns, padded, case.parts))
    if replicas > 1:
        smaller = {why: size / shards for why, size in padded.items()}
        flow = _flow("all_reduce", case.size / shards, replicas, f"{what}/s", shards * columns, smaller, case.parts)
        yield replace(flow, formula=flow.formula.replace("(n−1)/n", "(r−1)/r"))


@dataclass(frozen=True)
class Unit:
    """What FSDP1 makes one flat parameter of. `again` says that activation checkpointing of the block around it gathers it once more."""

    shapes: tuple[tuple[int, ...], ...]
    again: bool = False


def _units(case: _Case) -> list[Unit]:
    """The units of FSDP1's size-based policy, the root's last.

    A block that is computed again stops as soon as nothing more is missing: a unit that ends it, as gpt's have, is still gathered then.
    """
    least, units = case.options["min_parameters"], []

    def wrap(module: Module, inside: bool, ends: bool) -> tuple[tuple[int, ...], ...]:
        """Puts what is large enough into units; the shapes that are left to the unit around it."""
        if module.size < least:
            return module.parameters
        left = module.shapes
        for inner in module.inside:
            left += wrap(inner, True, ends and inner is module.inside[-1])
        if sum(map(math.prod, left)) < least:
            return left
        units.append(Unit(left, inside and not ends))
        return ()

    whole = sum(block.size for block in case.blocks) >= least
    left = [wrap(block, False, case.spec.workload == "gpt") if whole else block.parameters for block in case.blocks]
    return [*units, Unit(tuple(shape for those in left for shape in those))]


def _flat(unit: Unit, ranks: int) -> int:
    """Numbers of a flat parameter: each tensor begins at a multiple of four, and the whole is one of the ranks."""
    total = 0
    for shape in unit.shapes:
        total += -total % 4 + math.prod(shape)
    return total + -total % ranks


def _fsdp2(case: _Case) -> Iterator[Flow]:
    replicas = case.options["replicas"]
    yield from _sharded(case, case.n // replicas, replicas, reshard=case.options["reshard_after_forward"])
    if case.options["clip_norm"]:
        yield _scalars("the norms of all gradients", 4 * len(case.shapes), case.n // replicas, replicas)


def _sharded(case: _Case, shards: int, replicas: int = 1, columns: int = 1, reshard: bool = True) -> Iterator[Flow]:
    """FSDP2: all-gather before forward, and before backward where what was gathered is dropped; reduce-scatter of gradients."""
    padded = 4 * sum(-shape[0] % shards * math.prod(shape[1:]) for shape in case.shapes)
    why, share = "FSDP2 pads the rows of every parameter to a multiple of the ranks", 2 if case.half else 1
    what, times = f"{4 // share}{case.letter}", case.parts * (2 if reshard else 1)
    yield _flow("all_gather", case.size / share, shards, what, replicas * columns, {why: padded / share}, times)
    yield from _reduced(case, shards, replicas, {why: padded}, columns)


def _tp(case: _Case) -> Iterator[Flow]:
    yield from _split(case)
    if case.options["clip_norm"]:
        yield _scalars("the norms of gradients of split layers", 4 * case.cut, case.n)


def _split(case: _Case) -> Iterator[Flow]:
    """Tensor parallelism (Shoeybi et al. 2019, section 3): in each direction one all-reduce behind a pair of split matrices."""
    groups, wide = case.n // case.rows // case.pipes, 2 if case.half else 4
    if case.spec.workload == "gpt":
        yield from _split_gpt(case, groups, wide)
    elif case.spec.workload == "cnn":
        yield _flow("all_reduce", wide * case.batch * (1152 + 10), case.rows, f"{wide}·B·(1152 + 10)", groups)
    else:
        sums = wide * case.batch * 512
        more = {"a layer is computed again for its activations, and its parts are added up again": sums if case.again else 0}
        yield _flow("all_reduce", sums, case.rows, f"{wide}·B·512", groups, more)


def _split_gpt(case: _Case, groups: int, wide: int) -> Iterator[Flow]:
    layers, width, _ = GPT_SIZES[case.options["size"]]
    places = case.batch * case.options["context"]
    vectors, what = wide * places * width, f"{wide}·B·T·d"
    if case.options["sequence_parallel"]:
        yield from _split_places(case, groups, vectors, what)
    else:
        more = {
            "gradients behind query, key and value are added up one by one": 2 * layers * vectors,
            "attention is computed again for its activations, and its parts are added up again": layers * vectors if case.again else 0,
            "autocast leaves the gradients of what it casts in 32 bits": (4 * layers + 1) * vectors if case.cast else 0,
        }
        yield _flow("all_reduce", (4 * layers + 1) * vectors, case.rows, f"{what}·(4L + 1)", groups, more)
    if case.options.get("loss_parallel"):
        yield _flow("all_reduce", 3 * 4 * places, case.rows, "3·4·B·T", groups)
    else:
        yield _flow("all_gather", wide * places * GPT_VOCABULARY, case.rows, f"{wide}·B·T·V", groups)


def _split_places(case: _Case, groups: int, vectors: int, what: str) -> Iterator[Flow]:
    """Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): an all-reduce becomes a reduce-scatter and an all-gather."""
    layers, width, _ = GPT_SIZES[case.options["size"]]
    again, cast = layers if case.again else 0, vectors if case.cast else 0
    gathered = {
        "what goes into a perceptron or the head is gathered again for the gradients of its matrix": (layers + 1) * vectors,
        "a layer is computed again for its activations, and gathers again": 2 * again * vectors,
        "autocast casts behind the gather in front of attention, and not the embedding's gradients": (layers + 1 + again) * cast,
    }
    yield _flow("all_gather", (4 * layers + 2) * vectors, case.rows, f"{what}·(4L + 2)", groups, gathered)
    scattered = {
        "a layer is computed again for its activations, and scatters again": again * vectors,
        "autocast leaves the gradients of what it casts in 32 bits": (2 * layers + 1) * cast,
    }
    yield _scattered(case, _flow("reduce_scatter", (4 * layers + 1) * vectors, case.rows, f"{what}·(4L + 1)", groups, scattered))
    # FSDP2 adds the gradients of norms up by itself; else each operation that needs them does: three of AdamW's, and the clipping.
    norms, times = 4 * 2 * width * (2 * layers + 1), 1 if case.spec.strategy != "tp" else 4 if case.options["clip_norm"] else 3
    yield _scalars("gradients of norms, whenever an operation needs them", times * norms, case.rows, groups)


def _pp(case: _Case) -> Iterator[Flow]:
    yield from _piped(case)
    yield from _agreed(case)


def _agreed(case: _Case) -> Iterator[Flow]:
    """What the stages have to agree on."""
    if case.options["clip_norm"]:
        yield _scalars("the norm of all gradients", 4, case.pipes, case.n // case.pipes)
    if case.spec.precision == "fp16":
        yield _scalars("whether a gradient overflowed", 4, case.n)


def _piped(case: _Case) -> Iterator[Flow]:
    """A pipeline (Huang et al. 2019): what comes out of a stage goes to the next, and its gradient comes back."""
    borders = [_borders(case.spec)[first - 1] for first in case.stages[1:-1]]
    wide = 2 if case.half and not (case.cast and case.spec.workload == "gpt") else 4  # gpt's layers add to a sum in 32 bits
    lanes = case.n // case.pipes
    numbers = sum(size / case.rows if split else size for size, split in borders)
    total = 2 * wide * case.batch * numbers * lanes
    yield Flow("send", total, f"2 · {wide}·B·A per pipeline, A numbers of a sample between stages")


def _fsdp2_tp(case: _Case) -> Iterator[Flow]:
    yield from _split(case)
    yield from _sharded(case, case.n // case.rows, columns=case.rows, reshard=case.options["reshard_after_forward"])
    yield from _norms(case)


def _norms(case: _Case) -> Iterator[Flow]:
    """For the norm of all gradients: that of each tensor in shards, and again that of each tensor in split layers."""
    columns = case.n // case.rows // case.pipes
    if case.options["clip_norm"]:
        yield _scalars("the norms of all gradients", 4 * len(case.shapes), columns, case.rows)
        yield _scalars("the norms of all gradients", 4 * case.cut, case.rows, columns)


def _pp_ddp(case: _Case) -> Iterator[Flow]:
    yield from _piped(case)
    ranks = case.n // case.pipes
    used = {"DDP tells which parameters were used, for stages that are tried out": 4 * len(case.shapes)}
    yield _flow("all_reduce", case.size, ranks, f"4{case.letter}", more=used)
    yield from _agreed(case)


def _pp_fsdp2_tp(case: _Case) -> Iterator[Flow]:
    yield from _piped(case)
    yield from _split(case)
    yield from _sharded(case, case.n // case.rows // case.pipes, columns=case.rows, reshard=False)
    yield from _norms(case)
    yield from _agreed(case)


def _cp(case: _Case) -> Iterator[Flow]:
    """Context parallelism as Llama 3 was trained (2024, section 3.3.2): keys and values are gathered, their gradients scattered."""
    layers, width, _ = GPT_SIZES[case.options["size"]]
    wide = 2 if case.half else 4
    both, what = 2 * wide * layers * case.batch * case.options["context"] * width, f"2·{wide}·L·B·T·d"
    again = {"a layer is computed again for its activations, and gathers again": both if case.again else 0}
    yield _flow("all_gather", both, case.n, what, more=again)
    yield _scattered(case, _flow("reduce_scatter", both, case.n, what))
    yield from _ddp(case)


THEORY: dict[str, Callable[[_Case], Iterator[Flow]]] = {
    "single": _single,
    "dp": _dp,
    "ddp": _ddp,
    "zero1": _zero1,
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "fsdp2": _fsdp2,
    "tp": _tp,
    "pp": _pp,
    "fsdp2_tp": _fsdp2_tp,
    "pp_ddp": _pp_ddp,
    "pp_fsdp2_tp": _pp_fsdp2_tp,
    "cp": _cp,
}
