"""Events: what ranks and the supervisor report, one Struct per kind, and the parser of one line.

The Structs are the only definition: decoding checks every value, fields that a Struct does not have are ignored, and
`documents.schemas` publishes them as JSON Schema. A field without a default is required, and null where None is
allowed. Kinds and observations of newer versions are `Unknown`, so that their folders open. An event that passes needs
no further checks. How events are written is in `writer.py`.
"""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

ONE_AT_A_TIME = threading.Lock()  # msgspec 0.22 crashes if two threads convert to a type for the first time at once
RANKS = 1_024  # most ranks of one run; front ends draw a row for each

# ---- single values

if TYPE_CHECKING:
    Value: TypeAlias = float | str | bool | list["Value"] | None
else:  # of a metric or a report: lists nested at most as deep as a tensor of eight dimensions
    _Scalar = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | str | bool | None
    Value = _Scalar
    for _ in range(8):
        Value = _Scalar | list[Value]

Rank = Annotated[int, Meta(ge=0, lt=RANKS)]
World = Annotated[int, Meta(ge=1, le=RANKS)]  # processes of a run
Here = Annotated[int, Meta(ge=0, le=RANKS)]  # processes of a run whose events are in its folder
# Unix seconds, up to the year 2984: the last that every platform can write as a date is in 3000.
Time = Annotated[float, Meta(ge=0, le=32_000_000_000)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=2**53)]  # the largest that a column of floats holds exactly
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Bytes = Annotated[float, Meta(ge=0, le=2.0**62)]  # a mean over steps is not an integer
Flops = Annotated[float, Meta(ge=0, le=1e30)]  # floating-point operations, and those per second
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Loss = float  # not finite if the training diverged
Attempt = Annotated[int, Meta(ge=0, le=1_000_000)]  # 0, and one more after each restart
Series = Annotated[int, Meta(ge=0, le=63)]  # optimizers with separate losses; a chart has a line for each
Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Code = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Line = Annotated[str, Meta(pattern=r"^[^\x00]*$")]  # arguments, variables and paths, of any length
Name = Annotated[str, Meta(max_length=4_096, pattern=r"^[^\x00]*$")]
BY_RANK = Meta(max_length=RANKS, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,3})$"}})
Ranks: TypeAlias = Annotated[list[Rank], Meta(max_length=RANKS)]
Owners: TypeAlias = Annotated[dict[str, Bytes], Meta(max_length=100)]  # bytes by owner, see `writer.OWNERS`
Span: TypeAlias = tuple[Name, Seconds, Seconds]  # name, start, end


class Recorded(Struct, omit_defaults=True):
    """What a run folder holds. Fields at their default are not written."""


class Envelope(Recorded, kw_only=True):
    """What every event has: `t`, its time in unix seconds on the clock of the run, and `v`, the version of the
    envelope. In files, `kind` says which event it is."""

    t: Time
    v: Count | None = None

    @property
    def kind(self) -> str:
        """The kind, as it is in files."""
        return str(self.__struct_config__.tag)


class OfRank(Envelope, kw_only=True):
    """An event of a rank. `after` is the number of records in its step file when it was written (default: 0)."""

    rank: Rank
    after: Count | None = None


class Unknown(Envelope, kw_only=True):
    """An event of a kind, or an observation, of a newer version; its other fields are ignored."""

    kind: Name


# ---- reports: the start and end of a rank, its progress, errors, and what the script logs


class Collective(Recorded):
    """A collective that a rank has called: `op`, its group (`group` describes it, `id` is its number), the `ranks` of
    that group, `seq`, its number in the group, the `sizes` of its tensors, and whether it is `over`. A send or receive
    has no number in its group; `peer` is the other rank, `tag` the number that both must give."""

    op: Name = ""
    over: bool = False
    group: Name | None = None
    id: Name | None = None
    ranks: Ranks | None = None
    seq: Count | None = None
    sizes: Annotated[list[Annotated[list[Count], Meta(max_length=64)]], Meta(max_length=10_000)] | None = None
    peer: Rank | None = None
    tag: Code | None = None


Collectives: TypeAlias = Annotated[list[Collective], Meta(max_length=1_000)]


