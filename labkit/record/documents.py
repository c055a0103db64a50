"""Documents: the JSON files of a run folder as Structs, their reader, and the published JSON Schemas.

As for events, the Structs are the only definition. `GUESS`, `PLAN` and `SUMMARY` are the versions of what others may
read: a version grows when a field is removed or changes its meaning; new fields do not change it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, field

from labkit.common.processes import here, identity
from labkit.plan.spec import Spec
from labkit.record import events
from labkit.record.events import (
    BY_RANK,
    ONE_AT_A_TIME,
    RANKS,
    Amount,
    Busy,
    Bytes,
    Calls,
    Code,
    Count,
    Curves,
    Finite,
    Flops,
    Here,
    Line,
    Name,
    Operation,
    Owners,
    Pid,
    Rank,
    Ranks,
    Recorded,
    ReplicaExtra,
    ReplicaMeasured,
    Seconds,
    Spans,
    Time,
    Times,
    Value,
    World,
    parse,
)
from labkit.record.files import read_below
from labkit.record.writer import VERSION

GUESS = PLAN = SUMMARY = IMPORTED = 1

# In the order of a run's life; `ready` before the supervisor has written a status. `imported`: the files of a job
# that ran elsewhere, see `Imported`.
State: TypeAlias = Literal[
    "ready", "starting", "running", "stopping", "finished", "failed", "stopped", "lost", "imported"
]
StartMode: TypeAlias = Literal["warm", "cold"]


# ---- the request and the status


class SpecFields(Recorded):
    """The fields of `Spec` in `spec.json`; None stands for the default. `Spec` itself checks their combinations."""

    strategy: Name | None = None
    workload: Name | None = None
    nproc: World | None = None
    batch_size: Count | None = None
    scaling: Name | None = None
    epochs: Count | None = None
    steps: Count | None = None
    precision: Name | None = None
    seed: Code | None = None
    device: Name | None = None
    data: Name | None = None
    data_dir: Line | None = None
    samples: Count | None = None
    options: Annotated[dict[str, Name | int | Finite | bool | None], Meta(max_length=1_000)] = field(
        default_factory=dict
    )
    script: Line | None = None
    args: Annotated[list[Line], Meta(max_length=10_000)] = field(default_factory=list)
    tensors: bool | None = None
    save_every: Count | None = None
    checkpoint_async: bool | None = None
    resume: Line | None = None
    max_restarts: Count | None = None
    fault: Name | None = None
    sample_every: Count | None = None
    hang_after: Count | None = None
    as_module: bool | None = None

    @classmethod
    def of(cls, spec: Spec) -> SpecFields:
        return decoded(spec.to_json(), cls)

    def to_spec(self) -> Spec:
        """The Spec, see `Spec.from_json`. Raises `SpecError`."""
        return Spec.from_json(plain(self))


class Who(Recorded):
    """A process: its pid and start time, on which host, in which boot and container."""

    pid: Pid
    create_time: Time
    host: Name | None = None
    boot: Name | None = None


class Failed(Recorded):
    """How a rank failed, as torchrun reported it or as its traces show. `beside` is the stack of another thread that
    was in a collective then."""

    message: str = ""
    traceback: str = ""
    beside: str = ""
    last_seen: bool = False
    exit_code: Code | None = None
    pid: Pid | None = None
    signal: Name | None = None
    t: Time | None = None


class Status(Recorded):
    """What the supervisor writes about its run (`status.json`)."""

    state: State
    v: Count | None = None
    message: str = ""
    waiting: str = ""
    ranks_here: Here | None = None
    restarts: Count = 0
    start: StartMode = "cold"
    cold_because: str = ""
    started: Time | None = None
    ended: Time | None = None
    supervisor: Who | None = None
    agent: Who | None = None
    exit_code: Code | None = None
    detached: bool | None = None
    agent_began: Time | None = None
    ranks: Annotated[dict[Rank, Pid], BY_RANK] | None = None
    failures: Annotated[dict[Rank, Failed], BY_RANK] | None = None
    oom_kills: Count | None = None

    @classmethod
    def of_start(cls, plan: LaunchPlan, started: float) -> Status:
        """The first status of a run that was requested at `started`; its supervisor is this process."""
        return cls(
            "starting",
            v=1,
            started=started,
            supervisor=Who(**identity(), host=here()["host"], boot=here()["boot"]),
            detached=bool(plan.detached),
            start=plan.start,
            cold_because=plan.cold_because,
        )


class Devices(Recorded):
    """The devices that a run takes on its machine: `wanted` of those in `pool`, of one `kind` (gpu or cpu)."""

    kind: Name
    wanted: Count
    pool: Annotated[list[Name], Meta(max_length=RANKS)]


class TrainJob(Recorded):
    """A job of Kubeflow Trainer: its name, its namespace, and the context of the kubeconfig that leads to its cluster
    (empty in a pod of the cluster). `nodes` × `per_node` ranks run it."""

    name: Name
    namespace: Name
    context: Name
    nodes: Count
    per_node: Count


class LaunchPlan(Recorded):
    """The launch plan (`launch.json`): the command, the variables that it adds to the environment, the working
    directory."""

    argv: Annotated[list[Line], Meta(max_length=100_000)] = field(default_factory=list)
    env: Annotated[dict[str, Line], Meta(max_length=10_000)] = field(default_factory=dict)
    cwd: Line = ""
    start: StartMode = "cold"
    cold_because: str = ""
    v: Count | None = None
    engine: Name | None = None
    batch_job: Count | None = None
    trainjob: TrainJob | None = None
    limit: Seconds | None = None
    endpoint: Name | None = None
    ranks_here: Here | None = None
    lease: Devices | None = None
    detached: bool | None = None

    @property
    def is_scheduled(self) -> bool:
        """Whether the job of a scheduler runs it, which continues without its supervisor."""
        return self.batch_job is not None or self.trainjob is not None


# ---- what the learner predicted

# One value for all ranks, or a value by rank.
Guessed: TypeAlias = Amount | Annotated[dict[Rank, Amount], BY_RANK]


class Guesses(Recorded):
    """Values that the learner predicted before the run (`guess.json`), by the name of a figure, in its unit, see
    `analysis/guess.py`; unknown names are ignored. `notebook` is the name of the notebook without its suffix, if it is
    known: of a lab, that of the lab."""

    figures: Annotated[dict[str, Guessed], Meta(max_length=100)]
    v: Count | None = None
    notebook: Name | None = None


# ---- what the lab predicted

# How a figure was computed: by tracing the generated script, or by the formulas of `analysis/theory`.
Method: TypeAlias = Literal["simulated", "formula"]
Called: TypeAlias = tuple[Name, Bytes, Count]  # a collective: operation, bytes of the payload, ranks


class PredictedRank(Recorded):
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
    flops: Flops | None = None
    recomputed_flops: Flops | None = None


class PredictedStep(Recorded):
    """A traced step: bytes by owner from each of `times` on, and the phases. Times are numbers of operations."""

    times: Times
    seconds: Seconds
    phases: Spans
    owners: Curves
    peak: Bytes
    at_peak: Owners


class PredictedTimeline(Recorded):
    """The simulated timeline of a step, in the form of a profiled one. `low` and `high` are the quartiles of the
    seconds of all simulated steps (none in plans of earlier versions)."""

    seconds: Seconds
    phases: Spans
    comm: Calls
    busy: Busy
    exposed: Annotated[dict[str, Seconds], Meta(max_length=1_000)]
    low: Seconds | None = None
    high: Seconds | None = None


class Estimate(Recorded):
    """Memory of a GPU that is not a tensor of the step: from `low` to `high`, by a published `source`."""

    name: Name
    low: Bytes
    high: Bytes
    source: Line


class AllocatorPeak(Recorded):
    """The most that torch's caching allocator hands out and reserves in the first steps, if a workspace of cuBLAS has
    `workspace` bytes."""

    workspace: Bytes
    allocated: Bytes
    reserved: Bytes


class PredictedClass(Recorded):
    """Ranks that do the same work, the step of one of them, its traffic by operation, its collectives in order, and
    the timeline of the slowest of them. On GPUs its peak is that of the `allocator` for the workspaces of the machine,
    and `estimates` are what comes on top of it."""

    ranks: Ranks
    step: PredictedStep
    ops: Annotated[dict[str, Operation], Meta(max_length=1_000)]
    calls: Annotated[list[Called], Meta(max_length=1_000_000)]
    timeline: PredictedTimeline | None = None
    estimates: Annotated[list[Estimate], Meta(max_length=100_000)] = field(default_factory=list)
    allocator: Annotated[list[AllocatorPeak], Meta(max_length=100)] = field(default_factory=list)


class PredictedTime(Recorded):
    """The seconds of a step of the slowest rank, from `low` to `high`: on the machine of the run, from computation and
    collectives that were measured there, or `modelled` for a machine of the table. `links` says which collectives or
    which machine, and is empty if there is nothing to communicate. The samples of a script of the user's own are not
    known. `busy` is the share of the measurement in which something else used the machine."""

    seconds: Seconds
    links: Line
    low: Seconds | None = None
    high: Seconds | None = None
    samples_per_second: Amount | None = None
    modelled: bool = False
    busy: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Peak(Recorded):
    """The most FLOP/s of one device in the precision of the run, and their `source`; if `flops` is None, `source` says
    why they are not known."""

    flops: Flops | None
    source: Line


class MemoryLimit(Recorded):
    """The bytes of a device's memory and their `source`, or why they are not known. From `low_bytes` to `high_bytes` is
    what must fit: on a GPU the highest peak of a rank with all estimates, on CPUs, which ranks share, the sum of all
    peaks."""

    limit_bytes: Bytes | None
    low_bytes: Bytes
    high_bytes: Bytes
    source: Line


class Plan(Recorded, omit_defaults=False):
    """The prediction of a run, made before it started: `plan.json`, `predict --json` and `Prediction.to_json()`.
    `reason` says why there is no trace, if the method is a formula; `time` is known if it was asked for; `untimed` is
    the reason if it cannot be known.

    `model_flops` are the floating-point operations that forward and backward of a step need on one device, for all
    samples, without recomputation; of a script of the user's own, those of all ranks without recomputation. They are
    known if there is a trace. `six_nd` is the estimate of `analysis/theory/formulas.py`, of dense transformers. `peak`
    and `memory` are those of the machine that the plan is for; `fits` says whether the ranks fit into this memory, None
    if that is not known or depends on the estimates.
    """

    spec: SpecFields
    method: Method
    ranks: Annotated[list[PredictedRank], Meta(max_length=RANKS)]
    classes: Annotated[list[PredictedClass], Meta(max_length=100_000)]
    v: Count | None = None
    torch: Name = ""
    reason: Line = ""
    model_flops: Flops | None = None
    six_nd: Flops | None = None
    peak: Peak | None = None
    fits: bool | None = None
    memory: MemoryLimit | None = None
    time: PredictedTime | None = None
    untimed: Line = ""


# ---- the summary: `summary.json`, `run --json`, `show --json` and `Run.summary()`


class Figures(Recorded, omit_defaults=False):
    """A part of the summary; unknown values are null."""


class Durations(Figures):
    """Seconds from the request of the run to its end, and to the end of its first step."""

    total: Finite | None
    to_first_step: Finite | None


class Communication(Figures):
    """Of the newest profiled step: seconds of communication, exposed seconds, and the share that was overlapped by
    compute."""

    step: Count | None = None
    seconds: Seconds | None = None
    open_seconds: Seconds | None = None
    hidden: Finite | None = None


class RankFigures(Figures):
    """The figures of one rank: memory in bytes at its peak and by owner, medians of seconds per step and phase and the
    95th percentile of the seconds per step, all without the first step, bytes sent per step."""

    rank: Rank
    exit_code: Code | None
    peak_memory_bytes: Bytes | None
    memory_bytes: Annotated[dict[str, Bytes], Meta(max_length=1_000)]
    step_seconds_median: Seconds | None
    phase_seconds: Annotated[dict[str, Seconds | None], Meta(max_length=1_000)]
    comm_bytes_per_step: Finite | None
    communication: Communication | None
    step_seconds_p95: Seconds | None = None  # none in summaries of earlier versions


class ReplicaFigures(ReplicaMeasured):
    """Medians of one replica (thread) of dp: seconds of its forward and of its CPU, samples, bytes; `extra`, in replica
    0, are the bytes that only the first device has."""

    extra: ReplicaExtra | None = None


class Failure(Figures):
    """The first failure of a run, see `ranks.failure_of`."""

    rank: Rank
    type: str
    message: str
    traceback: str
    exit_code: Code | None
    collateral: Ranks
    alike: Ranks = field(default_factory=list)
    left: Ranks = field(default_factory=list)
    last_seen: bool = False


class PredictionOutcome(Figures):
    """The prediction of one rank against its measurement, see `analysis/prediction.py`."""

    rank: Rank
    peak_predicted: Bytes | None
    peak_measured: Bytes | None
    error: Finite | None
    sent_predicted: Bytes | None
    sent_measured: Bytes | None
    reason: str
    step_predicted: Seconds | None = None
    step_measured: Seconds | None = None
    step_error: Finite | None = None
    step_reason: str = ""


class GuessOutcome(Figures):
    """A figure that the learner predicted, of one rank or of the whole run (`rank` null), in its unit: `guessed`,
    `predicted` by the lab, and measured, see `analysis/guess.py`."""

    figure: Name
    unit: Name
    rank: Rank | None
    guessed: Amount
    predicted: Finite | None
    measured: Finite | None
    error: Finite | None
    reason: str


class LedgerEntry(Figures):
    """An operation of the communication ledger: bytes sent per step over all ranks, measured and by theory."""

    op: Name
    calls: Amount
    measured: Finite
    formula: str
    reason: str
    theory: Finite | None


class FindingFigures(Figures):
    """A finding: what happened, its evidence, cause and fix, and the ranks concerned."""

    name: str
    kind: str
    title: str
    evidence: str
    cause: str
    fix: str
    ranks: Ranks


class Imported(Recorded):
    """Where a run comes from that was not launched here but made from files of a job that ran elsewhere
    (`imported.json`): the names of these files in `sources`, what those of each kind are in `titles`, what cannot be
    told in `notes`, and the `findings`. Such a run has the figures that the files have; all others are unknown."""

    sources: Annotated[list[Line], Meta(max_length=100_000)]
    titles: Annotated[list[Line], Meta(max_length=1_000)] = field(default_factory=list)
    notes: Annotated[list[Line], Meta(max_length=100_000)] = field(default_factory=list)
    findings: Annotated[list[FindingFigures], Meta(max_length=1_000)] = field(default_factory=list)
    v: Count | None = None


class NodesFigures(Figures):
    """What happened to the nodes of a run on several, `seconds` after it was requested: `hosts` met, with so many
    `ranks`, or did not answer any more (cut off)."""

    seconds: Seconds | None
    what: Literal["met", "cut off"]
    hosts: Annotated[list[Name], Meta(max_length=RANKS)]
    ranks: World


class Summary(Figures):
    """The figures of a run: bytes, seconds, samples per second; null if unknown. `v` is the version of this schema
    (none before version 1). `flops_per_device` are model FLOP/s, see `analysis/metrics.py`, and `mfu_missing` says
    why they or `mfu` are unknown."""

    run: Name
    state: State
    strategy: Name | None
    workload: Name | None
    script: Line | None
    world_size: World
    device: Name | None
    steps: Count
    seconds: Durations
    samples_per_second: Finite | None
    loss: Finite | None
    accuracy: Value
    restarts: Count
    failure: Failure | None
    broken_lines: Count
    ranks: Annotated[list[RankFigures], Meta(max_length=RANKS)]
    note: str
    replicas: Annotated[list[ReplicaFigures], Meta(max_length=1_000)]
    gil_wait: Finite | None
    ledger: Annotated[list[LedgerEntry], Meta(max_length=1_000)]
    findings: Annotated[list[FindingFigures], Meta(max_length=1_000)]
    start: StartMode | None = None
    v: Count | None = None
    tokens_per_second: Amount | None = None  # of sequences; none of these four in summaries of earlier versions
    flops_per_device: Flops | None = None
    mfu: Finite | None = None
    mfu_missing: Line = ""
    nodes: Annotated[list[NodesFigures], Meta(max_length=1_000)] = field(default_factory=list)
    prediction: Annotated[list[PredictionOutcome], Meta(max_length=RANKS)] = field(default_factory=list)
    guess: Annotated[list[GuessOutcome], Meta(max_length=100 * RANKS)] = field(default_factory=list)


class UnreadableRun(Recorded, tag_field="state", tag="unreadable"):
    """In place of the summary of a run whose folder cannot be read: the reason, as one clause."""

    run: Name
    reason: str


# ---- the reader

_LIMITS = {  # the largest size of each file in bytes
    "spec.json": 1 << 20,
    "status.json": 64 << 20,
    "launch.json": 4 << 20,
    "plan.json": 64 << 20,
    "guess.json": 1 << 20,
    "summary.json": 64 << 20,
    "imported.json": 16 << 20,
}
_Document = TypeVar("_Document", bound=Recorded)
_Kind = TypeVar("_Kind")


class Unreadable(LookupError):
    """A run folder with an invalid file. `reason` is one clause: the file, the field, and what is wrong with it."""

    def __init__(self, run: str, reason: str):
        super().__init__(f"run {run} cannot be read: {reason}")
        self.reason = reason


def read_document(path: Path, kind: type[_Document]) -> _Document | None:
    """The document `path`, directly in a run folder; None if there is no such file.

    Raises `Unreadable` for anything but a plain file with valid values.
    """
    try:
        value = parse(read_below(path.parent, path, _LIMITS[path.name]))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error) if error.errno is None else f"{path.name}: {os.strerror(error.errno)}"
        raise Unreadable(path.parent.name, reason) from None
    except ValueError as error:
        raise Unreadable(path.parent.name, f"{path.name} is not JSON: {error}") from None
    try:
        return decoded(value, kind)
    except ValueError as error:
        raise Unreadable(path.parent.name, f"{path.name}: {error}") from None


def decoded(value: Any, kind: type[_Kind]) -> _Kind:
    """A parsed JSON value as a value of type `kind`. Raises `ValueError`, one clause: the field, what it must be, and
    what it is."""
    try:
        with ONE_AT_A_TIME:
            return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_clause(str(error), value)) from None


_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_SHOWN = 60  # characters of an invalid value that a clause quotes


def _clause(said: str, value: Any) -> str:
    """What msgspec said about a value, as `nproc must be an integer <= 1024, got 1000000`."""
    said, _, place = said.partition(" - at `")
    names: list[str] = []
    for name, index in re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", place):
        names.append(name or ("…" if index == "..." else index))
        if isinstance(value, dict) and name:
            value = value.get(name, Ellipsis)
        elif isinstance(value, list) and index.isdigit():
            value = value[int(index)]
        else:
            value = Ellipsis  # msgspec does not say which entry of an object it is
    if missing := re.search(r"missing required field `(.+)`", said):
        return f"{'.'.join([*names, missing[1]])} is missing"
    name = ("a name in " if place.startswith("key") else "") + (".".join(names) or "it")
    if said.startswith("Invalid enum value"):
        return f"{name} must be one of the known values, got {_quoted(value)}"
    expected, _, got = said.removeprefix("Expected ").partition(", got ")
    expected = expected.replace(" matching regex '^[^\\\\x00]*$'", " without NUL").replace(" | ", " or ")
    words = re.sub(r"`?\b(int|float|str|bool|array|object)\b`?", lambda kind: _WORDS[kind[1]], expected).replace(
        "`", ""
    )
    quoted = got.replace("`", "") if value is Ellipsis or place.startswith("key") else _quoted(value)
    return f"{name} must be {words}" + (f", got {quoted}" if quoted else "")


def _quoted(value: Any) -> str:
    """An invalid value as it was written, truncated; repr escapes control characters."""
    if isinstance(value, dict):
        return f"an object of {len(value)} entries"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def plain(value: Recorded | dict[str, Any]) -> dict[str, Any]:
    """A Struct, or a dict that may contain some, as dicts and lists for `json`."""
    values: dict[str, Any] = msgspec.to_builtins(value, str_keys=True)
    return values


# ---- the published schemas

_HEAD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$comment": "An integer has no decimal point or exponent. A number may be NaN, Infinity or -Infinity, as Python's"
    " json module writes them, where it has no bounds. Unknown fields are ignored.",
}


def schemas() -> dict[str, Any]:
    """By name, `events` (one line of an event file), `summary` and `guess`: `version` and `schema`. The version is
    that of the field `v`."""
    documents = {"summary": (SUMMARY, Summary), "guess": (GUESS, Guesses)}
    return {"events": {"version": VERSION, "schema": _HEAD | _of_events()}} | {
        name: {"version": version, "schema": _HEAD | msgspec.json.schema(kind)}
        for name, (version, kind) in documents.items()
    }


def _of_events() -> dict[str, Any]:
    """One definition for each kind, for each observation, and for those of newer versions."""
    kinds = [*events.KINDS.values(), *events.OBSERVATIONS.values(), events.Unknown]
    references, defined = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for kind in events.OBSERVATIONS.values():
        defined[kind.__name__]["properties"]["kind"] = {"const": "saw"}
        defined[kind.__name__]["required"].append("kind")
    defined["Unknown"]["anyOf"] = [
        {"properties": {"kind": {"not": {"enum": [*events.KINDS, "saw"]}}}},
        {
            "properties": {
                "kind": {"const": "saw"},
                "what": {"type": "string", "not": {"enum": [*events.OBSERVATIONS]}},
            },
            "required": ["what"],
        },
    ]
    return {"title": "an event of a run", "anyOf": list(references), "$defs": defined}
