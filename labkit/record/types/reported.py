"""Events in which a rank, or the supervisor in place of a rank, reports what it does: its start and end, its progress,
errors, and what the script logs."""

from typing import Annotated, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.types.envelope import Envelope, OfRank, Owners, Ranks
from labkit.record.types.values import RANKS, Attempt, Code, Count, Name, Pid, Rank, Seconds, Time, Value, World


class Collective(TypedDict):
    """A collective that a rank has called: `op`, its group (`group` describes it, `id` is its number), the `ranks` of
    that group, `seq`, its number in the group, the `sizes` of its tensors, and whether it is `over`."""

    op: NotRequired[Name]
    over: NotRequired[bool]
    group: NotRequired[Name | None]
    id: NotRequired[Name | None]
    ranks: NotRequired[Ranks | None]
    seq: NotRequired[Count | None]
    sizes: NotRequired[Annotated[list[Annotated[list[Count], Limits(most=64)]], Limits(most=10_000)] | None]


Collectives: TypeAlias = Annotated[list[Collective], Limits(most=1_000)]


class Start(OfRank):
    """The start of a rank, in its attempt `attempt`; torch is imported by then. `began` is when the process started,
    `device` is such as cpu or cuda:0."""

    kind: Literal["start"]
    device: NotRequired[Name]
    device_name: NotRequired[Name]
    attempt: NotRequired[Attempt]
    pid: NotRequired[Pid | None]
    host: NotRequired[Name | None]
    local_rank: NotRequired[Rank | None]
    world_size: NotRequired[World | None]
    torch: NotRequired[Name | None]
    began: NotRequired[Time | None]


class Startup(OfRank):
    """What the rank has reached for the first time in this attempt: `name` is group (init_process_group has returned),
    data (a DataLoader was made) or batch (the first batch was fetched, or a model was called to train)."""

    kind: Literal["startup"]
    name: Name


class Device(OfRank):
    """The device that the script actually uses, once it is known."""

    kind: Literal["device"]
    device: Name
    device_name: NotRequired[Name]


class Waiting(OfRank):
    """A rank that makes no progress since `since`, written repeatedly: its `step`, `activity`, `phase`, `stack`, the
    newest collective of each group in `ops`, and `computed`, its share of a core meanwhile."""

    kind: Literal["waiting"]
    since: Time
    stack: NotRequired[str]
    ops: NotRequired[Collectives]
    step: NotRequired[Count | None]
    activity: NotRequired[Name | None]
    phase: NotRequired[Name | None]
    computed: NotRequired[Seconds | None]


class GoingOn(Envelope):
    """A rank that was waiting makes progress again, after `waited` seconds (`after` in older versions)."""

    kind: Literal["going_on"]
    rank: Rank
    after: NotRequired[Seconds | None]
    waited: NotRequired[Seconds | None]


class Silent(OfRank):
    """The supervisor's report of a rank that cannot report itself: `process` is its state in the operating system,
    `computed` its share of a core since `since`."""

    kind: Literal["silent"]
    since: Time
    process: Name
    stack: NotRequired[str]
    computed: NotRequired[Seconds | None]


class Heard(OfRank):
    """A silent rank reports itself again."""

    kind: Literal["heard"]


class Dropped(OfRank):
    """How many events could not be written before this one, because the disk was full."""

    kind: Literal["dropped"]
    events: Count


class Activity(OfRank):
    """What the rank does now: training, evaluating, or a preparation in words; null before the first."""

    kind: Literal["activity"]
    name: Name | None


class Metric(Envelope):
    """A value that the script logged."""

    kind: Literal["metric"]
    rank: NotRequired[Rank | None]
    after: NotRequired[Count | None]
    name: NotRequired[Name | None]
    value: NotRequired[Value]
    step: NotRequired[Count | None]


class Report(OfRank):
    """What the script passed to `labkit.report`, by name."""

    kind: Literal["report"]
    values: dict[str, Value]


class Error(OfRank):
    """The exception that ended the script; `exit code 3` for os._exit(3)."""

    kind: Literal["error"]
    type: NotRequired[str]
    message: NotRequired[str]
    traceback: NotRequired[str]
    ops: NotRequired[Collectives]
    owners: NotRequired[Owners]


class Hosts(OfRank):
    """The host of each rank of a run on several nodes, as the ranks told each other."""

    kind: Literal["hosts"]
    hosts: Annotated[dict[str, Name], Limits(most=RANKS, numbers=RANKS)]


class CutOff(OfRank):
    """Nodes that have not answered this rank's node for `seconds`: the ranks there, each with its host."""

    kind: Literal["cut_off"]
    hosts: Annotated[dict[str, Name], Limits(most=RANKS, numbers=RANKS)]
    seconds: Seconds


class Queue(Envelope):
    """A scheduler's view of the run: the number of its `job`, its `state` and the `reason` for it in the words of the
    scheduler, and its `nodes`."""

    kind: Literal["queue"]
    job: Count
    state: Name
    reason: NotRequired[Name]
    nodes: NotRequired[Name]


class ProbeError(OfRank):
    """A part of the probe that failed; the script continues without it."""

    kind: Literal["probe_error"]
    part: str
    type: str
    message: str
    traceback: NotRequired[str | None]


class End(OfRank):
    """The end of a rank; `stack` is that of the call that ended the script without an error, such as sys.exit()."""

    kind: Literal["end"]
    stack: NotRequired[str]
    exit_code: NotRequired[Code | None]
    steps: NotRequired[Count | None]
    seconds: NotRequired[Seconds | None]


Reported: TypeAlias = (
    Start
    | Startup
    | Device
    | Waiting
    | GoingOn
    | Silent
    | Heard
    | Dropped
    | Activity
    | Metric
    | Report
    | Error
    | Hosts
    | CutOff
    | Queue
    | ProbeError
    | End
)