class CallKind(Recorded):
    """What a collective was: `op`, the `sizes` and `dtypes` of its inputs, and whether another `thread` of the script
    than the main one called it."""

    op: Name
    sizes: Annotated[list[Annotated[list[Count], Meta(max_length=64)]], Meta(max_length=10_000)] = []
    dtypes: Annotated[list[Name], Meta(max_length=10_000)] = []
    thread: bool = False


class Sequence(Recorded):
    """The newest collectives of a group in the order of their calls: `first` is the number of the first in the group,
    `calls` has for each its index in `kinds`."""

    group: Name
    id: Name
    ranks: Ranks
    first: Count
    kinds: Annotated[list[CallKind], Meta(max_length=100_000)]
    calls: Annotated[list[Count], Meta(max_length=100_000)]

    def __post_init__(self) -> None:
        if any(kind >= len(self.kinds) for kind in self.calls):
            raise ValueError("a call must have a kind")


class Start(OfRank, tag_field="kind", tag="start"):
    """The start of a rank, in its attempt `attempt`; torch is imported by then. `began` is when the process started,
    `device` is such as cpu or cuda:0. `steady`: earlier steps are not recorded, so that the first one is no warm-up."""

    device: Name = "cpu"
    device_name: Name = ""
    attempt: Attempt = 0
    pid: Pid | None = None
    host: Name | None = None
    local_rank: Rank | None = None
    world_size: World | None = None
    torch: Name | None = None
    began: Time | None = None
    steady: bool = False


class Startup(OfRank, tag_field="kind", tag="startup"):
    """What the rank has reached for the first time in this attempt: `name` is group (init_process_group has returned),
    data (a DataLoader was made) or batch (the first batch was fetched, or a model was called to train)."""

    name: Name


class Device(OfRank, tag_field="kind", tag="device"):
    """The device that the script actually uses, once it is known."""

    device: Name
    device_name: Name = ""


class Waiting(OfRank, tag_field="kind", tag="waiting"):
    """A rank that makes no progress since `since`, written repeatedly: its `step`, `activity`, `phase`, `stack`, the
    newest collective of each group in `ops`, and `computed`, its share of a core meanwhile."""

    since: Time
    stack: str = ""
    ops: Collectives = []
    step: Count | None = None
    activity: Name | None = None
    phase: Name | None = None
    computed: Seconds | None = None


class Called(Waiting, tag_field="kind", tag="called"):
    """Where a rank is when another one is about to report that it waits, in the fields of `waiting`, and in `groups`
    the collectives that it has called. It may make progress."""

    groups: Annotated[list[Sequence], Meta(max_length=1_000)] = []


class GoingOn(Envelope, tag_field="kind", tag="going_on"):
    """A rank that was waiting makes progress again, after `waited` seconds (`after` in older versions)."""

    rank: Rank
    after: Seconds | None = None
    waited: Seconds | None = None


class Silent(OfRank, tag_field="kind", tag="silent"):
    """The supervisor's report of a rank that cannot report itself: `process` is its state in the operating system,
    `computed` its share of a core since `since`."""

    since: Time
    process: Name
    stack: str = ""
    computed: Seconds | None = None


class Heard(OfRank, tag_field="kind", tag="heard"):
    """A silent rank reports itself again."""


class RasRank(Recorded):
    """A rank of a communicator as RAS knows it, with what it says about it (`dead`, `unresponsive`, an error)."""

    rank: Count
    says: Name
    pid: Pid | None = None
    host: Name = ""
    gpu: Name = ""


class RasAlike(Recorded):
    """Ranks of a communicator with the same `value` of `what`: the name of a collective and how often they launched it,
    or `status`. There are `count` of them, of which the text format does not name all."""

    what: Name
    value: Name
    count: Count
    ranks: Annotated[list[Count], Meta(max_length=RANKS)] = []


class Communicator(Recorded):
    """What RAS says about a communicator of NCCL. `missing` ranks did not answer, `failed` ones report an error, and
    `differ` has what is not equal on all ranks. Ranks are those of the communicator, unless `of_run` is true."""

    name: Name
    size: Count
    missing: Annotated[list[RasRank], Meta(max_length=RANKS)] = []
    failed: Annotated[list[RasRank], Meta(max_length=RANKS)] = []
    differ: Annotated[list[RasAlike], Meta(max_length=RANKS)] = []
    of_run: bool = False


