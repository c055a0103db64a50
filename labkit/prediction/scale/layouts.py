"""How a training is split: the table of shardings, the layout of a device mesh, and all layouts of some devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from labkit.prediction.devices import Device
from labkit.prediction.scale.frameworks import DEFAULT_FRAMEWORK, FRAMEWORKS, Framework
from labkit.prediction.scale.model import Model


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
        Sharding(
            "fsdp",
            "FSDP",
            ("parameters", "gradients", "optimizer"),
            forward=("all_gather",),
            backward=("all_gather", "reduce_scatter"),
            buffers=(0, 2, 1),
        ),
        Sharding(
            "hsdp",
            "HSDP",
            ("parameters", "gradients", "optimizer"),
            forward=("all_gather",),
            backward=("all_gather", "reduce_scatter"),
            once=("all_reduce",),
            buffers=(0, 2, 1),
            across=True,
        ),
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

    @property
    def mesh(self) -> tuple[Sharding, int, int, int, int]:
        """What distinguishes two layouts of the same devices, apart from the batch and recomputation."""
        return self.sharding, self.shards, self.tensor, self.pipeline, self.context

    @cached_property
    def _parts(self) -> list[tuple[str, str]]:
        degree = f" {self.replicas}×{self.shards}" if self.sharding.across else f" {self.data}" * (self.data > 1)
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
