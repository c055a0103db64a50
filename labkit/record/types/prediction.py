"""The prediction of a run, made before it started: `plan.json`, `predict --json` and `Prediction.to_json()`.

`VERSION` grows when a field is removed or changes its meaning; new fields do not change it.
"""

from typing import Annotated, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.documents import SpecFields
from labkit.record.types.envelope import Owners, Ranks
from labkit.record.types.measured import Call, Operation, Span
from labkit.record.types.values import RANKS, Amount, Bytes, Count, Flops, Line, Name, Rank, Seconds

VERSION = 1

# How a figure was computed: by tracing the generated script, or by the formulas of `analysis/theory`.
Method: TypeAlias = Literal["simulated", "formula"]

Called: TypeAlias = tuple[Name, Bytes, Count]  # a collective: operation, bytes of the payload, ranks


class PredictedRank(TypedDict):
    """One rank: bytes at the peak of a step and by owner, the same for what outlives a step (gradients included), and
    the bytes that it sends per step. `like` is the rank that was traced in its place. Unknown values are None. Of a
    traced rank, `flops` are the floating-point operations that it executes per step, of which `recomputed_flops` repeat
    earlier ones (none in plans of earlier versions)."""

    rank: Rank
    like: Rank
    peak_memory_bytes: Bytes | None
    at_peak: Owners
    phase_at_peak: Name
    memory_bytes: Owners
    comm_bytes_per_step: Bytes | None
    flops: NotRequired[Flops]
    recomputed_flops: NotRequired[Flops]


class PredictedStep(TypedDict):
    """A traced step: bytes by owner from each of `times` on, and the phases. Times are numbers of operations."""

    times: list[Seconds]
    seconds: Seconds
    phases: list[Span]
    owners: dict[str, list[Bytes]]
    peak: Bytes
    at_peak: Owners


class PredictedTimeline(TypedDict):
    """The simulated timeline of a step, in the form of a profiled one. `low` and `high` are the quartiles of the
    seconds of all simulated steps (none in plans of earlier versions)."""

    seconds: Seconds
    low: NotRequired[Seconds]
    high: NotRequired[Seconds]
    phases: list[Span]
    comm: list[Call]
    busy: list[tuple[Seconds, Seconds]]
    exposed: dict[str, Seconds]


class Estimate(TypedDict):
    """Memory of a GPU that is not a tensor of the step: from `low` to `high`, by a published `source`."""

    name: Name
    low: Bytes
    high: Bytes
    source: Line


class AllocatorPeak(TypedDict):
    """The most that torch's caching allocator hands out and reserves in the first steps, if a workspace of cuBLAS has
    `workspace` bytes."""

    workspace: Bytes
    allocated: Bytes
    reserved: Bytes


class PredictedClass(TypedDict):
    """Ranks that do the same work, the step of one of them, its traffic by operation, its collectives in order, and
    the timeline of the slowest of them. On GPUs its peak is that of the `allocator` for the workspaces of the machine,
    and `estimates` are what comes on top of it."""

    ranks: Ranks
    timeline: NotRequired[PredictedTimeline]
    step: PredictedStep
    ops: dict[str, Operation]
    calls: Annotated[list[Called], Limits(most=1_000_000)]
    allocator: NotRequired[list[AllocatorPeak]]
    estimates: NotRequired[list[Estimate]]


class PredictedTime(TypedDict):
    """The seconds of a step of the slowest rank, from `low` to `high`: on the machine of the run, from computation and
    collectives that were measured there, or `modelled` for a machine of the table. `links` says which collectives or
    which machine, and is empty if there is nothing to communicate. The samples of a script of the user's own are not
    known."""

    seconds: Seconds
    low: NotRequired[Seconds]
    high: NotRequired[Seconds]
    samples_per_second: NotRequired[Amount]
    links: Line
    modelled: NotRequired[bool]


class Peak(TypedDict):
    """The most FLOP/s of one device in the precision of the run, and their `source`; if `flops` is None, `source` says
    why they are not known."""

    flops: Flops | None
    source: Line


class MemoryLimit(TypedDict):
    """The bytes of a device's memory and their `source`, or why they are not known. From `low_bytes` to `high_bytes` is
    what must fit: on a GPU the highest peak of a rank with all estimates, on CPUs, which ranks share, the sum of all
    peaks."""

    limit_bytes: Bytes | None
    low_bytes: Bytes
    high_bytes: Bytes
    source: Line


class Plan(TypedDict):
    """The prediction of a run. `reason` says why there is no trace, if the method is a formula; `time` is known if it
    was asked for; `untimed` is the reason if it cannot be known.

    `model_flops` are the floating-point operations that forward and backward of a step need on one device, for all
    samples, without recomputation; of a script of the user's own, those of all ranks without recomputation. They are
    known if there is a trace. `six_nd` is the estimate of `analysis/theory/states.py`, of dense transformers. `peak`
    and `memory` are those of the machine that the plan is for; `fits` says whether the ranks fit into this memory,
    None if that is not known or depends on the estimates.
    """

    v: NotRequired[Count | None]
    spec: SpecFields
    torch: NotRequired[Name]
    method: Method
    reason: NotRequired[Line]
    ranks: Annotated[list[PredictedRank], Limits(most=RANKS)]
    classes: list[PredictedClass]
    model_flops: NotRequired[Flops]
    six_nd: NotRequired[Flops]
    peak: NotRequired[Peak]
    fits: NotRequired[bool | None]
    memory: NotRequired[MemoryLimit]
    time: NotRequired[PredictedTime]
    untimed: NotRequired[Line]