class Ras(Envelope, tag_field="kind", tag="ras"):
    """What NCCL's RAS service answered the supervisor while ranks waited: the `communicators` about which there is
    something to say. `saved` is the file in the run folder that has the whole answer."""

    saved: Name
    communicators: Annotated[list[Communicator], Meta(max_length=64)]


class Dropped(OfRank, tag_field="kind", tag="dropped"):
    """How many events could not be written before this one, because the disk was full."""

    events: Count


class Activity(OfRank, tag_field="kind", tag="activity"):
    """What the rank does now: training, evaluating, or a preparation in words; null before the first."""

    name: Name | None


class Checkpoint(OfRank, tag_field="kind", tag="checkpoint"):
    """The script has written a checkpoint after this step."""

    step: Count


class Metric(Envelope, tag_field="kind", tag="metric"):
    """A value that the script logged."""

    rank: Rank | None = None
    after: Count | None = None
    name: Name | None = None
    value: Value = None
    step: Count | None = None


class Report(OfRank, tag_field="kind", tag="report"):
    """What the script passed to `labkit.report`, by name."""

    values: Annotated[dict[str, Value], Meta(max_length=1_000)]


class Error(OfRank, tag_field="kind", tag="error"):
    """The exception that ended the script; `exit code 3` for os._exit(3)."""

    type: str = "Exception"
    message: str = ""
    traceback: str = ""
    ops: Collectives = []
    owners: Owners = {}


class Hosts(OfRank, tag_field="kind", tag="hosts"):
    """The host of each rank of a run on several nodes, as the ranks told each other."""

    hosts: Annotated[dict[Rank, Name], BY_RANK]


class CutOff(OfRank, tag_field="kind", tag="cut_off"):
    """Nodes that have not answered this rank's node for `seconds`: the ranks there, each with its host."""

    hosts: Annotated[dict[Rank, Name], BY_RANK]
    seconds: Seconds


class Queue(Envelope, tag_field="kind", tag="queue"):
    """A scheduler's view of the run: the number or the name of its `job`, its `state` and the `reason` for it in the
    words of the `scheduler`, and its `nodes`."""

    job: Count | Name
    state: Name
    reason: Name = ""
    nodes: Name = ""
    scheduler: Name = "Slurm"


class Unreported(Envelope, tag_field="kind", tag="unreported"):
    """The status of a TrainJob did not arrive: the `reason`, with the address of the server."""

    reason: Name


class ProbeError(OfRank, tag_field="kind", tag="probe_error"):
    """A part of the probe that failed; the script continues without it."""

    part: str
    type: str
    message: str
    traceback: str | None = None


class End(OfRank, tag_field="kind", tag="end"):
    """The end of a rank; `stack` is that of the call that ended the script without an error, such as sys.exit()."""

    stack: str = ""
    exit_code: Code | None = None
    steps: Count | None = None
    seconds: Seconds | None = None


# ---- measurements: steps, memory, traffic, profiled steps, and samples of the machine


class StepSeconds(Recorded):
    """Seconds of the whole step and of each of its phases."""

    step: Seconds | None = None
    data: Seconds | None = None
    copy: Seconds | None = None
    forward: Seconds | None = None
    backward: Seconds | None = None
    optimizer: Seconds | None = None
    other: Seconds | None = None


class StepMemory(Recorded):
    """Bytes at the end of the step, and its peak."""

    allocated: Bytes | None = None
    reserved: Bytes | None = None
    peak: Bytes | None = None


class Step(OfRank, tag_field="kind", tag="step"):
    """A step of training: `step` counts from 1 and continues over attempts, `loss` is null if this rank has none."""

    step: Count
    loss: Loss | None = None
    samples: Amount | None = None
    seconds: StepSeconds | None = None
    memory: StepMemory | None = None


class Optimizer(OfRank, tag_field="kind", tag="optimizer"):
    """Written once for each of several optimizers that train on separate losses. The steps, and the loss in them, are
    those of the optimizer that sets the pace."""

    optimizer: Series
    name: Name
    sets_pace: bool


