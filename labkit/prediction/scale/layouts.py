"""How a training is split: the table of shardings, the layout of a device mesh, and all layouts of some devices; and
what frameworks do differently with the same layout, a table of named recipes.

A row of `FRAMEWORKS` says what a framework stores per parameter and per token, what it sends, how long its host threads
take to launch the kernels of a layer, and how it splits a pipeline. Figures come from its source code, or, where
`source` says so, from a fit to published runs (labkit/MEASUREMENTS.md). `pytorch` has the textbook figures: the
formulas of the papers, with the kernels of the table of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from labkit.analysis.theory.formulas import RECIPES
from labkit.prediction.devices import Device
from labkit.prediction.scale.model import Model

# ---- what frameworks do differently

USABLE = 0.9  # of a device's memory


@dataclass(frozen=True)
class Framework:
    """A row of the table. Two figures in a pair are those of eager and of compiled execution, unless said otherwise.

    Memory:

    - `states`: bytes per parameter by owner in mixed precision; `unsharded`: further bytes of gradients that every
      data-parallel rank stores; `keeps_gathered`: sharded parameters of a pipeline are gathered, and their gradients
      reduced, once per step instead of once per micro-batch.
    - `kept`: numbers that a layer keeps for backward, relative to those of `Model.layer_activations`, in attention and
      in the MLP; `fused`: what compiled kernels keep of them; `logits`: bytes kept per logit, 0 for those of the
      papers; `whole_inputs`: inputs of tensor-parallel matrix products that stay gathered, per layer, without a
      pipeline.
    - `selective`: with selective recomputation, the part of forward that is computed again, and the part of the
      activations that is kept.
    - `reserved`: peak memory, relative to the sum of what is stored, and further bytes; `usable`: the part of a device
      that this may fill; `retries`: above 90 % of the device, the allocator frees and allocates again in every step,
      which takes this many times as long as the step.

    Kernels and their launch:

    - `passes`: memory traffic of the operations between matrix products, relative to reading and writing each tensor
      once; `accumulated`: bytes moved per parameter to add up the gradients of a micro-batch; `loss`: bytes moved per
      logit; `stepped`: traffic of the optimizer, relative to reading and writing its states once.
    - `attention`: the rate of its fused attention, relative to that of the row of the accelerator; `scores`: bytes that
      eager attention moves per score in forward.
    - `host`: seconds to launch the kernels of a layer, forward and backward; `across`: further seconds for each
      tensor-parallel collective and node that it crosses; `straggle`: factor and exponent of the growth of both with
      the logarithm of the tensor-parallel ranks if a pipeline crosses nodes.

    Communication:

    - `reduced`: bytes of a gradient in a reduction; `bucket`: bytes of a message of a reduction (0: a layer);
      `regathered`: the time to gather parameters after the optimizer, relative to that of a collective.
    - `call`: seconds that a tensor-parallel collective costs besides its transfer, in split or delayed matrix products;
      `hidden`: the part of its transfer that overlaps with computation, without and with asynchronous tensor
      parallelism.
    - `sharding` (a row of the table of shardings) and `recompute`: what its runs use if nothing else is said.
    - `chunks`: stages of a pipeline rank, if the layout does not say; `balanced`: stages have equal costs with the
      head, instead of equal numbers of layers; `least_micro_batches`: whether a pipeline needs at least as many
      micro-batches as stages less one.

    `fitted`: whether published runs of it were fitted; `counts_recomputation`: whether the FLOP/s that it reports count
    full recomputation (Narayanan et al. 2021, appendix).
    """

    name: str
    title: str
    source: str
    states: Mapping[str, float] = field(default_factory=lambda: RECIPES["mixed"], hash=False)
    unsharded: float = 0.0
    reduced: float = 2.0
    bucket: float = 0.0
    regathered: float = 1.0
    host: tuple[float, float] = (1.5e-3, 0.6e-3)
    across: float = 0.0
    straggle: tuple[float, float] = (0.0, 1.0)
    passes: tuple[float, float] = (1.9, 1.2)
    accumulated: float = 0.0
    loss: tuple[float, float] = (32.0, 20.0)
    stepped: float = 1.0
    call: float = 20e-6
    hidden: tuple[float, float] = (0.0, 0.5)
    attention: float = 1.0
    scores: tuple[float, float] = (14.0, 14.0)
    kept: tuple[float, float] = (1.0, 1.0)
    fused: float = 1.0
    logits: float = 0.0
    whole_inputs: float = 0.0
    selective: tuple[float, float] = (0.05, 1.0)
    reserved: tuple[float, float] = (1.0, 0.0)
    usable: float = USABLE
    retries: float = 0.0
    chunks: int = 1
    balanced: bool = False
    least_micro_batches: bool = False
    keeps_gathered: bool = False
    sharding: str = "ddp"
    recompute: str = "none"
    fitted: bool = False
    counts_recomputation: bool = False


FSDP_STATES = {"parameters": 4, "gradients": 4, "optimizer": 8}  # 32-bit shards; parameters are gathered in 16 bits
PURE_STATES = {"parameters": 2, "gradients": 2, "optimizer": 4}  # everything in 16 bits
_TORCHTUNE = Framework(
    "torchtune",
    "torchtune",
    "pytorch/torchtune: full fine-tuning in 16 bits; times and activations are fitted to its README",
    states=PURE_STATES,
    passes=(3.0, 0.8),
    fused=0.75,
    sharding="fsdp",
    recompute="full",
    fitted=True,
)

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework("pytorch", "PyTorch", "the formulas of the papers named in model.py, memory.py and step.py"),
        Framework(
            "nanotron",
            "nanotron",
            "huggingface/nanotron: optim/gradient_accumulator.py, optim/zero.py, models/base.py,"
            " parallel/tensor_parallel/functional.py; times and activations are fitted to the Ultra-Scale Playbook",
            states={"parameters": 2, "gradients": 4, "optimizer": 12},
            unsharded=1.5,
            reduced=4,
            bucket=52e6,
            regathered=3.0,
            host=(4.3e-3, 4.3e-3),
            across=0.36e-3,
            straggle=(0.82, 1.3),
            passes=(1.35, 1.35),
            accumulated=10,
            loss=(26.0, 26.0),
            stepped=4.0,
            call=52e-6,
            kept=(1.6, 1.15),
            logits=11,
            whole_inputs=1.85,
            reserved=(1.0, 0.33 * 2**30),
            usable=0.94,
            retries=2.0,
            balanced=True,
            least_micro_batches=True,
            fitted=True,
        ),
        Framework(
            "torchtitan",
            "torchtitan",
            "pytorch/torchtitan: FSDP2 with 32-bit shards and reductions, selective recomputation of every second"
            " matrix product; times and activations are fitted to its benchmarks",
            states=FSDP_STATES,
            reduced=4,
            passes=(1.85, 1.2),
            attention=1.12,
            fused=0.9,
            selective=(0.39, 0.4),
            reserved=(1.05, 0.0),
            usable=0.96,
            keeps_gathered=True,
            fitted=True,
            sharding="fsdp",
        ),
        Framework(
            "megatron",
            "Megatron-LM",
            "NVIDIA/Megatron-LM: selective recomputation of the matrices of attention (Korthikanti et al. 2022)",
            reduced=4,
            host=(1.5e-3, 1.5e-3),
            keeps_gathered=True,
            fitted=True,
            counts_recomputation=True,
        ),
        Framework(
            "llama3",
            "Meta's trainer of Llama 3",
            "The Llama 3 Herd of Models, 2024, section 3.3.2: interleaved stages of a layer, gradients in 32 bits",
            states=FSDP_STATES,
            reduced=4,
            chunks=8,
            keeps_gathered=True,
        ),
        Framework(
            "llm-foundry",
            "LLM Foundry",
            "mosaicml/llm-foundry: Composer with FSDP, 32-bit shards and reductions; times are fitted to its"
            " benchmarks",
            states=FSDP_STATES,
            reduced=4,
            passes=(1.91, 1.2),
            logits=6,
            usable=0.95,
            fitted=True,
            sharding="fsdp",
        ),
        Framework(
            "fms-fsdp",
            "fms-fsdp",
            "foundation-model-stack/fms-fsdp: compiled, FSDP with 16-bit parameters and states",
            states=PURE_STATES,
            passes=(1.9, 1.6),
            selective=(0.33, 0.67),
            sharding="fsdp",
        ),
        _TORCHTUNE,
        replace(
            _TORCHTUNE,
            name="torchtune-step-in-backward",
            title="torchtune, optimizer step in backward",
            states={**PURE_STATES, "gradients": 0.5},
        ),
        replace(
            _TORCHTUNE,
            name="torchtune-8bit",
            title="torchtune, optimizer step in backward, 8-bit AdamW",
            states={**PURE_STATES, "gradients": 0.5, "optimizer": 2},
        ),
        Framework(
            "litgpt",
            "LitGPT",
            "Lightning-AI/litgpt: FSDP with 32-bit shards",
            states=FSDP_STATES,
            reduced=4,
            sharding="fsdp",
        ),
        Framework(
            "deepspeed",
            "DeepSpeed",
            "microsoft/DeepSpeed: ZeRO in 16 bits with 32-bit states, alone or with Megatron-LM",
            sharding="zero1",
            counts_recomputation=True,
        ),
        Framework(
            "nanogpt",
            "nanoGPT",
            "karpathy/nanoGPT: autocast of 32-bit parameters; bytes of attention and passes are fitted to its README",
            states=FSDP_STATES,
            reduced=4,
            passes=(9.0, 4.8),
            scores=(75, 32),
            fitted=True,
        ),
        Framework(
            "olmo", "OLMo", "allenai/OLMo: FSDP with 32-bit shards", states=FSDP_STATES, reduced=4, sharding="fsdp"
        ),
    )
}
DEFAULT_FRAMEWORK = "pytorch"


# ---- how a training is split


@dataclass(frozen=True)
class Sharding:
    """How data-parallel ranks share the states of the model. A row of the table `SHARDINGS`.

    - `owners`: what is sharded. `across`: in several groups of ranks, each of a node or more, that store the same.
    - The collectives, each on the 16-bit or 32-bit numbers of a unit (a layer): in each `forward` and each `backward`
      of a micro-batch, `once` per step in the last backward, and `after` the optimizer.
    - `buffers`: copies of all gradients in buckets, and units of parameters and of gradients in buffers.
    """

    name: str
    title: str
    owners: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    buffers: tuple[int, int, int] = (0, 0, 0)
    across: bool = False


_FSDP = Sharding(
    "fsdp",
    "FSDP",
    ("parameters", "gradients", "optimizer"),
    forward=("all_gather",),
    backward=("all_gather", "reduce_scatter"),
    buffers=(0, 2, 1),
)

# ZeRO: Rajbhandari et al. 2020, sections 5 and 7. DDP: Li et al. 2020; its buckets are a second copy of the gradients
# (gradient_as_bucket_view=False). FSDP: Zhao et al. 2023: the gathered unit, the prefetched one, and unreduced
# gradients; its hybrid sharding all-reduces the shards of the gradients among the groups.
SHARDINGS: dict[str, Sharding] = {
    sharding.name: sharding
    for sharding in (
        Sharding("ddp", "DDP", once=("all_reduce",), buffers=(1, 0, 0)),
        Sharding("zero1", "ZeRO-1", ("optimizer",), once=("reduce_scatter",), after=("all_gather",), buffers=(0, 0, 1)),
        Sharding(
            "zero2",
            "ZeRO-2",
            ("gradients", "optimizer"),
            backward=("reduce_scatter",),
            after=("all_gather",),
            buffers=(0, 0, 2),
        ),
        _FSDP,
        replace(_FSDP, name="hsdp", title="HSDP", once=("all_reduce",), across=True),
    )
}
LEAST_POSITIONS = 1024  # of a sequence, on a rank: with fewer, attention waits for keys and values
ALONE = Sharding("single", "one device")


@dataclass(frozen=True)
class Stage:
    """What a pipeline rank computes: layers, and whether the embedding and the head are among its blocks."""

    layers: int
    first: bool
    last: bool


@cache
def stages(model: Model, pipeline: int, balanced: bool) -> tuple[Stage, ...]:
    """The stages of a pipeline. The first ones have one layer more if they do not divide evenly. Balanced ones take
    layers, and in the end the head, until they reach an equal share of all FLOPs (nanotron, models/base.py)."""
    if not balanced or pipeline == 1:
        each, more = divmod(model.layers, pipeline)
        last = pipeline - 1
        return tuple(Stage(each + (rank < more), rank == 0, rank == last) for rank in range(pipeline))
    head = model.table / model.of_matrices  # in layers
    layers, ends, rank, cost = [0] * pipeline, 0, 0, 0.0
    for block in range(model.layers + 1):
        if block == model.layers:
            ends = rank
            break
        layers[rank] += 1
        cost += 1
        if cost >= (model.layers + head) * (rank + 1) / pipeline and rank < pipeline - 1:
            rank += 1
    return tuple(Stage(number, rank == 0, rank == ends) for rank, number in enumerate(layers))


RECOMPUTED = ("none", "selective", "full")
LOSSES = ("whole", "chunked")
TRAINED = ("all", "lora", "qlora")


@dataclass(frozen=True)
class Layout:
    """A device mesh of pipeline × replicas × shards × context × tensor, the last in neighbouring ranks.

    - `data` is the number of data-parallel ranks; `shards` of the data and context ranks share the states.
    - A rank computes `micro_batches` micro-batches of `micro_batch` samples per step.
    - `recompute`: what backward computes again, `none`, `full` (every layer) or `selective` (what the framework's row
      says). `chunks`: stages per pipeline rank, more than one in an interleaved schedule.
    - `compiled`: by torch.compile; `asynchronous`: tensor-parallel transfers overlap with matrix products; `loss`:
      logits of all tokens at once (`whole`) or of some after another (`chunked`). `offload`: the inputs of recomputed
      layers wait in the memory of the host. `trained`: all parameters, or low-rank adapters of frozen matrices in 16
      (`lora`, Hu et al. 2021) or 4 bits (`qlora`, Dettmers et al. 2023).
    """

    sharding: Sharding
    data: int = 1
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    chunks: int = 1
    compiled: bool = True
    asynchronous: bool = False
    loss: str = "whole"
    offload: bool = False
    trained: str = "all"
    framework: Framework = FRAMEWORKS[DEFAULT_FRAMEWORK]

    @property
    def devices(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered, and gradients unreduced, from the first micro-batch of a step to the last:
        what frameworks do with sharded parameters in a pipeline."""
        return self.framework.keeps_gathered and self.pipeline > 1 and "parameters" in self.sharding.owners

    def refused(self, model: Model) -> str:
        """Why the layout cannot run, in one sentence; empty if it can."""
        if self.framework.least_micro_batches and self.micro_batches < self.pipeline - 1:
            return (
                f"a pipeline of {self.pipeline} stages needs at least {self.pipeline - 1} micro-batches in"
                f" {self.framework.title}, got {self.micro_batches}"
            )
        empty = self.pipeline * self.chunks > model.layers
        if self.framework.balanced:  # the loss alone may be in the stage after the head, and none may be behind it
            every = stages(model, self.pipeline, True)
            empty = next(rank for rank, stage in enumerate(every) if stage.last) < self.pipeline - 2
        if empty:
            return f"{model.layers} layers cannot be split into {self.pipeline * self.chunks} stages"
        return ""

    @property
    def synced(self) -> int:
        """The ranks that compute gradients of the same parameters."""
        return self.data * self.context

    def shards_of(self, owner: str) -> int:
        """The ranks that share the states of an owner."""
        return self.shards if owner in self.sharding.owners else 1

    @property
    def replicas(self) -> int:
        """The groups that each store all shards."""
        return self.synced // self.shards

    @property
    def kind(self) -> str:
        """The strategy without its degrees: `FSDP × TP`."""
        return " × ".join(name for name, _ in self._parts) or self.sharding.title

    @property
    def title(self) -> str:
        """The strategy with its degrees: `FSDP 8 × TP 4`; of HSDP, replicas and shards: `HSDP 4×8`."""
        return " × ".join(name + degree for name, degree in self._parts) or self.sharding.title

    @cached_property
    def _parts(self) -> list[tuple[str, str]]:
        degree = f" {self.data}" if self.data > 1 else ""
        if self.sharding.across:
            degree = f" {self.replicas}×{self.shards}"
        parts = [(self.sharding.title, degree)] if self.synced > 1 else []
        others = (("TP", self.tensor), ("PP", self.pipeline), ("CP", self.context))
        return parts + [(name, f" {degree}") for name, degree in others if degree > 1]


