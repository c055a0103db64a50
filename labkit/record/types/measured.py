"""Events with measurements: steps, memory, traffic, profiled steps, and samples of the machine."""

from typing import Annotated, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.envelope import Envelope, OfRank, Owners, Ranks
from labkit.record.types.values import RANKS, Amount, Bytes, Count, Loss, Name, Rank, Seconds, Series, Time

# JSON has lists for these tuples.
Span: TypeAlias = tuple[Name, Seconds, Seconds]  # name, start, end
Call: TypeAlias = Annotated[  # operation, start, end, and if known: bytes, group, ranks, sequence number
    tuple[Name, Seconds, Seconds, Bytes | None, Name | None, Ranks | None, Count | None], Limits(least=3)
]


class StepSeconds(TypedDict):
    """Seconds of the whole step and of each of its phases."""

    step: NotRequired[Seconds | None]
    data: NotRequired[Seconds | None]
    copy: NotRequired[Seconds | None]
    forward: NotRequired[Seconds | None]
    backward: NotRequired[Seconds | None]
    optimizer: NotRequired[Seconds | None]
    other: NotRequired[Seconds | None]


class StepMemory(TypedDict):
    """Bytes at the end of the step, and its peak."""

    allocated: NotRequired[Bytes | None]
    reserved: NotRequired[Bytes | None]
    peak: NotRequired[Bytes | None]


class Step(OfRank):
    """A step of training: `step` counts from 1 and continues over attempts, `loss` is null if this rank has none."""

    kind: Literal["step"]
    step: Count
    loss: NotRequired[Loss | None]
    samples: NotRequired[Amount | None]
    seconds: NotRequired[StepSeconds | None]
    memory: NotRequired[StepMemory | None]


class Optimizer(OfRank):
    """Written once for each of several optimizers that train on separate losses. The steps, and the loss in them, are
    those of the optimizer that sets the pace."""

    kind: Literal["optimizer"]
    optimizer: Series
    name: Name
    sets_pace: bool


class Losses(OfRank):
    """The losses of an optimizer that does not set the pace: `points` are pairs of a step of the run and the loss."""

    kind: Literal["losses"]
    optimizer: Series
    points: list[tuple[Count, Loss | None]]


class Memory(OfRank):
    """The bytes of live tensors by owner: parameters, gradients, optimizer, activations, communication, other."""

    kind: Literal["memory"]
    owners: Owners
    step: NotRequired[Count | None]


class ReplicaMeasured(TypedDict):
    """One replica (thread) of a model in DataParallel: seconds of its forward and of its CPU, samples, bytes."""

    replica: Rank
    device: Name
    forward: Seconds
    cpu: Seconds
    samples: Amount
    memory: Bytes


class ReplicaExtra(TypedDict):
    """Bytes that only the first device has: gathered outputs and summed gradients."""

    outputs: Bytes
    gradients: Bytes


class Replica(OfRank):
    """The replicas of a model in DataParallel; `gil_wait` is the share of time that their threads waited for the GIL or
    a core."""

    kind: Literal["replica"]
    replicas: Annotated[list[ReplicaMeasured], Limits(most=64, least=1)]
    extra: ReplicaExtra
    step: NotRequired[Count | None]
    gil_wait: NotRequired[Seconds | None]


class Operation(TypedDict):
    """The calls of one collective in a step, the bytes of their tensors, and the bytes that this rank sent."""

    calls: Amount
    bytes: Bytes
    sent: Bytes


class Traffic(OfRank):
    """The communication of one step, by operation."""

    kind: Literal["traffic"]
    step: Count
    ops: dict[str, Operation]


class Moment(OfRank):
    """A profiled step: `t0` is when it began, `seconds` how long it took. All times in it count from t0."""

    step: Count
    t0: Time
    seconds: Seconds
    phases: list[Span]


class Timeline(Moment):
    """What one profiled step did: `phases` [name, start, end], `comm` [operation, start, end, bytes, group, ranks,
    sequence number], `busy` [start, end] (the rank computed), `marks` [name, start, end] (FSDP units, micro-batches),
    `exposed` seconds of communication by phase, `left_out` calls that did not fit."""

    kind: Literal["timeline"]
    comm: list[Call]
    marks: list[Span]
    busy: list[tuple[Seconds, Seconds]]
    exposed: dict[str, Seconds]
    device: NotRequired[Name]
    backend: NotRequired[Name]
    left_out: NotRequired[Count]


class MemoryStep(Moment):
    """The memory of one profiled step: bytes by owner from each of `times` on, the `peak`, and the owners `at_peak`."""

    kind: Literal["memory_step"]
    times: list[Seconds]
    owners: dict[str, list[Bytes]]
    peak: Bytes
    at_peak: Owners


class Gpu(TypedDict):
    """A GPU: bytes, percent of its time, and watts."""

    index: Rank
    memory_used: NotRequired[Bytes | None]
    memory_total: NotRequired[Bytes | None]
    utilisation: NotRequired[Amount | None]
    power: NotRequired[Amount | None]


class Process(TypedDict):
    """The process of a rank: percent of one core, and its resident memory in bytes."""

    cpu_percent: NotRequired[Amount | None]
    rss: NotRequired[Bytes | None]


class System(Envelope):
    """The supervisor's sample of the machine: percent of all cores, memory in bytes, the GPUs, and the processes by
    rank."""

    kind: Literal["system"]
    rank: NotRequired[Rank | None]
    cpu_percent: NotRequired[Amount | None]
    memory_used: NotRequired[Bytes | None]
    gpus: NotRequired[Annotated[list[Gpu], Limits(most=1_024)] | None]
    ranks: NotRequired[Annotated[dict[str, Process], Limits(numbers=RANKS)] | None]


Measured: TypeAlias = Step | Optimizer | Losses | Memory | Replica | Traffic | Timeline | MemoryStep | System