class Losses(OfRank, tag_field="kind", tag="losses"):
    """The losses of an optimizer that does not set the pace: `points` are pairs of a step of the run and the loss."""

    optimizer: Series
    points: Annotated[list[tuple[Count, Loss | None]], Meta(max_length=100_000)]


class Memory(OfRank, tag_field="kind", tag="memory"):
    """The bytes of live tensors by owner: parameters, gradients, optimizer, activations, communication, other."""

    owners: Owners
    step: Count | None = None


class ReplicaMeasured(Recorded):
    """One replica (thread) of a model in DataParallel: seconds of its forward and of its CPU, samples, bytes."""

    replica: Rank
    device: Name
    forward: Seconds
    cpu: Seconds
    samples: Amount
    memory: Bytes


class ReplicaExtra(Recorded):
    """Bytes that only the first device has: gathered outputs and summed gradients."""

    outputs: Bytes
    gradients: Bytes


class Replica(OfRank, tag_field="kind", tag="replica"):
    """The replicas of a model in DataParallel; `gil_wait` is the share of time that their threads waited for the GIL or
    a core."""

    replicas: Annotated[list[ReplicaMeasured], Meta(min_length=1, max_length=64)]
    extra: ReplicaExtra
    step: Count | None = None
    gil_wait: Seconds | None = None


class TrackedModel(Recorded):
    """A model whose tensors are looked at: its class; for DDP the `ranks` of its group, whether it is `called` and
    whether it sends its `buffers`; whether it is `sharded` (FSDP, DTensor)."""

    name: Name
    ranks: Ranks | None = None
    called: bool = True
    buffers: bool = False
    sharded: bool = False


class TrackedTensor(Recorded, array_like=True):
    """A tensor that is looked at: the index of its model, its name, its role (parameter, frozen, buffer, or ignored by
    DDP), its shape."""

    model: Count
    name: Name
    role: Name
    shape: Annotated[list[Count], Meta(max_length=64)]


class Tracked(OfRank, tag_field="kind", tag="tracked"):
    """Which tensors the following looks have sums of, in order."""

    models: Annotated[list[TrackedModel], Meta(max_length=1_000)]
    tensors: Annotated[list[TrackedTensor], Meta(max_length=10_000)]


class Look(OfRank, tag_field="kind", tag="look"):
    """What step `step` left: `sums` (position-weighted sum, sum of absolute values) of each tracked tensor; 0 is before
    the first step, `end` is when the script ends. `settings` are the optimizers' hyperparameters.

    `group` is the size of the default process group (0: none), and `unset` are variables of other launchers that the
    script reads. `rates` is the sum of the learning rates that the optimizers' steps have used until now. `silent`:
    nothing was sent since the first step. `gone`: backward made gradients, and step() found none, or zeros. `idle` are
    the tracked parameters without a gradient, `unheld` those with one that no optimizer holds (`strangers`: it holds
    some of no model instead), `clipped` is the factor by which the script multiplied the gradients, `weight` the weight
    of one element in the loss, a mean over `elements` (`least` and `most` are both of the micro-batches where it is
    least and most, for losses of labels), and `random` the digests of generators that were used for this rank's
    samples, before and after. `unsynchronised`: the last backward before the step belongs to a forward in DDP's
    `no_sync`. `kept`: gradients of the step before were neither reset nor replaced. `evaluating`: a model with dropout
    or batch norm trains after `eval()`. `scaled`: gradients were clipped before a GradScaler divided them by its scale.
    `twice`: the loss function, and what the model computed before it although the loss computes it. `order` are the
    tracked parameters in the order in which an optimizer holds them, if it is another one. `whole` are the tracked
    tensors of sharded models that are not sharded themselves. `late`: gradients were clipped after the step before
    had used them. `dropped`: how many of the gradients of so many micro-batches were reset before the next one.
    `used` are the two sums over all gradients as the optimizer used them. `norm` is what `clip_grad_norm_` found,
    and its limit. `calls` is the number of collectives of each group since the group was made, by the group's id.
    `spent` is what all looks before this one have taken of the rank's time."""

    step: Count
    sums: Annotated[list[tuple[float, float]], Meta(max_length=10_000)]
    end: bool = False
    spent: Seconds = 0.0
    group: Annotated[int, Meta(ge=0, le=RANKS)] = 0
    settings: Annotated[dict[str, float], Meta(max_length=1_000)] = {}
    unset: Annotated[list[Name], Meta(max_length=100)] = []
    silent: bool = False
    rates: float = 0.0
    gradients: bool = False
    gone: bool = False
    idle: Annotated[list[Count], Meta(max_length=10_000)] = []
    unheld: Annotated[list[Count], Meta(max_length=10_000)] = []
    strangers: bool = False
    clipped: float | None = None
    weight: float | None = None
    elements: float | None = None
    least: tuple[float, float] | None = None
    most: tuple[float, float] | None = None
    random: Annotated[dict[str, tuple[Name, Name]], Meta(max_length=100)] = {}
    unsynchronised: bool = False
    kept: bool = False
    evaluating: bool = False
    scaled: bool = False
    whole: Annotated[list[Count], Meta(max_length=10_000)] = []
    late: bool = False
    dropped: tuple[Count, Count] | None = None
    twice: tuple[Name, Name] | None = None
    order: Annotated[list[Count], Meta(max_length=10_000)] = []
    used: tuple[float, float] | None = None
    norm: tuple[float, float] | None = None
    calls: Annotated[dict[Name, Count], Meta(max_length=10_000)] = {}