def layouts(model: Model, machine: Device, devices: int, sequence: int) -> Iterator[Layout]:
    """All meshes of some devices, with degrees in powers of two except for the data-parallel one.

    Tensor parallelism stays within a node and divides heads and hidden width; a pipeline has at most one stage per
    layer; context parallelism divides the sequence into two chunks per rank, which balances causal attention, and
    leaves a rank at least `LEAST_POSITIONS`.
    """
    for tensor in _powers(min(devices, machine.per_node)):
        if model.heads % tensor or model.kv_heads % tensor or model.hidden % tensor:
            continue
        for pipeline in _powers(min(devices // tensor, model.layers)):
            for context in _powers(min(devices // tensor // pipeline, max(1, sequence // LEAST_POSITIONS))):
                ranks = tensor * pipeline * context
                if devices % ranks == 0 and (context == 1 or sequence % (2 * context) == 0):
                    yield from _sharded(machine, devices // ranks, tensor, pipeline, context)


def _sharded(machine: Device, data: int, tensor: int, pipeline: int, context: int) -> Iterator[Layout]:
    synced = data * context
    if synced == 1:
        yield Layout(ALONE, tensor=tensor, pipeline=pipeline)
        return
    for sharding in SHARDINGS.values():
        groups = [size for size in _powers(synced // 2) if size > 1 and size * tensor >= machine.per_node]
        for shards in groups if sharding.across else [synced]:
            if synced % shards == 0:
                yield Layout(sharding, data, shards, tensor, pipeline, context)


def _powers(most: int) -> list[int]:
    """1, 2, 4, … up to `most`."""
    return [1 << exponent for exponent in range(max(0, most).bit_length())]
