"""The summary of a run: `summary.json`, `run --json`, `show --json` and `Run.summary()`.

`VERSION` grows when a field is removed or changes its meaning; new fields do not change it.
"""

from typing import Annotated, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.envelope import Ranks
from labkit.record.types.measured import ReplicaExtra, ReplicaMeasured
from labkit.record.types.values import RANKS, Amount, Bytes, Code, Count, Flops, Line, Name, Rank, Seconds, Value, World

VERSION = 1

# The states of a status, in the order of a run's life.
State: TypeAlias = Literal["starting", "running", "stopping", "finished", "failed", "stopped", "lost"]
StartMode: TypeAlias = Literal["warm", "cold"]


class Durations(TypedDict):
    """Seconds from the request of the run to its end, and to the end of its first step."""

    total: float | None
    to_first_step: float | None


class Communication(TypedDict):
    """Of the newest profiled step: seconds of communication, exposed seconds, and the share that was overlapped by
    compute."""

    step: NotRequired[Count | None]
    seconds: NotRequired[Seconds | None]
    open_seconds: NotRequired[Seconds | None]
    hidden: NotRequired[float | None]


class RankFigures(TypedDict):
    """The figures of one rank: memory in bytes at its peak and by owner, medians of seconds per step and phase and the
    95th percentile of the seconds per step, all without the first step, bytes sent per step."""

    rank: Rank
    memory_bytes: dict[str, Bytes]
    phase_seconds: dict[str, Seconds | None]
    exit_code: Code | None
    peak_memory_bytes: Bytes | None
    step_seconds_median: Seconds | None
    step_seconds_p95: NotRequired[Seconds | None]  # none in summaries of earlier versions
    comm_bytes_per_step: float | None
    communication: Communication | None


class ReplicaFigures(ReplicaMeasured):
    """Medians of one replica (thread) of dp: seconds of its forward and of its CPU, samples, bytes; `extra`, in replica
    0, are the bytes that only the first device has."""

    extra: NotRequired[ReplicaExtra]


class Failure(TypedDict):
    """The first failure of a run, see record/failures.py."""

    rank: Rank
    type: str
    message: str
    traceback: str
    collateral: Ranks
    alike: NotRequired[Ranks]
    left: NotRequired[Ranks]
    last_seen: NotRequired[bool]
    exit_code: Code | None


class PredictionOutcome(TypedDict):
    """The prediction of one rank against its measurement, see analysis/prediction.py."""

    rank: Rank
    peak_predicted: Bytes | None
    peak_measured: Bytes | None
    error: float | None
    sent_predicted: Bytes | None
    sent_measured: Bytes | None
    reason: str
    step_predicted: NotRequired[Seconds | None]
    step_measured: NotRequired[Seconds | None]
    step_error: NotRequired[float | None]
    step_reason: NotRequired[str]


class GuessOutcome(TypedDict):
    """A figure that the learner predicted, of one rank or of the whole run (`rank` null), in its unit: `guessed`,
    `predicted` by the lab, and measured, see analysis/guess.py."""

    figure: Name
    unit: Name
    rank: Rank | None
    guessed: Amount
    predicted: float | None
    measured: float | None
    error: float | None
    reason: str


class LedgerEntry(TypedDict):
    """An operation of the communication ledger: bytes sent per step over all ranks, measured and by theory."""

    op: Name
    calls: Amount
    measured: float
    formula: str
    reason: str
    theory: float | None


class FindingFigures(TypedDict):
    """A finding: what happened, its evidence, cause and fix, and the ranks concerned."""

    name: str
    kind: str
    title: str
    evidence: str
    cause: str
    fix: str
    ranks: Ranks


class NodesFigures(TypedDict):
    """What happened to the nodes of a run on several, `seconds` after it was requested: `hosts` met, with so many
    `ranks`, or did not answer any more (cut off)."""

    seconds: Seconds | None
    what: Literal["met", "cut off"]
    hosts: Annotated[list[Name], Limits(most=RANKS)]
    ranks: World


class Summary(TypedDict):
    """The figures of a run: bytes, seconds, samples per second; null if unknown. `v` is the version of this schema
    (none before version 1). `flops_per_device` are model FLOP/s, see analysis/efficiency.py, and `mfu_missing` says why
    they or `mfu` are unknown."""

    v: NotRequired[Count]
    run: Name
    state: Literal["ready", State]
    strategy: Name | None
    workload: Name | None
    script: Line | None
    world_size: World
    device: Name | None
    steps: Count
    seconds: Durations
    samples_per_second: float | None
    tokens_per_second: NotRequired[Amount | None]  # of sequences; none of these four in summaries of earlier versions
    flops_per_device: NotRequired[Flops | None]
    mfu: NotRequired[float | None]
    mfu_missing: NotRequired[Line]
    loss: float | None
    accuracy: Value
    start: NotRequired[StartMode]
    restarts: Count
    nodes: NotRequired[Annotated[list[NodesFigures], Limits(most=1_000)]]  # of a run on several hosts
    failure: Failure | None
    broken_lines: Count
    ranks: Annotated[list[RankFigures], Limits(most=RANKS)]
    note: str
    replicas: Annotated[list[ReplicaFigures], Limits(most=1_000)]
    gil_wait: float | None
    prediction: NotRequired[Annotated[list[PredictionOutcome], Limits(most=RANKS)]]
    guess: NotRequired[Annotated[list[GuessOutcome], Limits(most=100 * RANKS)]]
    ledger: Annotated[list[LedgerEntry], Limits(most=1_000)]
    findings: Annotated[list[FindingFigures], Limits(most=1_000)]


class UnreadableRun(TypedDict):
    """In place of the summary of a run whose folder cannot be read: the reason, as one clause."""

    run: Name
    state: Literal["unreadable"]
    reason: str