class Between(OfRank, tag_field="kind", tag="between"):
    """The sums of the tracked tensors, as in a `Look`, where the next step begins after step `step`, if collectives
    were called in between or, unlike in other steps, within that step; and the `bytes` of these collectives."""

    step: Count
    sums: Annotated[list[tuple[float, float]], Meta(max_length=10_000)]
    bytes: Bytes = 0


class Wrapped(OfRank, tag_field="kind", tag="wrapped"):
    """The sums of parameters of a model, as in a `Look`, when it is about to be wrapped in DDP, which then replaces
    them by those of its first rank."""

    names: Annotated[list[Name], Meta(max_length=10_000)]
    sums: Annotated[list[tuple[float, float]], Meta(max_length=10_000)]


class Operation(Recorded):
    """The calls of one collective in a step, the bytes of their tensors, and the bytes that this rank sent."""

    calls: Amount
    bytes: Bytes
    sent: Bytes


class Traffic(OfRank, tag_field="kind", tag="traffic"):
    """The communication of one step, by operation."""

    step: Count
    ops: Annotated[dict[str, Operation], Meta(max_length=1_000)]


class Call(Recorded, array_like=True):
    """A collective of a profiled step: operation, start and end, and if known the bytes of its payload, its group, the
    ranks of the group (of a message: its other end), and its number in it."""

    op: Name
    start: Seconds
    end: Seconds
    bytes: Bytes | None = None
    group: Name | None = None
    ranks: Ranks | None = None
    seq: Count | None = None


Spans: TypeAlias = Annotated[list[Span], Meta(max_length=100_000)]
Calls: TypeAlias = Annotated[list[Call], Meta(max_length=100_000)]
Busy: TypeAlias = Annotated[list[tuple[Seconds, Seconds]], Meta(max_length=100_000)]  # start, end
Times: TypeAlias = Annotated[list[Seconds], Meta(max_length=100_000)]
# bytes by owner at each time
Curves: TypeAlias = Annotated[dict[str, Annotated[list[Bytes], Meta(max_length=100_000)]], Meta(max_length=100)]


class Moment(OfRank, kw_only=True):
    """A profiled step: `t0` is when it began, `seconds` how long it took. All times in it count from t0."""

    step: Count
    t0: Time
    seconds: Seconds
    phases: Spans


class Timeline(Moment, kw_only=True, tag_field="kind", tag="timeline"):
    """What one profiled step did: `phases` [name, start, end], `comm`, its collectives, `busy` [start, end] (the rank
    computed), `marks` [name, start, end] (FSDP units, micro-batches), `exposed` seconds of communication by phase,
    `left_out` calls that did not fit. Of a profile of another job, `computed`, `copies` and `idle` are the seconds
    in which it computed, memory was copied, and nothing ran; `kernels` [name, count, seconds] take longest. With
    `calls_only`, it has the collectives that a rank called, from the call to their end, and is no step."""

    comm: Calls
    marks: Spans
    busy: Busy
    exposed: Annotated[dict[str, Seconds], Meta(max_length=1_000)]
    device: Name = "cpu"
    backend: Name = ""
    left_out: Count = 0
    computed: Seconds | None = None
    copies: Seconds | None = None
    idle: Seconds | None = None
    kernels: Annotated[list[tuple[Name, Count, Seconds]], Meta(max_length=1_000)] = []
    calls_only: bool = False


class MemoryStep(Moment, kw_only=True, tag_field="kind", tag="memory_step"):
    """The memory of one profiled step: bytes by owner from each of `times` on, the `peak`, and the owners `at_peak`."""

    times: Times
    owners: Curves
    peak: Bytes
    at_peak: Owners

    def __post_init__(self) -> None:
        if any(len(sizes) != len(self.times) for sizes in self.owners.values()):
            raise ValueError("the owners must have as many values as times")


class Gpu(Recorded):
    """A GPU: bytes, percent of its time, and watts."""

    index: Rank
    memory_used: Bytes | None = None
    memory_total: Bytes | None = None
    utilisation: Amount | None = None
    power: Amount | None = None


class Process(Recorded):
    """The process of a rank: percent of one core, and its resident memory in bytes."""

    cpu_percent: Amount | None = None
    rss: Bytes | None = None


class System(Envelope, tag_field="kind", tag="system"):
    """The supervisor's sample of the machine: percent of all cores, memory in bytes, the GPUs, and the processes by
    rank."""

    rank: Rank | None = None
    cpu_percent: Amount | None = None
    memory_used: Bytes | None = None
    gpus: Annotated[list[Gpu], Meta(max_length=1_024)] | None = None
    ranks: Annotated[dict[Rank, Process], BY_RANK] | None = None


# ---- observations (kind `saw`): a few per run; see probe/samples.py and probe/threads.py


class Observed(OfRank, kw_only=True):
    """An observation; `what` says of what."""

    @property
    def kind(self) -> str:
        """The kind, as it is in files."""
        return "saw"

    @property
    def what(self) -> str:
        """What was observed, as it is in files."""
        return str(self.__struct_config__.tag)


class Model(Observed, tag_field="what", tag="model"):
    """A model that trains: its class, FSDP units and parameters."""

    name: Name
    units: Count
    parameters: Count


class Loader(Observed, tag_field="what", tag="loader"):
    """The script iterates over a DataLoader: its numbers of batches, samples and worker processes, and the class of its
    sampler. `streams`: its data set is an IterableDataset, of which each worker has a copy. `parts`: a
    DistributedSampler and accelerate both divide the data, into so many parts together."""

    batches: Count | None
    samples: Count | None
    sampler: Name | None = None
    workers: Count = 0
    streams: bool = False
    parts: Count = 0


class Epoch(Observed, tag_field="what", tag="epoch"):
    """An iteration over a DistributedSampler begins: which one, the epoch `set` by set_epoch, whether it shuffles and
    with which `seed`, and over how many ranks."""

    sampler: Count
    set: Annotated[int, Meta(ge=-(2**53), le=2**53)]
    shuffle: bool
    ranks: Count | None = None
    seed: Annotated[int, Meta(ge=-(2**53), le=2**53)] = 0


class Batch(Observed, tag_field="what", tag="batch"):
    """A digest of the tensors of a batch, in the first steps."""

    step: Count
    digest: Name


class Item(Observed, tag_field="what", tag="item"):
    """In how many of the first `steps` .item() was called between phases."""

    calls: Count
    steps: Count


class Save(Observed, tag_field="what", tag="save"):
    """The script called torch.save with a path."""

    path: Name
    step: Count


class Restored(Observed, tag_field="what", tag="restored"):
    """The script loaded the state of an optimizer after step `step` of this process, as it does to repeat steps."""

    step: Count


class Loaded(Observed, tag_field="what", tag="loaded"):
    """The script loaded a state dict of `tensors` into a module of class `name`, which has `used` of their names; one
    that it does not have, and one that the state dict does not have."""

    name: Name
    tensors: Count
    used: Count
    unexpected: Name | None = None
    missing: Name | None = None


class Input(Observed, tag_field="what", tag="input"):
    """A digest of a model's inputs, in the first steps; null if they are activations, as a pipeline stage receives them
    from the previous one."""

    step: Count
    digest: Name | None = None


class Evaluation(Observed, tag_field="what", tag="evaluation"):
    """An evaluation has drawn `count` samples of a data set of `samples` on this rank: `indices` in the data set that
    the parts for training and evaluation are taken from (empty if there are too many), and how many of them also
    belong to the part for training, `trained`."""

    samples: Count
    count: Count
    sampler: Name
    indices: Annotated[list[Count], Meta(max_length=100_000)] = []
    trained: Count = 0


class GatheredOnce(Observed, tag_field="what", tag="gathered_once"):
    """The script gathers the results of an evaluation without those of repeated samples."""


class DividedData(Observed, tag_field="what", tag="divided"):
    """A data set that a DistributedSampler divides among `ranks`: its class, digests of its parts in order and in any
    order."""

    name: Name
    ranks: Count
    samples: Count
    digest: Name
    content: Name = ""


class StartedProcess(Observed, tag_field="what", tag="process"):
    """A process that the script started: `how`, and the function or command that it runs."""

    how: Name
    target: Name


class Thread(Observed, tag_field="what", tag="thread"):
    """A thread that trains but is not recorded."""

    name: Name


class Gradients(Observed, tag_field="what", tag="gradients"):
    """The number of calls of backward, if the script ended without a step, and of a GradScaler's step."""

    backwards: Count
    scaler_steps: Count = 0


class NotFinite(Observed, tag_field="what", tag="not_finite"):
    """The first loss that is not finite, before the optimizer steps with it: how many parameter tensors contain NaN or
    infinities."""

    step: Count
    parameters: Count | None = None
    nan: Count | None = None
    infinite: Count | None = None


Seen: TypeAlias = (
    Model | Loader | Epoch | Batch | Item | Save | Restored | Input | Evaluation | GatheredOnce | Loaded | DividedData
    | StartedProcess | Thread | Gradients | NotFinite
)  # fmt: skip
Event: TypeAlias = (
    Start | Startup | Device | Waiting | Called | GoingOn | Silent | Heard | Ras | Dropped | Activity | Checkpoint
    | Metric | Report | Error | Hosts | CutOff | Queue | Unreported | ProbeError | End
    | Step | Optimizer | Losses | Memory | Replica | Tracked | Look | Between | Wrapped | Traffic | Timeline
    | MemoryStep | System | Seen | Unknown
)  # fmt: skip


# ---- the parser


def _by_tag(kinds: Any, field: str) -> dict[Any, Any]:
    return {kind.__struct_config__.tag: kind for kind in get_args(kinds) if kind.__struct_config__.tag_field == field}


KINDS, OBSERVATIONS = _by_tag(Event, "kind"), _by_tag(Seen, "what")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def decoded(line: bytes) -> Event | None:
    """The event of one line; None if it is broken or invalid."""
    try:
        return checked(parse(line))
    except ValueError:
        return None


def checked(value: Any) -> Event:
    """The event of a parsed line. Raises `ValueError`, one clause, if it is invalid."""
    kind = value.get("kind") if isinstance(value, dict) else None
    known = KINDS
    if kind == "saw":
        kind, known = value.get("what"), OBSERVATIONS
        if not isinstance(kind, str):
            raise ValueError("what must be a text")
    kind_of_event = known.get(kind, Unknown) if isinstance(kind, str) else Unknown
    with ONE_AT_A_TIME:
        event: Event = msgspec.convert(value, kind_of_event, str_keys=True)
    return event


def parse(content: bytes) -> Any:
    """The value of a JSON text of any origin. Raises `ValueError`, one clause, if it is invalid or nested too deeply.

    NaN and Infinity, which msgspec refuses and Python's `json` writes, are numbers here. An unpaired surrogate, which
    no file and no page can hold, becomes the replacement character.
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text)
        return _encodable(value) if _SURROGATE.search(text) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return value
